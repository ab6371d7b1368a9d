"""When a traced script has trained enough: its data loaders run dry, so that it goes on to evaluate and save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from torch.utils.data import DataLoader

from memfit.tape import Phase
from memfit.virtual.card import Card
from memfit.virtual.longest import Longest, longest
from memfit.virtual.observer import EnoughSteps, Observer
from memfit.virtual.patching import patched

EVALUATED = 4  # forward passes over one loader that only evaluates; later ones find the memory as these left it
AHEAD = 1  # steps beyond: accelerate reads a batch ahead, and steps once more with the last one
_DRY = 1000  # empty epochs, after which a script is taken to cycle through its loader for ever
_ALONE = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None}


class ScriptObserver(Observer):
    """Stops a script after `enough` optimizer steps: at once, or where its loader would give the next batch."""

    def __init__(self, card: Card, enough: int) -> None:
        self.enough = enough
        self.backwards = self.evaluations = 0
        self.trained: WeakSet[Any] = WeakSet()  # loaders that steps were taken from
        self.read: Any = None  # weak reference to the iterator that gave the last batch
        self._dry = 0
        self._longest: WeakKeyDictionary[Any, Longest | None] = WeakKeyDictionary()
        self.assumed = card.assumed
        super().__init__(card)

    @property
    def over(self) -> bool:
        """The steps that were asked for are done."""
        return self.done >= self.enough

    def mark(self, phase: Phase, instant: str) -> None:
        """An instant begins."""
        marks = self.card.ledger.marks
        if instant == "backward" and marks[-1][1:] == ("eval", "forward"):  # models read from files are in eval mode
            marks[-1] = (marks[-1][0], phase, "forward")
            self.evaluations -= 1
        self.backwards += instant == "backward"
        self.evaluations += phase == "eval"
        super().mark(phase, instant)

    def longest_of(self, loader: Any) -> Longest | None:
        """Its longest batch, looked for once."""
        if loader not in self._longest:
            self._longest[loader] = found = longest(loader)
            if found:
                self.assumed.setdefault(found.said)
        return self._longest[loader]

    def ran_dry(self) -> None:
        """A loader that has been trained from was asked for more. Raises EnoughSteps where that never ends."""
        self._dry += 1
        if self._dry > _DRY:
            raise EnoughSteps

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.done >= self.enough + AHEAD:
            raise EnoughSteps
        super()._before_step(optimizer, args, kwargs)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        super()._after_step(optimizer, args, kwargs)
        batches = self.read and self.read()
        if batches is not None:
            self.trained.add(batches.loader)
        elif self.over and not self._dry:
            raise EnoughSteps


class _Batches:
    """A loader's iterator that ends when no more batches are needed."""

    def __init__(self, loader: Any, real: Any, observer: ScriptObserver) -> None:
        self.loader, self._real, self._observer = loader, real, observer
        self._before = observer.backwards, observer.evaluations
        self._longest = observer.longest_of(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __next__(self) -> Any:
        observer, (backwards, evaluations) = self._observer, self._before
        observer.read = None
        if observer.over and self.loader in observer.trained:
            observer.ran_dry()
            raise StopIteration
        if observer.backwards == backwards and observer.evaluations - evaluations >= EVALUATED:
            raise StopIteration
        batch = next(self._real)
        observer.read = ref(self)
        return self._longest.batch(self.loader) if self._longest else batch


@contextmanager
def enough_batches(observer: ScriptObserver) -> Iterator[None]:
    """While the block runs, data loaders work in this process and stop when the observer has seen enough."""
    make, iterate = DataLoader.__init__, DataLoader.__iter__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args[:5], **(kwargs | _ALONE)) if len(args) <= 5 else make(self, *args, **kwargs)

    def iterated(self: Any) -> Any:
        return _Batches(self, iterate(self), observer)

    with patched(DataLoader, {"__init__": made, "__iter__": iterated}):
        yield
