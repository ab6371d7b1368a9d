"""Real runs on the CPU learn, resume to the bit, count every sample, and save adapters and a model card."""

from __future__ import annotations

import json
import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # the libraries' own

from safetensors.torch import load_file  # noqa: E402

import runs  # noqa: E402
from conftest import Ran  # noqa: E402
from memfit.cli.train_checks import check_data  # noqa: E402
from memfit.errors import BadInput  # noqa: E402
from memfit.nouns.job import Recipe, Training  # noqa: E402
from memfit.train import worker  # noqa: E402
from memfit.train.attempt import _module, attempt  # noqa: E402
from memfit.train.checkpoints import COMPLETE  # noqa: E402
from memfit.train.children import in_child, with_earlier  # noqa: E402
from memfit.train.folder import Run  # noqa: E402
from memfit.train.outcome import Event, Outcome  # noqa: E402
from memfit.train.sample_counts import Marks, SampleLedger  # noqa: E402
from memfit.train.supervise import supervise  # noqa: E402
from memfit.units import human  # noqa: E402
from runs import failing, history, lines, silent, stopping_at, weights  # noqa: E402


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

    from memfit.frameworks import names as framework_names
    from memfit.train.rehearsal import empty_step

    if "8bit" in optimizer or "lion" in optimizer:
        pytest.importorskip("bitsandbytes")
    chosen = framework_names.optim(Recipe(optimizer=optimizer), "trl")
    model = torch.nn.Linear(96, 96)
    arguments = TrainingArguments(output_dir="unused", use_cpu=True, weight_decay=0.1, **chosen)
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
    from memfit.train.attempt import load
    from memfit.train.rehearsal import worst_rows

    run = runs.make_run(tmp_path / "run", made)
    trainer = load(run, run.settings)
    lengths = sorted((len(ids) for ids in trainer.train_dataset["input_ids"]), reverse=True)
    assert [len(row["input_ids"]) for row in worst_rows(trainer)] == lengths[:4]


def test_adapters_are_trained_evaluated_and_merged(made: tuple[Path, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from memfit.train import merge
    from memfit.train.model_card import write_card

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
    (run.path / "merged").mkdir()
    (run.path / "merged" / "of before").touch()
    whole = merge.merged(run)  # takes its place
    assert (
        not (whole / "of before").exists()
        and (whole / "model.safetensors").read_bytes() == (tmp_path / "merged" / "model.safetensors").read_bytes()
    )
    assert "library_name: transformers" in (whole / "README.md").read_text() and not list(run.path.glob(".merged*"))
    text = write_card(run, outcome).read_text()
    assert not [text for text in (text, (whole / "README.md").read_text()) if str(tmp_path.parent) in text]
    assert (
        run.falls[0].changed[0] in text
        and "evaluation loss" in text
        and "## Falls" in text
        and 'method = "lora"' in text
    )
    for row in ("learning rate | 0.05", "most optimizer steps | 4", f"evaluation data | {made[1].name}"):
        assert f"| {row} |" in text


def test_a_runs_recipe_trains_the_same_again(
    ran: Ran, whole: tuple[Run, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rate, steps and checkpoints are the recipe's: by `memfit train` of it, and by the train.py beside it alone."""
    monkeypatch.setattr("memfit.cli.train.in_child", lambda run, tell: attempt(run, tell))
    code, _, err = ran(
        "train", whole[0].path / "recipe.toml", "--gpu-memory", "2GiB", "--cpu", "--out", tmp_path / "run"
    )
    assert code == 0, err
    again = Run(tmp_path / "run")
    assert again.plan.job.training == whole[0].plan.job.training == runs.TRAINING
    assert lines(again) == lines(whole[0])
    losses, before = ([log["loss"] for log in history(r) if "loss" in log] for r in (again, whole[0]))
    assert losses == before and len(losses) == runs.STEPS
    script = _module(whole[0].path / "train.py")
    trainer = script.build(script.arguments(["--cpu", "--output", str(tmp_path / "alone")]))
    trainer.train()
    trainer.save_model()
    alone = load_file(tmp_path / "alone" / "model.safetensors")
    assert all(torch.equal(t, weights(whole[0])[name]) for name, t in alone.items())


def test_flags_beside_a_recipe_override_its_training(
    ran: Ran, made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = Outcome(status="stopped")
    monkeypatch.setattr("memfit.cli.train.in_child", lambda run, tell: done)
    recipe = runs.recipe_of(tmp_path / "recipe.toml", made, training=runs.TRAINING)
    words = ("train", recipe, "--gpu-memory", "2GiB", "--cpu", "--force", "--out", tmp_path / "run")
    for flags, training in (
        ((), runs.TRAINING),
        (("--max-steps", 3), replace(runs.TRAINING, max_steps=3)),
        (("--epochs", 4), replace(runs.TRAINING, epochs=4.0, max_steps=-1)),
        (("--save-steps", 0.5, "--eval-data", made[1]), replace(runs.TRAINING, save_steps=0.5, eval_data=str(made[1]))),
    ):
        ran(*words, *flags)
        assert Run(tmp_path / "run").plan.job.training == training
    ran("train", runs.recipe_of(recipe, made), *words[2:])
    assert Run(tmp_path / "run").plan.job.training == Training(save_steps=0.1)


def test_the_run_is_watched(whole: tuple[Run, Outcome]) -> None:
    from memfit.train.model_card import card

    watched, damaged = whole[0].watched()
    assert not damaged
    assert watched is not None and watched.header.predicted is not None
    assert {s.phase for s in watched.samples} >= {"load", "first_step", "step", "save"}
    assert max(s.step for s in watched.samples) == runs.STEPS
    assert "resident memory of the process" in card(*whole)


def test_the_card_holds_measured_against_predicted(whole: tuple[Run, Outcome], tmp_path: Path) -> None:
    """As a GPU leaves it: the log of a watch on a card, of the present rung alone."""
    from memfit.documents import watch_log
    from memfit.nouns.footprint import Levels
    from memfit.nouns.sample import Header, Sample
    from memfit.train.folder import MEMORY_FILE
    from memfit.train.model_card import card

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
    whole_log = b"".join(map(watch_log.line, nouns))
    (tmp_path / MEMORY_FILE).write_bytes(whole_log + b"\0\0\0\n" + watch_log.line(nouns[-1]))  # a block was lost
    assert "1 line of memory.jsonl cannot be read" in card(run, whole[1])
    (tmp_path / MEMORY_FILE).write_bytes(whole_log)
    text, step = card(run, whole[1]), next(p for p in run.plan.footprint.phases if p.phase == "step")
    assert f"| step | {human(step.levels.reserved)} | 5.00 MiB | 3.00 MiB |" in text
    assert "| load |" in text and "| save |" not in text


def test_a_ledger_survives_a_line_that_was_cut_off(tmp_path: Path) -> None:
    ledger = SampleLedger(tmp_path / "samples.jsonl")
    ledger.begin(0)
    for step in (1, 2, 3):
        ledger.saw(Marks([step, 10]))
        ledger.step(step)
    with ledger.path.open("a") as stream:
        stream.write('{"step": 4, "sam')
    again = SampleLedger(ledger.path)
    again.begin(2)
    assert again.total == 4 and [line["step"] for line in again.lines()] == [1, 2]


def test_samples_that_are_cut_are_told_of(made: tuple[Path, Path], tmp_path: Path) -> None:
    """The plan may have known their tokens by an estimate only."""
    for length, cut in ((8, True), (32, False)):
        run, told = (
            runs.make_run(tmp_path / str(length), made, runs.RECIPE.but(sequence_length=length), max_steps=1),
            list[Event](),
        )
        supervise(run, attempt, told.append)
        warned = [event["text"] for event in told if event["event"] == "cut"]
        assert (len(warned) == 1 and "are cut there" in warned[0] and f"of {runs.SAMPLES} samples" in warned[0]) is cut


@pytest.mark.parametrize("long", [5, 12])
def test_samples_of_whose_completion_nothing_is_left_are_told_of(
    made: tuple[Path, Path], tmp_path: Path, long: int
) -> None:
    """TRL leaves them out and says so in a log only."""
    data = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "p" * (90 if n < long else 4), "completion": f"answer {n}"} for n in range(12)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = runs.make_run(tmp_path / "run", (made[0], data), runs.RECIPE.but(sequence_length=32), max_steps=1)
    told = list[Event]()
    if long == 12:
        with pytest.raises(BadInput, match="no sample has any of its completion within 32 tokens"):
            supervise(run, attempt, told.append)
        return
    supervise(run, attempt, told.append)
    said = [event["text"] for event in told if event["event"] == "cut"]
    assert said == [
        "5 of 12 samples have nothing of their completion within 32 tokens, and are left out: --sequence-length"
    ]


def test_half_a_character_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    data = tmp_path / "scraped.jsonl"
    data.write_text('{"text": "good"}\n{"text": "\\ud83d"}\n')
    with pytest.raises(BadInput, match="line 2: the text is not valid Unicode"):
        check_data(str(data))


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (OSError(28, "No space left on device"), True),
        (OSError(27, "File too large"), True),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 4992 vs 4928"), True),
        (RuntimeError("shapes do not match"), False),
    ],
)  # fmt: skip
def test_a_full_disk_is_called_so(error: Exception, hint: bool) -> None:
    assert ("(hint: the disk" in worker._error_line(error)) is hint and str(error) in worker._error_line(error)


def test_an_outcome_keeps_the_peaks_of_the_attempts_it_continues() -> None:
    before = Outcome(status="stopped", step=3, steps=6, host=700, reserved=9, peaks={"step": 5, "eval": 2})
    after = Outcome(status="done", step=6, steps=6, host=500, reserved=11, peaks={"step": 4, "save": 1})
    found = with_earlier(after, before)
    assert (found.host, found.reserved, found.peaks) == (700, 11, {"step": 5, "eval": 2, "save": 1})
    assert (
        with_earlier(after, Outcome(status="oom", host=700)) == after == with_earlier(after, None)
    )  # a rung of its own


def test_what_train_py_warns_of_is_heard(made: tuple[Path, Path], tmp_path: Path) -> None:
    """Once, through the pipe to the supervising process: a row without text, a failure after a step that was saved."""
    data = tmp_path / "some.jsonl"
    data.write_text("".join(json.dumps({"text": "a" * (i % 5)}) + "\n" for i in range(20)))
    run, told = runs.make_run(tmp_path / "run", (made[0], data), max_steps=2, save_steps=1), list[Event]()
    assert in_child(run, told.append).status == "done"
    assert [e["text"] for e in told if e["event"] == "warning"] == [f"{data}: 4 of 20 rows without text are left out"]


def test_what_trl_says_of_the_data_is_told(made: tuple[Path, Path], tmp_path: Path) -> None:
    """A prompt that ends in the middle of a token of its completion: what is learned is not what was written."""
    from tokenizers import Tokenizer

    model, data, told = tmp_path / "model", tmp_path / "pairs.jsonl", list[Event]()
    shutil.copytree(made[0], model)
    bytes_only = json.loads((model / "tokenizer.json").read_text())
    bytes_only["model"]["vocab"]["ab"] = 259
    bytes_only["model"]["merges"] = [["a", "b"]]
    Tokenizer.from_str(json.dumps(bytes_only)).save(str(model / "tokenizer.json"))
    data.write_text("".join(json.dumps({"prompt": f"{i} a", "completion": "b c"}) + "\n" for i in range(8)))
    run = runs.make_run(tmp_path / "run", (model, data), max_steps=1)
    assert supervise(run, attempt, told.append).status == "done"
    warned = [event["text"] for event in told if event["event"] == "warning"]
    assert len(warned) == 1 and "prompt is not a prefix" in warned[0] and "  " not in warned[0]
    assert not logging.getLogger("trl").handlers
