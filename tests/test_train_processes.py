"""Train in several processes over gloo: shards and samples as on cards, and a failure of one stops all."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # the libraries' own

import runs  # noqa: E402
from memfit.nouns.job import Recipe  # noqa: E402
from memfit.train.children import command, in_child  # noqa: E402
from memfit.train.folder import Run  # noqa: E402
from memfit.train.outcome import Outcome  # noqa: E402
from memfit.train.run_callback import RunCallback  # noqa: E402
from memfit.train.sample_counts import MODULUS  # noqa: E402
from memfit.train.supervise import supervise  # noqa: E402
from runs import exhausting, forked, history, lines, silent, weights  # noqa: E402

SHARDED = runs.RECIPE.but(num_gpus=2, micro_batch=2, shard="parameters")
EPOCH = 5  # steps before the last of the epoch, which accelerate fills up by repeating samples
Made = tuple[Path, Path]
Whole = tuple[Run, Outcome]


def test_the_processes_shard_and_learn_what_one_learns(whole: Whole, sharded: Whole) -> None:
    run, outcome = sharded
    assert (outcome.status, outcome.step, outcome.samples) == ("done", runs.STEPS, 24)
    for rank in range(2):
        told = json.loads((run.path / f"shards.{rank}.json").read_text())
        assert set(told["kinds"]) == {"DTensor"} and told["of"] == sum(t.numel() for t in weights(run).values())
        assert told["here"] == told["of"] // 2
    assert dealt(run)[:EPOCH] == dealt(whole[0])[:EPOCH]
    assert losses(run)[:EPOCH] == pytest.approx(losses(whole[0])[:EPOCH], rel=1e-4)
    assert losses(run)[-1] < losses(run)[0]


def test_the_model_is_saved_whole(whole: Whole, sharded: Whole) -> None:
    from transformers import AutoModelForCausalLM

    saved, alone = weights(sharded[0]), weights(whole[0])
    assert {name: t.shape for name, t in saved.items()} == {name: t.shape for name, t in alone.items()}
    loaded = AutoModelForCausalLM.from_pretrained(sharded[0].output).state_dict()
    assert all(torch.equal(t, loaded[name]) for name, t in saved.items())


def test_a_run_that_is_done_can_be_resumed(sharded: Whole) -> None:
    before = weights(sharded[0])
    again = supervise(sharded[0], forked(), silent)
    assert (again.status, again.step, again.samples) == ("done", runs.STEPS, 24)
    assert all(torch.equal(t, before[name]) for name, t in weights(sharded[0]).items())


def test_all_stop_after_the_same_step_and_resume_to_the_bit(sharded: Whole, made: Made, tmp_path: Path) -> None:
    """Only the second process is asked to stop; nothing is rehearsed, which changes no bit either."""
    run = runs.make_run(tmp_path / "run", made, SHARDED, rehearse=False)

    def spoil(rank: int, callbacks: list[RunCallback]) -> Any:
        def before(meter: Any, size: int) -> None:
            if callbacks[0].trainer and callbacks[0].trainer.state.global_step == 2:
                callbacks[0].stop = True

        return before if rank else None

    stopped = supervise(run, forked(spoil), silent)
    assert (stopped.status, stopped.step, stopped.samples) == ("stopped", 3, 12)
    done = supervise(run, forked(), silent)
    assert (done.status, done.samples) == ("done", 24)
    assert parts(run) == parts(sharded[0])
    assert all(torch.equal(t, weights(sharded[0])[name]) for name, t in weights(run).items())


@pytest.mark.parametrize(
    ("recipe", "stage", "step", "good"),
    [
        (SHARDED, "forward and backward", 3, 2),
        pytest.param(SHARDED.but(method="lora", lora_rank=4), "rehearsal", 0, 0, marks=pytest.mark.nightly),
        (SHARDED.but(shard="none"), "optimizer step", 3, 2),
    ],
    ids=["fsdp2", "fsdp2 lora", "ddp"],
)
def test_memory_that_runs_out_in_one_process_makes_all_fall(
    whole: Whole, made: Made, tmp_path: Path, recipe: Recipe, stage: str, step: int, good: int
) -> None:
    recipe = recipe.but(optimizer="adamw-foreach")  # the fused step makes nothing but its states
    run = runs.make_run(tmp_path / "run", made, recipe, falls=1)
    done = supervise(run, first(lambda rank, callbacks: exhausting(callbacks, stage, step) if rank else None), silent)
    assert (done.status, done.samples) == ("done", 24), done.error
    (fall,) = run.falls
    assert (fall.shortage.stage, fall.shortage.step, fall.resumed_at) == (stage, step, good)
    assert run.plan.recipe.effective_batch == recipe.effective_batch and run.plan.recipe.shard == recipe.shard
    assert dealt(run)[:EPOCH] == dealt(whole[0])[:EPOCH]
    if recipe.method == "full":
        assert losses(run)[:EPOCH] == pytest.approx(losses(whole[0])[:EPOCH], rel=1e-3)
    else:
        adapters = weights(run, "adapter_model.safetensors")
        assert {min(t.shape) for t in adapters.values()} == {4} and all(bool(t.any()) for t in adapters.values())


def test_the_process_that_failed_says_why(made: Made, tmp_path: Path) -> None:
    """The others fail because it is gone, and the first of them must not speak for it."""
    run = runs.make_run(tmp_path / "run", made, SHARDED)

    def spoil(rank: int, callbacks: list[RunCallback]) -> Any:
        def before(meter: Any, size: int) -> None:
            if callbacks[0].trainer and callbacks[0].trainer.state.global_step == 2:
                raise OSError("No space left on device")

        return before if rank else None

    failed = supervise(run, forked(spoil), silent)
    error, _, hint = failed.error.partition(" (hint: ")
    assert (failed.status, error) == ("failed", "OSError: No space left on device") and hint.startswith("the disk")


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_deepspeed_stops_resumes_and_saves_whole(
    whole: Whole, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: Any
) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    recipe = SHARDED.but(shard=shard, precision="bf16-master" if shard == "parameters" else "fp32")
    run = runs.make_run(tmp_path / "run", made, recipe)
    done = supervise(run, first(lambda rank, callbacks: exhausting(callbacks, "forward and backward", 3)), silent)
    assert (done.status, [fall.resumed_at for fall in run.falls]) == ("done", [2]), done.error
    assert dealt(run)[:EPOCH] == dealt(whole[0])[:EPOCH]
    assert losses(run)[:EPOCH] == pytest.approx(losses(whole[0])[:EPOCH], rel=1e-3)
    assert {n: t.shape for n, t in weights(run).items()} == {n: t.shape for n, t in weights(whole[0]).items()}


def started(made: Made, tmp_path: Path) -> tuple[subprocess.Popen[str], list[str]]:
    """`memfit train` on two processes, after its first step; what it said so far."""
    recipe = runs.recipe_of(tmp_path / "recipe.toml", made, SHARDED)
    words = [
        "train",
        str(recipe),
        "--gpu-memory",
        "2GiB",
        "--out",
        str(tmp_path / "run"),
        "--epochs",
        "200",
        "--cpu",
        "--json",
    ]
    found = subprocess.Popen(
        [sys.executable, "-m", "memfit", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert found.stderr is not None
    told = []
    for line in found.stderr:
        told.append(line)
        if ": loss" in line:
            break
    return found, told


def test_a_signal_stops_all_of_torchruns_processes(sharded: Whole, made: Made, tmp_path: Path) -> None:
    """SIGTERM to `memfit train` alone: every process finishes the step, which is saved once and resumed from."""
    running, told = started(made, tmp_path)
    running.send_signal(signal.SIGTERM)
    assert running.stderr is not None and running.stdout is not None
    told += running.stderr.readlines()
    said, code, run = json.loads(running.stdout.read()), running.wait(), Run(tmp_path / "run")
    assert code == 75 and said["status"] == "stopped", "".join(told)
    assert said["step"] >= 1 and [c.step for c in run.checkpoints()] == [said["step"]]
    assert len(dealt(run)) == said["step"] and sum(samples for samples, _ in dealt(run)) == said["samples"]
    assert dealt(run)[: min(said["step"], EPOCH)] == dealt(sharded[0])[: min(said["step"], EPOCH)]


# in place of a worker, which would import everything to be killed
KILLED = """\
import os, signal, time
os.kill(os.getpid(), signal.SIGKILL if os.environ["RANK"] == "1" else signal.SIGCONT)
time.sleep(60)
"""


def test_the_host_that_killed_one_process_is_named(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torchrun, whose words on it are read; those that are left only see a connection that was closed."""
    run = runs.make_run(tmp_path / "run", made, SHARDED)
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    torchrun = command(run, SHARDED)[: -len(command(run, runs.RECIPE)[1:])]
    monkeypatch.setattr("memfit.train.children.command", lambda run, recipe: [*torchrun, str(program)])
    failed = in_child(run, silent)
    assert failed.status == "failed" and "signal 9" in failed.error


@pytest.mark.parametrize(
    ("change", "by"),
    [
        ({}, "memfit.train.worker"),
        ({"num_gpus": 2}, "torch.distributed.run"),
        ({"offload": "optimizer"}, "torch.distributed.run"),
    ],
    ids=["one", "two", "deepspeed on one"],
)
def test_torchrun_starts_what_needs_a_process_group(change: dict[str, Any], by: str) -> None:
    words = command(Run(Path("run")), runs.RECIPE.but(**change))
    assert words[words.index("-m") + 1] == by and words[-2:] == ["memfit.train.worker", "run"]


# ---- what they share


@pytest.fixture(scope="module")
def sharded(one_thread: None, made: Made, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A run under FSDP2 that nothing disturbed; each process leaves what it held in shards.N.json."""
    run = runs.make_run(tmp_path_factory.mktemp("sharded") / "run", made, SHARDED)

    def spoil(rank: int, callbacks: list[RunCallback]) -> Any:
        def before(meter: Any, size: int) -> None:
            path = run.path / f"shards.{rank}.json"
            if callbacks[0].stage == "optimizer step" and not path.exists():
                held = list(callbacks[0].trainer.model.parameters())
                here = sum(getattr(p, "_local_tensor", p).numel() for p in held)
                kinds = sorted({type(p).__name__ for p in held})
                path.write_text(json.dumps({"kinds": kinds, "here": here, "of": sum(p.numel() for p in held)}))

        return before

    return run, supervise(run, forked(spoil), silent)


def parts(run: Run) -> list[list[dict[str, Any]]]:
    """What every step trained, of each of the two processes."""
    return [lines(run, name) for name in ("samples.jsonl", "samples.1.jsonl")]


def dealt(run: Run) -> list[tuple[int, int]]:
    """(samples, sum of their digests) of every step, over all processes."""
    steps = zip(*filter(None, parts(run)), strict=True)
    return [(sum(x["samples"] for x in each), sum(int(x["digest"], 16) for x in each) % MODULUS) for each in steps]


def losses(run: Run) -> list[float]:
    """The training loss of every step."""
    return [log["loss"] for log in history(run) if "loss" in log]


def first(spoil: Any) -> Any:
    """A start whose first attempt alone is disturbed."""
    spoiled = [forked(spoil)]
    return lambda run, tell: (spoiled.pop() if spoiled else forked())(run, tell)
