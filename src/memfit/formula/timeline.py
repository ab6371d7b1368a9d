"""A whole run as one integer tape: the load weight by weight, then optimizer steps built from unrolled passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.formula.fold import Meter
from memfit.formula.run import MicroStep
from memfit.formula.static import Stored
from memfit.formula.unroll import Pass, Tape
from memfit.tape import Phase


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a run does, in bytes."""

    stored: Sequence[Stored]
    states: Sequence[tuple[int, ...]]  # per trained weight, made at the first step
    step_groups: Sequence[tuple[int, ...]]  # temporaries of one optimizer step, see Optimizer.step_temporaries
    workspace: int
    batch: int  # bytes of one tensor of token ids
    accumulation: int = 1
    steps: int = 2


def write(schedule: Schedule, first: MicroStep, later: MicroStep, meter: Meter) -> list[tuple[Phase, list[int]]]:
    """The tape in sections: load, first step, later step. `later` is the pass that adds to existing gradients."""
    tape = Tape()
    sections: list[tuple[Phase, list[int]]] = []

    def close(phase: Phase) -> None:
        sections.append((phase, tape.events))
        tape.events = []

    for item in schedule.stored:
        passing = tape.alloc(item.passing)
        for size in item.stays:
            tape.alloc(size)
        tape.free(passing)
    close("load")
    batch: list[int] = []
    for number in range(schedule.steps):
        gradients: list[int] = []
        for micro in range(min(schedule.accumulation, 2)):
            fresh = [tape.alloc(schedule.batch) for _ in range(3)]
            for old in batch:
                tape.free(old)
            batch = fresh
            one = Pass(tape, meter, later if micro else first)
            one.run(schedule.workspace if number == 0 and micro == 0 else 0)
            gradients += one.gradients
        if number == 0:
            for group in schedule.states:
                for size in group:
                    tape.alloc(size)
        optimizer_step(tape, schedule.step_groups)
        for index in gradients:
            tape.free(index)
        close("first_step" if number == 0 else "step")
    return sections


def optimizer_step(tape: Tape, groups: Sequence[tuple[int, ...]]) -> None:
    last = 0
    for group in groups:
        *done, kept = [tape.alloc(size) for size in group]
        tape.free(last)
        for index in done:
            tape.free(index)
        last = kept
    tape.free(last)
