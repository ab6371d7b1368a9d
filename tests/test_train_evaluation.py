"""Evaluations on the way: their worst batch is tried first, and what they need decides what is tried next.

One that fails or is broken off is made up.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
datasets = pytest.importorskip("datasets")
pytest.importorskip("trl")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # the libraries' own

import runs  # noqa: E402
from memfit.train.attempt import attempt  # noqa: E402
from memfit.train.folder import Run  # noqa: E402
from memfit.train.oom_recovery import lower  # noqa: E402
from memfit.train.outcome import Event, Outcome, Shortage  # noqa: E402
from memfit.train.run_callback import RunCallback  # noqa: E402
from memfit.train.supervise import supervise  # noqa: E402
from memfit.train.worker import stop_on_signal  # noqa: E402
from runs import failing, forked, history, lines, silent, weights  # noqa: E402


@pytest.fixture(scope="module")
def evaluated(one_thread: None, made: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with evaluations that nothing disturbed."""
    return undisturbed(tmp_path_factory.mktemp("evaluated") / "run", made)


@pytest.fixture(scope="module")
def halved(one_thread: None, made: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same with half the evaluation batch, of whose means the Trainer makes other losses."""
    return undisturbed(tmp_path_factory.mktemp("halved") / "run", made, eval_batch=2)


def undisturbed(place: Path, made: tuple[Path, Path], **told: Any) -> Run:
    run = runs.make_run(place, made, eval_data=str(made[1]), **told)
    assert supervise(run, attempt, silent).status == "done"
    return run


def losses(run: Run) -> list[tuple[int, float]]:
    """(step, evaluation loss) of the run."""
    return [(log["step"], log["eval_loss"]) for log in history(run) if "eval_loss" in log]


def broken_off(event: str, number: int) -> runs.Start:
    """Is told to stop at the `number`-th call of an event of the trainer's."""

    def start(run: Run, tell: Any) -> Outcome:
        def keep(callback: RunCallback) -> None:
            heard, calls = getattr(callback, event), []

            def hear(*args: Any, **named: Any) -> Any:
                calls.append(event)
                callback.stop |= len(calls) == number
                return heard(*args, **named)

            setattr(callback, event, hear)

        return attempt(run, tell, keep=keep)

    return start


def same(run: Run, other: Run) -> bool:
    """Trained on the same, evaluated at the same steps, to the bit."""
    return lines(run) == lines(other) and all(torch.equal(t, weights(other)[name]) for name, t in weights(run).items())


@pytest.mark.parametrize("step", [2, runs.STEPS])
def test_an_evaluation_that_memory_ran_out_in_is_made_up(
    evaluated: Run, halved: Run, made: tuple[Path, Path], tmp_path: Path, step: int
) -> None:
    run = runs.make_run(tmp_path / "run", made, eval_data=str(made[1]))
    outcome = supervise(run, failing("eval", step), silent)
    assert outcome.status == "done" and [(f.shortage.stage, f.resumed_at) for f in run.falls] == [("eval", step)]
    assert same(run, evaluated)
    before = [loss for loss in losses(evaluated) if loss[0] < step]
    behind = [loss for loss in losses(halved) if loss[0] >= step]
    assert outcome.eval_loss == behind[-1][1]
    # the loss of the last step is logged after the last checkpoint
    assert losses(run) == before + behind[: None if step < runs.STEPS else 0]


@pytest.mark.parametrize(("call", "step"), [(1, 2), (6, 2), (7, 4), (18, 6)])
def test_an_evaluation_is_broken_off_and_made_up(
    evaluated: Run, made: tuple[Path, Path], tmp_path: Path, call: int, step: int
) -> None:
    """22 samples are 6 batches: the stop does not wait for their end, and no step is trained after it."""
    run = runs.make_run(tmp_path / "run", made, eval_data=str(made[1]))
    stopped = supervise(run, broken_off("on_prediction_step", call), silent)
    last = run.last_good()
    assert (stopped.status, stopped.step) == ("stopped", step) and last is not None and last.evaluate
    assert len(lines(run)) == step and step not in dict(losses(run))
    again = supervise(run, broken_off("on_prediction_step", 2), silent)  # in the one that is made up
    assert (again.status, again.step) == ("stopped", step)
    done = supervise(run, attempt, silent)
    assert done.status == "done" and done.eval_loss == losses(evaluated)[-1][1] and same(run, evaluated)
    assert [loss for loss in losses(evaluated) if loss not in losses(run)] == losses(evaluated)[-1:] * (step == 6)


def test_a_stop_before_the_first_step_trains_nothing(made: tuple[Path, Path], tmp_path: Path) -> None:
    run, told = runs.make_run(tmp_path / "run", made), list[Event]()
    stopped = supervise(run, broken_off("on_train_begin", 1), told.append)
    assert (stopped.status, stopped.step, stopped.steps) == ("stopped", 0, runs.STEPS)
    assert not lines(run) and not any(event["event"] == "begin" for event in told)
    assert supervise(run, attempt, silent).status == "done"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_data_are_read_ends_the_attempt_at_once(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    run = runs.make_run(tmp_path / "run", made)
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    tokenised: list[int] = []
    real = datasets.Dataset.map

    def slow(self: datasets.Dataset, *args: Any, **named: Any) -> Any:
        os.kill(os.getpid(), number)
        tokenised.append(len(self))
        return real(self, *args, **named)

    with monkeypatch.context() as patched:
        patched.setattr(datasets.Dataset, "map", slow)
        try:
            stopped = supervise(run, lambda run, tell: attempt(run, tell, keep=stop_on_signal), silent)
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
    assert (stopped.status, stopped.step, tokenised) == ("stopped", 0, []) and not lines(run)
    assert supervise(run, attempt, silent).status == "done"


def test_two_processes_leave_an_evaluation_together(made: tuple[Path, Path], tmp_path: Path) -> None:
    """Only one of them was asked to."""
    recipe = runs.RECIPE.but(num_gpus=2, micro_batch=2)
    run = runs.make_run(tmp_path / "run", made, recipe, eval_data=str(made[1]))

    def spoil(rank: int, callbacks: list[RunCallback]) -> None:
        if rank == 1:
            real = RunCallback.on_prediction_step

            def hear(self: RunCallback, *args: Any, **named: Any) -> None:
                self.stop = True
                real(self, *args, **named)

            RunCallback.on_prediction_step = hear  # type: ignore[method-assign]

    stopped = supervise(run, forked(spoil), silent)
    last = run.last_good()
    assert (stopped.status, stopped.step) == ("stopped", 2) and last is not None and last.evaluate
    assert supervise(run, forked(), silent).status == "done" and [step for step, _ in losses(run)] == [2, 4, 6]


def test_the_worst_batch_of_an_evaluation_comes_before_the_first_step(made: tuple[Path, Path], tmp_path: Path) -> None:
    """It is longer than any that is trained, and the limit leaves room for training only."""
    longer = tmp_path / "eval.txt"
    longer.write_text("".join(f"{'abcdefgh' * 60} {i}\n" for i in range(8)))
    recipe = runs.RECIPE.but(sequence_length=512, checkpointing="full")
    tried = runs.make_run(tmp_path / "tried", made, recipe, eval_data=str(longer), memory_limit=1 << 30, max_steps=2)
    peaks = supervise(tried, attempt, silent).peaks
    others = max(size for stage, size in peaks.items() if stage != "eval")
    assert peaks["eval"] > others
    run = runs.make_run(
        tmp_path / "run", made, recipe, eval_data=str(longer), memory_limit=(others + peaks["eval"]) // 2, max_steps=2
    )
    outcome = supervise(run, attempt, silent)
    assert outcome.status == "done" and outcome.eval_loss is not None
    assert {(f.shortage.stage, f.shortage.step) for f in run.falls} == {("eval", 0)}
    assert run.plan.recipe == recipe and run.settings.eval_batch < 4


@pytest.mark.parametrize(
    ("began", "held", "asked", "limit", "samples"),
    [
        (600, 900, 300, 1000, 4),  # two thirds of 8 would do, but what came behind is not known
        (600, 1000, 1400, 1000, 1),  # 8 need 1800 where 400 are left
        (600, 1000, 800, 1000, 2),  # 8 need at least 1200
        (1000, 1000, 10, 1000, 4),  # nothing was left: it says nothing of the batch
        (0, 0, 10, 0, 4),  # nobody counted
    ],
)
def test_what_an_evaluation_needed_decides_how_many_samples_it_takes(
    made: tuple[Path, Path], tmp_path: Path, began: int, held: int, asked: int, limit: int, samples: int
) -> None:
    run = runs.make_run(tmp_path / "run", made, runs.RECIPE.but(micro_batch=8))
    below = lower(run, Shortage(stage="eval", step=2, text="", began=began, held=held, asked=asked, limit=limit))
    assert below is not None and (below.settings.eval_batch, below.plan.recipe) == (samples, run.plan.recipe)


def test_a_share_of_the_data_is_held_out(made: tuple[Path, Path], tmp_path: Path) -> None:
    """It is evaluated, not trained on, and not counted among samples that are left out."""
    events: list[Event] = []
    run = runs.make_run(tmp_path / "run", made, eval_share=0.25, lr_scheduler="cosine", warmup=0.1)
    outcome = supervise(run, attempt, events.append)
    assert outcome.status == "done" and outcome.eval_loss is not None
    assert losses(run)
    assert not any("left out" in str(event.get("text")) for event in events)
