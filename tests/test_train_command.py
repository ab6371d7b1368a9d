"""memfit train as it is typed: what it refuses before anything is written, and how it stops."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

torch = pytest.importorskip("torch")
pytest.importorskip("trl")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # the libraries' own

import memfit.frameworks.script  # noqa: E402
import runs  # noqa: E402
from conftest import Ran  # noqa: E402
from memfit.cli.train_checks import SCHEDULERS  # noqa: E402
from memfit.train import folder  # noqa: E402
from memfit.train.folder import Run  # noqa: E402
from memfit.train.outcome import Outcome, Settings  # noqa: E402
from runs import lines  # noqa: E402


def test_the_embedded_run_stops_resumable_when_it_is_told_to(ran: Ran, tmp_path: Path) -> None:
    """SIGTERM to `memfit train` alone, as a cluster sends it before it takes a node away, ends the step and saves."""
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
    assert (
        "warning" not in heard
        and "memfit-tiny on this CPU" in heard
        and "SIGTERM: finishing this step" in heard
        and "--resume" in heard
    )
    assert ran("train", "--out", tmp_path / "run", "--cpu")[0] == 2  # never overwritten


def test_a_task_s_own_package_is_asked_for_before_anything_is_written(
    ran: Ran, made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memfit.frameworks.script, "installed", lambda name: name != "sentence-transformers")
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"anchor": "a", "positive": "b"}\n' * 8)
    words = ("train", made[0], "--task", "embedding", "--cpu", "--data", pairs, "--out", tmp_path / "run")
    code, _, said = ran(*words)
    assert code == 2 and "pip install sentence-transformers" in said and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run.toml", "--cpu", "--max-steps", "-1"), "--max-steps must be"),
        (("run.toml", "--cpu", "--learning-rate", "nan"), "--learning-rate must be"),
        (("run.toml", "--cpu", "--micro-batch", "2"), "decided by run.toml"),
        (("--resume", "--max-steps", "3"), "cannot change"),
        (("qwen2.5-0.5b", "--data", "x.jsonl"), "no GPU in this machine"),
        (("--resume",), "there is no run"),
        (("--cpu", "--eval-data", "nothere"), "there is no file nothere"),
        (("run.toml", "--cpu", "--eval-data", "gone.jsonl"), "gone.jsonl"),
        (("qwen2.5-0.5b", "--resume"), "--resume continues"),
        (("qwen2.5-0.5b", "--cpu"), "no data"),
        (("missing.toml", "--cpu"), "there is no file"),
        (("qwen2.5-0.5b", "--cpu", "--memory-limit", "much"), "not a size"),
        (("--cpu", "--data", "../broken.jsonl"), "line 2: not JSON"),
        (("--cpu", "--data", "../empty.jsonl"), "every sample of ../empty.jsonl is empty"),
        (("--cpu", "--eval-data", "../empty.jsonl"), "every sample of ../empty.jsonl is empty"),
        (("--cpu", "--data", "../mixed.jsonl"), "2 with text, 1 with messages"),
        (("--cpu", "--data", "../uneven.jsonl"), "3 input_ids, 2 labels"),
        (("--cpu", "--data", "../tools.jsonl"), "line 1: 'tools' is text, and no JSON"),
        (("qwen2.5-0.5b", "--cpu", "--data", "../foreign.jsonl"), "line 2: token 151,936 is outside"),
        (("--cpu", "--data", "../number.jsonl"), "line 2: a number"),
        (("--cpu", "--data", "../list.jsonl"), "line 8: 'text' is not text but a list"),
        (("--cpu", "--data", "../bare.jsonl"), "line 2: a sample must be an object with fields, not a list"),
        (("--cpu", "--save-steps", "1.5"), "--save-steps must be"),
        (("bert-base-uncased", "--cpu", "--data", "../good.jsonl"), "does not run masked language modelling"),
        (("qwen2.5-0.5b", "--cpu", "--data", "../good.jsonl", "--task", "grpo"), "does not run group relative"),
        (("flan-t5-small", "--cpu", "--data", "../good.jsonl", "--task", "classification"), "none counts text"),
        (("run.toml", "--cpu", "--task", "dpo"), "--task is decided by run.toml"),
        (("--cpu", "--task", "dpo"), "--task is for a model"),
        (("--cpu", "--checkpointing", "offload"), "--checkpointing full"),
        (("--cpu", "--sequence-length", "10000000"), "a smaller --sequence-length"),
        (("--cpu", "--compile"), "--no-compile"),
    ],
)
def test_bad_input_is_refused_with_a_hint(
    ran: Ran,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_this_process: list[Path],
    words: tuple[str, ...],
    said: str,
) -> None:
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text":\n')
    (tmp_path / "number.jsonl").write_text('{"text": "a"}\n{"text": NaN}\n')
    (tmp_path / "list.jsonl").write_text('{"text": "a"}\n' + '{"text": null}\n' * 6 + '{"text": ["a", "b"]}\n')
    (tmp_path / "bare.jsonl").write_text('{"text": "a"}\n[1, 2]\n')
    (tmp_path / "good.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "uneven.jsonl").write_text('{"input_ids": [1, 2, 3], "labels": [1, 2]}\n')
    (tmp_path / "foreign.jsonl").write_text('{"input_ids": [1, 2]}\n{"input_ids": [5, 151936]}\n')
    (tmp_path / "tools.jsonl").write_text('{"messages": [{"role": "user", "content": "c"}], "tools": "[{"}\n')
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n{"text": ""}\n')
    (tmp_path / "mixed.jsonl").write_text(
        '{"text": "a"}\n{"text": "b"}\n{"messages": [{"role": "user", "content": "c"}]}\n'
    )
    tmp_path = tmp_path / "here"
    tmp_path.mkdir()
    monkeypatch.chdir(tmp_path)
    code, out, err = ran("train", *words)
    assert (code, out) == (2, "") and said in err and "hint:" in err
    assert not list(tmp_path.iterdir()) and not in_this_process


MALFORMED: dict[str, tuple[str, dict[str, Any]]] = {  # what is said of it -> table, values
    "effective_batch = 16 contradicts": ("job", {"effective_batch": 16}),
    "effective_batch = 2 contradicts": ("job", {"effective_batch": 2}),
    "`workers` must be from 0": ("job", {"workers": 2**60}),
    "there is no file \u00e9": ("job", {"data": "\u00e9" * 500}),
    "unknown LoRA module 'x'": ("recipe", {"lora_targets": ["x"]}),
    "names no module": ("recipe", {"lora_targets": []}),
    "unknown optimizer 'x'": ("recipe", {"optimizer": "x"}),
    "processes need": ("recipe", {"num_gpus": 1 << 20}),
    "save_steps = 0": ("training", {"save_steps": 0}),
    "nothing to evaluate on": ("training", {"eval_steps": 5}),
    "gone.jsonl does not exist": ("training", {"eval_data": "gone.jsonl"}),
    "holds out 22 of the 22 samples": ("training", {"eval_share": 22}),
    "must be a whole number": ("training", {"eval_share": 1.5}),
    "unknown lr_scheduler 'cosin'": ("training", {"lr_scheduler": "cosin"}),
    "lr_scheduler = 'greedy' needs evaluation data": ("training", {"lr_scheduler": "greedy"}),
    "needs lr_scheduler_kwargs": ("training", {"lr_scheduler": "cosine_with_min_lr"}),
    "'<none>' is no special token": ("training", {"pad_token": "<none>"}),
    "`adam_beta2` must be": ("training", {"adam_beta2": 1.0}),
    "not nan": ("shape", {"audio_seconds": float("nan")}),
}


@pytest.mark.parametrize("said", MALFORMED)
def test_a_malformed_recipe_is_refused_before_anything_is_written(
    ran: Ran, made: tuple[Path, Path], tmp_path: Path, said: str
) -> None:
    table, values = MALFORMED[said]
    written = runs.recipe_of(tmp_path / "recipe.toml", made, runs.RECIPE.but(method="lora"))
    data = tomllib.loads(written.read_text())
    written.write_text(tomli_w.dumps(data | {table: data.get(table, {}) | values}))
    code, out, err = ran("train", written, "--gpu-memory", "2GiB", "--cpu", "--out", tmp_path / "run")
    assert (code, out) == (2, "") and said in err and err.splitlines()[-1].startswith("hint: "), err
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]


def test_the_schedules_are_those_of_transformers() -> None:
    from transformers.trainer_utils import SchedulerType

    assert {str(kind.value) for kind in SchedulerType} == set(SCHEDULERS)


@pytest.mark.parametrize(
    ("change", "missing"),
    [({"shard": "gradients", "num_gpus": 2}, "deepspeed"), ({"optimizer": "adamw-8bit"}, "bitsandbytes")],
)
def test_what_the_recipe_needs_is_looked_for_first(
    ran: Ran,
    made: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    missing: str,
) -> None:
    def distribution(name: str) -> None:
        if name == missing:
            raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    written = runs.recipe_of(tmp_path / "recipe.toml", made, runs.RECIPE.but(**change))
    code, out, err = ran("train", written, "--gpu-memory", "2GiB", "--cpu", "--out", tmp_path / "run")
    assert (code, out) == (2, "") and f"not installed: {missing}" in err and f"pip install {missing}" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("length", [512, 4096])
def test_cautions_are_told_with_what_is_trained(
    ran: Ran, made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr("memfit.cli.train.in_child", lambda run, tell: Outcome(status="stopped"))
    positions = json.loads((made[0] / "config.json").read_text())["max_position_embeddings"]
    written = runs.recipe_of(tmp_path / "recipe.toml", made, runs.RECIPE.but(sequence_length=length))
    err = ran("train", written, "--gpu-memory", "24GiB", "--cpu", "--out", tmp_path / "run")[2]
    said = f"sequence {length:,} is beyond the {positions:,} positions" in err
    assert said is (length > positions) and 512 <= positions < 4096


@pytest.mark.parametrize(
    ("task", "row"),
    [("dpo", {"prompt": "one", "chosen": " two", "rejected": " three"}), ("classification", {"text": "a", "label": 1})],
)
def test_a_model_is_planned_for_its_task_and_trained(
    task: str, row: dict[str, Any], ran: Ran, made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memfit.cli.train.in_child", lambda run, tell: Outcome(status="stopped"))
    (data := tmp_path / "rows.jsonl").write_text(20 * (json.dumps(row) + "\n"))
    words = (made[0], "--task", task, "--gpu-memory", "24GiB", "--precision", "fp32", "--data", data)
    assert ran("train", *words, "--cpu", "--out", tmp_path / "run")[0] == 75
    run, plan = Run(tmp_path / "run"), json.loads(ran("plan", *words, "--json")[1])
    assert (run.plan.job.task, run.plan.recipe.micro_batch) == (task, plan["recipe"]["micro_batch"])
    assert f"{task.upper()}Trainer" in (run.path / "train.py").read_text() or task == "classification"


def test_a_folder_that_holds_something_else_is_left_alone(ran: Ran, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    code, _, err = ran("train", "--out", tmp_path, "--cpu", "--force")
    assert code == 2 and "holds no run" in err and (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("words", [("--optimizer", "adamwx"), ("--micro-batch", "3", "--accumulation", "5")])
def test_a_run_is_still_there_where_the_one_to_replace_it_cannot_be_made(
    ran: Ran, made: tuple[Path, Path], tmp_path: Path, in_this_process: list[Path], words: tuple[str, ...]
) -> None:
    old = runs.make_run(tmp_path / "run", made)
    (old.output / "checkpoint-2").mkdir(parents=True)
    (old.path / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in old.path.rglob("*") if path.is_file() and path.name != ".lock"}
    assert ran("train", "--out", old.path, "--cpu", "--force", *words)[0] == 2
    assert {
        path: path.read_bytes() for path in old.path.rglob("*") if path.is_file() and path.name != ".lock"
    } == before
    assert (old.output / "checkpoint-2").is_dir() and not (old.path / ".before").exists() and not in_this_process


@pytest.mark.parametrize("new", [False, True])
def test_a_run_that_was_making_way_when_the_process_died_is_found_again(
    made: tuple[Path, Path], tmp_path: Path, new: bool
) -> None:
    """Unless the new one was made by then: its run.json is written last."""
    run = runs.make_run(tmp_path / "run", made)
    run.output.mkdir()
    (run.output / "model").write_text("old")
    with pytest.raises(KeyError), folder.fresh(run.path, force=True):
        raise KeyError
    assert (run.output / "model").read_text() == "old"  # an error is no death: the old run is back
    aside = run.path / folder.ASIDE
    aside.mkdir()
    for name in ("output", "run.json"):
        (run.path / name).rename(aside / name)
    (aside / folder.MARK).touch()
    if new:
        run.keep(Settings(cpu=True, falls=7), ())
    found = folder.opened(run.path)
    assert (found.settings.falls == 7) is new and found.output.exists() is not new and not aside.exists()


def test_a_run_of_files_that_it_would_replace_is_refused(ran: Ran, made: tuple[Path, Path], tmp_path: Path) -> None:
    run = runs.make_run(tmp_path / "run", made)
    (run.path / "assets").mkdir()
    data = run.path / "assets" / "data.txt"
    data.write_text("a\nb\n")
    code, _, err = ran("train", made[0], "--data", data, "--out", run.path, "--cpu", "--force")
    assert code == 2 and "would replace" in err and data.exists()


def test_half_a_checkpoint_makes_room_on_a_full_disk(
    ran: Ran, made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_this_process: list[Path]
) -> None:
    """What was being written when the disk was full goes first; no half-written file stays."""
    run = runs.make_run(tmp_path / "run", made)
    half = run.output / "checkpoint-3"  # no step that is saved again
    half.mkdir(parents=True)
    (half / "model.safetensors").write_text("half")
    real = os.fsync

    def full(number: int) -> None:
        if half.exists():
            raise OSError(28, "No space left on device")
        real(number)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        run.keep(run.settings, ())
    assert not list(run.path.glob(".run.json.*")) and run.settings.cpu
    code, _, err = ran("train", "--out", run.path, "--resume")
    assert code == 0 and not half.exists(), err


def test_a_full_disk_is_a_failure_with_a_way_on(
    ran: Ran, made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("memfit.cli.train.supervise", full)
    run = runs.make_run(tmp_path / "run", made)
    code, out, err = ran("train", "--out", run.path, "--resume")
    assert (code, out) == (1, "") and "No space left on device" in err and "--resume" in err.splitlines()[-1]


def test_one_folder_is_trained_in_by_one_run_at_a_time(ran: Ran, made: tuple[Path, Path], tmp_path: Path) -> None:
    run = runs.make_run(tmp_path / "run", made)
    with folder.held(run.path):
        for words in (("--resume",), ("--force",)):
            code, _, err = ran("train", "--out", run.path, "--cpu", *words)
            assert code == 2 and "a run is going on in" in err and "hint:" in err
    assert folder.opened(run.path).outcome is None


def test_a_worker_that_lost_its_supervisor_keeps_the_folder_saves_and_ends(
    ran: Ran, made: tuple[Path, Path], tmp_path: Path
) -> None:
    """SIGKILL to `memfit train`: what it started finishes its step as at a signal, and its run can be resumed."""
    run = runs.make_run(tmp_path / "run", made, max_steps=2000, save_steps=1000)
    words = [sys.executable, "-m", "memfit", "train", "--out", str(run.path), "--resume"]
    started = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert started.stderr is not None
    assert any("step 40:" in line for line in started.stderr)
    worker = int(Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()[0])
    os.kill(worker, signal.SIGSTOP)
    started.kill()
    started.wait()
    code, _, err = ran("train", "--out", run.path, "--resume")
    assert code == 2 and "a run is going on in" in err
    os.kill(worker, signal.SIGCONT)
    until = time.monotonic() + runs.WAIT
    while run.outcome is None and time.monotonic() < until:
        time.sleep(0.05)
    assert run.outcome is not None and run.outcome.status == "stopped" and 40 <= run.outcome.step < 2000
    assert [line["step"] for line in lines(run)] == list(range(1, run.outcome.step + 1))


def test_the_tokenizer_of_a_model_that_lies_here_counts_its_data(
    ran: Ran, made: tuple[Path, Path], tmp_path: Path
) -> None:
    model, data = made
    words = ["plan", model, "--data", data, "--gpu-memory", "8GiB", "--json"]
    told, given = (json.loads(ran(*words, *more)[1]) for more in ((), ("--tokenizer", model)))
    assert told["job"]["longest_sample"] == given["job"]["longest_sample"] > 10


@pytest.mark.parametrize("moved", range(5))
@pytest.mark.parametrize("back", [False, True])
def test_a_move_that_was_cut_off_loses_nothing(made: tuple[Path, Path], tmp_path: Path, moved: int, back: bool) -> None:
    """On its way aside or back: whatever is where, all of the old run is in the folder again."""
    run = runs.make_run(tmp_path / "run", made)
    run.output.mkdir()
    (run.output / "model").write_text("old")
    whole = {path.name for path in run.path.iterdir()}
    aside = run.path / folder.ASIDE
    aside.mkdir()
    names = sorted(whole)
    for name in names[:moved] if not back else names[moved:]:
        (run.path / name).rename(aside / name)
    found = folder.opened(run.path)
    assert {path.name for path in found.path.iterdir()} == whole and (found.output / "model").read_text() == "old"
    assert found.plan.recipe == runs.RECIPE
