"""memfit replay and --save-tape: exit codes, files, JSON and errors, as a script meets them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from memfit.documents import codec, tape_file
from memfit.documents.snapshot import read
from memfit.errors import BadInput
from memfit.nouns.alloc_settings import torch_version
from memfit.nouns.tape import Alloc, Free, Mark, Tape
from memfit.units import GIB

SNAPSHOT = Path(__file__).parent / "data" / "snapshots" / "plain-full.pickle.gz"
Ran = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tape(tmp_path: Path) -> Path:
    """10 GiB of weights, 5 GiB that come and go in the step."""
    events = (
        Mark("load", "weights"),
        Alloc(1, 10 * GIB, "parameters"),
        Mark("step", "forward"),
        Alloc(2, 5 * GIB),
        Free(2),
    )
    path = tmp_path / "run.tape.gz"
    path.write_bytes(tape_file.dumps(Tape(events, "measured")))
    return path


@pytest.mark.parametrize(
    ("memory", "code", "words"), [("20GiB", 0, "FITS"), ("15.5GiB", 4, "TOO TIGHT"), ("12GiB", 3, "DOES NOT FIT")]
)
def test_the_exit_code_is_the_verdict(ran: Ran, tape: Path, memory: str, code: int, words: str) -> None:
    got, out, _ = ran("replay", tape, "--gpu-memory", memory)
    assert got == code and words in out


def test_an_out_of_memory_is_told_in_pytorch_s_words(ran: Ran, tape: Path) -> None:
    _, out, _ = ran("replay", tape, "--gpu-memory", "12GiB")
    assert "out of memory in forward (step), event 3" in out
    assert "CUDA out of memory. Tried to allocate 5.00 GiB. GPU has a total capacity of 12.0 GiB" in out


def test_without_a_card_it_says_which_would_do(ran: Ran, tape: Path) -> None:
    code, out, err = ran("replay", tape)
    assert (code, err) == (0, "")
    assert "smallest: 15.00 GiB without expandable segments · 15.00 GiB with expandable segments" in out
    assert f"next: memfit replay {tape} --gpu rtx-4090" in out


def test_the_json_is_a_document_with_the_same_answer(ran: Ran, tape: Path) -> None:
    code, out, _ = ran("replay", tape, "--gpu-memory", "12GiB", "--json")
    found = json.loads(out)
    assert code == 3 and found["schema"] == "memfit.replay/1" and found["verdict"] == "misfit"
    assert found["oom"]["event"] == 3 and found["oom"]["requested"] == 5 * GIB
    assert found["smallest"] == 15 * GIB and found["slack"]["tensors"] == 15 * GIB
    assert [phase["phase"] for phase in found["phases"]] == ["load", "step"]
    assert codec.dumps(codec.loads(out)) == out.rstrip("\n")


def test_a_snapshot_under_another_setting_and_version(ran: Ran) -> None:
    code, out, _ = ran(
        "replay",
        SNAPSHOT,
        "--gpu-memory",
        "2GiB",
        "--alloc-conf",
        "expandable_segments:True",
        "--torch",
        "2.11.1+cu130",
    )
    assert code == 0 and "PyTorch 2.11 · expandable_segments:True" in out
    _, out, _ = ran("replay", SNAPSHOT)
    assert "took and returned every segment as recorded" in out


def test_files_are_written_once_and_read_back(ran: Ran, tmp_path: Path) -> None:
    names = {name: tmp_path / "new" / name for name in ("t.tape.gz", "s.pickle", "p.html")}
    flags = ("--save-tape", names["t.tape.gz"], "--snapshot", names["s.pickle"], "--html", names["p.html"])
    code, _, err = ran("replay", SNAPSHOT, *flags)
    assert code == 0 and err.count("wrote") == 3
    assert read(names["t.tape.gz"]) == read(SNAPSHOT)
    assert pickle.loads(names["s.pickle"].read_bytes())["device_traces"][0]
    assert "<title>plain-full.pickle.gz</title>" in names["p.html"].read_text()
    before = {path: path.read_bytes() for path in names.values()}
    code, out, err = ran("replay", SNAPSHOT, *flags)
    assert code == 2 and "exists already" in err and "hint: add --force" in err and not out
    assert {path: path.read_bytes() for path in names.values()} == before
    assert ran("replay", SNAPSHOT, *flags, "--force")[0] == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(names)


@pytest.mark.parametrize("name", ["estimate", "plan"])
def test_a_recipe_s_run_is_saved_and_replayed(ran: Ran, tmp_path: Path, name: str) -> None:
    path = tmp_path / "run.tape.gz"
    code, _, err = ran(name, "smollm2-135m", "--gpu", "rtx-4090", "--save-tape", path)
    assert code == 0 and f"memfit replay {path}" in err
    assert read(path).about["model"] and read(path).source == "formula"
    assert ran("replay", path, "--gpu", "rtx-4090")[0] == 0
    assert ran(name, "smollm2-135m", "--gpu", "rtx-4090", "--save-tape", path)[0] == 2
    assert ran(name, "smollm2-135m", "--gpu", "rtx-4090", "--save-tape", path, "--force")[0] == 0


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--gpu", "8xh100"), "a tape is of one card"),
        (("--reserve", "1GiB"), "--reserve needs a card"),
        (("--gpu", "l4", "--reserve", "30GiB"), "leaves nothing"),
        (("--torch", "1.13"), "not a PyTorch version"),
        (("--torch", "new"), "not a PyTorch version"),
        (("--alloc-conf", "nonsense:1"), "unknown allocator setting"),
        (("--alloc-conf", "backend:cudaMallocAsync"), "not modelled"),
        (("--device", "7"), "only a snapshot has several devices"),
        (("--force",), "--force needs a file"),
        (("--html", "x", "--snapshot", "x"), "same name"),
        (("--html", "."), "is a folder"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_a_hint(ran: Ran, tape: Path, flags: tuple[str, ...], problem: str) -> None:
    code, out, err = ran("replay", tape, *flags)
    assert (code, out) == (2, "") and problem in err and "hint:" in err and "Traceback" not in err


def test_a_file_that_cannot_be_written(ran: Ran, tape: Path) -> None:
    code, _, err = ran("replay", tape, "--html", tape / "x.html")
    assert code == 2 and "cannot write" in err


def test_versions() -> None:
    assert torch_version("2.13.0+cu130") == (2, 13)
    with pytest.raises(BadInput):
        torch_version("2")
