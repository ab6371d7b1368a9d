"""Real runs on the CPU: they learn, resume to the bit, count every sample, and fall down a rung where memory runs out."""

from __future__ import annotations

import gc
import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

from safetensors.torch import load_file  # noqa: E402

import runs  # noqa: E402
from conftest import Ran  # noqa: E402
from memfit.job import Recipe  # noqa: E402
from memfit.run.attempt import attempt  # noqa: E402
from memfit.run.folder import COMPLETE, Run, fallen  # noqa: E402
from memfit.run.keeper import Keeper  # noqa: E402
from memfit.run.limit import CountingMeter  # noqa: E402
from memfit.run.nouns import Outcome, Shortage, Stage  # noqa: E402
from memfit.run.relief import changes, lower  # noqa: E402
from memfit.run.samples import Ledger, Marks  # noqa: E402
from memfit.run.supervise import fall_of, supervise  # noqa: E402
from memfit.units import human  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))


def silent(event: dict[str, Any]) -> None:
    """Nobody listens."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    """Beside other tests two threads wait for each other; what the libraries made at import need not be collected each time."""
    import trl.trainer.sft_trainer  # noqa: F401

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return runs.assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture(scope="module")
def whole(made: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Outcome]:
    """A run that nothing disturbed."""
    run = runs.make_run(tmp_path_factory.mktemp("whole") / "run", made)
    return run, supervise(run, attempt, silent)


def weights(run: Run, name: str = "model.safetensors") -> dict[str, Any]:
    return load_file(run.output / name)


def lines(run: Run) -> list[dict[str, Any]]:
    return Ledger(run.path / "samples.jsonl").lines()


def stopping_at(step: int) -> Any:
    """A start for `supervise` that is told to stop in the middle of a step."""

    def start(run: Run, tell: Any) -> Outcome:
        keepers: list[Keeper] = []

        def watch(event: dict[str, Any]) -> None:
            if event["event"] == "step" and event["step"] == step - 1:
                keepers[0].stop = True

        return attempt(run, watch, keep=keepers.append)

    return start


def failing(stage: str, step: int, times: int = 1) -> Any:
    """A start whose memory is gone in one stage of one step, at the first allocation that follows; `times` over."""
    left = [times]

    def start(run: Run, tell: Any) -> Outcome:
        keepers: list[Keeper] = []
        struck: list[int] = []  # once in an attempt

        def before(meter: CountingMeter, size: int) -> None:
            state = keepers[0].trainer.state.global_step if keepers[0].trainer else 0
            meter.limit = 0
            if left[0] and not struck and keepers[0].stage == stage and state == step:
                left[0] -= 1
                struck.append(state)
                meter.limit = max(meter.live, 1)

        return attempt(run, tell, keep=keepers.append, before=before)

    return start


# ---- a run as it should be


def test_a_run_learns_and_saves(whole: tuple[Run, Outcome]) -> None:
    run, outcome = whole
    assert (outcome.status, outcome.step, outcome.steps) == ("done", runs.STEPS, runs.STEPS)
    assert outcome.samples == runs.SAMPLES == sum(line["samples"] for line in lines(run))
    assert [c.step for c in run.checkpoints()] == [4, 6]
    assert all(bool(torch.isfinite(t).all()) for t in weights(run).values())


def test_the_loss_goes_down(made: tuple[Path, Path], tmp_path: Path) -> None:
    run = runs.make_run(tmp_path / "run", made, max_steps=30, save_steps=30, learning_rate=2e-2)
    outcome = supervise(run, attempt, silent)
    assert outcome.first_loss is not None and outcome.loss is not None
    assert outcome.loss < 0.8 * outcome.first_loss


def test_a_stopped_run_resumes_to_the_bit(whole: tuple[Run, Outcome], made: tuple[Path, Path], tmp_path: Path) -> None:
    run = runs.make_run(tmp_path / "run", made)
    stopped = supervise(run, stopping_at(3), silent)
    assert (stopped.status, stopped.step, stopped.samples) == ("stopped", 3, 12)
    assert run.last_good() is not None and not (run.output / "model.safetensors").exists()
    done = supervise(run, attempt, silent)
    assert (done.status, done.samples) == ("done", whole[1].samples)
    assert lines(run) == lines(whole[0])
    assert all(torch.equal(t, weights(whole[0])[name]) for name, t in weights(run).items())


def test_a_run_that_is_done_can_be_resumed(whole: tuple[Run, Outcome]) -> None:
    before = weights(whole[0])
    again = attempt(whole[0], silent)
    assert (again.status, again.step, again.samples) == ("done", runs.STEPS, runs.SAMPLES)
    assert all(torch.equal(t, before[name]) for name, t in weights(whole[0]).items())


@pytest.mark.parametrize("damage", ["no marker", "half a file"])
def test_half_a_checkpoint_is_ignored(
    whole: tuple[Run, Outcome], made: tuple[Path, Path], tmp_path: Path, damage: str
) -> None:
    run = runs.make_run(tmp_path / "run", made)
    supervise(run, stopping_at(4), silent)
    broken = run.output / "checkpoint-4"
    (broken / COMPLETE).unlink()
    if damage == "half a file":
        (broken / "optimizer.pt").write_bytes(b"PK")
    assert run.last_good() is not None and run.last_good().step == 2
    done = supervise(run, attempt, silent)
    assert done.status == "done" and lines(run) == lines(whole[0])
    assert all(torch.equal(t, weights(whole[0])[name]) for name, t in weights(run).items())


def test_the_rehearsal_leaves_no_trace(whole: tuple[Run, Outcome], made: tuple[Path, Path], tmp_path: Path) -> None:
    """Weights, states, random numbers and counters: a run without it ends in the same bits."""
    run = runs.make_run(tmp_path / "run", made, rehearse=False)
    supervise(run, attempt, silent)
    assert lines(run) == lines(whole[0])
    assert all(torch.equal(t, weights(whole[0])[name]) for name, t in weights(run).items())
    tokens, others = ([log["num_tokens"] for log in history(r)] for r in (run, whole[0]))
    assert tokens == others and len(tokens) == runs.STEPS


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-8bit", "adafactor", "lion", "sgd-momentum"])
def test_an_empty_step_moves_nothing(optimizer: str) -> None:
    from transformers import Trainer, TrainingArguments

    from memfit import framework_names
    from memfit.run.rehearsal import empty_step

    if "8bit" in optimizer or "lion" in optimizer:
        pytest.importorskip("bitsandbytes")
    spelled = framework_names.optim(Recipe(optimizer=optimizer), "trl")
    model = torch.nn.Linear(96, 96)
    arguments = TrainingArguments(
        output_dir="unused", optim=spelled.optim, use_cpu=True, weight_decay=0.1, **spelled.extra
    )
    kind, words = Trainer.get_optimizer_cls_and_kwargs(arguments)
    made = kind(model.parameters(), **words)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in made.param_groups]
    model(torch.randn(4, 96)).sum().backward()
    with empty_step(made):
        assert made.state or optimizer == "sgd-momentum"
    assert not made.state
    assert [{k: v for k, v in group.items() if k != "params"} for group in made.param_groups] == groups
    assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters())


def test_the_worst_batch_is_the_longest(made: tuple[Path, Path], tmp_path: Path) -> None:
    from memfit.run.attempt import load
    from memfit.run.rehearsal import worst_rows

    run = runs.make_run(tmp_path / "run", made)
    trainer = load(run, run.settings)
    lengths = sorted((len(ids) for ids in trainer.train_dataset["input_ids"]), reverse=True)
    assert [len(row["input_ids"]) for row in worst_rows(trainer)] == lengths[:4]


# ---- memory runs out


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


def history(run: Run) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run.output / "checkpoint-6" / "trainer_state.json").read_text())[
        "log_history"
    ]
    return found


def test_after_as_many_falls_as_allowed_it_stops_resumable(
    whole: tuple[Run, Outcome], made: tuple[Path, Path], tmp_path: Path
) -> None:
    run = runs.make_run(tmp_path / "run", made, falls=1)
    stopped = supervise(run, failing("forward and backward", 3, times=2), silent)
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


# ---- adapters


def test_adapters_are_trained_evaluated_and_merged(made: tuple[Path, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from memfit.run import merge
    from memfit.run.card import write_card

    recipe = runs.RECIPE.but(method="lora", lora_rank=4)
    run = runs.make_run(tmp_path / "run", made, recipe, eval_data=str(made[1]), max_steps=4, learning_rate=5e-2)
    outcome = supervise(run, failing("eval", 2), silent)
    assert outcome.status == "done" and outcome.eval_loss is not None and math.isfinite(outcome.eval_loss)
    assert [(f.shortage.stage, f.resumed_at, f.changed) for f in run.falls] == [
        ("eval", 2, ("evaluation batch 4 -> 2",))
    ]
    assert run.plan.recipe == recipe  # training is as it was
    adapters = weights(run, "adapter_model.safetensors")
    assert all(bool(t.any()) for t in adapters.values())
    merge.main(str(made[0]), str(run.output), str(tmp_path / "merged"))
    base, merged = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (made[0], tmp_path / "merged"))
    changed = {name for name, t in merged.items() if not torch.equal(t, base[name])}
    assert changed == {name for name in base if "_proj" in name}
    text = write_card(run, outcome).read_text()
    assert (
        run.falls[0].changed[0] in text
        and "evaluation loss" in text
        and "## Falls" in text
        and 'method = "lora"' in text
    )


# ---- processes of their own


def test_two_processes_fall_together_and_deal_the_same_samples(
    whole: tuple[Run, Outcome], made: tuple[Path, Path], tmp_path: Path
) -> None:
    """torchrun with gloo; the last step of an epoch is left out, which accelerate fills up by repeating samples."""
    from memfit.run.children import in_child

    recipe = runs.RECIPE.but(num_gpus=2, micro_batch=2)
    run = runs.make_run(tmp_path / "run", made, recipe, max_steps=2, falls=1, memory_limit=5 << 20)

    def start(run: Run, tell: Any) -> Outcome:
        """The second attempt has all memory."""
        outcome = in_child(run, tell)
        run.keep(replace(run.settings, memory_limit=0), run.falls)
        return outcome

    done = supervise(run, start, silent)
    assert (done.status, done.samples, len(run.falls)) == ("done", 8, 1), done.error
    parts = [Ledger(run.path / name).lines() for name in ("samples.jsonl", "samples.1.jsonl")]
    for first, second, alone in zip(*parts, lines(whole[0]), strict=False):
        assert first["samples"] == second["samples"] == 2
        assert (int(first["digest"], 16) + int(second["digest"], 16)) % 2**64 == int(alone["digest"], 16)


def test_the_embedded_run_stops_resumable_when_it_is_told_to(ran: Ran, tmp_path: Path) -> None:
    """SIGTERM to `memfit train` alone, as a cluster sends before it takes the machine away: the step is finished and saved."""
    words = ["train", "--out", str(tmp_path / "run"), "--max-steps", "40", "--cpu", "--json"]
    started = subprocess.Popen(
        [sys.executable, "-m", "memfit", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert started.stderr is not None
    told: list[str] = []
    for line in started.stderr:
        told.append(line)
        if "training from step 0 of 40" in line:
            started.send_signal(signal.SIGTERM)
    out, code = started.stdout.read(), started.wait()  # type: ignore[union-attr]
    assert code == 75, told
    said, run = json.loads(out), Run(tmp_path / "run")
    assert (said["schema"], said["status"], said["samples"]) == ("memfit.train/1", "stopped", 8 * said["step"])
    assert 1 <= said["step"] < 40 and run.last_good() is not None and len(lines(run)) == said["step"]
    heard = "".join(told)
    assert "memfit-tiny on this CPU" in heard and "SIGTERM: finishing this step" in heard and "--resume" in heard
    assert ran("train", "--out", tmp_path / "run", "--cpu")[0] == 2  # never overwritten


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


def test_the_run_is_watched(whole: tuple[Run, Outcome]) -> None:
    from memfit.run.card import card

    watched = whole[0].watched()
    assert watched is not None and watched.header.predicted is not None
    assert {s.phase for s in watched.samples} >= {"load", "first_step", "step", "save"}
    assert max(s.step for s in watched.samples) == runs.STEPS
    assert "resident memory of the process" in card(*whole)


def test_the_card_holds_measured_against_predicted(whole: tuple[Run, Outcome], tmp_path: Path) -> None:
    """As a GPU leaves it: the log of a watch on a card, of the present rung alone."""
    from memfit import watch_file
    from memfit.footprint import Levels
    from memfit.run.card import card
    from memfit.run.folder import MEMORY_FILE
    from memfit.sample import Header, Sample

    run = Run(tmp_path)
    for name in ("run.json", "recipe.toml"):
        (tmp_path / name).write_bytes((whole[0].path / name).read_bytes())
    peak, now = Levels(3 << 20, 3 << 20, 5 << 20, 9 << 20), Levels(1 << 20, 1 << 20, 5 << 20, 9 << 20)
    old, new = (Header("run", "cuda", "L4", 1 << 34, predicted=p) for p in (None, run.plan.footprint))
    nouns = [
        old,
        Sample(0.0, 1, "save", now, peak),
        new,
        Sample(0.0, 0, "load", now, peak),
        new,
        Sample(1.0, 2, "step", now, peak),
    ]
    (tmp_path / MEMORY_FILE).write_bytes(b"".join(map(watch_file.line, nouns)))
    text, step = card(run, whole[1]), next(p for p in run.plan.footprint.phases if p.phase == "step")
    assert f"| step | {human(step.levels.reserved)} | 5.00 MiB | 3.00 MiB |" in text
    assert "| load |" in text and "| save |" not in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run.toml", "--cpu", "--max-steps", "-1"), "--max-steps must be"),
        (("run.toml", "--cpu", "--learning-rate", "nan"), "--learning-rate must be"),
        (("run.toml", "--cpu", "--micro-batch", "2"), "settled by run.toml"),
        (("--resume", "--max-steps", "3"), "cannot change"),
        (("qwen2.5-0.5b", "--data", "x.jsonl"), "no GPU in this machine"),
        (("--resume",), "there is no run"),
        (("qwen2.5-0.5b", "--resume"), "--resume continues"),
        (("qwen2.5-0.5b", "--cpu"), "no data"),
        (("missing.toml", "--cpu"), "there is no file"),
        (("qwen2.5-0.5b", "--cpu", "--memory-limit", "much"), "not a size"),
    ],
)
def test_bad_input_is_refused_with_a_hint(
    ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = ran("train", *words)
    assert (code, out) == (2, "") and said in err and "hint:" in err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_else_is_left_alone(ran: Ran, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    code, _, err = ran("train", "--out", tmp_path, "--cpu", "--force")
    assert code == 2 and "holds no run" in err and (tmp_path / "thesis.txt").read_text() == "years of work"


# ---- parts


def test_counted_bytes_are_those_that_live() -> None:
    from memfit.run.limit import metered

    with metered(cpu=True, limit=1 << 20) as meter:
        kept = torch.zeros(1000)
        view = kept[:10]
        assert meter.held == 4096 and view.shape == (10,)
        with pytest.raises(torch.OutOfMemoryError, match=r"allocate 1\.91 MiB.*capacity of 1\.00 MiB"):
            torch.ones(500_000)
        assert meter.held == 4096
        del kept, view
        assert meter.held == 0 and meter.peaks["load"] == 4096


def test_a_ledger_survives_a_line_that_was_cut_off(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "samples.jsonl")
    ledger.begin(0)
    for step in (1, 2, 3):
        ledger.saw(Marks([step, 10]))
        ledger.step(step)
    with ledger.path.open("a") as stream:
        stream.write('{"step": 4, "sam')
    again = Ledger(ledger.path)
    again.begin(2)
    assert again.total == 4 and [line["step"] for line in again.lines()] == [1, 2]


def test_memory_errors_are_known_wherever_they_are_wrapped() -> None:
    from memfit.run.attempt import exhausted

    assert exhausted(torch.OutOfMemoryError("x")) and exhausted(RuntimeError("CUDA driver error: out of memory"))
    assert not exhausted(ValueError("out of memory")) and not exhausted(RuntimeError("shape"))
    try:
        try:
            raise torch.OutOfMemoryError("x")
        except RuntimeError as error:
            raise ValueError("wrapped") from error
    except ValueError as error:
        assert exhausted(error)


@pytest.mark.parametrize("seed", [1, 6])
def test_recovery_from_random_limits(seed: int, tmp_path: Path) -> None:
    """A handful of `python benchmarks/recovery.py`, one of each kind of fault."""
    import recovery

    result = recovery.Bench(tmp_path).one(seed)
    assert result.exact and result.status in ("done", "oom")
