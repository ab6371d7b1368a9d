"""Scripts that end in their own ways, and what they do to their process: no verdict is given for what was not seen."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from memfit import cli  # noqa: E402
from memfit.errors import BadInput  # noqa: E402
from memfit.nouns.tape import Tape  # noqa: E402
from memfit.virtual.scripts.script import ScriptOutcome, trace_script  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
MIB = 1 << 20
TRAINS = """
import torch
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.AdamW(model.parameters())
def train(count=3):
    for _ in range(count):
        model(torch.randn(64, 512, device="cuda")).sum().backward(); optimizer.step(); optimizer.zero_grad()
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


def traced(folder: Path, text: str) -> tuple[Tape, ScriptOutcome]:
    return trace_script(written(folder, text), [], "l4")


# --- ends ---


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import sys, torch\nsys.exit(0)\n", "exited at train.py:2"),
        ("import torch\n", "nothing was allocated"),
        (TRAINS.replace(".cuda()", "").replace(', device="cuda"', "") + "train()\n", "on the CPU"),
        ("import torch\ntorch.ones(9).cuda()\n" + TRAINS.replace(".cuda()", "").replace(', device="cuda"', "")
         + "train()\n", "on the CPU"),
        (TRAINS + "exit()\n", "train.py:8 before its first training step"),
        (TRAINS, "its optimizer made no step"),
    ],
)  # fmt: skip
def test_a_run_that_did_not_train_on_the_card_has_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    assert cli.main(["trace", str(written(tmp_path, text)), "--gpu", "l4"]) == 6
    out, err = capsys.readouterr()
    assert out == "" and said in err and "FITS" not in err


@pytest.mark.parametrize(
    "end", ["", "import os; os._exit(0)\n", "raise SystemExit\n", "import sys; sys.exit(1)\n", "1 / 0\n"]
)
def test_a_run_that_trained_has_a_verdict_however_it_ends(tmp_path: Path, end: str) -> None:
    _, outcome = traced(tmp_path, TRAINS + "train(2)\n" + end)
    assert outcome.untrained == "" and outcome.steps == 2
    failed = end in ("import sys; sys.exit(1)\n", "1 / 0\n")
    assert any("after its steps" in text for text in outcome.assumed) == failed


USAGE = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.parse_args()
"""
CAUGHT = """
import sys, torch
try: {}
except Exception as error:
    print(error)
    sys.exit(1)
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (USAGE, "arguments are required: --data"),
        (CAUGHT.format("open('nowhere.json')"), "FileNotFoundError"),
        ("import os\nos._exit(7)\n", "exit code 7 (after 0 optimizer steps) at train.py:2"),
        ("import torch\ntorch.nn.Linear(8, 8)(torch.ones(4, 9))\n", "in torch/nn/modules/linear.py:"),
    ],
)
def test_the_reason_of_a_script_that_ends_itself_is_shown(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        traced(tmp_path, text)
    assert said in caught.value.message and "--answer" not in caught.value.hint


def test_a_hint_names_defaults_only_where_a_value_was_read(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        traced(tmp_path, "import torch\n[0, 1][int(torch.ones(9999, device='cuda').mul(3).sum()) + 1]\n")
    assert "--answer" in caught.value.hint


@pytest.mark.parametrize("thread", [False, True])
def test_memory_that_runs_out_is_seen_where_the_script_hides_it(tmp_path: Path, thread: bool) -> None:
    text = CAUGHT.format("torch.empty(1 << 40, device='cuda')")
    if thread:
        text = "import threading, torch\nthreading.Thread(target=lambda: torch.empty(1 << 40, device='cuda')).start()\n"
    _, outcome = traced(tmp_path, text)
    assert outcome.ending == "oom" and outcome.where.startswith("train.py:")


# --- its process ---


def test_the_process_is_as_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    handler, folder = signal.getsignal(signal.SIGTERM), Path.cwd()
    text = f"""
import atexit, os, signal, sys, tempfile, threading
signal.signal(signal.SIGTERM, lambda *_: None)
os.makedirs("{tmp_path}/new/deep"); os.chdir("{tmp_path}/new")
atexit.register(lambda: print("bytes at exit", torch.ones(3, device="cuda").nbytes))
child = os.fork()
if child == 0: sys.exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
child = os.fork()
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    worker = threading.Thread(target=train); worker.start(); worker.join()
"""
    _, outcome = traced(tmp_path, TRAINS + text)
    assert outcome.steps == 2
    assert signal.getsignal(signal.SIGTERM) is handler and Path.cwd() == folder
    assert "bytes at exit 12" in capfd.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
