"""Make a traced script's data loaders return their longest batch, and end once the script has trained enough."""

from __future__ import annotations

import copy
import functools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from memfit.nouns.tape import BACKWARD, FORWARD, GENERATION, Phase, Tape
from memfit.virtual.device.card import Card
from memfit.virtual.device.graphs import KEPT
from memfit.virtual.inference import OpenPass, caller, settled
from memfit.virtual.libraries.inductor import warming
from memfit.virtual.observer import EnoughSteps, Observer, within_a_step
from memfit.virtual.patching import patched
from memfit.virtual.scripts.growth import LONGER, Growth
from memfit.virtual.scripts.stages import Stages, ends_quietly, needs_an_item

# --- the longest batch ---

PROBED = 64  # samples, spread over the data set: windows of a text and pictures mostly have one size
LOOKED = 20_000  # samples that are read at most to find the longest batch
SECONDS, SECONDS_ALIKE = 5.0, 0.5  # that reading them may take; the latter where PROBED samples have one size


@dataclass(frozen=True, slots=True)
class Longest:
    """The samples of the longest batch. `size`: numbers in its longest sample; `typical`: in the median sample."""

    samples: tuple[int, ...]
    size: int
    typical: int
    seen: int  # samples that were read
    known: int  # samples of the data set

    def batch(self, loader: DataLoader[Any]) -> Any:
        """Collate the samples anew, as a script may change a batch."""
        with _random_state_kept():
            return _collated(loader, self.samples)

    @property
    def assumption(self) -> str:
        """Return what is assumed, as a sentence for the user."""
        of = f"{self.known:,}" if self.seen >= self.known else f"the first {self.seen:,} of {self.known:,}"
        longest = f"every batch holds the longest samples of {of}: {self.size:,} numbers"
        return f"{longest}, where the median has {self.typical:,}"


def longest(loader: DataLoader[Any]) -> Longest | None:
    """Find the longest batch; None where samples cannot be read twice, are not batched, or all have one size."""
    dataset, sampler = loader.dataset, loader.batch_sampler
    if isinstance(dataset, IterableDataset) or sampler is None or loader.collate_fn is None:
        return None
    try:
        with _random_state_kept():
            sizes = _sizes(dataset)
            batch = _padded(loader, _largest(sampler, sizes), sizes) if len(set(sizes)) > 1 else ()
    except Exception:  # the script will then raise the data set's own error
        return None
    if not batch:
        return None
    ordered = sorted(sizes)
    typical, known = ordered[len(ordered) // 2], len(dataset)  # type: ignore[arg-type]
    return Longest(batch, max(sizes[i] for i in batch), typical, len(sizes), known)


def _collated(loader: DataLoader[Any], samples: tuple[int, ...]) -> Any:
    assert loader.collate_fn is not None
    return loader.collate_fn([loader.dataset[i] for i in samples])


def _sizes(dataset: Any) -> list[int]:
    """Return the sizes of the samples in their order, as far as time allows."""
    count, began, found = len(dataset), time.monotonic(), list[int]()
    alike = len({_size(dataset[count * i // PROBED]) for i in range(PROBED)}) == 1 if count > PROBED else False
    for i in range(min(count, LOOKED)):
        found.append(_size(dataset[i]))
        if time.monotonic() > began + (SECONDS_ALIKE if alike else SECONDS):
            break
    return found


def _size(sample: Any) -> int:
    """Return the numbers in a sample, or the characters of a text that is not tokenized yet."""
    if isinstance(sample, Tensor):
        return sample.numel()
    if hasattr(sample, "dtype") and isinstance(getattr(sample, "size", None), int):  # a numpy array
        return int(sample.size)
    if isinstance(sample, Mapping):
        return sum(map(_size, sample.values()))
    if isinstance(sample, list | tuple):
        return len(sample) if sample and isinstance(sample[0], int | float) else sum(map(_size, sample))
    return len(sample) if isinstance(sample, str | bytes) else 1


def _largest(sampler: Any, sizes: list[int]) -> tuple[int, ...]:
    """Return the largest batch. A shuffled loader may combine any samples; other samplers list their batches."""
    if type(sampler) is BatchSampler and isinstance(sampler.sampler, RandomSampler):
        count = min(sampler.batch_size, len(sizes))
        return tuple(sorted(range(len(sizes)), key=lambda i: -sizes[i])[:count])
    drawn: list[list[int]] = [list(batch) for batch in islice(iter(sampler), LOOKED)]
    known = [(len(b) * max(sizes[i] for i in b), b) for b in drawn if b and max(b) < len(sizes)]
    return tuple(max(known, key=itemgetter(0))[1]) if known else ()


def _padded(loader: DataLoader[Any], batch: tuple[int, ...], sizes: list[int]) -> tuple[int, ...]:
    """Swap in a short sample if the batch stays as large: padding needs a mask, and masks need other kernels."""
    if len(batch) < 2:
        return batch
    mixed = (*sorted(batch, key=lambda i: -sizes[i])[:-1], min(range(len(sizes)), key=sizes.__getitem__))
    return mixed if _size(_collated(loader, mixed)) >= _size(_collated(loader, batch)) else batch


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Restore the random generators after the block."""
    numpy: Any = sys.modules.get("numpy")
    before, state, drawn = random.getstate(), torch.get_rng_state(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(before)
        torch.set_rng_state(state)
        if numpy:
            numpy.random.set_state(drawn)


# --- when a script has trained enough ---

EVALUATED = 4  # forward passes over a loader that only evaluates; later ones begin with the same memory
PASSES = 2  # over such a loader after training; those of later epochs get one batch, a copy, and read no data
AHEAD = 1  # further steps: accelerate reads a batch ahead, and steps once more with the last one
WAITED = 30  # further steps for optimizers that step rarely, such as a generator once per five steps of its critic
WITHOUT = 200  # backward passes of a script that makes no optimizer, such as a loop that updates its weights itself
SPENT = 100  # further steps, after which every loader ends: a script may have any number of stages
ALIKE = 2  # loaders of a kind that are trained from; those of later epochs, folds and clients are no new stage
FURTHER = 50_000  # allocations in epochs after the steps, or as many as before if that is more; then epochs end
LENT = 3  # batches that a function gets for a loop that cannot do without any, in further epochs
_DRY = 1000  # empty epochs after which the script is assumed to cycle for ever: it gets further batches
_GIVEN_UP = 20_000  # empty epochs after which such a script is stopped
_ALONE = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None}


class ScriptObserver(Observer):
    """Stops a script after `enough` steps of every optimizer, at its loader's next batch or its next training step."""

    def __init__(self, card: Card, enough: int) -> None:
        self.enough = enough
        self.backwards = self.evaluations = 0  # evaluations: passes without a backward, in no training step
        self._iterators = 0
        self._open: list[OpenPass] = []
        self._last_backward = 0  # index of its mark
        self._followed: set[int] = set()  # numbers of the iterators from whose batches a backward followed
        self._graphs: set[int] = set()  # ids of the modules that ran with gradients since
        self._trained: set[int] = set()  # ids of those that a backward followed
        self.optimizers: WeakSet[Any] = WeakSet()
        self.trained: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # loader -> its batches that led to a step
        self.read: Any = None  # weak reference to the iterator that gave the last batch
        self.any_made = False  # whether there was an optimizer
        self.over = False  # whether every optimizer made its steps, or had the time to
        self.dry = 0  # how often a loader ended early
        self.pending: Any = None  # weak reference to the loader that ended last, with no batch of another since
        self.overran = False  # whether the loader that ended last had given a batch after it should have ended
        self.born: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # loader -> when it was made
        self._trained_by: int | None = None  # allocations when a loader ended early for the first time
        self.lent: Counter[CodeType] = Counter()  # function -> such batches that its loop needed
        self.lacking: list[str] = []  # descriptions of optimizers that lack steps
        self._stale, self._ended = 0, False  # _stale: steps since the last new batch
        self._kinds: Counter[Any] = Counter()  # kind -> loaders from which enough was trained
        self._longest: WeakKeyDictionary[Any, Longest | None] = WeakKeyDictionary()
        self._evaluated: WeakSet[Any] = WeakSet()
        self._passes: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # loader -> passes after training, without it
        self.kept: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # loader -> its batch for further passes
        self.assumed = card.assumed
        self.stages = Stages()
        self.growth = Growth(card.ledger, enough)  # what grows from step to step
        self.alone = True  # whether no other rank is traced
        self._warmed = 0  # further steps in which compiled functions warmed up
        self.captures = False  # whether the script captures a CUDA graph, which it does after warm-up steps
        self.lengthen: list[Callable[[int], None]] = []  # let Trainers make so many further steps
        super().__init__(card)

    def made(self, optimizer: Any) -> None:
        """Register a new optimizer, which may make its steps unless the script makes one optimizer after the other."""
        self.any_made = True
        self.optimizers.add(optimizer)
        self.over = self.over and self._beyond(WAITED)

    def used_card(self) -> bool:
        """Return whether anything was allocated on the card while the script trained."""
        ledger = self.card.ledger
        began = next((at for at, phase, _ in ledger.marks if phase in ("first_step", "step")), len(ledger.ops))
        return any(op >= 0 for op in ledger.ops[began:])

    @property
    def nearly(self) -> bool:
        """Return whether the last steps are being made."""
        return not self.over and self._beyond(-len(self.optimizers))

    def _beyond(self, steps: int) -> bool:
        return self.done >= self.enough * max(len(self.optimizers), 1) + steps

    def _behind(self) -> Iterator[Any]:
        """Yield optimizers that lack steps and have weights on the card that no finished optimizer has."""
        few = [o for o in self.optimizers if self.stepped.get(o, 0) < self.enough]
        shared = {id(p) for o in self.stepped if self.stepped[o] >= self.enough for p in _weights(o)} if few else set()
        yield from (o for o in few if any(p.is_cuda and id(p) not in shared for p in _weights(o)))

    def exhausted(self, loader: Any) -> bool:
        """Return whether enough was trained from a loader or its kind; a loader of a later stage has its own steps."""
        if not self.over:
            return False
        return self._beyond(SPENT) or self.trained.get(loader, 0) >= self.enough or self._kinds[_kind(loader)] >= ALIKE

    def evaluates(self, loader: Any) -> bool:
        """Return whether a loader that trained enough is read to evaluate, for the first time: without gradients."""
        if torch.is_grad_enabled() or loader in self._evaluated or not self.exhausted(loader):
            return False
        self._evaluated.add(loader)
        return True

    def last_pass(self, loader: Any) -> bool:
        """Count a pass over a loader that does not train, after training; return whether it is the last whole one."""
        if not self.over or self.trained.get(loader, 0):
            return False
        self._passes[loader] = self._passes.get(loader, 0) + 1
        return self._passes[loader] == PASSES

    def mark(self, phase: Phase, instant: str) -> None:
        """Begin an instant. Raises EnoughSteps where training would go on."""
        marks = self.card.ledger.marks
        if instant == BACKWARD and marks[-1][1] == "eval":  # models loaded from files are in eval mode
            marks[-1] = (marks[-1][0], phase, marks[-1][2])
            self.evaluations -= 1
        if instant == BACKWARD:
            self.backwards += 1
            self._last_backward = len(marks)
            self._followed.add(self._batches())
            self._trained |= self._graphs
            self._graphs = set()
        super().mark(phase, instant)
        if self.backwards > WITHOUT and not self.any_made:
            self.assumed.setdefault(
                f"stopped after {WITHOUT} backward passes: the script made no torch.optim optimizer"
            )
            raise EnoughSteps
        if self._ended and phase == self.phase and instant in (FORWARD, BACKWARD) and self.over:
            raise EnoughSteps

    def iterated(self) -> int:
        """Number a new iterator, from 1."""
        self._iterators += 1
        return self._iterators

    def _batches(self) -> int:
        """Return the number of the iterator whose last batch no step was made with yet, 0 without one."""
        batches = self.read and self.read()
        return batches.number if batches is not None and batches.fresh else 0

    def _begin_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        super()._begin_forward(module, inputs)
        if self._open and self._open[-1].mark == len(self.card.ledger.marks):  # a further part, not marked of its own
            self._open.pop()
        if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            self._graphs.add(id(getattr(module, "_orig_mod", module)))

    def _without_training(self, root: torch.nn.Module) -> tuple[Phase, str]:
        part, instant = caller()
        self.evaluations += part != "training"
        if not part:
            evaluates = not root.training and instant != GENERATION
            self._open.append(OpenPass(len(self.card.ledger.marks), self._batches(), id(root), evaluates, self.phase))
        return self.phase if part == "training" else "eval", instant

    def tape(self, about: dict[str, str]) -> Tape:
        settled(self.card.ledger.marks, self._open, self._followed, self._trained, self._last_backward)
        return super().tape(about)

    def longest_of(self, loader: Any) -> Longest | None:
        """Return a loader's longest batch, found once."""
        if loader not in self._longest:
            self._longest[loader] = found = longest(loader)
            if found:
                self.assumed.setdefault(found.assumption)
        return self._longest[loader]

    def ran_dry(self) -> bool:
        """Count that an exhausted loader was read again; return whether it may end. Raises EnoughSteps at last."""
        self.dry += 1
        if self.dry > _GIVEN_UP:
            raise EnoughSteps
        return self.dry % _DRY != 0

    def further_epoch(self, loader: Any) -> None:
        """End the loops over a loader's epochs once those after the steps have cost much: each may evaluate or sample.

        Other traced ranks would have to end theirs too, so there they go on.
        """
        made = len(self.card.ledger.blocks)
        self._trained_by = made if self._trained_by is None else self._trained_by
        if self.alone and made - self._trained_by > max(FURTHER, self._trained_by):
            self.stages.end(self.born.get(loader, 0))
            self.assumed.setdefault("epochs after the steps were ended early: what they do had repeated long enough")

    def _repeats(self) -> bool:
        """Return whether steps were made without new batches; one batch may lead to a step of each optimizer."""
        return self._stale >= (self.enough + AHEAD) * max(len(self.optimizers), 1)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if (self._ended or self._repeats()) and self.over:
            raise EnoughSteps
        super()._before_step(optimizer, args, kwargs)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        before = self.done
        # one step, however many make it
        (self.optimizers.discard if within_a_step() else self.optimizers.add)(optimizer)
        super()._after_step(optimizer, args, kwargs)
        if self.done == before:  # no training step
            return
        if isinstance(optimizer, torch.optim.LBFGS):
            self._fill_history(optimizer)
        if self.done % max(len(self.optimizers), 1) == 0 and (longer := self.growth.stepped() or self._warming()):
            self.enough += longer
            for lengthen in self.lengthen:
                lengthen(longer)
        self._tell_windows()
        batches = self.read and self.read()
        loader = batches.loader if batches is not None and batches.fresh else self.pending and self.pending()
        if loader is not None:
            if batches is not None:
                batches.fresh = False
            self.pending, self._stale = None, 0
            self.trained[loader] = count = self.trained.get(loader, 0) + 1
            self._kinds[_kind(loader)] += count == self.enough
        else:
            self._stale += 1
        if (batches is not None and batches.overrun) or self.overran or (self.trained and self._repeats()):
            self.stages.end()
            self.overran = False
        if self.done % max(len(self.optimizers), 1) == 0:  # with one optimizer per weight there are thousands
            waits = (self.captures and KEPT not in self.assumed) or next(self._behind(), None) is not None
            self.over = self.done >= self.enough and (self._beyond(WAITED) or not waits)
        if self.over:
            if batches is not None and batches.counted:
                self.stages.end()
            self.lacking = [_described(o, self.stepped.get(o, 0)) for o in self._behind()]
            self._ended = self._ended or (batches is None and loader is None and not self.dry)

    def _tell_windows(self) -> None:
        for note in self.growth.notes:
            self.assumed.setdefault(note)
        for t in self.growth.filled:
            self._tag(t, "activations", "items of a container that is taken as full")

    def _warming(self) -> int:
        """Return how many more steps are to be traced until the graphs of what is compiled are recorded: 1 or none."""
        if not self._beyond(0) or self._warmed == LONGER or not self.growth.anywhere(warming()):
            return 0
        self._warmed += 1
        return 1

    def _fill_history(self, optimizer: torch.optim.LBFGS) -> None:
        """Allocate all of LBFGS's history; how fast it fills depends on the losses."""
        state = optimizer.state[optimizer.param_groups[0]["params"][0]]
        direction = state.get("d")
        if direction is None or not direction.is_cuda:
            return
        for name, like in (("old_dirs", direction), ("old_stps", direction), ("ro", direction.new_empty(()))):
            held = state[name]
            held += [torch.empty_like(like) for _ in range(optimizer.param_groups[0]["history_size"] - len(held))]
        self.assumed.setdefault("LBFGS: its history taken as full")


def _weights(optimizer: Any) -> Iterator[Any]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _kind(loader: Any) -> Any:
    """Return the type and length of the data and the batch size, which loaders of one stage's epochs or folds share."""
    data = loader.dataset
    return type(data), len(data) if hasattr(data, "__len__") else id(data), loader.batch_size


def _described(optimizer: Any, steps: int) -> str:
    which = f"{type(optimizer).__name__} of {sum(p.numel() for p in _weights(optimizer)):,} parameters"
    return f"{which} made {steps} of its steps" if steps else f"{which} made no step: its states are not counted"


class _Batches:
    """A loader's iterator that ends once no more batches are needed."""

    def __init__(self, loader: Any, make: Callable[[], Any], observer: ScriptObserver) -> None:
        self.loader, self._make, self._observer = loader, make, observer
        self.number = observer.iterated()
        self.fresh = False  # whether no step was made with the last batch yet
        self.overrun = False  # whether the last batch came after the loader should have ended
        self.counted = False  # whether the loop that reads it counts its turns, and would not end with the loader
        self._before = observer.backwards, observer.evaluations
        self._evaluates, self._given = observer.evaluates(loader), 0
        self._keeps, self._repeated = observer.last_pass(loader), loader in observer.kept
        spent = observer.exhausted(loader) and not self._evaluates
        self._made = None if spent or self._repeated else make()
        self._longest = None if spent else observer.longest_of(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    @property
    def _real(self) -> Any:
        if self._made is None:
            self._made = self._make()
        return self._made

    def __next__(self) -> Any:
        observer, (backwards, evaluations) = self._observer, self._before
        observer.read = None
        spent = observer.exhausted(self.loader) and not (self._evaluates and self._given < EVALUATED)
        seen = observer.backwards == backwards and observer.evaluations - evaluations >= EVALUATED
        seen = seen or (self._repeated and self._given > 0)
        quiet = (spent or seen) and ends_quietly(sys._getframe(1)) and not (spent and self._lends(sys._getframe(1)))
        if quiet and (not spent or observer.ran_dry()):
            observer.overran = self.overrun
            if spent:
                observer.further_epoch(self.loader)
            raise StopIteration
        if observer.nearly and torch.is_grad_enabled():
            self.counted = not ends_quietly(sys._getframe(1))
        batch = self._next(copied=self._repeated and not self._given and not spent)
        self._given, observer.overran, observer.pending = self._given + 1, False, None
        observer.read, self.fresh, self.overrun = ref(self), not spent, spent
        return batch

    def _lends(self, frame: FrameType) -> bool:
        """Return whether a loop that would fail without any batch gets one; each loop is helped a few times."""
        lent = self._observer.lent
        if self._given or lent[frame.f_code] >= LENT or not needs_an_item(frame):
            return False
        lent[frame.f_code] += 1
        return True

    def _next(self, *, copied: bool) -> Any:
        kept = self._observer.kept
        if copied:
            return copy.deepcopy(kept[self.loader])
        try:
            batch = next(self._real)
        except StopIteration:
            if self._given and torch.is_grad_enabled():  # who reads ahead makes one more step
                self._observer.pending = ref(self.loader)
            raise
        batch = self._longest.batch(self.loader) if self._longest else batch
        if self._keeps and not self._given:
            with suppress(Exception):  # a batch that cannot be copied is read again each time
                kept[self.loader] = copy.deepcopy(batch)
        return batch


@contextmanager
def enough_batches(observer: ScriptObserver) -> Iterator[None]:
    """Run data loaders in this process, end them when the observer has seen enough, and register all optimizers."""
    make, iterate = DataLoader.__init__, DataLoader.__iter__

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **(kwargs | _ALONE if len(args) <= 5 else kwargs))
        observer.born[self] = observer.stages.tick()

    def iterated(self: Any) -> Any:
        return _Batches(self, lambda: iterate(self), observer)

    create = torch.optim.Optimizer.__init__

    @functools.wraps(create)
    def created(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        observer.made(self)

    with (
        patched(DataLoader, {"__init__": made, "__iter__": iterated}),
        patched(torch.optim.Optimizer, {"__init__": created}),
    ):
        yield
