"""What tests of several commands share: memfit run as a script meets it, and real runs that others are held against."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memfit import cli

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: a worker a core is enough

Ran = Callable[..., tuple[int, str, str]]


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Collect the cycles that a test leaves, and the tensors in them, before the next begins."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _small_heap() -> None:
    """Let the collector look at what the test makes: what was there before, libraries above all, is most of a heap."""
    gc.freeze()


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ran:
    """memfit, run in this process as in a pipe: (exit code, stdout, stderr)."""
    for name in ("FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


# ---- runs of memfit train


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Train on one thread (two would wait for each other beside other tests), with the libraries frozen in the heap."""
    import torch
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
    """A model's folder and its data."""
    import runs

    return runs.assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture(scope="module")
def whole(one_thread: None, made: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(Run, Outcome) of a run that nothing disturbed."""
    import runs
    from memfit.train.attempt import attempt
    from memfit.train.supervise import supervise

    run = runs.make_run(tmp_path_factory.mktemp("whole") / "run", made)
    return run, supervise(run, attempt, runs.silent)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Let `memfit train` do here what its child processes do, without their imports: seconds for each of them.

    Those are the attempts, the merge and the writing of the embedded model. Returns the folders of the attempts.
    """
    from memfit.train import embedded, merge
    from memfit.train.attempt import attempt

    attempted: list[Path] = []
    mains = {"memfit.train.embedded": lambda place: embedded.write(Path(place)), "memfit.train.merge": merge.main}

    def start(run: Any, tell: Any) -> Any:
        attempted.append(run.path)
        return attempt(run, tell)

    def child(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        mains[words[2]](*words[3:])
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr("memfit.cli.train.in_child", start)
    for module in ("memfit.train.merge", "memfit.cli.train"):
        monkeypatch.setattr(f"{module}.subprocess", SimpleNamespace(run=child))
    return attempted
