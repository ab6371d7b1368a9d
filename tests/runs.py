"""Make runs of a second for tests: two layers, a few distinct samples, on the CPU; disturbed, or in processes."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import multiprocess  # of datasets: it sends closures
from safetensors.torch import load_file, save_file  # noqa: F401

import memfit.train.attempt
from memfit.catalogue.cards import custom_gpu
from memfit.closed_form.run.estimate import estimate
from memfit.documents import recipe_file
from memfit.frameworks.accelerate import environment
from memfit.models.hub import resolve_model
from memfit.nouns.job import AS_USUAL, Job, Recipe, Training
from memfit.nouns.plan import Plan, judge
from memfit.train import embedded, folder, worker
from memfit.train.memory_limit import CountingMeter
from memfit.train.outcome import Event, Outcome, Settings
from memfit.train.run_callback import RunCallback
from memfit.train.sample_counts import SampleLedger
from memfit.units import GIB

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
RECIPE = Recipe(precision="fp32", micro_batch=4, sequence_length=32, loss="fused")
TRAINING = Training(max_steps=6, save_steps=2, learning_rate=5e-3)
SAMPLES, STEPS = 22, 6  # 22 samples in steps of 4: the last step of an epoch is short


def assets(place: Path) -> tuple[Path, Path]:
    """The model's folder and a data file whose lines all differ."""
    model, data = embedded.write(place, SMALL)
    data.write_text("".join(f"{'abcdefghijklmnop'[: 3 + i % 11]} {i * i}\n" for i in range(SAMPLES)))
    return model, data


def plan_for(model: Path, data: Path, recipe: Recipe = RECIPE, training: Training = TRAINING) -> Plan:
    """The plan of a recipe on a card of 2 GiB."""
    card = custom_gpu(2 * GIB)
    architecture = resolve_model(str(model))
    footprint = estimate(architecture, recipe, card)
    job = Job(
        architecture=architecture, gpu=card, effective_batch=recipe.effective_batch, method=recipe.method,
        sequence_length=recipe.sequence_length, num_gpus=recipe.num_gpus, dataset=str(data),
        training=training,
    )  # fmt: skip
    return Plan(job, recipe, footprint, judge(footprint, card), ())


def make_run(place: Path, made: tuple[Path, Path], recipe: Recipe = RECIPE, **told: Any) -> folder.Run:
    """A run that was created and not yet started; `told` are fields of Training and of Settings."""
    training = replace(TRAINING, **{name: told.pop(name) for name in Training.__dataclass_fields__ if name in told})
    with folder.fresh(place, force=False):
        return folder.create(place, plan_for(*made, recipe, training), Settings(**{"cpu": True} | told))


def recipe_of(path: Path, made: tuple[Path, Path], recipe: Recipe = RECIPE, training: Training = AS_USUAL) -> Path:
    """The recipe.toml of a run, as a plan leaves it."""
    file = recipe_file.RecipeFile(model=str(made[0]), recipe=recipe, data=str(made[1]), training=training)
    path.write_text(recipe_file.dumps(file))
    return path


def silent(event: Event) -> None:
    """Nobody listens."""


# ---- what a run left behind


def weights(run: folder.Run, name: str = "model.safetensors") -> dict[str, Any]:
    """The tensors of the model, or of its adapters."""
    return load_file(run.output / name)


def lines(run: folder.Run, name: str = folder.SAMPLES_FILE) -> list[dict[str, Any]]:
    """What every step trained."""
    return SampleLedger(run.path / name).lines()


def history(run: folder.Run) -> list[dict[str, Any]]:
    """What the trainer logged, up to the last checkpoint."""
    found: list[dict[str, Any]] = json.loads(
        (run.last_good().path / "trainer_state.json").read_text()  # type: ignore[union-attr]
    )["log_history"]
    return found


# ---- starts for `supervise` that disturb

Start = Callable[[folder.Run, Callable[[Event], None]], Outcome]
Spoil = Callable[[RunCallback], None]  # done to a run in the middle of a step
Before = Callable[[CountingMeter, int], None]
Spoiler = Callable[[int, list[RunCallback]], Before | None]


def stopping_at(step: int) -> Start:
    """Is told to stop in the middle of a step."""

    def start(run: folder.Run, tell: Any) -> Outcome:
        callbacks: list[RunCallback] = []

        def watch(event: Event) -> None:
            if event["event"] == "step" and event["step"] == step - 1:
                callbacks[0].stop = True

        return memfit.train.attempt.attempt(run, watch, keep=callbacks.append)

    return start


def failing(stage: str, step: int, times: int = 1, after: int = 0) -> Start:
    """Take its memory in one stage of one step, at the next allocation or `after` so many; `times` over."""
    left = [times]

    def start(run: folder.Run, tell: Any) -> Outcome:
        callbacks: list[RunCallback] = []
        left[0] -= 1
        before = exhausting(callbacks, stage, step, after) if left[0] >= 0 else None
        return memfit.train.attempt.attempt(run, tell, keep=callbacks.append, before=before)

    return start


def exhausting(callbacks: list[RunCallback], stage: str, step: int, after: int = 0) -> Before:
    """Leaves no memory in one stage of one step, once."""
    struck: list[int] = []
    passed = [0]

    def before(meter: CountingMeter, size: int) -> None:
        state = callbacks[0].trainer.state.global_step if callbacks[0].trainer else 0
        there = not struck and callbacks[0].stage == stage and state == step
        passed[0] += there
        here = there and passed[0] > after
        meter.limit = max(meter.live, 1) if here else 0
        if here:
            struck.append(state)

    return before


# ---- several processes

WAIT = 120  # seconds: longer than any attempt of these runs takes on a loaded machine


def forked(spoil: Spoiler = lambda rank, callbacks: None, processes: int = 2) -> Start:
    """What torchrun starts, without its imports: forks of a process that has made them, and used no virtual card.

    `spoil` is called once in each process, with its rank and the list that its RunCallback will be in; what it returns
    is called before every allocation. The output of the processes goes to log.txt.
    """

    def start(run: folder.Run, tell: Any) -> Outcome:
        codes = together(run, processes, spoil)
        if -signal.SIGSEGV in codes:  # PyTorch 2.13's thread of gloo: once in some hundred runs, in malloc
            codes = together(run, processes, spoil)
        log = (run.path / folder.LOG_FILE).read_text()[-8000:]
        assert None not in codes and run.outcome is not None, log
        if run.outcome.status == "failed":  # pytest shows it where the test did not expect that
            print("exit codes", codes, log, sep="\n")
        return run.outcome

    return start


def together(run: folder.Run, processes: int, spoil: Spoiler) -> list[int | None]:
    """How each process of one attempt ended; None: it had not when the time was over."""
    (run.path / folder.OUTCOME_FILE).unlink(missing_ok=True)
    port = free_port()
    ranks = [imported().Process(target=_rank, args=(run, rank, processes, port, spoil)) for rank in range(processes)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(WAIT)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    return codes


@cache
def imported() -> Any:
    """Start processes as forks of one that has imported the trainers, which takes six seconds and no virtual card."""
    context = multiprocess.get_context("forkserver")
    context.set_forkserver_preload(["runs", "trl.trainer.sft_trainer", "peft"])
    return context


def script(code: str, words: list[str], folder: Path, caches: Path) -> str:
    """What `python -c code words` prints in a folder, offline and without its imports; it must succeed.

    `caches` keeps what datasets writes.
    """
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    process = imported().Process(target=_script, args=(code, words, folder, out, err, caches))
    process.start()
    process.join(WAIT)
    code_of_exit = process.exitcode
    process.kill()
    assert code_of_exit == 0, err.read_text()[-3000:]
    return out.read_text()


def _script(code: str, words: list[str], folder: Path, out: Path, err: Path, caches: Path) -> None:
    import datasets
    from huggingface_hub import constants

    gc.freeze()
    for number, path in ((1, out), (2, err)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false")
    constants.HF_HUB_OFFLINE = True  # read from the environment when it was imported
    datasets.config.HF_DATASETS_CACHE = caches
    sys.argv = ["-c", *words]
    exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})
    sys.stdout.flush()


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _rank(run: folder.Run, rank: int, processes: int, port: int, spoil: Callable[..., Before | None]) -> None:
    """One process as torchrun starts it."""
    gc.freeze()  # collections look at what is made here, not at the libraries
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": processes,
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    os.environ.update(environment(run.plan.recipe, run.plan.job.architecture.model_type, run.path))
    with (run.path / folder.LOG_FILE).open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    callbacks: list[RunCallback] = []
    real, before = memfit.train.attempt.attempt, spoil(rank, callbacks)

    def attempt(run: folder.Run, tell: Any, keep: Spoil) -> Outcome:
        return real(run, tell, keep=lambda callback: (callbacks.append(callback), keep(callback))[1], before=before)

    with mock.patch.object(memfit.train.attempt, "attempt", attempt):
        code = worker.main(str(run.path))
    os._exit(code)  # nothing of the tests' own is closed here
