"""Growth of live bytes: found when it is there, never seen in noise."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.live.watch.leak_test import FLOOR, MOST_POINTS, WARMUP, Growth, Series, growth_of
from memfit.units import GIB, MIB

STEPS = 400


def first_growth(live: list[int]) -> Growth | None:
    series = Series()
    return next((found for step, size in enumerate(live, 1) if (found := series.add(step, size))), None)


def noise(seed: int, spread: int) -> list[int]:
    draw = random.Random(seed)
    return [GIB + draw.randrange(spread) for _ in range(STEPS)]


@pytest.mark.parametrize("seed", range(40))
def test_varying_lengths_are_no_growth(seed: int) -> None:
    assert first_growth(noise(seed, 512 * MIB)) is None


@pytest.mark.parametrize("seed", range(10))
def test_a_leak_under_noise_is_found_with_its_slope(seed: int) -> None:
    leaking = [size + 2 * MIB * step for step, size in enumerate(noise(seed, 64 * MIB))]
    found = first_growth(leaking)
    assert found is not None
    assert 1 * MIB < found.per_step < 3 * MIB
    assert found.since < found.until


SHAPES = {
    "constant": [GIB] * STEPS,
    "falling": [GIB - MIB * i for i in range(STEPS)],
    "states of the first step": [GIB] + [3 * GIB] * STEPS,
    "a cache that fills and stays": [GIB + 10 * MIB * min(i, 9) for i in range(STEPS)],
    "one jump": [GIB] * 150 + [2 * GIB] * 250,
    "every other step": [GIB + (i % 2) * GIB for i in range(STEPS)],
    "below the floor": [GIB + i for i in range(STEPS)],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_what_settles_is_no_growth(shape: str) -> None:
    assert first_growth(SHAPES[shape]) is None


def test_a_leak_that_starts_late_is_found() -> None:
    assert first_growth([GIB] * 60 + [GIB + 4 * MIB * i for i in range(STEPS)]) is not None


def test_a_leak_in_stairs_is_found_when_there_are_enough() -> None:
    assert first_growth([GIB + 50 * MIB * (i // 20) for i in range(2 * STEPS)]) is not None


def test_the_first_look_is_early() -> None:
    found = first_growth([GIB + MIB * i for i in range(STEPS)])
    assert found is not None and found.until == WARMUP + 16
    assert found.per_step == MIB and found.bytes == 7 * MIB


@given(st.lists(st.integers(0, GIB), min_size=16, max_size=200), st.integers(0, GIB))
def test_a_growth_has_the_bytes_and_steps_of_its_points(live: list[int], floor: int) -> None:
    points = list(enumerate(live))
    found = growth_of(points, floor)
    late = points[len(points) // 2 :]
    if found is not None:
        assert found.bytes >= floor and found.per_step > 0
        assert (found.since, found.until) == (late[0][0], late[-1][0])
    assert growth_of([(step, max(live)) for step, _ in points], floor) is None


def test_a_long_run_keeps_few_points_and_its_lows() -> None:
    series = Series(floor=1 << 60)
    for step in range(1, 10 * MOST_POINTS):
        series.add(step, GIB + (step % 7) * MIB)
    assert len(series.points) <= MOST_POINTS + 1
    assert {size for _, size in series.points[:-1]} == {GIB}
    assert FLOOR == MIB
