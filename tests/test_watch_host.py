"""Runs without a card: how often live tensors are counted, and what a slow leak needs to be seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memfit.footprint import Levels
from memfit.growth import Series
from memfit.units import KIB, MIB
from memfit.watcher import meters
from memfit.watcher.census import live_tensors
from memfit.watcher.meters import AT_ONCE, RISING, SHARE, HostMeter

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


@pytest.mark.parametrize(("leak", "at_once", "share"), [(0, 0.0, SHARE), (128 * KIB, AT_ONCE, RISING)])
def test_counting_stays_within_its_time(
    monkeypatch: pytest.MonkeyPatch, leak: int, at_once: float, share: float
) -> None:
    machine = Machine(monkeypatch, leak)
    for _ in range(5000):
        machine.step()
    assert machine.spent <= (meters.FIRST + 1) * COUNT + at_once + share * machine.now


def test_every_kind_of_tensor_is_alive_until_it_is_gone() -> None:
    plain, weight = torch.empty(3), nn.Parameter(torch.empty(3))
    alive = {id(t) for t in live_tensors()}
    assert {id(plain), id(weight)} <= alive
    assert id(alive) not in alive
