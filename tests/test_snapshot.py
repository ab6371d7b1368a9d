"""Replay snapshots of torch.cuda.memory to the recorded segments and blocks, read without trust, known by content."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import threading
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import snapshots
from memfit.allocator.player import alive_at
from memfit.allocator.replay import replay, retrace
from memfit.documents.snapshot import ahead, pickles, read
from memfit.documents.snapshot.frames import Reader
from memfit.documents.snapshot.history import tape_of
from memfit.errors import BadInput
from memfit.explain.history.reading import memory_of
from memfit.nouns.tape import WRITTEN, Alloc, EmptyCache, Free, Mark, Oom, SegmentAlloc, SegmentFree, Tape
from memfit.units import KIB, MIB

ROOT = Path(__file__).resolve().parents[1]
OURS = ROOT / "tests" / "data" / "snapshots"
SHARED = ROOT.parent / "shared" / "data" / "snapshots"  # larger ones, where they lie beside the repository
SNAPSHOTS = sorted([*OURS.glob("*.pickle.gz"), *SHARED.glob("*.pickle")])
TAPES = ROOT / "tests" / "data" / "tapes"


def data_of(name: str) -> Any:
    return pickle.loads(gzip.decompress((OURS / name).read_bytes()))


# --- recorded histories ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SNAPSHOTS, ids=lambda path: path.name)
def test_every_segment_and_every_final_block_is_the_recorded_one(path: Path) -> None:
    assert snapshots.check(snapshots.read(path)) == ""


@pytest.mark.parametrize("name", ["plain-full.pickle.gz", "expandable-full.pickle.gz", "streams-full.pickle.gz"])
def test_a_full_ring_starts_with_what_was_alive(name: str) -> None:
    data = data_of(name)
    tape = tape_of(data)
    ends = sum(b["state"] != "inactive" for s in data["segments"] for b in s["blocks"])
    births = sum(type(event) is Alloc for event in tape.events)
    deaths = sum(type(event) is Free for event in tape.events)
    alive = sum(piece.alloc is not None for segment in tape.start for piece in segment.pieces)
    assert alive and alive + births - deaths == ends


def test_the_ages_of_segments_are_learned_from_what_was_chosen() -> None:
    tape = tape_of(data_of("plain-full-by-age.pickle.gz"))
    addresses = [segment.address for segment in tape.start]
    assert addresses != sorted(addresses)
    assert retrace(tape)[0] == ""
    by_address = Tape(tape.events, tape.source, tape.about, tuple(sorted(tape.start, key=lambda s: s.address)))
    _, allocator = retrace(by_address)
    assert snapshots.final_blocks(allocator) != snapshots.final_blocks(retrace(tape)[1])


def test_the_checker_sees_a_segment_and_a_block_that_differ() -> None:
    data = data_of("torch-2.7-empty.pickle.gz")
    first = next(e for e in data["device_traces"][0] if e["action"] == "segment_alloc")
    assert snapshots.check(pickle.dumps(data)) == ""
    first["size"] += 2 * MIB
    assert "no segment of" in error_of(data)
    other = data_of("plain-full.pickle.gz")
    for segment in other["segments"]:
        if len(segment["blocks"]) > 1 and segment["blocks"][-1]["state"] == "inactive":
            segment["blocks"][-1]["size"] -= 512
            segment["blocks"].append({**segment["blocks"][-1], "size": 512})
            break
    assert "final segments" in snapshots.check(pickle.dumps(other))


def error_of(data: Any) -> str:
    with pytest.raises(BadInput) as caught:
        snapshots.check(pickle.dumps(data))
    return caught.value.message


def test_the_benchmark_exits_by_what_it_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert snapshots.main([str(tmp_path)]) == 2
    (tmp_path / "a.pickle.gz").write_bytes((OURS / "torch-2.7-empty.pickle.gz").read_bytes())
    assert snapshots.main([str(tmp_path)]) == 0
    (tmp_path / "b.pickle").write_bytes(b"\x80\x04N.")
    assert snapshots.main([str(tmp_path)]) == 1
    assert "b.pickle: this is no snapshot" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(TAPES.glob("*.tape.json.gz")), ids=lambda path: path.name)
def test_recorded_runs_are_read_with_their_phases_and_card(path: Path) -> None:
    assert snapshots.check_record(path) == ""
    tape = read(path)
    assert tape.about["capacity"].isdecimal() and tape.source == "measured"
    assert sum(type(event) is Alloc for event in tape.events) > 500
    conf = tape.about.get("alloc_conf", "")
    assert conf == ("expandable_segments:True" if "expandable" in path.name else "")


def test_a_recorded_run_gets_the_phases_of_its_record(tmp_path: Path) -> None:
    columns = '{"format":"","op":"SAAfAf","size":[2097152,512,512,512,512,512],"addr":[0,0,1,1,1,1]}'
    (tmp_path / "x.tape.json.gz").write_bytes(gzip.compress(columns.encode()))
    rows = (
        '[{"phase":"build","n_alloc":1,"n_free":0},{"phase":"s1.m0.forward","n_alloc":2,"n_free":1},'
        '{"phase":"eval","n_alloc":3,"n_free":2}]'
    )
    (tmp_path / "x.json").write_text('{"phases":' + rows + ',"device":{"total_memory":99},"case":{"model":"m"}}')
    tape = read(tmp_path / "x.tape.json.gz")
    assert [e for e in tape.events if type(e) is Mark] == [
        Mark("load", "build"), Mark("first_step", "forward"), Mark("eval", "eval")
    ]  # fmt: skip
    assert [type(e).__name__ for e in tape.events] == [
        "Mark", "SegmentAlloc", "Alloc", "Mark", "Alloc", "Free", "Mark", "Alloc", "Free"
    ]  # fmt: skip
    assert tape.about["capacity"] == "99" and tape.about["model"] == "m"


def test_the_checker_sees_a_phase_that_differs(tmp_path: Path) -> None:
    columns = '{"format":"","op":"SA","size":[2097152,512],"addr":[0,0]}'
    (path := tmp_path / "x.tape.json.gz").write_bytes(gzip.compress(columns.encode()))
    row = {
        "phase": "build",
        "n_alloc": 1,
        "n_free": 0,
        "requested_peak": 512,
        "allocated_peak": 512,
        "reserved_peak": 2 * MIB,
    }
    (tmp_path / "x.json").write_text(json.dumps({"phases": [row]}))
    assert snapshots.check_record(path) == ""
    (tmp_path / "x.json").write_text(json.dumps({"phases": [row | {"allocated_peak": 1024}]}))
    assert snapshots.check_record(path).startswith("phase build: here")


# --- histories made by hand ------------------------------------------------------------------------------------------

BASE = 0x7F00_0000_0000


def entry(action: str, offset: int = 0, size: int = 0, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": BASE + offset, "size": size, "stream": 0, "frames": []} | more


def segment(offset: int, *blocks: tuple[int, str], kind: str = "large", **more: Any) -> dict[str, Any]:
    made = [{"size": size, "requested_size": size, "state": state} for size, state in blocks]
    total = sum(size for size, _ in blocks)
    return {"address": BASE + offset, "total_size": total, "stream": 0, "segment_type": kind, "blocks": made} | more


def snapshot(trace: list[dict[str, Any]], *segments: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"segments": list(segments), "device_traces": [trace]} | more


def test_an_old_snapshot_without_addresses_times_and_settings_is_read() -> None:
    trace = [entry("segment_alloc", 0, 20 * MIB), entry("alloc", 0, 5 * MIB), entry("alloc", 5 * MIB, 6 * MIB),
             entry("free_requested", 0, 5 * MIB), entry("free_completed", 0, 5 * MIB)]  # fmt: skip
    final = segment(0, (5 * MIB, "inactive"), (6 * MIB, "active_allocated"), (9 * MIB, "inactive"))
    tape = tape_of(snapshot(trace, final))
    assert tape.about == {"device": "0", "torch": "2.7", "capacity": str(20 * MIB)}
    assert [type(e) for e in tape.events] == [Mark, SegmentAlloc, Alloc, Alloc, Free]
    assert snapshots.final_blocks(retrace(tape, torch=(2, 7))[1]) == [
        [(5 * MIB, "inactive"), (6 * MIB, "active_allocated"), (9 * MIB, "inactive")]
    ]


def test_a_pending_block_is_free_at_free_completed() -> None:
    trace = [entry("segment_alloc", 0, 20 * MIB), entry("alloc", 0, 5 * MIB), entry("free_requested", 0, 5 * MIB)]
    tape = tape_of(snapshot(trace, segment(0, (5 * MIB, "active_pending_free"), (15 * MIB, "inactive"))))
    assert [type(e) for e in tape.events] == [Mark, SegmentAlloc, Alloc]


def test_a_small_gap_behind_an_old_tensor_is_its_slack() -> None:
    """12 MiB are free, 11.5 MiB requested: less than 1 MiB would be left, so the block keeps all 12."""
    trace = [entry("free_requested", 0, 23 * MIB // 2), entry("free_completed", 0, 23 * MIB // 2)]
    final = segment(0, (12 * MIB, "inactive"), (8 * MIB, "active_allocated"))
    trace[1]["frames"] = [{"name": "where it died", "filename": "/a.py", "line": 1}]
    (start,) = tape_of(snapshot(trace, final)).start
    assert start.pieces[0].alloc is not None and start.pieces[0].alloc.label == ""
    assert [(piece.size, piece.alloc is not None) for piece in start.pieces] == [(12 * MIB, True), (8 * MIB, True)]


def test_a_call_of_empty_cache_is_distinguished_from_making_room() -> None:
    def history(wanted: int) -> list[dict[str, Any]]:
        return [
            entry("segment_alloc", 0, 20 * MIB), entry("alloc", 0, 20 * MIB),
            entry("segment_alloc", 64 * MIB, 40 * MIB), entry("alloc", 64 * MIB, 40 * MIB),
            entry("free_completed", 0, 20 * MIB), entry("segment_free", 0, 20 * MIB),
            entry("segment_alloc", 128 * MIB, wanted), entry("alloc", 128 * MIB, wanted),
        ]  # fmt: skip

    for wanted, called in ((16 * MIB, True), (30 * MIB, False)):
        final = segment(64 * MIB, (40 * MIB, "active_allocated")), segment(128 * MIB, (wanted, "active_allocated"))
        tape = tape_of(snapshot(history(wanted), *final))
        assert (EmptyCache() in tape.events) is called, wanted
        assert retrace(tape, torch=(2, 7))[0] == ""


def test_segments_alone_are_a_start_without_events() -> None:
    tape = tape_of(
        {"segments": [segment(0, (5 * MIB, "active_allocated"), (15 * MIB, "inactive"))], "device_traces": [[], []]}
    )
    assert tape.events == (Mark("step", WRITTEN),)
    assert replay(tape.events, start=tape.start).peak.requested == 5 * MIB


def test_an_out_of_memory_shows_the_capacity() -> None:
    trace = [entry("segment_alloc", 0, 20 * MIB), entry("alloc", 0, 20 * MIB)]
    oom = {"action": "oom", "size": 50 * MIB, "device_free": 10 * MIB, "stream": 0}
    tape = tape_of(snapshot([*trace, oom], segment(0, (20 * MIB, "active_allocated"))))
    assert tape.about["capacity"] == str(30 * MIB)
    assert tape.events[-1] == Oom(50 * MIB, 10 * MIB)
    assert replay(tape.events, capacity=60 * MIB).oom_at == len(tape.events) - 1
    assert replay(tape.events, capacity=70 * MIB).peak.requested == 70 * MIB


def test_private_pools_and_streams_share_no_blocks() -> None:
    trace = [
        entry("segment_alloc", 0, 20 * MIB), entry("alloc", 0, 20 * MIB), entry("free_completed", 0, 20 * MIB),
        entry("segment_alloc", 32 * MIB, 20 * MIB, pool_id=(0, 1)), entry("alloc", 32 * MIB, 20 * MIB, pool_id=(0, 1)),
        entry("segment_alloc", 64 * MIB, 20 * MIB, stream=77), entry("alloc", 64 * MIB, 20 * MIB, stream=77),
    ]  # fmt: skip
    final = (segment(0, (20 * MIB, "inactive")),
             segment(32 * MIB, (20 * MIB, "active_allocated"), segment_pool_id=(0, 1)),
             segment(64 * MIB, (20 * MIB, "active_allocated"), stream=77))  # fmt: skip
    tape = tape_of(snapshot(trace, *final))
    assert len({event.stream for event in tape.events if type(event) is Alloc}) == 3
    assert retrace(tape)[0] == ""


def test_roles_follow_from_the_stack_and_from_what_a_tensor_outlives() -> None:
    def frames(*names: tuple[str, str]) -> list[dict[str, Any]]:
        return [{"name": name, "filename": file, "line": 7} for name, file in names]

    forward, engine = ("forward", "/home/me/model.py"), ("torch::autograd::Engine::thread_main", "??")
    moved = frames(("convert", "/x/torch/nn/modules/module.py"), ("main", "/home/me/train.py"))
    adam = frames(("_init_group", "/x/torch/optim/adam.py"), ("main", "/home/me/train.py"))
    plan = [("weight", moved), ("saved", frames(forward)), ("scratch", frames(forward)), ("grad", frames(engine)),
            ("state", adam), ("next", frames(forward))]  # fmt: skip
    trace = [entry("segment_alloc", 0, 2 * MIB)]
    trace += [entry("alloc", n * KIB, KIB, frames=stack) for n, (_, stack) in enumerate(plan)]
    trace.insert(4, entry("free_completed", 2 * KIB, KIB))  # scratch dies in the forward
    final = [(KIB, "active_allocated"), (KIB, "active_allocated"), (KIB, "inactive"), *[(KIB, "active_allocated")] * 3]
    tape = tape_of(snapshot(trace, segment(0, *final, (2 * MIB - 6 * KIB, "inactive"), kind="small")))
    roles = [event.role for event in tape.events if type(event) is Alloc]
    assert roles == ["parameters", "activations", "temporaries", "gradients", "optimizer_states", "temporaries"]
    labels = [event.label for event in tape.events if type(event) is Alloc]
    assert labels[:2] == ["main (train.py:7)", "forward (model.py:7)"]


# frames of C++ as cards have recorded them, innermost first -> the operator in the label
STACKS = [
    (("c10::cuda::malloc()", "at::_ops::empty_strided::call(c10::ArrayRef<c10::SymInt>)",
      "at::_ops::empty_like::call()", "at::_ops::_to_copy::redispatch(c10::DispatchKeySet)",
      "at::_ops::to_dtype::call()"), "_to_copy"),
    (("at::_ops::mul_Tensor::redispatch()", "at::_ops::mul_Tensor::call()"), "mul"),
    (("at::_ops::sum_dim_IntList::call()", "at::_ops::sum::call()"), "sum_dim"),
    (("at::_ops::_softmax::redispatch()", "at::_ops::softmax_int::call()"), "_softmax"),
    (("at::_ops::resize_::call()", "at::_ops::where_self::call()"), "where_self"),
    (("at::_ops::empty_memory_format::call()",), ""), (("torch::CapturedTraceback::gather(bool, bool, bool)",), ""),
]  # fmt: skip


@pytest.mark.parametrize(("names", "operator"), STACKS)
def test_a_label_has_the_operator_and_the_user_s_line(names: tuple[str, ...], operator: str) -> None:
    lines = [
        ("forward", "/x/torch/nn/modules/activation.py", 7),
        ("block", "/home/me/model.py", 41),
        ("main", "/home/me/a.py", 3),
    ]
    frames = [{"name": name, "filename": "??", "line": 0} for name in names]
    frames += [{"name": name, "filename": file, "line": line} for name, file, line in lines]
    assert Reader().read(frames) == (
        "forward",
        f"block: {operator} (model.py:41)" if operator else "block (model.py:41)",
    )


def test_without_frames_of_cpp_the_function_of_pytorch_stands_for_the_operator() -> None:
    reader = Reader()
    user = {"name": "step", "filename": "<ipython-input-3>", "line": 5}
    for name, file, operator in (
        ("cross_entropy", "functional.py", ": cross_entropy"),
        ("forward", "modules/linear.py", ""),
        ("_call_impl", "modules/module.py", ""),
    ):
        frames = [{"name": name, "filename": f"/usr/lib/python3/dist-packages/torch/nn/{file}", "line": 9}, user]
        assert reader.read(frames) == ("forward", f"step{operator} (<ipython-input-3>:5)")
    assert reader.without == "backward"  # whose thread has no frames of Python
    reader.read([{"name": "at::_ops::mm::call()", "filename": "??", "line": 0}])
    assert reader.without == ""


def test_a_failed_request_has_its_line_and_its_part_of_the_step() -> None:
    adam = [
        ("at::_ops::zeros_like::call()", "??", 0),
        ("_init_group", "/x/torch/optim/adam.py", 9),
        ("train", "/home/me/a.py", 8),
    ]
    moved = [("convert", "/x/torch/nn/modules/module.py", 1), ("main", "/home/me/a.py", 2)]
    for stack, label, phase, instant in (
        (adam, "train: zeros_like (a.py:8)", "step", "optimizer step"), (moved, "main (a.py:2)", "load", "load"),
    ):  # fmt: skip
        frames = [{"name": name, "filename": file, "line": line} for name, file, line in stack]
        born = [{"name": "forward", "filename": "/home/me/model.py", "line": 1}]
        trace = [
            entry("segment_alloc", 0, 20 * MIB),
            entry("alloc", 0, 20 * MIB, frames=born if stack is adam else frames),
        ]
        oom = {"action": "oom", "size": 50 * MIB, "device_free": 10 * MIB, "stream": 0, "frames": frames}
        tape = tape_of(snapshot([*trace, oom], segment(0, (20 * MIB, "active_allocated"))))
        memory = memory_of(tape)
        assert tape.events[-1] == Oom(50 * MIB, 10 * MIB, label) and memory.asked_by == label
        assert (memory.phase, memory.instant, memory.line) == (phase, instant, label.split("(")[1][:-1])


def test_the_profiler_s_annotations_become_marks() -> None:
    trace = [
        entry("segment_alloc", 0, 2 * MIB, time_us=10),
        entry("alloc", 0, 512, time_us=11),
        entry("alloc", 512, 512, time_us=30),
    ]
    notes = [
        {"name": "Optimizer.step", "stage": stage, "device": 0, "time_us": t}
        for stage, t in (("START", 20), ("END", 25))
    ]
    final = segment(0, (512, "active_allocated"), (512, "active_allocated"), (2 * MIB - KIB, "inactive"), kind="small")
    tape = tape_of(snapshot(trace, final, external_annotations=notes))
    marks = [event.instant for event in tape.events if type(event) is Mark]
    assert marks == ["recording", "Optimizer.step", "after Optimizer.step"]


def test_the_card_with_the_longest_history_is_read_by_default(tmp_path: Path) -> None:
    def history(offset: int, count: int) -> list[dict[str, Any]]:
        births = [entry("alloc", offset + n * 512, 512) for n in range(count)]
        return [entry("segment_alloc", offset, 2 * MIB), *births]

    def final(offset: int, count: int, device: int) -> dict[str, Any]:
        held = [(512, "active_allocated")] * count
        return segment(offset, *held, (2 * MIB - 512 * count, "inactive"), kind="small", device=device)

    data = {
        "segments": [final(0, 2, 0), final(64 * MIB, 5, 1)],
        "device_traces": [history(0, 2), history(64 * MIB, 5), []],
    }
    path = tmp_path / "two.pickle"
    path.write_bytes(pickle.dumps(data))
    assert sum(type(e) is Alloc for e in read(path).events) == 5
    assert len(alive_at((tape := read(path, 0)).events, len(tape.events))) == 2
    for device in (2, 3, -1):
        with pytest.raises(BadInput, match="nothing of device") as caught:
            read(path, device)
        assert "0, 1" in caught.value.hint


# --- without trust ---------------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo pwned > /tmp/memfit-pwned",)


def refused(content: bytes, tmp_path: Path, name: str = "x.pickle") -> BadInput:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        read(path)
    assert caught.value.hint and "\n" not in caught.value.message
    return caught.value


MEMO_BOMB = b"\x80\x04N" + b"r" + struct.pack("<I", 0xFFFF_FFFF) + b"."  # LONG_BINPUT: a table of 2^32 entries
LENGTH_BOMB = b"\x80\x04\x8d" + struct.pack("<Q", 1 << 45) + b"x."  # BINUNICODE8 of 32 TiB
HOSTILE = {
    "a call": pickle.dumps({"segments": [Evil()]}),
    "a class": pickle.dumps(io.BytesIO),
    "an old global": b"\x80\x02cos\nsystem\n(S'true'\ntR.",
    "a persistent id": b"\x80\x04\x8c\x01xQ.",
    "a huge table": MEMO_BOMB,
    "a huge length": LENGTH_BOMB,
    "no pickle": b"\x80\x04hello",
    "nothing in it": b"\x80\x04",
    "another thing": pickle.dumps([1, 2, 3]),
    "deep lists": pickle.dumps({"segments": []})[:2] + b"]" * 200_000 + b"a" * 199_999 + b".",
    "segments of text": pickle.dumps({"segments": "all"}),
    "negative sizes": pickle.dumps(snapshot([entry("alloc", 0, -5)])),
    "addresses out of range": pickle.dumps(snapshot([entry("alloc", 1 << 60, 5)])),
    "a birth of nothing": pickle.dumps(snapshot([entry("alloc", 0, 512)])),
    "a death outside": pickle.dumps(snapshot([entry("free_completed", 0, 512)])),
    "dying twice": pickle.dumps(snapshot([entry("free_completed", 0, 512)] * 2, segment(0, (2 * MIB, "inactive")))),
    "blocks that do not fill": pickle.dumps(snapshot([], segment(0, (2 * MIB, "inactive"), total_size=5))),
    "no history": pickle.dumps(snapshot([])),
    "empty": b"",
    "half a gzip": gzip.compress(b"x" * 1000)[:20],
    "a gzip of rubbish": gzip.compress(b"rubbish"),
    "text": b"CUDA out of memory",
    "another document": b'{"schema": "memfit.plan/1"}',
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    refused(content, tmp_path)
    assert not Path("/tmp/memfit-pwned").exists()


def test_a_class_is_named_and_not_loaded(tmp_path: Path) -> None:
    assert "system, which memfit does not load" in refused(HOSTILE["a call"], tmp_path).message


def test_a_list_that_holds_itself_is_refused(tmp_path: Path) -> None:
    frames: list[Any] = []
    frames.append(frames)
    trace = [entry("segment_alloc", 0, 2 * MIB), entry("alloc", 0, 512, frames=frames)]
    final = segment(0, (512, "active_allocated"), (2 * MIB - 512, "inactive"), kind="small")
    path = tmp_path / "x.pickle"
    path.write_bytes(pickle.dumps(snapshot(trace, final)))
    assert [event.label for event in read(path).events if type(event) is Alloc] == [""]  # frames that are none
    refused(pickle.dumps(snapshot(frames)), tmp_path)


@pytest.mark.parametrize("ends", ["whole", "whole before it is opened", "too soon", "given up"])
def test_a_snapshot_is_read_while_it_is_written(tmp_path: Path, ends: str) -> None:
    content = pickle.dumps(data_of("plain-full.pickle.gz"), 4)
    path, part = tmp_path / "run.pickle", tmp_path / "run.pickle.part"
    written = content if ends.startswith("whole") else content[:-1]
    cuts = [0, 1, len(content) // 3, len(content) // 2, len(written)]
    part.touch()

    def write() -> None:
        with part.open("ab", buffering=0) as file:
            for begin, end in pairwise(cuts):
                file.write(written[begin:end])
                time.sleep(0.01)
        if ends == "given up":
            part.unlink()
        else:
            part.rename(path)

    writer = threading.Thread(target=write)
    writer.start()
    if ends == "whole before it is opened":
        writer.join()
    with nullcontext() if ends.startswith("whole") else pytest.raises(BadInput):
        ahead.read(path, part, len(content))
    writer.join()
    if ends.startswith("whole"):
        assert tape_of(ahead.taken(path)) == read(path)
    assert ahead.taken(path) is None


def test_size_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.documents.snapshot.MAX_FILE", 10)
    assert "is larger than" in refused(bytes(11), tmp_path).message


def test_what_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.pickle"):
        with pytest.raises(BadInput, match=r"cannot read|is a folder") as caught:
            read(path)
        assert caught.value.hint


SMALL = (OURS / "torch-2.7-empty.pickle.gz").read_bytes()
PLAIN = gzip.decompress(SMALL)


@given(cut=st.integers(2, len(PLAIN) - 1))
def test_a_file_cut_short_is_refused(cut: int) -> None:
    with pytest.raises(BadInput):
        tape_of(pickles.loads(PLAIN[:cut]))


@given(place=st.integers(2, len(PLAIN) - 1), byte=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_read_but_never_crashes(place: int, byte: int) -> None:
    content = PLAIN[:place] + bytes([byte]) + PLAIN[place + 1 :]
    try:
        tape = tape_of(pickles.loads(content))
    except BadInput as error:
        assert error.hint
    else:
        assert {type(event) for event in tape.events} <= {Alloc, Free, Mark, SegmentAlloc, SegmentFree, EmptyCache, Oom}
