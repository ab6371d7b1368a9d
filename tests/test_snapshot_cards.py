"""Snapshots of several cards, without a history, and of runs that ran out: which card is chosen, and its peak."""

from __future__ import annotations

import gzip
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memfit.allocator.replay import as_recorded, made_with, room_of
from memfit.documents import footprint_file, watch_log
from memfit.documents.snapshot import read
from memfit.documents.snapshot.history import tape_of
from memfit.documents.snapshot_writer import snapshot
from memfit.errors import BadInput
from memfit.explain.history.reading import memory_of
from memfit.nouns.alloc_settings import AllocSettings
from memfit.nouns.sample import Header, Sample
from memfit.nouns.tape import WRITTEN, Alloc, Free, Mark, Oom, Tape
from memfit.report.timeline_html import SHOWN, sample
from memfit.units import GIB, MIB

Ran = Callable[..., tuple[int, str, str]]
SNAPSHOTS = sorted((Path(__file__).parent / "data" / "snapshots").glob("*.pickle.gz"))
MOVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
BUSY = Tape(
    (
        *(event for n in range(40) for event in (Alloc(n, 30 * MIB, "temporaries"), Free(n))),
        Alloc(99, 8 * MIB, "parameters"),
    ),
    "traced",
)
FULL = Tape((*(Alloc(n, 40 * MIB, "activations") for n in range(3)), Alloc(9, 100 * MIB, "activations")), "traced")


def cards(*numbered: tuple[int, Tape, int | None], history: bool = True) -> dict[str, Any]:
    """One snapshot of several cards: (its number, what ran there, bytes it had)."""
    made: dict[str, Any] = {}
    traces: dict[int, list[Any]] = {}
    segments: list[Any] = []
    for number, tape, capacity in numbered:
        made = snapshot(tape, AllocSettings(), (2, 13), capacity)
        traces[number] = made["device_traces"][0] if history else []
        segments += [{**segment, "device": number} for segment in made["segments"]]
    return {**made, "segments": segments, "device_traces": [traces.get(n, []) for n in range(max(traces) + 1)]}


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    def save(data: dict[str, Any]) -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.pickle"
        path.write_bytes(pickle.dumps(data))
        return path

    return save


@pytest.mark.parametrize(
    ("there", "history", "chosen", "why"),
    [
        (((0, BUSY, None), (2, FULL, 140 * MIB)), True, 2, "ran out of memory"),
        (((0, FULL, 140 * MIB), (1, BUSY, None)), True, 0, "ran out of memory"),
        (((0, FULL, None), (1, BUSY, None)), True, 1, "longest history"),
        (((0, BUSY, None), (1, FULL, None)), False, 1, "held most"),
    ],
)
def test_the_card_that_ran_out_is_read(ran: Ran, saved: Any, there: Any, history: bool, chosen: int, why: str) -> None:
    path = saved(cards(*there, history=history))
    assert read(path).device == chosen
    others = [number for number, *_ in there if number != chosen]
    for command in ("explain", "replay"):
        _, out, err = ran(command, path)
        assert f"this is card {chosen}, the " in err and why in err and f"holds {others[0]} too" in err, command
        _, other, err = ran(command, path, "--device", others[0])
        assert "this is card" not in err and other != out, command
    assert json.loads(ran("explain", path, "--json")[1])["device"] == chosen


def test_a_saved_tape_is_of_one_card(ran: Ran, saved: Any, tmp_path: Path) -> None:
    tape = tmp_path / "run.tape.json.gz"
    assert "this is card" in ran("replay", saved(cards((0, BUSY, None), (1, FULL, None))), "--save-tape", tape)[2]
    for command in ("replay", "explain"):
        assert "--device" not in ran(command, tape)[2], command
    assert read(tape).device == 0


def test_a_snapshot_of_one_card_names_none(ran: Ran, saved: Any) -> None:
    path = saved(cards((1, BUSY, None)))
    assert read(path).device == 1 and "this is card" not in "".join(ran("explain", path)[1:])


def test_of_two_that_ran_out_the_later_one_ended_the_run() -> None:
    data = cards((0, FULL, 140 * MIB), (1, FULL, 140 * MIB))
    for first in (0, 1):
        for number, trace in enumerate(data["device_traces"]):
            for time, entry in enumerate(trace):
                entry["time_us"] = time + 1000 * (number == first)
        assert tape_of(data).device == first


def test_the_page_s_stacks_are_of_the_card_that_is_read(ran: Ran, saved: Any, tmp_path: Path) -> None:
    data = cards((0, FULL, 140 * MIB), (1, BUSY, None))
    for segment in data["segments"]:
        for block in segment["blocks"]:
            block["frames"] = [{"filename": "run.py", "name": f"made_on_{segment['device']}", "line": 3}]
    ran("explain", saved(data), "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "made_on_0" in page and "made_on_1" not in page


# --- without a history -----------------------------------------------------------------------------------------------


def test_an_instant_is_no_peak(ran: Ran, saved: Any, tmp_path: Path) -> None:
    path = saved(cards((0, FULL, None), history=False))
    assert read(path).is_instant and memory_of(read(path)).instant == WRITTEN
    code, out, _ = ran("explain", path)
    assert code == 4 and WRITTEN in out and "no history was recorded" in out and "220 MiB" in out
    with pytest.raises(BadInput, match="a single instant"):
        footprint_file.read(path)
    ran("explain", path, "--html", tmp_path / "page.html")
    drawn = re.findall(r'<polygon class="\w+" points="([^"]+)"', (tmp_path / "page.html").read_text())
    assert drawn and all({point.split(",")[0] for point in points.split()} >= {"0.0", "1200.0"} for points in drawn)


# --- what failed is no part of a peak --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SNAPSHOTS, ids=lambda path: path.name)
def test_the_peak_reserved_is_that_of_the_recorded_segments(path: Path) -> None:
    data = pickle.loads(gzip.decompress(path.read_bytes()))
    steps = [entry["size"] * MOVES.get(entry["action"], 0) for entry in data["device_traces"][0]]
    reserved = most = sum(segment["total_size"] for segment in data["segments"]) - sum(steps)
    for step in steps:
        reserved += step
        most = max(most, reserved)
    assert footprint_file.read(path).peak.levels.reserved == most


@pytest.mark.parametrize("path", SNAPSHOTS, ids=lambda path: path.name)
def test_the_page_never_draws_more_than_there_was(path: Path) -> None:
    tape = read(path)
    torch, settings = made_with(tape)
    drawing = sample(tape, settings, torch, room_of(tape), go_on=True)
    most = as_recorded(tape).peak
    assert max(column.reserved for column in drawing.columns) == most.reserved
    assert max(sum(column.roles) for column in drawing.columns) <= most.requested
    assert (drawing.oom is not None) == any(isinstance(event, Oom) for event in tape.events)
    last = max(index for index, event in enumerate(tape.events) if isinstance(event, Alloc | Free))
    width = max(1, -(-len(tape.events) // 1200))
    assert drawing.columns[-1].event // width == last // width  # it goes on behind what was caught


def test_a_request_that_failed_is_said_and_not_drawn(ran: Ran, saved: Any, tmp_path: Path) -> None:
    path = saved(cards((0, FULL, 140 * MIB)))
    ran("explain", path, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Tried to allocate 100 MiB" in page and "140 MiB usable" in page
    assert "peak 0.12 GiB reserved" in page
    tape = Tape((*FULL.events[:3], Oom(100 * MIB, 20 * MIB)), "traced")
    drawing = sample(tape, AllocSettings(), (2, 13), go_on=True)
    assert max(column.roles[SHOWN.index("temporaries")] for column in drawing.columns) == 0


def test_a_run_that_ran_out_needs_more_than_it_shows(ran: Ran, saved: Any, tmp_path: Path) -> None:
    whole, cut = saved(cards((0, FULL, None))), saved(cards((0, FULL, 140 * MIB)))
    code, out, _ = ran("compare", whole, cut)
    assert code == 4 and "LESS UNTIL IT RAN OUT" in out and "120 MiB reserved" in out
    assert "the right ran out of memory asking for 100 MiB more" in out
    found = json.loads(ran("compare", whole, cut, "--json")[1])
    assert found["refused"] == [0, 100 * MIB] and found["right_need"] == 120 * MIB
    caught = saved(cards((0, Tape((*FULL.events, Alloc(50, MIB, "temporaries")), "traced"), None)))
    assert json.loads(ran("compare", whole, caught, "--json")[1])["refused"] == [0, 0]


# --- which card, which context ---------------------------------------------------------------------------------------


def test_compare_takes_the_number_of_a_snapshot_s_card(ran: Ran, saved: Any) -> None:
    path = saved(cards((0, BUSY, None), (1, FULL, 140 * MIB)))
    alone = saved(cards((0, BUSY, None)))
    assert ran("compare", alone, path)[0] != 0 and "this is card 1" in ran("compare", alone, path)[1]
    code, out, _ = ran("compare", alone, path, "--device", 0)
    assert code == 0 and "this is card" not in out
    assert ran("compare", alone, path, "--device", 7)[0] == 2


def test_a_number_without_a_snapshot_is_a_mistake(ran: Ran, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    ran("plan", "qwen2.5-0.5b", "--gpu", "l4", "--out", tmp_path, "--target", "trl")
    code, _, err = ran("compare", recipe, recipe, "--device", 0)
    assert code == 2 and "only a snapshot has several devices" in err
    code, _, err = ran("compare", recipe, recipe, "--gpu", "4xl4")
    assert code == 2 and "asks for 4 GPUs, and the recipe is for 1" in err
    assert ran("compare", recipe, recipe, "--gpu", "l40s")[0] == 0


def test_a_card_there_is_not_is_a_mistake_whatever_the_files_are(ran: Ran, tmp_path: Path) -> None:
    seen = outside(tmp_path, GIB)
    assert ran("compare", seen, seen)[0] == 0
    code, _, err = ran("compare", seen, seen, "--gpu", "nonsense")
    assert code == 2 and "unknown GPU" in err and "hint: " in err


@pytest.mark.parametrize(
    ("tape", "said"),
    [
        (Tape((), "traced"), "the tape is empty"),
        (Tape(FULL.events, "traced", {"alloc_conf": "no_such_key:1"}), "no_such_key"),
    ],
)
def test_a_tape_that_cannot_be_replayed_is_a_mistake(tape: Tape, said: str) -> None:
    with pytest.raises(BadInput, match=said) as error:
        footprint_file.of_tape(tape)
    assert error.value.hint


def outside(tmp_path: Path, device: int) -> Path:
    """The log of a run that NVML saw."""
    from memfit.nouns.footprint import Levels

    levels = Levels(0, 0, 0, device)
    path = tmp_path / "seen.jsonl"
    nouns = (Header("run.py", "nvml", "NVIDIA L4", 24 * GIB), Sample(1.0, 1, "step", levels, levels))
    path.write_bytes(b"".join(map(watch_log.line, nouns)))
    return path


def test_what_the_driver_sees_has_the_context_in_it(ran: Ran, tmp_path: Path, saved: Any) -> None:
    from memfit.catalogue import cards as catalogue

    context = catalogue.find_gpu("l4").context_bytes
    path = saved(cards((0, FULL, None)))
    reserved = footprint_file.read(path).peak.levels.reserved
    seen = outside(tmp_path, reserved + context)
    code, _, err = ran("compare", path, seen)
    assert code == 2 and "names no card" in err and "hint: --gpu " in err
    assert ran("compare", path, seen, "--gpu", "l4")[0] == 0
    said = footprint_file.of(path, catalogue.find_gpu("l4"))
    assert said is not None and said.peak.levels.device == reserved + context
    named = footprint_file.of_tape(Tape((Mark("step", "forward"), *FULL.events), "traced", {"gpu": "L4"}))
    assert named.peak.levels.device == named.peak.levels.reserved + context
    own = footprint_file.of(named, catalogue.find_gpu("h100"))
    assert own is not None and own.peak.levels.device == named.peak.levels.device


# --- names -----------------------------------------------------------------------------------------------------------

HALF = "caf\udce9 \ud800"  # a path that is no UTF-8, as Python reads it; and half of a pair


@pytest.mark.parametrize("command", ["explain", "replay"])
def test_names_that_are_no_unicode_are_replaced(ran: Ran, saved: Any, tmp_path: Path, command: str) -> None:
    data = cards((0, FULL, 140 * MIB))
    frames = [{"filename": f"/home/{HALF}/run.py", "name": HALF, "line": 3}]
    for piece in (*data["device_traces"][0], *(block for segment in data["segments"] for block in segment["blocks"])):
        piece |= {"frames": frames, "user_metadata": HALF, "time_us": 1}
    data["external_annotations"] = [{"name": HALF, "stage": "START", "device": 0, "time_us": 1}]
    page, path = tmp_path / "page.html", saved(data)
    assert ran(command, path, "--html", page)[2].endswith("wrote " + str(page) + "\n")
    assert "caf? ?" in page.read_text(encoding="utf-8")
    found = ran(command, path, "--json")[1].encode()
    assert b"caf? ?" in found if command == "explain" else found


def test_a_tape_of_such_a_snapshot_is_saved_and_read(ran: Ran, saved: Any, tmp_path: Path) -> None:
    data = cards((0, FULL, 140 * MIB))
    for entry in data["device_traces"][0]:
        entry["user_metadata"] = HALF
    tape = tmp_path / "run.tape.json.gz"
    ran("replay", saved(data), "--save-tape", tape)
    assert any(isinstance(event, Alloc) and event.label.startswith("caf? ?") for event in read(tape).events)
