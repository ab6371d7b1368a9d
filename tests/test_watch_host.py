"""Runs without a card: how often live tensors are counted, what a slow leak needs to be found, what is said where there
were too few counts; and how often a run of very short steps is sampled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from memfit.holders.live_tensors import live_tensors
from memfit.live.watch import meters
from memfit.live.watch.leak_test import Series, inconclusive, stopped
from memfit.live.watch.loop import Watch
from memfit.live.watch.meters import AT_ONCE, COUNT_SHARE, FULL, MOST, RISING, STEP_SHARE, HostMeter, SamplingInterval
from memfit.live.watch.outputs import Quiet
from memfit.live.watch.recorder import Recorder
from memfit.nouns.footprint import Levels
from memfit.nouns.sample import Header, Leak, Sample
from memfit.units import KIB, MIB

STEP, COUNT = 0.02, 0.03  # seconds that a step and a count of live tensors take here
HELD, RESIDENT = 10 * MIB, 300 * MIB


class Machine:
    """A process by a clock of its own: `leak` bytes more after every step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, leak: int) -> None:
        self.now, self.steps, self.leak = 0.0, 0, leak
        monkeypatch.setattr(meters, "live_bytes", self.count)
        monkeypatch.setattr(meters, "resident_bytes", lambda: RESIDENT + self.steps * self.leak)
        self.meter = HostMeter(clock=lambda: self.now)
        self.spent = 0.0

    def count(self) -> int:
        self.now += COUNT
        self.spent += COUNT
        return HELD + self.steps * self.leak

    def step(self) -> tuple[Levels, bool]:
        self.now += STEP
        self.steps += 1
        reading = self.meter.read()
        return reading.now, reading.counted


def first_seen(machine: Machine, steps: int) -> int | None:
    """The step at which the exact count shows a growth."""
    series = Series()
    for _ in range(steps):
        levels, counted = machine.step()
        if counted and series.add(machine.steps, levels.allocated) is not None:
            return machine.steps
    return None


@pytest.mark.parametrize("leak", [64 * KIB, 128 * KIB, MIB])
def test_a_leak_of_a_few_kilobytes_a_step_is_seen_within_a_hundred_steps(
    monkeypatch: pytest.MonkeyPatch, leak: int
) -> None:
    found = first_seen(Machine(monkeypatch, leak), 100)
    assert found is not None


@pytest.mark.parametrize(("leak", "at_once", "share"), [(0, 0.0, COUNT_SHARE), (128 * KIB, AT_ONCE, RISING)])
def test_counting_stays_within_its_time(
    monkeypatch: pytest.MonkeyPatch, leak: int, at_once: float, share: float
) -> None:
    machine = Machine(monkeypatch, leak)
    for _ in range(5000):
        machine.step()
    assert machine.spent <= (meters.FIRST + 1) * COUNT + at_once + share * machine.now


def test_what_was_not_counted_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 128 * KIB)
    seen = [(machine.steps, *machine.step()) for _ in range(60)]
    assert {counted for _, _, counted in seen} == {True, False}
    for before, levels, counted in seen:
        live = HELD + (before + 1) * machine.leak if counted else 0
        assert (levels.requested, levels.allocated, levels.reserved) == (live,) * 3
        assert levels.device > RESIDENT


def test_the_first_look_of_every_phase_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 0)
    log = Recorder(Header("run.py", "tensors"), None, (), Quiet())
    with Watch(log, machine.meter, find_leaks=False, clock=lambda: machine.now) as watch:
        for _ in range(6):
            watch.step()
            with watch.phase("eval"):
                machine.now += STEP
    counted = [(s.phase, s.step) for s in log.samples if s.counted]
    assert counted == [("load", 0), ("first_step", 1), ("step", 1), ("eval", 1), ("step", 6)]
    assert {levels.allocated for levels in log.peaks.values()} == {HELD}


def test_counts_that_only_rise_are_followed_by_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where resident memory hides the leak: the process had room for it."""
    quiet, leaks = (Machine(monkeypatch, leak) for leak in (0, MIB))
    monkeypatch.setattr(meters, "resident_bytes", lambda: RESIDENT)
    spent = []
    for machine in (quiet, leaks):
        monkeypatch.setattr(meters, "live_bytes", machine.count)
        for _ in range(1000):
            machine.step()
        spent.append(machine.spent)
    assert spent[1] > AT_ONCE > spent[0]


def looked(counts: dict[int, int], resident: int, steps: int = 40, every: int = 0) -> tuple[Sample, ...]:
    """A run whose tensors were counted at these steps; resident memory grew by so much."""
    found = []
    for step in range(1, steps + 1):
        live = counts.get(step, HELD if every and step % every == 0 else 0)
        now = Levels(live, live, live, RESIDENT + resident * step // steps)
        found.append(Sample(step * STEP, step, "step" if step > 1 else "first_step", now, now, bool(live)))
    return tuple(found)


DOUBTS = {
    "resident memory grew": (looked({2: HELD}, 20 * MIB), "tensors were counted once in 40 steps"),
    "counts rose": (looked({2: HELD, 30: HELD + 5 * MIB}, 0), "they grew by 5.00 MiB from step 2 to 30"),
    "neither grew": (looked({2: HELD, 30: HELD}, MIB), None),
    "counts rose and fell": (looked({2: HELD, 20: HELD + 5 * MIB, 30: HELD + MIB}, 0), None),
    "counts say it is no tensors": (looked(dict.fromkeys((2, 10, 20, 30), HELD), 20 * MIB), None),
    "counted at every step": (looked({}, 20 * MIB, every=1), None),
    "too short for any test": (looked({2: HELD}, 20 * MIB, steps=12), None),
    "short, and grows at every step": (
        looked({step: HELD + step * MIB for step in range(1, 13)}, 0, steps=12),
        "the run ended after 12 steps, too few to tell a leak: tensors grew by 8.00 MiB from step 4 to 12",
    ),
    "short, and settles": (looked({step: HELD + min(step, 4) * MIB for step in range(1, 13)}, 0, steps=12), None),
    "three counts past the first steps": (looked(dict.fromkeys((4, 5, 6), HELD) | {6: 2 * HELD}, 0, steps=6), None),
    "no step": (looked({}, 20 * MIB, steps=1), None),
}


@pytest.mark.parametrize("case", DOUBTS)
def test_what_was_looked_at_too_seldom_is_said(case: str) -> None:
    samples, text = DOUBTS[case]
    alarm = inconclusive(samples)
    assert (alarm is None) == (text is None)
    if alarm is not None and text is not None:
        assert alarm.kind == "unsure" and text in alarm.text
        assert "count_every=1" in alarm.text or "too few to tell" in alarm.text


def grown(until: int, steps: int, each: int = MIB) -> tuple[Sample, ...]:
    """A run that grows by so much a step until one of them."""
    return looked({step: HELD + min(step, until) * each for step in range(1, steps + 1)}, 0, steps)


@pytest.mark.parametrize(
    ("samples", "reported"),
    [
        (grown(60, 200), True),
        (grown(200, 200), False),
        (grown(195, 200), False),  # the later half has grown
        (grown(60, 200, MIB // 20), True),  # a twentieth of the leak
        (grown(20, 40), False),  # too few steps
    ],
)
def test_a_leak_that_has_stopped_is_reported(samples: tuple[Sample, ...], reported: bool) -> None:
    leak = Leak(MIB, 12, 19, 7 * MIB)
    alarm = stopped(leak, samples, 27)
    assert (alarm is not None) == reported
    if alarm is not None:
        assert alarm.kind == "unsure" and "steps 12 to 19 has not grown from step 114 to 200" in alarm.text
    assert stopped(replace(leak, unit="run"), samples, 27) is None


LOOK = 0.0001  # seconds of one look


def looks(step: float, steps: int) -> tuple[int, int]:
    """(looks, steps between the last two) of a run by a clock of its own."""
    now, taken = 0.0, 0
    pace = SamplingInterval(lambda: now)
    for _ in range(steps):
        now += step
        if pace.due():
            taken += 1
            now += LOOK
            pace.sampled()
    return taken, pace.every


@pytest.mark.parametrize(("step", "every"), [(0.02, 1), (0.0101, 1), (0.0006, 17), (1e-7, MOST)])
def test_short_steps_are_looked_at_less_often(step: float, every: int) -> None:
    taken, between = looks(step, 20_000)
    assert between == every
    assert taken * LOOK <= FULL * LOOK + 1.01 * STEP_SHARE * max(step, LOOK / STEP_SHARE / MOST) * 20_000
    assert looks(step, FULL)[0] == FULL


def test_steps_that_become_long_are_looked_at_within_a_second() -> None:
    now = 0.0
    pace = SamplingInterval(lambda: now)
    for step in [0.0001] * 20_000 + [0.4] * 10:
        now += step
        if pace.due():
            last = now
            now += LOOK
            pace.sampled()
        elif step > 0.1:
            assert now - last < 1.0
    assert pace.every > 10


def test_a_search_looks_at_every_step() -> None:
    pace = SamplingInterval(lambda: 0.0)
    for _ in range(2 * FULL):
        if pace.due():
            pace.sampled()
    assert pace.every > 1
    assert [pace.due(always=True) for _ in range(5)] == [True] * 5


def test_every_kind_of_tensor_is_alive_until_it_is_gone() -> None:
    plain, weight = torch.empty(3), nn.Parameter(torch.empty(3))
    alive = {id(t) for t in live_tensors()}
    assert {id(plain), id(weight)} <= alive
    assert id(alive) not in alive


def test_counting_never_takes_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def count() -> int:
        now[0] += 0.05
        return 1 << 20

    monkeypatch.setattr(meters, "live_bytes", count)
    monkeypatch.setattr(meters, "resident_bytes", lambda: 1 << 30)
    meter, spent = meters.HostMeter(clock=lambda: now[0]), 0.0
    for step in range(4000):
        before, reading = now[0], meter.read()
        spent += (now[0] - before) * (step >= meters.FIRST)
        assert spent <= meters.EARLY * now[0] + 1e-9, step
        assert reading.counted or step >= meters.FIRST
        now[0] += 0.2
    assert spent >= 0.8 * meters.COUNT_SHARE * now[0]
