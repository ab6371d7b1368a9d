"""Lengths: statistics against sorted lists, padding against all shuffles, packing against one sample at a time."""

from __future__ import annotations

from itertools import pairwise, permutations
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.data.lengths import Lengths, choose_sequence_length, packed, padding_waste, truncation
from memfit.errors import BadInput

SAMPLES = st.lists(st.integers(0, 5000), min_size=1, max_size=200)
PERCENT = st.floats(0.1, 100)


def batches(samples: list[int], size: int) -> list[list[int]]:
    return [samples[i : i + size] for i in range(0, len(samples), size)]


def padded(samples: list[int], size: int) -> int:
    return sum(len(batch) * max(batch) for batch in batches(samples, size))


def best_fit_decreasing(samples: list[int], room: int) -> int:
    """The plain algorithm: each sample into the fullest sequence that still has room for it."""
    rooms: list[int] = []
    for length in sorted((min(s, room) for s in samples if s), reverse=True):
        fitting = [r for r in rooms if r >= length]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - length)
        else:
            rooms.append(room - length)
    return len(rooms)


@given(SAMPLES, PERCENT)
def test_percentile_is_the_nearest_rank(samples: list[int], percent: float) -> None:
    expected = sorted(samples)[ceil(len(samples) * percent / 100) - 1]
    assert Lengths.of(samples).percentile(percent) == expected


@given(SAMPLES)
def test_totals(samples: list[int]) -> None:
    lengths = Lengths.of(samples)
    assert (lengths.count, lengths.tokens, lengths.longest) == (len(samples), sum(samples), max(samples))
    named = lengths.summary()["percentiles"]
    assert list(named) == ["p50", "p90", "p95", "p99", "max"]
    assert list(named.values()) == sorted(named.values())
    assert named["max"] == max(samples)


@given(SAMPLES, st.integers(1, 40))
def test_histogram_holds_every_sample_once(samples: list[int], bins: int) -> None:
    rows = Lengths.of(samples).histogram(bins)
    assert sum(n for _, _, n in rows) == len(samples)
    assert len(rows) <= bins
    assert all(after[0] == before[1] + 1 for before, after in pairwise(rows))
    for low, high, n in rows:
        assert n == sum(low <= s <= high for s in samples)


@given(SAMPLES, st.integers(1, 6000), st.integers(0, 1000))
def test_a_longer_sequence_never_loses_more(samples: list[int], length: int, more: int) -> None:
    lengths = Lengths.of(samples)
    short, long = truncation(lengths, length), truncation(lengths, length + more)
    assert 1 >= short.truncated >= long.truncated >= 0
    assert 1 >= short.lost >= long.lost >= 0
    assert truncation(lengths, max(samples)).truncated == truncation(lengths, max(samples)).lost == 0
    assert lengths.cut(length).tokens == pytest.approx(lengths.tokens * (1 - short.lost))


@given(SAMPLES, PERCENT, st.sampled_from([1, 8, 64, 128]))
def test_the_chosen_length_covers_the_percentile(samples: list[int], percent: float, multiple: int) -> None:
    lengths = Lengths.of(samples)
    chosen = choose_sequence_length(lengths, percent, multiple)
    assert chosen.length > 0
    assert chosen.length % multiple == 0
    assert round(chosen.truncated * len(samples)) <= len(samples) - ceil(len(samples) * percent / 100)
    assert chosen.length - multiple < max(1, lengths.percentile(percent))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 7), st.integers(1, 60))
def test_random_padding_is_the_mean_over_all_shuffles(samples: list[int], size: int, length: int) -> None:
    kept = [min(s, length) for s in samples]
    shuffles = [padded(list(order), size) for order in permutations(kept)]
    waste = padding_waste(Lengths.of(samples), size, length)
    assert waste.real == sum(kept)
    assert waste.computed == pytest.approx(sum(shuffles) / len(shuffles), rel=1e-9)


@given(st.lists(st.integers(0, 120), min_size=1, max_size=150), st.integers(1, 100))
def test_packing_is_best_fit_decreasing(samples: list[int], length: int) -> None:
    sequences = packed(Lengths.of(samples), length)
    kept = [min(s, length) for s in samples]
    assert sequences == best_fit_decreasing(samples, length)
    assert ceil(sum(kept) / length) <= sequences <= len([k for k in kept if k])


def test_packing_as_trl_documents_it() -> None:
    assert packed(Lengths.of([5, 2, 3, 1]), 4) == 3  # [[4], [3, 1], [2]]


def test_padding_of_a_large_dataset_does_not_overflow() -> None:
    waste = padding_waste(Lengths.counted({100: 9_999_999, 1000: 1}), 8, 2048)
    assert waste.computed == pytest.approx(10_000_000 * 100 + 8 * 900, rel=1e-6)


@pytest.mark.parametrize("counts", [{}, {5: 0}])
def test_no_samples_is_bad_input(counts: dict[int, int]) -> None:
    with pytest.raises(BadInput, match="no samples"):
        Lengths.counted(counts)


def test_negative_lengths_are_a_programming_error() -> None:
    with pytest.raises(ValueError, match="negative"):
        Lengths.of([-1])


@pytest.mark.parametrize("percent", [0, -1, 100.1])
def test_percentile_outside_its_range(percent: float) -> None:
    with pytest.raises(BadInput, match="percentile"):
        Lengths.of([1]).percentile(percent)


def test_multiple_outside_its_range() -> None:
    with pytest.raises(BadInput, match="multiple"):
        choose_sequence_length(Lengths.of([1]), multiple=0)
