"""A checkpoint is whole or it does not count: damage of every kind is found, named and set aside, and loses nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("xxhash")

from memfit.errors import BadInput
from memfit.train.checkpoints import COMPLETE, damage, digest, read, seal
from memfit.train.folder import DAMAGED, Run, opened
from memfit.train.outcome import Settings
from memfit.train.run_file import RUN_COPY, RUN_FILE, write, write_json
from memfit.train.sample_counts import Marks, SampleLedger, recorded

MARKS = {"samples": 8, "by_process": [8], "optimizer": "adamw", "evaluate": False}


def made(tmp_path: Path, steps: tuple[int, ...] = (2, 4)) -> Run:
    run = Run(tmp_path / "run")
    for step in steps:
        path = run.output / f"checkpoint-{step}"
        (path / "global_step").mkdir(parents=True)
        for name, size in (("model.safetensors", 9000), ("optimizer.pt", 5000), ("global_step/rank_0.pt", 700)):
            (path / name).write_bytes(bytes((step + i) % 251 for i in range(size)))
        seal(path, {"step": step, **MARKS}, write_json)
    return run


def flipped(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 3] ^= 1
    path.write_bytes(whole)


def zeroed(path: Path) -> None:
    half = path.stat().st_size // 2
    path.write_bytes(path.read_bytes()[:half] + bytes(path.stat().st_size - half))


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 4])


DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "bit flipped": ("model.safetensors", flipped),
    "half zeroed": ("model.safetensors", zeroed),
    "truncated": ("optimizer.pt", truncated),
    "empty": ("optimizer.pt", lambda path: path.write_bytes(b"") and None),
    "removed": ("optimizer.pt", Path.unlink),
    "shard of a rank removed": ("global_step/rank_0.pt", Path.unlink),
    "mark empty": (COMPLETE, lambda path: path.write_bytes(b"") and None),
    "mark without its digests": (
        COMPLETE,
        lambda path: path.write_bytes(path.read_bytes().replace(b"files", b"fides")) and None,
    ),
    "mark truncated": (COMPLETE, truncated),
    "mark of another kind": (COMPLETE, lambda path: path.write_text("[1]") and None),
    "mark with text for numbers": (COMPLETE, lambda path: path.write_text('{"step": "x"}') and None),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_the_newest_good_checkpoint_is_taken_and_nothing_is_lost(kind: str, tmp_path: Path) -> None:
    run = made(tmp_path)
    name, harm = DAMAGES[kind]
    harm(run.output / "checkpoint-4" / name)
    left = {p.name: p.read_bytes() for p in (run.output / "checkpoint-4").rglob("*") if p.is_file()}
    found, passed = run.verified()
    assert found is not None and found.step == 2
    assert len(passed) == 1 and "checkpoint-4" in passed[0] and Path(name).name in passed[0]
    aside = run.path / DAMAGED / "checkpoint-4"
    assert {p.name: p.read_bytes() for p in aside.rglob("*") if p.is_file()} == left
    assert run.verified() == (found, [])


def test_whole_checkpoints_are_whole_and_all_damaged_leave_none(tmp_path: Path) -> None:
    run = made(tmp_path)
    found, passed = run.verified()
    assert found is not None and (found.step, passed) == (4, []) and found.size == 14700
    assert [c.step for c in run.checkpoints()] == [2, 4]
    for step in (2, 4):
        flipped(run.output / f"checkpoint-{step}" / "optimizer.pt")
    assert run.verified()[0] is None and len(list((run.path / DAMAGED).iterdir())) == 2


def test_what_only_begins_like_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    run = made(tmp_path)
    mine = run.output / "checkpoint-best"
    mine.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run.output / "checkpoint-9").symlink_to(elsewhere)
    (run.output / "checkpoint-7").mkdir()  # half a checkpoint
    assert run.drop_broken() == [run.output / "checkpoint-7"]
    assert mine.is_dir() and elsewhere.is_dir() and (run.output / "checkpoint-9").is_symlink()
    assert run.verified()[0] is not None


def test_states_of_an_earlier_optimizer_may_have_another_name(tmp_path: Path) -> None:
    run = made(tmp_path, (4,))
    states = run.output / "checkpoint-4" / "optimizer.pt"
    states.replace(states.with_name("optimizer.adamw.pt"))
    found = read(states.parent)
    assert not isinstance(found, str) and damage(found) == ""


def test_a_mark_without_a_checksum_is_damaged(tmp_path: Path) -> None:
    run = made(tmp_path, (4,))
    write_json(run.output / "checkpoint-4" / COMPLETE, {"step": 4, **MARKS})
    assert run.verified()[0] is None


def test_a_mark_comes_after_what_it_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memfit.train import checkpoints

    order: list[str] = []
    monkeypatch.setattr(checkpoints, "_flush", lambda path: order.append(path.name))

    def write(path: Path, value: object) -> None:
        order.append(path.name)
        path.write_text(json.dumps(value))

    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    seal(folder, {"step": 1, **MARKS}, write)
    assert order == ["model.safetensors", "checkpoint-1", COMPLETE, "checkpoint-1", tmp_path.name]
    for size in (0, 100, (1 << 24) + 9):
        (folder / "model.safetensors").write_bytes(b"xyz" * (size // 3))
        read, mapped = (digest(folder / "model.safetensors", mapped) for mapped in (False, True))
        assert read == mapped and read.startswith("xxh3:")


def test_every_line_of_the_record_stands_for_itself(tmp_path: Path) -> None:
    ledger = SampleLedger(tmp_path / "samples.jsonl")
    ledger.begin(0)
    for step in range(1, 11):
        ledger.saw(Marks(range(10)))
        ledger.step(step)
    whole = ledger.path.read_bytes().splitlines(keepends=True)
    for at in range(0, 8 * len(whole[4]) - 8, 5):  # any one bit of a line, its end left out
        line = bytearray(whole[4])
        line[at // 8] ^= 1 << at % 8
        ledger.path.write_bytes(b"".join([*whole[:4], line, *whole[5:]]))
        assert recorded(tmp_path, 10) == 90
    ledger.path.write_bytes(b"".join(whole[:3]) + b"\0" * 90 + b"\n" + b"".join(whole[7:9]))
    ledger.begin(9, 90)
    assert (ledger.total, ledger.missing, recorded(tmp_path, 9), recorded(tmp_path, 3)) == (90, 40, 50, 30)
    ledger.path.unlink()
    ledger.begin(9, 90)
    assert (ledger.total, ledger.missing, recorded(tmp_path, 9)) == (90, 90, 0)


@pytest.mark.parametrize("harm", [flipped, zeroed, truncated, piped, Path.unlink])
@pytest.mark.parametrize("name", [RUN_FILE, RUN_COPY])
def test_a_run_is_known_by_either_of_its_two_files(harm: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    files = {"recipe.toml": "a = 1\n", "train.py": "print()\n"}
    write(tmp_path, Settings(falls=3), (), files)
    harm(tmp_path / name)
    run = opened(tmp_path)
    assert run.settings == Settings(falls=3) and (tmp_path / "train.py").read_text() == files["train.py"]
    assert (tmp_path / RUN_FILE).read_bytes() == (tmp_path / RUN_COPY).read_bytes() and not run.edited()
    (tmp_path / "train.py").write_text("print(1)\n")
    assert [path.name for path in run.edited()] == ["train.py"]
    for path in (tmp_path / RUN_FILE, tmp_path / RUN_COPY):
        harm(path)
    with pytest.raises(BadInput, match=r"cannot be read|no run"):
        opened(tmp_path)
