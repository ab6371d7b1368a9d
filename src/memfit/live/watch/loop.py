"""memfit.watch() and the Watch it returns: follows the phases of a training loop and reads the meter at their ends."""

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

from memfit.errors import BadInput, MissingExtra

try:
    import torch
except ImportError:
    raise MissingExtra("memfit.watch", "trace") from None

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memfit.allocator.replay import Timeline
from memfit.documents import footprint_file as footprints
from memfit.explain.oom_message import messages
from memfit.footprints import footprint_of_watch
from memfit.live.holders.live_tensors import storages
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
SENTENCES = 2  # of an error's message that are kept: what ran out, and how much was requested
SAME = 0.5  # share of a growth that an earlier leak must grow by to explain it too
EXPLAINED = 0.2  # share of a growth that named holders must keep to explain it


class Following:
    """A hook on the watched model. Its copies, saved ones too, get one that does nothing and needs no memfit."""

    def __init__(self, call: Callable[[Any, Any], None]) -> None:
        self._call = call

    def __call__(self, module: Any, args: Any) -> None:
        self._call(module, args)

    def __deepcopy__(self, _: Any) -> Callable[[Any, Any], Any]:
        return partial(dict.get, {})  # made of builtins alone; changes no arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (dict.get, {})


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method for PyTorch's global hooks, which else would keep a watch that nobody closes, and its model."""
    found = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        alive = found()
        if alive is not None:
            alive(*args)

    return call


class Watch:
    """A watched training loop. Use it as a context manager, or call `close()`.

    With an optimizer its steps are counted automatically, also those of an optimizer that replaces it; without, call
    `step()` at the end of each. `phase("eval")` names a part of the loop; evaluation is detected automatically where
    the model is given. `leaks`, `footprint()` and `timeline()` return what was found so far.
    """

    def __init__(
        self, recorder: Recorder, meter: Meter, model: Any = None, optimizer: Any = None, *,
        find_leaks: bool = True, paced: bool = True, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.recorder, self.meter, self.model, self.clock = recorder, meter, model, clock
        self._optimizer: Callable[[], Any] = lambda: None
        self.optimizer = optimizer
        self._beside: tuple[Callable[[], Any], ...] = ()  # further optimizers, whose states lie on the card as well
        self._states_of = 0  # number of weights with optimizer states, when they were last counted
        self.done = 0  # optimizer steps
        self._phase: Phase = "load"
        self._interval = SamplingInterval(clock)
        self._paced = paced  # False: a look at every step, however short
        self._began = clock()
        self._series = Series() if find_leaks else None
        self._search: LeakSearch | None = None
        self._growth = Growth(0.0, 0, 0, 0)  # the growth that the search is about
        self._hooks: list[Any] = []
        self._counts_itself = False
        self._closed = False
        first = self._sample("load")
        self._between_experiments(first)
        self._phase = "first_step"
        self._hook()
        _closes_with_the_program(self)

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
        """Note that an optimizer step is done. An optimizer's steps are noted automatically, until this is called."""
        if self._counts_itself:
            self._unhook_optimizer()
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
        """End the watch: take a last look, and report what was found."""
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

    def _unhook_optimizer(self) -> None:
        self._hooks.pop().remove()  # the hook behind the step, made last
        self._counts_itself = False

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        """Let go of the first optimizer where the loop has replaced it by another of the same weights."""
        if optimizer is self.optimizer:
            return
        mine = {id(weight) for weight in self._parameters()}
        if any(id(weight) in mine for group in optimizer.param_groups for weight in group["params"]):
            self._kept = None  # it lives on only where the loop keeps it
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
        states_of = sum(len(getattr(optimizer, "state", None) or ()) for optimizer in self._optimizers())
        if self.done == 1 or states_of != self._states_of:  # some weights get their states later than others
            self._states_of = states_of
            self.recorder.share(self._shares())
        if self._series is not None:
            self._look_for_leaks(self._series, reading)
        self._interval.looked()

    def _sample(self, phase: Phase, always: bool = False) -> Reading:
        """Take a look; at the first one of each phase tensors are always counted."""
        reading = self.meter.read(always or phase not in self.recorder.peaks)
        seconds = self.clock() - self._began
        every = self._interval.every if self._paced else 1
        self.recorder.add(Sample(seconds, self.done, phase, reading.now, reading.peak, reading.counted, every))
        return reading

    def _look_for_leaks(self, series: Series, reading: Reading) -> None:
        """Test the series, which is cheap; once it grows, search over the next steps for who holds it."""
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
        """Report the leak, once for each holder, where the holders explain the growth."""
        growth = self._growth
        known = {(h.name, h.place) for leak in self.leaks for h in leak.holders}
        fresh = any((h.name, h.place) not in known for h in holders)
        sure = any(h.kind in ("graph", "cycle") for h in holders)
        if fresh and (sure or sum(h.bytes for h in holders) >= EXPLAINED * growth.per_step):
            found = Leak(int(growth.per_step), growth.since, growth.until, growth.bytes, holders)
            self.recorder.leak(found, "step")

    def _report_inconclusive(self) -> None:
        """Report growth that the run was too short to explain, and leaks that have stopped growing since."""
        growth = self._growth
        for leak in self.leaks:
            alarm = stopped(leak, self.recorder.samples, leak.until + 2 * APART)
            if alarm is not None:
                self.recorder.alarm(alarm)
        known = any(leak.per_step >= SAME * growth.per_step for leak in self.leaks if leak.unit == "step")
        if self._search is not None and not known:
            span = f"steps {growth.since:,} to {growth.until:,}"
            per_step = human(int(growth.per_step))
            text = (
                f"live memory grew by {per_step} per step over {span}; the run ended before it was known who holds it"
            )
            self.recorder.alarm(Alarm("unsure", self.done, "step", growth.bytes, 0, text))
        elif self.meter.name == "tensors" and not self.leaks:
            alarm = inconclusive(self.recorder.samples)
            if alarm is not None:
                self.recorder.alarm(alarm)

    def _between_experiments(self, first: Reading) -> None:
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
        parts: tuple[tuple[Role, list[Tensor]], ...] = (
            ("parameters", self._parameters()),
            ("optimizer_states", self._states()),
        )
        kind = "cuda" if self.meter.name == "cuda" else "cpu"
        sizes = ((role, sum(storages(t for t in found if t.device.type == kind).values())) for role, found in parts)
        return tuple((role, size) for role, size in sizes if size)

    def _parameters(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.model.buffers()] if self.model is not None else []

    def _optimizers(self) -> list[Any]:
        return [self.optimizer, *(optimizer() for optimizer in self._beside)]

    def _states(self) -> list[Tensor]:
        kept = [state for o in self._optimizers() for state in (getattr(o, "state", None) or {}).values()]
        return [v for state in kept if isinstance(state, dict) for v in state.values() if isinstance(v, Tensor)]


# --- beginning a watch ---


def watch(
    model: Any = None,
    optimizer: Any = None,
    *,
    predicted: footprints.Predicted | None = None,
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
    """Watch a training loop from here on.

    model, optimizer: as the loop has them; with an optimizer its steps are counted automatically, with a model
    evaluation is distinguished from training. predicted: a Footprint, a Tape, or a file (recipe.toml, tape, snapshot,
    JSON of memfit estimate, log of another watch) to compare the run with. log: JSON lines are appended here; None:
    nowhere. to: further sinks, "tensorboard:runs/a", "wandb", "prometheus:9400". live: a view in the terminal instead
    of lines. reset_peaks: give every step a peak of its own, by torch.cuda.reset_peak_memory_stats. count_every: on a
    run without a card, count live tensors every so many steps instead of when there is time, and look at every step,
    however short. screen: shows the run instead of these. Raises MemfitError for bad arguments.
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
        predicted=footprints.of(predicted),
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
    """Return the alarm for an error; its `bytes` are those of a request for memory that failed, 0 for another error."""
    message = " ".join(str(error).split())
    requested = next((found.tried for found in messages(message) if found.tried is not None), 0)
    short = ". ".join(message.split(". ")[:SENTENCES])
    return Alarm("failed", step, phase, requested, 0, f"the run ended in {type(error).__name__}: {short}")


_OPEN: weakref.WeakSet[Watch] = weakref.WeakSet()


def _closes_with_the_program(watch: Watch) -> None:
    """Let an error that nobody catches end this watch, as an error that leaves its block does."""
    _hook_uncaught_errors()
    _OPEN.add(watch)


@cache
def _hook_uncaught_errors() -> None:
    before = sys.excepthook

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            for watch in list(_OPEN):
                watch.__exit__(kind, error, trace)
        finally:
            before(kind, error, trace)

    sys.excepthook = uncaught
