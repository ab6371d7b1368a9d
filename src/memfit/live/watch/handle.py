"""Watch: what memfit.watch() returns. It follows the phases of a training loop and reads the meter at their ends."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memfit.allocator.replay import Timeline
from memfit.footprints import footprint_of_watch as measured
from memfit.live.holders.live_tensors import storages
from memfit.live.watch.experiments import THIS_PROCESS
from memfit.live.watch.failure import ends_with_the_program, failed
from memfit.live.watch.inconclusive_leaks import doubt, stopped
from memfit.live.watch.leak_search import APART, Hunt
from memfit.live.watch.leak_test import Growth, Series
from memfit.live.watch.meters import Meter, Reading
from memfit.live.watch.recorder import Recorder
from memfit.live.watch.sampling_interval import Pace
from memfit.nouns.footprint import Footprint
from memfit.nouns.sample import Alarm, Holder, Leak, Sample
from memfit.nouns.tape import PHASES, Phase, Role
from memfit.units import human

SAME = 0.5  # of a growth: a leak that was told and grows by as much explains it, too
EXPLAINED = 0.2  # of a growth: names that keep less than this of it do not explain it


class Following:
    """A model's hook. Copies of the model, and those that are saved, follow nothing and need no memfit."""

    def __init__(self, call: Callable[[Any, Any], None]) -> None:
        self._call = call

    def __call__(self, module: Any, args: Any) -> None:
        self._call(module, args)

    def __deepcopy__(self, _: Any) -> Callable[[Any, Any], Any]:
        return partial(dict.get, {})  # of Python alone, and gives the arguments back as they are

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (dict.get, {})


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """For PyTorch's own list of hooks, which would keep a watch that nobody closes, and its model."""
    found = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        alive = found()
        if alive is not None:
            alive(*args)

    return call


class Watch:
    """A watched training loop. Use it as a context manager, or call `close()`.

    With an optimizer its steps are counted by themselves, and those of the one that takes its place; without, call
    `step()` at the end of each. `phase("eval")` names a part of the loop; evaluation is also seen by itself where the
    model is given. `leaks`, `footprint()` and `timeline()` say what was found so far.
    """

    def __init__(
        self, recorder: Recorder, meter: Meter, model: Any = None, optimizer: Any = None, *,
        find_leaks: bool = True, paced: bool = True, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.recorder, self.meter, self.model, self.clock = recorder, meter, model, clock
        self._optimizer: Callable[[], Any] = lambda: None
        self.optimizer = optimizer
        self._beside: tuple[Callable[[], Any], ...] = ()  # other optimizers, whose states lie on the card as well
        self._states_of = 0  # weights of which optimizers keep states, when they were last counted
        self.done = 0  # optimizer steps
        self._phase: Phase = "load"
        self._pace = Pace(clock)
        self._paced = paced  # else a look at every step, however short
        self._began = clock()
        self._series = Series() if find_leaks else None
        self._hunt: Hunt | None = None
        self._growth = Growth(0.0, 0, 0, 0)  # the one that the hunt is about
        self._hooks: list[Any] = []
        self._counts_itself = False
        self._closed = False
        first = self._sample("load")
        self._between_experiments(first)
        self._phase = "first_step"
        self._hook()
        ends_with_the_program(self)

    # --- what a loop calls ---

    @property
    def optimizer(self) -> Any:
        """The one that steps."""
        return self._optimizer()

    @optimizer.setter
    def optimizer(self, given: Any) -> None:
        given = getattr(given, "optimizer", given)  # accelerate wraps it
        self._optimizer = weakref.ref(given) if given is not None else lambda: None
        self._kept = given  # until another one steps

    def beside(self, optimizers: Iterable[Any]) -> None:
        """Optimizers that step beside the first: their states count with its own, their steps do not."""
        self._beside = tuple(weakref.ref(optimizer) for optimizer in optimizers)

    def step(self) -> None:
        """An optimizer step is done. With an optimizer given this is called by itself; calling it once takes over."""
        if self._counts_itself:
            self._unhook_optimizer()
            if self.done:  # this step was counted by the hook
                return
        self._stepped()

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """What runs inside is of this phase: load, eval, save, resume, merge."""
        if name not in PHASES:
            raise ValueError(f"phase {name!r} is none of {', '.join(PHASES)}")
        before = self._phase
        self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def enter(self, name: Phase) -> None:
        """From here on the run is in this phase."""
        if name != self._phase:
            self._sample(self._phase)
            self._phase = name

    def train(self) -> None:
        """From here on the run trains again."""
        self.enter("step" if self.done else "first_step")

    def close(self) -> None:
        """The run is over: a last look, and what was found."""
        if self._closed:
            return
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._sample(self._phase, always=True)
        if self._series is not None:
            self._doubt()
            THIS_PROCESS.end()
        self.recorder.close()
        self._beside = ()
        self.model = self.optimizer = None  # a watch that is kept for what it found keeps no model

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Exception) and not self._closed:
            self.recorder.alarm(failed(error, self.done, self._phase))
        self.close()

    # --- what was found ---

    @property
    def leaks(self) -> tuple[Leak, ...]:
        """What grew beyond noise, and who holds it."""
        return tuple(self.recorder.leaks)

    def footprint(self) -> Footprint:
        """The peaks of every phase so far, as predictions have them."""
        return measured.footprint_of(self.recorder.watched())

    def timeline(self) -> Timeline:
        """The run so far, stretch by stretch."""
        return measured.timeline_of(self.recorder.watched())

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
        self._hooks.pop().remove()  # the last that was made
        self._counts_itself = False

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        """The loop may have put another optimizer of its weights in the place of the first, whose states then go."""
        if optimizer is self.optimizer:
            return
        mine = {id(weight) for weight in self._parameters()}
        if any(id(weight) in mine for group in optimizer.param_groups for weight in group["params"]):
            self._kept = None  # alive from here on only where the loop has it, too
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
        if not self._pace.due(always=self._hunt is not None or not self._paced):
            return
        phase: Phase = "first_step" if self.done == 1 else "step"
        reading = self._sample(phase)
        self._phase = "step"
        states_of = sum(len(getattr(optimizer, "state", None) or ()) for optimizer in self._optimizers())
        if self.done == 1 or states_of != self._states_of:  # some optimizers begin later than others
            self._states_of = states_of
            self.recorder.share(self._shares())
        if self._series is not None:
            self._look_for_leaks(self._series, reading)
        self._pace.looked()

    def _sample(self, phase: Phase, always: bool = False) -> Reading:
        """A look; tensors are counted at the first one of each phase."""
        reading = self.meter.read(always or phase not in self.recorder.peaks)
        seconds = self.clock() - self._began
        every = self._pace.every if self._paced else 1
        self.recorder.add(Sample(seconds, self.done, phase, reading.now, reading.peak, reading.counted, every))
        return reading

    def _look_for_leaks(self, series: Series, reading: Reading) -> None:
        """Cheap until the series grows; then a hunt over the next steps says who holds it."""
        if self._hunt is not None:
            holders = self._hunt.look()
            if holders is not None:
                self._hunt = None
                self._tell(holders)
                series.forget()
            return
        growth = series.add(self.done, reading.now.allocated) if reading.counted else None
        if growth is not None:
            self._growth, self._hunt = growth, Hunt()

    def _tell(self, holders: tuple[Holder, ...]) -> None:
        """Raise the leak, once for each holder, where what was found explains the growth."""
        growth = self._growth
        known = {(h.name, h.place) for leak in self.leaks for h in leak.holders}
        fresh = any((h.name, h.place) not in known for h in holders)
        sure = any(h.kind in ("graph", "cycle") for h in holders)
        if fresh and (sure or sum(h.bytes for h in holders) >= EXPLAINED * growth.per_step):
            found = Leak(int(growth.per_step), growth.since, growth.until, growth.bytes, holders)
            self.recorder.leak(found, "step")

    def _doubt(self) -> None:
        """Memory that grew when the run ended before anybody could say why, and growth that was told and has stopped."""
        growth = self._growth
        for leak in self.leaks:
            alarm = stopped(leak, self.recorder.samples, leak.until + 2 * APART)
            if alarm is not None:
                self.recorder.alarm(alarm)
        known = any(leak.per_step >= SAME * growth.per_step for leak in self.leaks if leak.unit == "step")
        if self._hunt is not None and not known:
            span = f"steps {growth.since:,} to {growth.until:,}"
            text = f"live memory grew by {human(int(growth.per_step))} per step over {span}; the run ended before it was known who holds it"
            self.recorder.alarm(Alarm("unsure", self.done, "step", growth.bytes, 0, text))
        elif self.meter.name == "tensors" and not self.leaks:
            alarm = doubt(self.recorder.samples)
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
        """Bytes of parameters (and buffers) and of optimizer states on the metered device."""
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
