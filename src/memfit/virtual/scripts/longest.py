"""The longest batch that a script's data loader can give: what must fit, whether or not it comes in the steps that are traced."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

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
