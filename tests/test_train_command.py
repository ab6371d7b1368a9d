"""memfit train as it is typed: what it refuses before anything is written, and how it stops."""

from __future__ import annotations

import importlib.metadata
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
from conftest import Ran  # noqa: E402
from memfit.run.folder import Run  # noqa: E402
from runs import lines  # noqa: E402


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run.toml", "--cpu", "--max-steps", "-1"), "--max-steps must be"),
        (("run.toml", "--cpu", "--learning-rate", "nan"), "--learning-rate must be"),
        (("run.toml", "--cpu", "--micro-batch", "2"), "settled by run.toml"),
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
    ],
)
def test_bad_input_is_refused_with_a_hint(
    ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text":\n')
    tmp_path = tmp_path / "here"
    tmp_path.mkdir()
    monkeypatch.chdir(tmp_path)
    code, out, err = ran("train", *words)
    assert (code, out) == (2, "") and said in err and "hint:" in err
    assert not list(tmp_path.iterdir())


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


def test_a_folder_that_holds_something_else_is_left_alone(ran: Ran, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    code, _, err = ran("train", "--out", tmp_path, "--cpu", "--force")
    assert code == 2 and "holds no run" in err and (tmp_path / "thesis.txt").read_text() == "years of work"
