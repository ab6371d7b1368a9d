"""Memory that runs out: the run falls a rung and loses nothing, or stops with everything saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # the libraries' own

import runs  # noqa: E402
from memfit.catalogue.cards import custom_gpu  # noqa: E402
from memfit.documents.recipe_file import RecipeFile  # noqa: E402
from memfit.frameworks.process_layout import backend  # noqa: E402
from memfit.frameworks.recipe_toml import plan_of  # noqa: E402
from memfit.frameworks.script import packages  # noqa: E402
from memfit.nouns.job import Recipe  # noqa: E402
from memfit.planner.next_lower_recipe import LEARNED, STORED  # noqa: E402
from memfit.tables.tasks import TASKS  # noqa: E402
from memfit.train.attempt import attempt  # noqa: E402
from memfit.train.folder import Run, create, fallen, fresh, target_of  # noqa: E402
from memfit.train.oom_recovery import changes, lower  # noqa: E402
from memfit.train.outcome import Event, Outcome, Settings, Shortage, Stage  # noqa: E402
from memfit.train.supervise import cause, fall_of, supervise  # noqa: E402
from memfit.units import GIB  # noqa: E402
from runs import failing, history, lines, silent, weights  # noqa: E402


@pytest.mark.parametrize(
    ("stage", "step", "good"),
    [("load", 0, 0), ("rehearsal", 0, 0), ("forward and backward", 3, 3), ("optimizer step", 3, 2)],
)
def test_a_fall_loses_nothing(
    whole: tuple[Run, Outcome], made: tuple[Path, Path], tmp_path: Path, stage: str, step: int, good: int
) -> None:
    # the fused step makes nothing but its states; this one has temporaries in every step
    recipe = runs.RECIPE.but(optimizer="adamw-foreach") if stage == "optimizer step" else runs.RECIPE
    run = runs.make_run(tmp_path / "run", made, recipe)
    outcome = supervise(run, failing(stage, step), silent)
    assert (outcome.status, outcome.step) == ("done", runs.STEPS)
    (fall,) = run.falls
    assert (fall.shortage.stage, fall.shortage.step, fall.resumed_at) == (stage, step, good)
    assert fall.changed and run.plan.recipe.effective_batch == runs.RECIPE.effective_batch
    assert run.plan.job.training == runs.TRAINING and "MAX_STEPS = 6 " in (run.path / "train.py").read_text()
    assert lines(run) == lines(whole[0])  # the same samples in every step
    assert (run.path / "falls" / "1" / "recipe.toml").is_file() and "out of memory" in (
        run.path / "falls/1/error.txt"
    ).read_text()
    rates, planned = (
        {log["step"]: log["learning_rate"] for log in history(r) if "loss" in log} for r in (run, whole[0])
    )
    assert rates == {step: planned[step] for step in rates}
    assert len(rates) >= runs.STEPS - 1  # memory may run out while a loss is logged
    # other micro-batches sum in another order
    assert all(torch.allclose(t, weights(whole[0])[n], rtol=1e-2, atol=1e-3) for n, t in weights(run).items())


WORDS = [f"{'abcdefghijklmnop'[: 3 + i % 11]} {i * i}" for i in range(runs.SAMPLES)]
ROWS: dict[str, list[dict[str, object]]] = {
    "dpo": [{"prompt": word, "chosen": " yes", "rejected": f" no {i % 7}"} for i, word in enumerate(WORDS)],
    "classification": [{"text": word, "label": ("short", "long")[len(word) > 9]} for word in WORDS],
    "seq2seq": [{"source": word, "target": word[::-1]} for word in WORDS],
    "embedding": [{"anchor": word, "positive": word[::-1]} for word in WORDS],
}
T5 = {"model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2,
      "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "dropout_rate": 0.0}  # fmt: skip


def model_for(task: str, made: Path, place: Path) -> Path:
    """Return the model that a task trains: the tiny decoder, or a T5 with its tokenizer."""
    if task != "seq2seq":
        return made
    from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

    words = AutoTokenizer.from_pretrained(made)
    words.save_pretrained(place)
    T5ForConditionalGeneration(T5Config(**T5, vocab_size=len(words))).save_pretrained(place)
    return place


@pytest.mark.parametrize("task", ROWS)
def test_other_tasks_fall_and_lose_nothing(task: str, made: tuple[Path, Path], tmp_path: Path) -> None:
    if package := TASKS[task].package:
        pytest.importorskip(package.replace("-", "_"))
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS[task]))
    recipe = runs.RECIPE.but(trainer=TASKS[task].by, loss="full", method="lora" if task == "dpo" else "full")
    model = model_for(task, made[0], tmp_path / "model")
    file = RecipeFile(model=str(model), recipe=recipe, data=str(data), training=runs.TRAINING, task=task)
    plan = plan_of(file, custom_gpu(2 * GIB))
    found = []
    for name, start in (("whole", attempt), ("fallen", failing("forward and backward", 3))):
        with fresh(tmp_path / name, force=False):
            found.append(run := create(tmp_path / name, plan, Settings(cpu=True)))
        outcome = supervise(run, start, silent)
        assert (outcome.status, outcome.step, outcome.samples) == ("done", runs.STEPS, 22), outcome.error
    whole, run = found
    (fall,) = run.falls
    assert (fall.shortage.step, fall.resumed_at, run.plan.recipe.effective_batch) == (3, 3, 4)
    assert fall.changed and run.plan.job.task == task
    assert lines(run) == lines(whole) and len({line["digest"] for line in lines(run)}) == runs.STEPS


def test_after_as_many_falls_as_allowed_it_stops_resumable(
    whole: tuple[Run, Outcome], made: tuple[Path, Path], tmp_path: Path
) -> None:
    run, told = runs.make_run(tmp_path / "run", made, falls=1), list[Event]()
    stopped = supervise(run, failing("forward and backward", 3, times=2), told.append)
    # the last is explained like the others
    assert [event["event"] for event in told if "cause" in event] == ["fall", "cause"]
    assert all("forward and backward" in event["cause"][0] for event in told if "cause" in event)
    for number in ("1", "2"):
        assert "OutOfMemoryError" in (run.path / "falls" / number / "error.txt").read_text()
    assert (stopped.status, stopped.step, stopped.samples, len(run.falls)) == ("oom", 3, 12, 1)
    assert "--falls" in stopped.error
    done = supervise(run, attempt, silent)
    assert done.status == "done" and lines(run) == lines(whole[0])


def test_where_nothing_needs_less_it_stops(made: tuple[Path, Path], tmp_path: Path) -> None:
    recipe = runs.RECIPE.but(micro_batch=1, accumulation=4, checkpointing="full")
    run = runs.make_run(tmp_path / "run", made, recipe, memory_limit=1 << 16, falls=20)
    stopped = supervise(run, attempt, silent)
    assert stopped.status == "oom" and "nothing that learns the same needs less memory in" in stopped.error
    assert run.plan.recipe.micro_batch == 1
    needs = [fall.shortage.limit for fall in run.falls]
    assert needs and set(needs) == {1 << 16}


@pytest.mark.parametrize("stage", get_args(Stage))
def test_every_stage_has_its_own_way_down(made: tuple[Path, Path], tmp_path: Path, stage: Stage) -> None:
    """Evaluation shrinks first where evaluation failed; saving and merging never touch the training recipe."""
    run = runs.make_run(tmp_path / "run", made)
    shortage = Shortage(stage=stage, step=2, text="out of memory", asked=1 << 20)
    recipes, changed = [], []
    while (below := lower(run, shortage)) is not None and len(recipes) < 4:
        recipes.append(below.plan.recipe)
        changed.append(changes(run, below))
        fallen(run, fall_of(run, shortage, below), below.plan, below.settings)
    assert all(changed) and all(recipe.effective_batch == 4 for recipe in recipes)
    if stage == "eval":
        assert changed[:2] == [("evaluation batch 4 -> 2",), ("evaluation batch 2 -> 1",)]
        assert recipes[:2] == [runs.RECIPE] * 2 and recipes[2] != runs.RECIPE
    elif stage in ("save", "merge"):
        assert recipes == [runs.RECIPE] * (stage == "save")
    else:
        assert recipes[0] != runs.RECIPE


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(precision="bf16-mixed", micro_batch=4, sequence_length=512),
        Recipe(method="lora", micro_batch=4, sequence_length=512),
        Recipe(method="qlora", quantization="nf4-double", micro_batch=4, sequence_length=512),
        Recipe(precision="bf16-mixed", micro_batch=4, sequence_length=512, num_gpus=2, shard="parameters"),
        Recipe(precision="bf16-master", micro_batch=4, sequence_length=512, num_gpus=2, shard="gradients"),
    ],
    ids=["full", "lora", "qlora", "fsdp2", "zero2"],
)
def test_no_fall_changes_what_is_learned_or_how_a_checkpoint_looks(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe, trained: bool
) -> None:
    """Steps down to where nothing needs less keep LoRA, and what is stored once there is a checkpoint."""
    monkeypatch.setattr(Run, "last_good", lambda run: object() if trained else None)
    monkeypatch.setattr("memfit.frameworks.script.installed", lambda name: True)  # DeepSpeed, bitsandbytes and torchao
    run = runs.make_run(tmp_path / "run", made, recipe, cpu=False)
    fixed = (*LEARNED, *(STORED if trained else ()), *(("optimizer",) if trained and recipe.zero else ()))
    for falls in range(20):
        below = lower(run, Shortage(stage="forward and backward", step=falls, text="", asked=1 << 20))
        if below is None:
            break
        now = below.plan.recipe
        assert now != run.plan.recipe and now.effective_batch == recipe.effective_batch
        assert {name: getattr(now, name) for name in fixed} == {name: getattr(recipe, name) for name in fixed}
        run.keep(run.settings, run.falls, below.plan)
    assert 0 < falls < 20


@pytest.mark.parametrize(
    ("recipe", "package"),
    [
        (Recipe(precision="bf16-mixed", micro_batch=4, sequence_length=512), "bitsandbytes"),
        (Recipe(precision="bf16-mixed", micro_batch=4, sequence_length=512, num_gpus=2, shard="parameters"), "torchao"),
        (Recipe(precision="bf16-master", micro_batch=4, sequence_length=512, num_gpus=2), "deepspeed"),
        (Recipe(precision="bf16-mixed", micro_batch=4, sequence_length=512, trainer="transformers"), "liger-kernel"),
    ],
)
@pytest.mark.parametrize("there", [True, False])
def test_no_fall_needs_what_is_not_installed(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe, package: str, there: bool
) -> None:
    monkeypatch.setattr("memfit.frameworks.script.installed", lambda name: there or name != package)
    run, needed = runs.make_run(tmp_path / "run", made, recipe, cpu=False), set[str]()
    for step in range(20):
        below = lower(run, Shortage(stage="forward and backward", step=step, text="", asked=1 << 20))
        if below is None:
            break
        now = below.plan.recipe
        needed |= set(packages(now, target_of(below.plan), backend(now)))
        run.keep(run.settings, run.falls, below.plan)
    assert step and (package in needed) is there


def test_a_cpu_gets_no_kernels_of_a_card(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memfit.frameworks.script.installed", lambda name: True)
    run = runs.make_run(tmp_path / "run", made, runs.RECIPE.but(trainer="transformers", loss="full"))
    for step in range(20):
        below = lower(run, Shortage(stage="forward and backward", step=step, text="", asked=1 << 10))
        if below is None:
            break
        assert below.plan.recipe.loss == "full"
        run.keep(run.settings, run.falls, below.plan)
    assert step


def test_saving_that_ran_out_is_tried_again_with_the_same_recipe(
    whole: tuple[Run, Outcome], made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real, struck = runs.make_run(tmp_path / "run", made), torch.save, []

    def save(*args: Any, **named: Any) -> None:
        if not struck and "checkpoint-4" in str(args[1]):
            struck.append(Path(args[1]).write_bytes(b"half"))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        real(*args, **named)

    monkeypatch.setattr(torch, "save", save)
    assert supervise(run, attempt, silent).status == "done"
    assert [(f.shortage.stage, f.resumed_at) for f in run.falls] == [("save", 2)]
    assert run.settings.lean_save and run.plan.recipe == runs.RECIPE and lines(run) == lines(whole[0])
    assert all(torch.equal(t, weights(whole[0])[name]) for name, t in weights(run).items())


def test_counted_bytes_are_those_that_live() -> None:
    from memfit.train.memory_limit import metered

    with metered(cpu=True, limit=1 << 20) as meter:
        kept = torch.zeros(1000)
        view = kept[:10]
        assert meter.held == 4096 and view.shape == (10,)
        with pytest.raises(torch.OutOfMemoryError, match=r"allocate 1\.91 MiB.*capacity of 1\.00 MiB"):
            torch.ones(500_000)
        assert meter.held == 4096
        del kept, view
        assert meter.held == 0 and meter.peaks["load"] == 4096


def test_memory_errors_are_known_wherever_they_are_wrapped() -> None:
    from memfit.train.attempt import exhausted

    assert exhausted(torch.OutOfMemoryError("x")) and exhausted(RuntimeError("CUDA driver error: out of memory"))
    assert not exhausted(ValueError("out of memory")) and not exhausted(RuntimeError("shape"))
    try:
        try:
            raise torch.OutOfMemoryError("x")
        except RuntimeError as error:
            raise ValueError("wrapped") from error
    except ValueError as error:
        assert exhausted(error)


def test_no_cause_is_told_that_cannot_be_one_in_its_stage() -> None:
    """The rehearsal's batch is the longest on purpose, and nothing was before it."""
    text = (
        "Token indices sequence length is longer than the specified maximum (9001 > 2048)\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    found = {
        stage: cause(Shortage(stage=stage, step=0, text=text))[1] for stage in ("forward and backward", "rehearsal")
    }
    assert "longer than the ones before it" in found["forward and backward"]
    assert "longer than the ones before it" not in found["rehearsal"]


@pytest.mark.parametrize("after", [0, 60])
def test_what_a_failed_step_drew_is_drawn_again(made: tuple[Path, Path], tmp_path: Path, after: int) -> None:
    """Dropout of a step that ran out of memory on its way: the step is taken again as if for the first time."""
    recipe = runs.RECIPE.but(method="lora", lora_rank=4, lora_dropout=0.5, micro_batch=2, accumulation=2)
    whole = runs.make_run(tmp_path / "whole", made, recipe)
    assert supervise(whole, attempt, silent).status == "done"
    run = runs.make_run(tmp_path / "run", made, recipe)
    assert supervise(run, failing("forward and backward", 3, after=after), silent).status == "done"
    assert len(run.falls) == 1 and run.falls[0].resumed_at == 3 and lines(run) == lines(whole)
    losses, undisturbed = ({log["step"]: log["loss"] for log in runs.history(r) if "loss" in log} for r in (run, whole))
    assert {4, 5, 6} <= losses.keys() and losses == {step: undisturbed[step] for step in losses}
