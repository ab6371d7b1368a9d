"""memfit.watch() and Watch, which follows the phases of a training loop and reads the meter at the end of each step."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any

from memfit.errors import BadInput
from memfit.extras import MissingExtra

try:
    import torch
except ImportError:
    raise MissingExtra("memfit.watch", "trace") from None

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memfit.allocator.replay import Timeline
from memfit.documents import footprint_file
from memfit.explain.oom_message import messages
from memfit.footprints import footprint_of_watch
from memfit.holders.live_tensors import storages
from memfit.live.watch.leak_search import APART, THIS_PROCESS, LeakSearch
from memfit.live.watch.leak_test import Growth, Series, inconclusive, stopped
from memfit.live.watch.meters import Meter, Reading, SamplingInterval, meter_for
from memfit.live.watch.outputs import Screen, open_sinks, screen_for
from memfit.live.watch.recorder import Recorder, check_log
from memfit.nouns.footprint import Footprint
from memfit.nouns.sample import Alarm, Header, Leak, LeakHolder, Sample
from memfit.nouns.tape import PHASES, Phase, Role
from memfit.units import human

LOG = "memfit-watch.jsonl"
SENTENCES = 2  # sentences of an error's message that are kept: what ran out, and how much was requested
SAME = 0.5  # an earlier leak explains a growth too if it grows by at least this share of it
EXPLAINED = 0.2  # named holders explain a growth if they keep at least this share of it


class Following:
    """A hook on the watched model; copies and saved files of the model get a hook that does nothing, without memfit."""

    def __init__(self, call: Callable[[Any, Any], None]) -> None:
        self._call = call

    def __call__(self, module: Any, args: Any) -> None:
        self._call(module, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (dict.get, {})  # made of builtins alone; changes no arguments


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method for PyTorch's global hooks by a weak reference, so that a watch that is never closed is freed."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*args)

    return call


class Watch:
    """A watched training loop. Use it as a context manager, or call `close()`.

    The steps of `optimizer`, or of one that replaces it, are counted automatically; without an optimizer call `step()`
    at the end of each. `phase("eval")` names a part of the loop; where the model is given, evaluation is detected
    automatically. `leaks`, `footprint()` and `timeline()` return what was found so far.
    """

    def __init__(
        self, recorder: Recorder, meter: Meter, model: Any = None, optimizer: Any = None, *,
        find_leaks: bool = True, paced: bool = True, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.recorder, self.meter, self.model, self.clock = recorder, meter, model, clock
        self._optimizer: Callable[[], Any] = lambda: None
        self.optimizer = optimizer
        self._beside: tuple[Callable[[], Any], ...] = ()  # further optimizers, whose states lie on the card as well
        self._with_states = 0  # number of weights that had optimizer states at the last count
        self.done = 0  # optimizer steps
        self._phase: Phase = "load"
        self._interval = SamplingInterval(clock)
        self._paced = paced  # False: a look at every step, however short
        self._began = clock()
        self._series = Series() if find_leaks else None
        self._search: LeakSearch | None = None
        self._growth = Growth(0.0, 0, 0, 0)  # the growth whose holders are searched
        self._hooks: list[Any] = []
        self._counts_itself = False
        self._closed = False
        first = self._sample("load")
        self._between_experiments(first)
        self._phase = "first_step"
        self._hook()
        _hook_uncaught_errors()
        _OPEN.add(self)

    # --- what a loop calls ---

    @property
    def optimizer(self) -> Any:
        """The optimizer whose steps are counted."""
        return self._optimizer()

    @optimizer.setter
    def optimizer(self, given: Any) -> None:
        given = getattr(given, "optimizer", given)  # accelerate wraps it
        self._optimizer = weakref.ref(given) if given is not None else lambda: None
        self._kept = given  # a strong reference, until another optimizer steps

    def beside(self, optimizers: Iterable[Any]) -> None:
        """Add optimizers whose states count with those of the first, but whose steps do not."""
        self._beside = tuple(weakref.ref(optimizer) for optimizer in optimizers)

    def step(self) -> None:
        """Count an optimizer step. The first call ends the automatic count of the optimizer's steps."""
        if self._counts_itself:
            self._hooks.pop().remove()  # the post-step hook, which was added last
            self._counts_itself = False
            if self.done:  # the hook has counted this step
                return
        self._stepped()

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Attribute what runs inside to a phase: load, eval, save, resume, merge."""
        if name not in PHASES:
            raise ValueError(f"phase {name!r} is none of {', '.join(PHASES)}")
        before = self._phase
        self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def enter(self, name: Phase) -> None:
        """Attribute what runs from here on to this phase."""
        if name != self._phase:
            self._sample(self._phase)
            self._phase = name

    def train(self) -> None:
        """Attribute what runs from here on to training."""
        self.enter("step" if self.done else "first_step")

    def close(self) -> None:
        """End the watch: read the meter once more, and report what was found."""
        if self._closed:
            return
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._sample(self._phase, always=True)
        if self._series is not None:
            self._report_inconclusive()
            THIS_PROCESS.end()
        self.recorder.close()
        self._beside = ()
        self.model = self.optimizer = None  # a watch that is kept for its findings keeps no model

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Exception) and not self._closed:
            self.recorder.alarm(failed(error, self.done, self._phase))
        self.close()

    # --- what was found ---

    @property
    def leaks(self) -> tuple[Leak, ...]:
        """The leaks so far: what grew beyond noise, and who holds it."""
        return tuple(self.recorder.leaks)

    def footprint(self) -> Footprint:
        """Return the peaks of every phase so far, in the form of a prediction."""
        return footprint_of_watch.footprint_of(self.recorder.watched())

    def timeline(self) -> Timeline:
        """Return the run so far, stretch by stretch."""
        return footprint_of_watch.timeline_of(self.recorder.watched())

    # --- inside ---

    def _hook(self) -> None:
        if hasattr(self.model, "register_forward_pre_hook"):
            self._hooks.append(self.model.register_forward_pre_hook(Following(self._before_forward)))
        if isinstance(self.optimizer, torch.optim.Optimizer):
            self._hooks.append(register_optimizer_step_pre_hook(_weakly(self._before_step)))
            self._hooks.append(register_optimizer_step_post_hook(_weakly(self._after_step)))
            for hook in self._hooks[-2:]:
                weakref.finalize(self, hook.remove)
            self._counts_itself = True
        elif hasattr(self.optimizer, "register_step_post_hook"):
            self._hooks.append(self.optimizer.register_step_post_hook(lambda *_: self._stepped()))
            self._counts_itself = True

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        """Drop the reference to the first optimizer where the loop has replaced it by another of the same weights."""
        if optimizer is self.optimizer:
            return
        mine = {id(weight) for weight in self._parameters()}
        if any(id(weight) in mine for group in optimizer.param_groups for weight in group["params"]):
            self._kept = None  # from here on it lives only as long as the loop keeps it
            if self.optimizer is None:
                self.optimizer = optimizer

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if optimizer is self.optimizer:
            self._stepped()

    def _before_forward(self, module: Any, _: Any) -> None:
        trains = module.training and torch.is_grad_enabled()
        if not trains and self._phase in ("first_step", "step"):
            self.enter("eval")
        elif trains and self._phase == "eval":
            self.train()

    def _stepped(self) -> None:
        self.train()
        self.done += 1
        if not self._interval.due(always=self._search is not None or not self._paced):
            return
        phase: Phase = "first_step" if self.done == 1 else "step"
        reading = self._sample(phase)
        self._phase = "step"
        with_states = sum(len(getattr(optimizer, "state", None) or ()) for optimizer in self._optimizers())
        if self.done == 1 or with_states != self._with_states:  # some weights get their states later than others
            self._with_states = with_states
            self.recorder.share(self._shares())
        if self._series is not None:
            self._look_for_leaks(self._series, reading)
        self._interval.sampled()

    def _sample(self, phase: Phase, always: bool = False) -> Reading:
        """Read the meter and record a sample; tensors are always counted at the first one of each phase."""
        reading = self.meter.read(always or phase not in self.recorder.peaks)
        seconds = self.clock() - self._began
        every = self._interval.every if self._paced else 1
        self.recorder.add(Sample(seconds, self.done, phase, reading.now, reading.peak, reading.counted, every))
        return reading

    def _look_for_leaks(self, series: Series, reading: Reading) -> None:
        """Test the series, which is cheap; once it grows, search over the next steps for the holders."""
        if self._search is not None:
            holders = self._search.look()
            if holders is not None:
                self._search = None
                self._report(holders)
                series.forget()
            return
        growth = series.add(self.done, reading.now.allocated) if reading.counted else None
        if growth is not None:
            self._growth, self._search = growth, LeakSearch()

    def _report(self, holders: tuple[LeakHolder, ...]) -> None:
        """Report the leak where the holders explain the growth and one of them is new."""
        growth = self._growth
        known = {(h.name, h.place) for leak in self.leaks for h in leak.holders}
        fresh = any((h.name, h.place) not in known for h in holders)
        sure = any(h.kind in ("graph", "cycle") for h in holders)
        if fresh and (sure or sum(h.bytes for h in holders) >= EXPLAINED * growth.per_step):
            leak = Leak(int(growth.per_step), growth.since, growth.until, growth.bytes, holders)
            self.recorder.leak(leak, "step")

    def _report_inconclusive(self) -> None:
        """Report growth that the run was too short to explain, and leaks that have stopped growing since."""
        growth = self._growth
        for leak in self.leaks:
            alarm = stopped(leak, self.recorder.samples, leak.until + 2 * APART)
            if alarm is not None:
                self.recorder.alarm(alarm)
        known = any(leak.per_step >= SAME * growth.per_step for leak in self.leaks if leak.unit == "step")
        if self._search is not None and not known:
            text = (
                f"live memory grew by {human(int(growth.per_step))} per step over steps {growth.since:,} to "
                f"{growth.until:,}; the run ended before it was known who holds it"
            )
            self.recorder.alarm(Alarm("unsure", self.done, "step", growth.bytes, 0, text))
        elif self.meter.name == "tensors" and not self.leaks:
            alarm = inconclusive(self.recorder.samples)
            if alarm is not None:
                self.recorder.alarm(alarm)

    def _between_experiments(self, first: Reading) -> None:
        """Report what earlier watched runs of this process left behind."""
        if self._series is None:
            return
        own = [*self._parameters(), *self._states()]
        mine = sum(storages(own).values())
        readings = [first]

        def live() -> int:
            reading = readings.pop() if readings else self.meter.read(always=True)
            return reading.now.allocated - mine

        leak = THIS_PROCESS.begin(live, own)
        if leak is not None:
            self.recorder.leak(leak, "load")

    def _shares(self) -> tuple[tuple[Role, int], ...]:
        """Return the bytes of parameters (with buffers) and of optimizer states on the metered device."""
        parts: dict[Role, list[Tensor]] = {"parameters": self._parameters(), "optimizer_states": self._states()}
        kind = "cuda" if self.meter.name == "cuda" else "cpu"
        sizes = (
            (role, sum(storages(t for t in part if t.device.type == kind).values())) for role, part in parts.items()
        )
        return tuple((role, size) for role, size in sizes if size)

    def _parameters(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.model.buffers()] if self.model is not None else []

    def _optimizers(self) -> list[Any]:
        return [self.optimizer, *(optimizer() for optimizer in self._beside)]

    def _states(self) -> list[Tensor]:
        kept = [state for o in self._optimizers() for state in (getattr(o, "state", None) or {}).values()]
        return [v for state in kept if isinstance(state, dict) for v in state.values() if isinstance(v, Tensor)]


# --- beginning a watch ---


class Watching:
    """What the callbacks of trainers share: the arguments of `watch`, and the watch of the last training."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.watch: Watch | None = None

    @property
    def leaks(self) -> tuple[Leak, ...]:
        """The leaks so far: what grew beyond noise, and who holds it."""
        return self.watch.leaks if self.watch else ()


def watch(
    model: Any = None,
    optimizer: Any = None,
    *,
    predicted: footprint_file.Predicted | None = None,
    log: str | os.PathLike[str] | None = LOG,
    to: Iterable[str] = (),
    live: bool = False,
    quiet: bool = False,
    find_leaks: bool = True,
    reset_peaks: bool = True,
    count_every: int | None = None,
    name: str = "",
    screen: Screen | None = None,
) -> Watch:
    """Watch a training loop from here on. Raises MemfitError for bad arguments.

    model, optimizer: as the loop has them; with an optimizer its steps are counted automatically, with a model
    evaluation is distinguished from training. predicted: a Footprint, a Tape, or a file (recipe.toml, tape, snapshot,
    JSON of memfit estimate, log of another watch) to compare the run with. log: the file that JSON lines are appended
    to, or None. to: further sinks, "tensorboard:runs/a", "wandb", "prometheus:9400". live: draw a view in the terminal
    instead of printing lines. reset_peaks: give every step a peak of its own, by torch.cuda.reset_peak_memory_stats.
    count_every: on a run without a card, count live tensors every so many steps instead of when there is time, and
    read the meter at every step, however short. screen: a screen to use in place of `live` and `quiet`.
    """
    if model is not None and not callable(getattr(model, "parameters", None)):
        raise BadInput(
            f"memfit.watch takes one model, not a {type(model).__name__}",
            hint="torch.nn.ModuleList(models), or a watch with a log of its own for each",
        )
    if isinstance(optimizer, list | tuple | dict):
        raise BadInput(
            f"memfit.watch takes one optimizer, not a {type(optimizer).__name__}",
            hint="the one whose steps are to be counted, or none and watch.step()",
        )
    if count_every is not None and count_every < 1:
        raise BadInput(
            f"count_every must be at least 1, not {count_every}", hint="count_every=1 counts tensors at every step"
        )
    meter = meter_for(model, reset_peaks, count_every)
    header = Header(
        name=name or Path(sys.argv[0] or "python").name, meter=meter.name, card=meter.card, total=meter.total,
        started=datetime.now(UTC).isoformat(timespec="seconds"), torch=torch.__version__.partition("+")[0],
        predicted=footprint_file.of(predicted),
    )  # fmt: skip
    path = _of_rank(log)
    check_log(path)  # before sinks open files and ports
    recorder = Recorder(header, path, open_sinks(to, header), screen or screen_for(live, quiet))
    return Watch(recorder, meter, model, optimizer, find_leaks=find_leaks, paced=count_every is None)


def _of_rank(log: str | os.PathLike[str] | None) -> Path | None:
    """Return the file that this rank writes: run.jsonl, run.rank1.jsonl."""
    if log is None:
        return None
    path, rank = Path(log), os.environ.get("RANK", "0")
    return path if rank in ("", "0") or not rank.isdigit() else path.with_suffix(f".rank{rank}{path.suffix}")


# --- the error that a run ends in ---


def failed(error: Exception, step: int, phase: Phase) -> Alarm:
    """Return the alarm for an error; its `bytes` are those of a failed request for memory, 0 for any other error."""
    message = " ".join(str(error).split())
    requested = next((found.tried for found in messages(message) if found.tried is not None), 0)
    short = ". ".join(message.split(". ")[:SENTENCES])
    return Alarm("failed", step, phase, requested, 0, f"the run ended in {type(error).__name__}: {short}")


_OPEN: weakref.WeakSet[Watch] = weakref.WeakSet()


@cache
def _hook_uncaught_errors() -> None:
    """Let an error that nobody catches end every open watch, as an error that leaves its block does."""
    before = sys.excepthook

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            for watch in list(_OPEN):
                watch.__exit__(kind, error, trace)
        finally:
            before(kind, error, trace)

    sys.excepthook = uncaught
