"""Token lengths of a dataset: percentiles, where to cut, padding waste and packing.

A run must fit its *longest* batch: memory depends on the tokens of one micro-batch, and batches are drawn at random, so
the longest sample may come at step 2000. Plans are therefore made for it; `padding_waste` and `packed` concern time
only.

Everything is computed from the number of samples of each length, which is exact, and small for data of any size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import ceil, exp, lgamma
from typing import Any

from memfit.errors import BadInput
from memfit.nouns.job import Samples

PERCENTILES = (50, 90, 95, 99, 100)
BINS = 20
MULTIPLE = 64  # sequence lengths are rounded up to a multiple of it


@dataclass(frozen=True)
class Lengths:
    """The lengths of all samples. `counts` holds (tokens, samples of that length), shortest first; never empty."""

    counts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, samples: Iterable[int]) -> Lengths:
        """Return the lengths of samples with these token counts."""
        return cls.counted(Counter(samples))

    @classmethod
    def counted(cls, counts: Mapping[int, int]) -> Lengths:
        """Return the lengths of {tokens: samples}. Raises BadInput if empty, ValueError if negative."""
        kept = tuple(sorted((t, n) for t, n in counts.items() if n))
        if any(t < 0 or n < 0 for t, n in kept):
            raise ValueError("lengths and counts cannot be negative")
        if not kept:
            raise BadInput("there are no samples", hint="give a file with at least one sample")
        return cls(kept)

    @cached_property
    def count(self) -> int:
        """Return the number of samples."""
        return sum(n for _, n in self.counts)

    @cached_property
    def tokens(self) -> int:
        """Return the tokens of all samples."""
        return sum(t * n for t, n in self.counts)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest sample."""
        return self.counts[-1][0]

    @cached_property
    def _up_to(self) -> tuple[int, ...]:
        """Count, for each entry of `counts`, the samples that are at most that long."""
        return tuple(accumulate(n for _, n in self.counts))

    def percentile(self, percent: float) -> int:
        """Return the smallest length that at least `percent` % of the samples do not exceed (nearest rank)."""
        if not 0 < percent <= 100:
            raise BadInput(f"a percentile is above 0 and at most 100, not {percent}", hint="99 is usual")
        rank = ceil(self.count * percent / 100)
        return next(t for (t, _), below in zip(self.counts, self._up_to, strict=True) if below >= rank)

    def cut(self, length: int) -> Lengths:
        """Return the lengths after truncation to `length` tokens."""
        counts: Counter[int] = Counter()
        for t, n in self.counts:
            counts[min(t, length)] += n
        return Lengths.counted(counts)

    def histogram(self, bins: int = BINS) -> tuple[tuple[int, int, int], ...]:
        """Return equally wide bins that cover every sample: (first length, last length, samples)."""
        low, width = self.counts[0][0], ceil((self.longest - self.counts[0][0] + 1) / bins)
        samples = Counter[int]()
        for t, n in self.counts:
            samples[(t - low) // width] += n
        last = (self.longest - low) // width
        return tuple((low + i * width, low + (i + 1) * width - 1, samples[i]) for i in range(last + 1))

    def summary(self) -> dict[str, Any]:
        """Return plain numbers for JSON: samples, tokens, mean, percentiles by name, histogram."""
        return {
            "samples": self.count,
            "tokens": self.tokens,
            "mean": self.tokens / self.count,
            "percentiles": {"max" if p == 100 else f"p{p}": self.percentile(p) for p in PERCENTILES},
            "histogram": [list(row) for row in self.histogram()],
        }


@dataclass(frozen=True, slots=True)
class Cut:
    """A sequence length, and what it cuts off."""

    length: int
    truncated: float  # share of the samples that are longer
    lost: float  # share of the tokens that are cut off


def truncation(lengths: Lengths, length: int) -> Cut:
    """Return what is lost by cutting every sample at `length` tokens."""
    found = samples_of(lengths, length)
    return Cut(length, found.cut / found.count, found.lost / found.tokens if found.tokens else 0.0)


def samples_of(lengths: Lengths, length: int) -> Samples:
    """Count the samples and tokens, and those of them that a sequence length cuts off."""
    longer = [(t, n) for t, n in lengths.counts if t > length]
    return Samples(lengths.count, lengths.tokens, sum(n for _, n in longer), sum((t - length) * n for t, n in longer))


def choose_sequence_length(lengths: Lengths, percentile: float = 99, multiple: int = MULTIPLE) -> Cut:
    """Return the percentile rounded up to a multiple, since kernels are fastest on multiples of 64 or 128."""
    if multiple < 1:
        raise BadInput(f"the sequence length must be a multiple of at least 1, not {multiple}", hint="64 is usual")
    return truncation(lengths, max(1, ceil(lengths.percentile(percentile) / multiple)) * multiple)


@dataclass(frozen=True, slots=True)
class Waste:
    """Tokens that the model computes in one epoch, and those of the data."""

    real: int  # tokens of the samples, after truncation
    computed: float  # with padding, expected over all shuffles

    @property
    def share(self) -> float:
        """Return the share of the computed tokens that is padding."""
        return 1 - self.real / self.computed if self.computed else 0.0


def padding_waste(lengths: Lengths, micro_batch: int, sequence_length: int) -> Waste:
    """Return the padding of one epoch when each micro-batch is padded to its longest sample; the last may be smaller.

    It is the exact expectation over all shuffles.
    """
    kept = lengths.cut(sequence_length)
    full, rest = divmod(kept.count, micro_batch)
    computed = full * micro_batch * _expected_longest(kept, micro_batch) if full else 0.0
    return Waste(kept.tokens, computed + (rest * _expected_longest(kept, rest) if rest else 0.0))


def _expected_longest(lengths: Lengths, draws: int) -> float:
    """Return the expected longest of `draws` samples without replacement: sum of t * (P(all <= t) - P(all < t))."""
    mean, before = 0.0, 0.0
    for (t, _), at_most in zip(lengths.counts, lengths._up_to, strict=True):
        share = _share_of_draws(at_most, lengths.count, draws)
        mean += t * (share - before)
        before = share
    return mean


def _share_of_draws(some: int, of: int, draws: int) -> float:
    """Return P(all draws are among `some` of `of`) = C(some, draws) / C(of, draws), in logarithms against overflow."""
    if some < draws:
        return 0.0
    if some == of:
        return 1.0
    return exp(lgamma(some + 1) - lgamma(some - draws + 1) - lgamma(of + 1) + lgamma(of - draws + 1))


def packed(lengths: Lengths, sequence_length: int) -> int:
    """Count the sequences after packing by best fit, longest sample first, as TRL's packing_strategy="bfd".

    Longer samples are truncated, empty ones dropped, and each sample goes where the least room is left over. TRL packs
    each map batch (1000 samples by default) separately, so it makes slightly more sequences.
    """
    bins: Counter[int] = Counter()  # room left -> sequences with that room
    rooms: list[int] = []  # the keys of `bins`, in order
    for t, n in reversed(lengths.cut(sequence_length).counts):
        while t and n:
            at = bisect_left(rooms, t)
            room = rooms[at] if at < len(rooms) else sequence_length
            each = room // t  # a sequence that took a sample of t tokens has the least room for the next, so fill it
            filled = min(n // each, bins[room]) if at < len(rooms) else n // each
            if filled == 0:  # fewer samples than one sequence has room for
                filled, each = 1, n
            if at < len(rooms):
                _move(bins, rooms, room, -filled)
            _move(bins, rooms, room - each * t, filled)
            n -= filled * each
    return sum(bins.values())


def _move(bins: Counter[int], rooms: list[int], room: int, sequences: int) -> None:
    """Add sequences with that much room (a negative number removes them); keep `rooms` the keys of `bins`."""
    if not bins[room]:
        insort(rooms, room)
    bins[room] += sequences
    if not bins[room]:
        rooms.remove(room)
