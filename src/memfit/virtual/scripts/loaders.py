"""A traced script's data loaders: each gives the longest batch it can, and runs dry once the script has trained enough."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from memfit.nouns.tape import Phase
from memfit.virtual.device.card import Card
from memfit.virtual.observer import EnoughSteps, Observer
from memfit.virtual.patching import patched

# --- the longest batch ---

LOOKED = 20_000  # samples that are read to find it
SECONDS = 5.0  # that are spent on it


@dataclass(frozen=True, slots=True)
class Longest:
    """The samples of the longest batch. `size`: numbers in its longest sample; `typical`: in the median one."""

    samples: tuple[int, ...]
    size: int
    typical: int
    seen: int  # samples that were read
    known: int  # of the data set

    def batch(self, loader: DataLoader[Any]) -> Any:
        """Collated anew, as a script may change what it was given."""
        with _same_chance():
            return _collated(loader, self.samples)

    @property
    def said(self) -> str:
        """What was taken for granted."""
        of = f"{self.known:,}" if self.seen >= self.known else f"the first {self.seen:,} of {self.known:,}"
        return f"every batch holds the longest samples of {of}: {self.size:,} numbers, where the median has {self.typical:,}"


def longest(loader: DataLoader[Any]) -> Longest | None:
    """None where samples cannot be read twice, come in no batches, or are all of one size."""
    dataset, sampler = loader.dataset, loader.batch_sampler
    if isinstance(dataset, IterableDataset) or sampler is None or loader.collate_fn is None:
        return None
    try:
        with _same_chance():
            sizes = _sizes(dataset)
            batch = _padded(loader, _largest(sampler, sizes), sizes) if len(set(sizes)) > 1 else ()
    except Exception:  # a data set that cannot be asked out of turn says so in its own words, when it is its turn
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
    """Of the samples, in their order, as far as time allows."""
    until = time.monotonic() + SECONDS
    found = []
    for i in range(min(len(dataset), LOOKED)):
        found.append(_size(dataset[i]))
        if time.monotonic() > until:
            break
    return found


def _size(sample: Any) -> int:
    """Numbers in a sample; letters of a text that is not yet tokens."""
    if isinstance(sample, Tensor):
        return sample.numel()
    if hasattr(sample, "dtype") and isinstance(getattr(sample, "size", None), int):  # of numpy
        return int(sample.size)
    if isinstance(sample, Mapping):
        return sum(map(_size, sample.values()))
    if isinstance(sample, list | tuple):
        return len(sample) if sample and isinstance(sample[0], int | float) else sum(map(_size, sample))
    return len(sample) if isinstance(sample, str | bytes) else 1


def _largest(sampler: Any, sizes: list[int]) -> tuple[int, ...]:
    """Of a shuffled loader any samples may meet; of another one the batches are known."""
    if type(sampler) is BatchSampler and isinstance(sampler.sampler, RandomSampler):
        count = min(sampler.batch_size, len(sizes))
        return tuple(sorted(range(len(sizes)), key=lambda i: -sizes[i])[:count])
    drawn: list[list[int]] = [list(batch) for batch in islice(iter(sampler), LOOKED)]
    known = [(len(some) * max(sizes[i] for i in some), some) for some in drawn if some and max(some) < len(sizes)]
    return tuple(max(known, key=itemgetter(0))[1]) if known else ()


def _padded(loader: DataLoader[Any], batch: tuple[int, ...], sizes: list[int]) -> tuple[int, ...]:
    """With a short sample where that makes the batch no smaller: padding needs a mask, and masks other kernels."""
    if len(batch) < 2:
        return batch
    mixed = (*sorted(batch, key=lambda i: -sizes[i])[:-1], min(range(len(sizes)), key=sizes.__getitem__))
    whole, part = (_size(_collated(loader, some)) for some in (batch, mixed))
    return mixed if part >= whole else batch


@contextmanager
def _same_chance() -> Iterator[None]:
    """What is drawn inside is drawn again after it."""
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

EVALUATED = 4  # forward passes over one loader that only evaluates; later ones find the memory as these left it
AHEAD = 1  # steps beyond: accelerate reads a batch ahead, and steps once more with the last one
WAITED = 30  # steps beyond enough in which seldom optimizers may make theirs: a critic's five to one of its generator
SPENT = 100  # steps beyond enough, after which every loader is dry: stages have no end
ALIKE = 2  # loaders of one kind that are trained from; those of later epochs, folds and clients are no other stage
_DRY = 1000  # empty epochs, after which a script is taken to cycle through its loader for ever
_ALONE = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None}


class ScriptObserver(Observer):
    """Stops a script after `enough` steps of every optimizer: where its loader would give the next batch, or training goes on."""

    def __init__(self, card: Card, enough: int) -> None:
        self.enough = enough
        self.backwards = self.evaluations = 0
        self.optimizers: WeakSet[Any] = WeakSet()
        self.trained: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # loader -> its batches that led to a step
        self.read: Any = None  # weak reference to the iterator that gave the last batch
        self.over = False  # every optimizer made the steps that were asked for, or had its time to
        self.dry = 0  # how often a loader had no more to give
        self.lacking: list[
            str
        ] = []  # optimizers without all their steps when the last was made; later they may be gone
        self._stale, self._ended = 0, False  # _stale: steps since the last new batch
        self._kinds: Counter[Any] = Counter()  # of loaders that were trained from enough
        self._longest: WeakKeyDictionary[Any, Longest | None] = WeakKeyDictionary()
        self.assumed = card.assumed
        super().__init__(card)

    def _enough(self) -> bool:
        return self.done >= self.enough and (self._beyond(WAITED) or next(self._behind(), None) is None)

    def knows(self, optimizer: Any) -> None:
        """One more was made, which gets its steps, unless a script makes one after the other."""
        self.optimizers.add(optimizer)
        self.over = self.over and self._beyond(WAITED)

    def _beyond(self, steps: int) -> bool:
        return self.done >= self.enough * max(len(self.optimizers), 1) + steps

    def _behind(self) -> Iterator[Any]:
        """Optimizers that lack steps, of weights on the card that no other one steps."""
        few = [o for o in self.optimizers if self.stepped.get(o, 0) < self.enough]
        shared = {id(p) for o in self.stepped if self.stepped[o] >= self.enough for p in _weights(o)} if few else set()
        return (o for o in few if any(p.is_cuda and id(p) not in shared for p in _weights(o)))

    def exhausted(self, loader: Any) -> bool:
        """Enough was trained from it, or from others like it; a loader of a later stage trains its own steps."""
        if not self.over:
            return False
        return self._beyond(SPENT) or self.trained.get(loader, 0) >= self.enough or self._kinds[_kind(loader)] >= ALIKE

    def mark(self, phase: Phase, instant: str) -> None:
        """An instant begins. Raises EnoughSteps where training would go on."""
        marks = self.card.ledger.marks
        if instant == "backward" and marks[-1][1:] == ("eval", "forward"):  # models read from files are in eval mode
            marks[-1] = (marks[-1][0], phase, "forward")
            self.evaluations -= 1
        self.backwards += instant == "backward"
        self.evaluations += phase == "eval"
        super().mark(phase, instant)
        if self._ended and phase == self.phase and instant in ("forward", "backward") and self.over:
            raise EnoughSteps

    def longest_of(self, loader: Any) -> Longest | None:
        """Its longest batch, looked for once."""
        if loader not in self._longest:
            self._longest[loader] = found = longest(loader)
            if found:
                self.assumed.setdefault(found.said)
        return self._longest[loader]

    def ran_dry(self) -> None:
        """A loader that has been trained from was asked for more. Raises EnoughSteps where that never ends."""
        self.dry += 1
        if self.dry > _DRY:
            raise EnoughSteps

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        again = self._stale >= (self.enough + AHEAD) * max(len(self.optimizers), 1)  # one batch may make a step of each
        if (self._ended or again) and self.over:
            raise EnoughSteps
        super()._before_step(optimizer, args, kwargs)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        before = self.done
        super()._after_step(optimizer, args, kwargs)
        if self.done == before:  # none of training's
            return
        if isinstance(optimizer, torch.optim.LBFGS):
            self._remembered(optimizer)
        batches = self.read and self.read()
        if batches is not None and batches.fresh:
            batches.fresh, self._stale = False, 0
            self.trained[batches.loader] = count = self.trained.get(batches.loader, 0) + 1
            self._kinds[_kind(batches.loader)] += count == self.enough
        else:
            self._stale += 1
        if self.done % max(len(self.optimizers), 1) == 0:  # of one optimizer per weight there are thousands
            self.over = self._enough()
        if self.over:
            self.lacking = [_described(o, self.stepped.get(o, 0)) for o in self._behind()]
            self._ended = self._ended or (batches is None and not self.dry)

    def _remembered(self, optimizer: torch.optim.LBFGS) -> None:
        """All of the history that it comes to hold; how fast depends on the values of losses."""
        direction = optimizer.state[optimizer.param_groups[0]["params"][0]].get("d")
        if direction is None or not direction.is_cuda:
            return
        state = optimizer.state[optimizer.param_groups[0]["params"][0]]
        for name, like in (("old_dirs", direction), ("old_stps", direction), ("ro", direction.new_empty(()))):
            held = state[name]
            held += [torch.empty_like(like) for _ in range(optimizer.param_groups[0]["history_size"] - len(held))]
        self.assumed.setdefault("LBFGS: its history taken as full")


def _weights(optimizer: Any) -> Iterator[Any]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _kind(loader: Any) -> Any:
    """What is alike of loaders that each epoch, fold or client makes anew: what is read, how much of it, in which batches."""
    data = loader.dataset
    return type(data), len(data) if hasattr(data, "__len__") else id(data), loader.batch_size


def _described(optimizer: Any, steps: int) -> str:
    which = f"{type(optimizer).__name__} of {sum(p.numel() for p in _weights(optimizer)):,} parameters"
    return f"{which} made {steps} of its steps" if steps else f"{which} made no step: its states are not counted"


class _Batches:
    """A loader's iterator that ends when no more batches are needed."""

    def __init__(self, loader: Any, real: Any, observer: ScriptObserver) -> None:
        self.loader, self._real, self._observer = loader, real, observer
        self.fresh = False  # no step was made with the last batch yet
        self._before = observer.backwards, observer.evaluations
        self._longest = None if observer.exhausted(loader) else observer.longest_of(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __next__(self) -> Any:
        observer, (backwards, evaluations) = self._observer, self._before
        observer.read = None
        if observer.exhausted(self.loader):
            observer.ran_dry()
            raise StopIteration
        if observer.backwards == backwards and observer.evaluations - evaluations >= EVALUATED:
            raise StopIteration
        batch = next(self._real)
        observer.read, self.fresh = ref(self), True
        return self._longest.batch(self.loader) if self._longest else batch


@contextmanager
def enough_batches(observer: ScriptObserver) -> Iterator[None]:
    """While the block runs, data loaders work in this process and stop when the observer has seen enough; it knows all optimizers."""
    make, iterate = DataLoader.__init__, DataLoader.__iter__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args[:5], **(kwargs | _ALONE)) if len(args) <= 5 else make(self, *args, **kwargs)

    def iterated(self: Any) -> Any:
        return _Batches(self, iterate(self), observer)

    create = torch.optim.Optimizer.__init__

    def created(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        observer.knows(self)

    with (
        patched(DataLoader, {"__init__": made, "__iter__": iterated}),
        patched(torch.optim.Optimizer, {"__init__": created}),
    ):
        yield
