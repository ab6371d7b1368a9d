"""A whole run: the load weight by weight, then optimizer steps built from unrolled passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from memfit.closed_form.run.micro_step import MicroStep
from memfit.closed_form.run.peak import Meter
from memfit.closed_form.run.unroll import Memory, Pass
from memfit.closed_form.static import Stored
from memfit.nouns.tape import Phase


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a run does, in bytes."""

    stored: Sequence[Stored]
    states: Sequence[tuple[int, ...]]  # per trained weight, made at the first step
    step_groups: Sequence[tuple[int, ...]]  # temporaries of one optimizer step, see Optimizer.step_temporaries
    workspace: int
    batch: int  # bytes of one tensor of token ids
    warmup: int = 0  # bytes asked for and freed before the first weight arrives
    accumulation: int = 1
    steps: int = 2


def play(schedule: Schedule, first: MicroStep, later: MicroStep, meter: Meter, memory: Memory) -> Iterator[Phase]:
    """Play load, first step and later step on `memory`, yielding each at its end. `later` adds to existing gradients."""
    memory.free(memory.malloc(schedule.warmup))
    load(schedule.stored, memory)
    yield "load"
    batch: list[Any] = []
    for number in range(schedule.steps):
        gradients: list[Any] = []
        for micro in range(min(schedule.accumulation, 2)):
            fresh = [memory.malloc(schedule.batch) for _ in range(3)]
            for old in batch:
                memory.free(old)
            batch = fresh
            one = Pass(memory, meter, later if micro else first)
            one.run(schedule.workspace if number == 0 and micro == 0 else 0)
            gradients += one.gradients
        if number == 0:
            for group in schedule.states:
                for size in group:
                    memory.malloc(size)
        optimizer_step(schedule.step_groups, memory)
        for gradient in gradients:
            memory.free(gradient)
        yield "first_step" if number == 0 else "step"


def load(stored: Sequence[Stored], memory: Memory) -> None:
    """Weights arrive one by one; what a conversion needs is gone after it. Then some are replaced by wider copies."""
    narrow: list[tuple[Any, int]] = []
    for item in stored:
        passing = memory.malloc(item.passing)
        blocks = [memory.malloc(size) for size in item.stays]
        memory.free(passing)
        if item.widened:
            narrow.append((blocks[0], item.widened))
    for block, size in narrow:
        memory.malloc(size)
        memory.free(block)


def optimizer_step(groups: Sequence[tuple[int, ...]], memory: Memory) -> None:
    """The temporaries of one optimizer step: of each group the last is kept until the next group is there."""
    last = None
    for group in groups:
        *done, kept = [memory.malloc(size) for size in group]
        memory.free(last)
        for block in done:
            memory.free(block)
        last = kept
    memory.free(last)
