"""The live view of memfit train: the steps, losses and time left above the memory."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from memfit import Job, Recipe, find_gpu, resolve_model
from memfit.cli.train_shown import Shown
from memfit.train.folder import Run


class Screen:
    """A live display that keeps what it is given."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def update(self, view: Any, refresh: bool) -> None:
        out = io.StringIO()
        Console(file=out, width=100).print(view)
        self.lines.append(out.getvalue().splitlines()[0])


@pytest.fixture
def shown() -> Shown:
    job = Job(architecture=resolve_model("qwen2.5-0.5b"), gpu=find_gpu("l4"))
    run = SimpleNamespace(
        plan=SimpleNamespace(job=job, recipe=Recipe()), settings=SimpleNamespace(cpu=False), path="run"
    )
    made = Shown(cast(Run, run), json=False, now=lambda: made.clock)  # type: ignore[attr-defined]
    made.clock, made.live = 0.0, Screen()  # type: ignore[attr-defined]
    return made


def step(shown: Shown, number: int, seconds: float, **logged: float) -> str:
    """Let a step of the run take so long; return the line above the view."""
    shown.clock += seconds  # type: ignore[attr-defined]
    shown.tell({"event": "step", "step": number, "steps": 10})
    if logged:
        shown.tell({"event": "log", "step": number, **logged})
    line: str = shown.live.lines[-1]
    return line


def test_the_view_counts_steps_and_shows_the_last_losses(shown: Shown) -> None:
    shown.tell({"event": "begin", "step": 0, "steps": 10})
    assert "step 0 of 10" in shown.live.lines[-1]
    assert "loss" not in step(shown, 1, 9.0)
    assert "step 2 of 10" in step(shown, 2, 2.0, loss=3.25)
    assert "3.2500" in shown.live.lines[-1]
    line = step(shown, 3, 2.0, eval_loss=1.5)
    assert "3.2500" in line and "eval loss 1.5000" in line
    assert "2.0000" in step(shown, 4, 2.0, loss=2.0) and "3.2500" not in shown.live.lines[-1]


def test_time_left_follows_from_the_pace_without_the_first_step(shown: Shown) -> None:
    shown.tell({"event": "begin", "step": 0, "steps": 10})
    assert "left" not in step(shown, 1, 60.0)  # the first step compiles and warms up
    step(shown, 2, 2.0)
    assert "4.0 s a step, 28 s left" in step(shown, 3, 6.0)


def test_a_resumed_attempt_has_a_pace_of_its_own(shown: Shown) -> None:
    shown.tell({"event": "begin", "step": 0, "steps": 10})
    for number in (1, 2, 3):
        step(shown, number, 1.0)
    shown.tell({"event": "begin", "step": 2, "steps": 10})
    assert "left" not in step(shown, 3, 500.0)
    assert "5.0 s a step" in step(shown, 4, 5.0)


@pytest.mark.parametrize(("tokens", "told"), [(1, True), (880, False)])
def test_samples_much_shorter_than_planned_are_told(
    tokens: int, told: bool, shown: Shown, capsys: pytest.CaptureFixture[str]
) -> None:
    shown.run.plan.job = replace(shown.run.plan.job, longest_sample=900)  # type: ignore[misc]
    shown.tell({"event": "rehearsed", "tokens": tokens})
    assert ("900" in capsys.readouterr().err) == told
