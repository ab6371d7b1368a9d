"""What is made of a tape: a snapshot that torch's own tools open, and a page that needs no network."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.allocator import UNLIMITED
from memfit.allocator.replay import made_with, replay, retrace
from memfit.cli.web_files import look
from memfit.documents.snapshot import read
from memfit.documents.snapshot.history import tape_of
from memfit.documents.snapshot_writer import snapshot_pickle
from memfit.explain.history.reading import memory_and_segments_of
from memfit.footprints.rank_peaks import peak_of_rank
from memfit.nouns.alloc_settings import AllocSettings, parse_alloc_conf
from memfit.nouns.tape import Alloc, EmptyCache, Event, Free, Mark, Oom, Tape
from memfit.report.rank_lanes_html import rank_lanes
from memfit.report.timeline_html import COLUMNS, NAMED, SHOWN, Drawing, PeakColumn, plot, sample, timeline_html
from memfit.units import MIB

SNAPSHOTS = sorted((Path(__file__).parent / "data" / "snapshots").glob("*.pickle.gz"))
SETTINGS = {"plain": AllocSettings(), "expandable": AllocSettings(expandable_segments=True)}
TORCH = (2, 13)
TAPE = Tape(
    (Mark("load", "weights"), Alloc(1, 40 * MIB, "parameters", "layers.0.weight"), Mark("first_step", "forward"),
     Alloc(2, 5 * MIB, "activations", "layers.0 <output>", stream=1), Alloc(3, 700, "temporaries"), Free(3), Free(2),
     EmptyCache(),
     Mark("step", "forward"), Alloc(4, 30 * MIB, "gradients", "</script><b>")),
    "traced",
)  # fmt: skip


# --- the snapshot ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_torch_s_own_tools_take_the_snapshot(settings: AllocSettings, tmp_path: Path) -> None:
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    data = pickle.loads(snapshot_pickle(TAPE, settings, TORCH))
    lines = dict.fromkeys(("segments", "memory"), "")
    for name in lines:
        lines[name] = getattr(viewer, name)(data, format_flamegraph=str)  # its own asks the network for a script
    assert "layers.0.weight" in lines["memory"] and str(40 * MIB) in lines["memory"]
    assert "active_allocated" in lines["segments"]
    assert "30.0MiB" in viewer.trace(data)
    assert viewer.segsum(data)
    assert isinstance(viewer.compare(data["segments"], data["segments"], format_flamegraph=str), str)
    assert "html" in viewer.trace_plot(data) and "html" in viewer.segment_plot(data)


def test_the_viewer_s_needs_are_met() -> None:
    """Blocks in address order without holes, and a category "unknown" where there are categories."""
    for settings in SETTINGS.values():
        data = pickle.loads(snapshot_pickle(TAPE, settings, TORCH))
        for segment in data["segments"]:
            place = segment["address"]
            for block in segment["blocks"]:
                assert block["address"] == place
                place += block["size"]
            assert place == segment["address"] + segment["total_size"]
        categories = {entry["category"] for entry in data["device_traces"][0]}
        assert categories == {"unknown", "parameters", "activations", "temporaries", "gradients"}
        assert [note["stage"] for note in data["external_annotations"]] == ["START", "END"] * 2 + ["START"]


@pytest.mark.parametrize("path", SNAPSHOTS, ids=lambda path: path.name)
def test_a_recorded_tape_written_and_read_again_is_the_same_run(path: Path) -> None:
    tape = read(path)
    tape = replace(tape, events=tuple(event for event in tape.events if not isinstance(event, Oom)))
    settings = parse_alloc_conf(tape.about.get("alloc_conf", ""))
    again = tape_of(pickle.loads(snapshot_pickle(tape, settings, TORCH)))

    def moves(events: tuple[Event, ...]) -> list[tuple[type, int]]:
        return [(type(e), e.size if isinstance(e, Alloc) else 0) for e in events if isinstance(e, Alloc | Free)]

    assert moves(again.events) == moves(tape.events)
    assert retrace(again, settings)[0] == ""


def test_the_snapshot_ends_where_memory_runs_out() -> None:
    data = pickle.loads(snapshot_pickle(TAPE, SETTINGS["plain"], TORCH, capacity=64 * MIB))
    last = data["device_traces"][0][-1]
    assert (last["action"], last["size"], last["device_free"]) == ("oom", 30 * MIB, 24 * MIB) and "addr" not in last


def test_the_snapshot_goes_on_after_a_failure_that_was_caught() -> None:
    tape = replace(TAPE, events=(Oom(900 * MIB), *TAPE.events))
    data = pickle.loads(snapshot_pickle(tape, SETTINGS["plain"], TORCH, capacity=512 * MIB))
    first, *others = data["device_traces"][0]
    whole = pickle.loads(snapshot_pickle(TAPE, SETTINGS["plain"], TORCH, capacity=512 * MIB))
    assert (first["action"], first["size"]) == ("oom", 900 * MIB)
    assert [e["action"] for e in others] == [e["action"] for e in whole["device_traces"][0]]
    assert data["segments"] == whole["segments"]


# --- the page --------------------------------------------------------------------------------------------------------


def page(tape: Tape, capacity: int | None = None, title: str = "a run") -> str:
    return timeline_html(title, tape, SETTINGS["plain"], TORCH, look(), capacity).decode()


def data_in(text: str) -> Any:
    found = re.search(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_asks_nothing_of_a_network() -> None:
    text = page(TAPE)
    assert not re.findall(r"https?:|//[a-z]|@import|url\(|<link|<img|\bsrc=|\bfetch\b|XMLHttp", text)
    assert "<!--" not in text


def test_every_traced_rank_has_a_lane_on_one_scale() -> None:
    timeline = replay(TAPE.events, settings=SETTINGS["plain"], torch=TORCH)
    names = ("stage 0", "stage <1>")
    ranks = [(peak_of_rank(n, (n,), what, TAPE, timeline, 1 << 30, (), 0, False), TAPE) for n, what in enumerate(names)]
    text = rank_lanes(ranks, SETTINGS["plain"], TORCH, 40 * MIB)
    assert (text.count('class="plot lane"'), text.count('class="areas"'), text.count('class="card"')) == (2, 2, 2)
    assert "stage &lt;1&gt;" in text and "stage <1>" not in text
    free = rank_lanes(ranks, SETTINGS["plain"], TORCH, None)
    assert all(drawn in page(TAPE) for drawn in re.findall(r"points=[^/]*", free))


def test_the_peak_of_a_recording_that_begins_with_a_full_allocator_is_where_most_tensors_are() -> None:
    roles = [0] * len(SHOWN)
    held = [PeakColumn(n, [size, *roles[1:]], size, size, 9 * MIB) for n, size in enumerate((MIB, 8 * MIB, 2 * MIB))]
    assert '<circle cx="50.00%"' in plot(Drawing(held, [], [], [], 3, None), None)


def test_names_from_files_are_data_not_markup() -> None:
    text = page(TAPE, title="<img src=x>")
    assert text.count("</script>") == 2 and "</script><b>" not in text and "<img" not in text
    assert "</script><b>" in [tensor[0] for tensor in data_in(text)["tensors"]]


def test_the_page_names_what_was_alive() -> None:
    data = data_in(page(TAPE))
    assert "peak: step, forward<" in page(TAPE)  # 70 MiB, after 62 in the first step
    event, roles, allocated, reserved, named = data["columns"][4]
    assert event == 4 and (allocated, reserved) == (45 * MIB + 1024, 62 * MIB)
    assert dict(zip([row[0] for row in data["roles"]], roles, strict=True))["activations"] == 5 * MIB
    assert [data["tensors"][n][0] for n in named] == ["", "layers.0.weight", "layers.0 <output>"]
    assert "not recorded" in page(TAPE) and data["roles"][data["tensors"][named[0]][2]][0] == "unknown"
    assert [row[1:] for row in data["marks"]] == [["load", "weights"], ["first step", "forward"], ["step", "forward"]]


def test_the_parts_of_a_step_stand_under_the_axis() -> None:
    instants = (
        "weights", "forward", "loss", "backward of the loss", "backward of block 1", "forward, later micro-batch",
        "backward of block 1", "optimizer step", "saving a checkpoint",
    )  # fmt: skip
    events = [event for n, instant in enumerate(instants) for event in (Mark("step", instant), Alloc(n, MIB), Free(n))]
    text = page(Tape(tuple(events), "traced"))
    parts = re.findall(r'<rect class="(\w+)" x="([\d.]+)%" y="100%" width="([\d.]+)%"', text)
    assert [name for name, *_ in parts] == ["forward", "backward", "forward", "backward", "optimizer", "saving"]
    for (_, left, width), (_, after, _) in pairwise(parts):
        assert abs(float(left) + float(width) - float(after)) < 0.02
    assert [name for name in ("forward", "backward", "optimizer", "saving") if f"</svg>{name}</li>" not in text] == []
    assert "</svg>forward</li>" not in page(replace(TAPE, events=TAPE.events[:2]))


def test_a_long_tape_keeps_its_peaks_in_few_columns() -> None:
    events: list[Event] = []
    for number in range(20_000):
        size = 300 * MIB if number == 13_331 else 2 * MIB
        events += (Alloc(number, size, "activations", f"t{number}"), Free(number))
    drawing = sample(Tape(tuple(events), "traced"), SETTINGS["plain"], TORCH)
    assert len(drawing.columns) <= COLUMNS
    highest = max(drawing.columns, key=lambda column: column.total)
    assert (highest.total, highest.event) == (300 * MIB, 2 * 13_331)
    assert [drawing.named[n].label for n in highest.tensors] == ["t13331"]
    assert all(len(column.tensors) <= NAMED * len(SHOWN) for column in drawing.columns)


def test_the_page_says_of_the_card_what_the_answer_says() -> None:
    text = timeline_html("a run", TAPE, SETTINGS["plain"], TORCH, look(), 40 * MIB, 64 * MIB).decode()
    assert "total capacity of 64.0 MiB" in text and "40.0 MiB usable" in text


@pytest.mark.parametrize("path", SNAPSHOTS, ids=lambda path: path.name)
def test_the_page_s_peaks_are_those_of_the_replay(path: Path) -> None:
    tape = read(path)
    settings = parse_alloc_conf(tape.about.get("alloc_conf", ""))
    drawing, peak = sample(tape, settings, TORCH), replay(tape.events, settings=settings, start=tape.start).peak
    assert max(column.reserved for column in drawing.columns) == peak.reserved
    assert max(column.allocated for column in drawing.columns) == peak.allocated
    assert all(sum(column.roles) == column.total <= column.reserved for column in drawing.columns)


@pytest.mark.parametrize("path", SNAPSHOTS, ids=lambda path: path.name)
def test_the_run_that_was_explained_is_drawn_as_if_it_was_played(path: Path) -> None:
    tape = read(path)
    torch, settings = made_with(tape)
    memory, segments, levels = memory_and_segments_of(tape, drawn=True)
    assert (memory, segments) == memory_and_segments_of(tape)[:2]
    capacity = None if levels.capacity == UNLIMITED else levels.capacity
    drawn = sample(tape, settings, torch, capacity, go_on=True, levels=levels)
    assert drawn == replace(sample(tape, settings, torch, capacity, go_on=True), oom=levels.oom)


SIZES = st.integers(1, 60 * MIB)


@given(st.lists(SIZES | st.builds(Oom, SIZES) | st.just(EmptyCache()) | st.integers(-50, -1), max_size=60))
def test_a_run_with_failures_is_drawn_from_its_levels(moves: list[int | Oom | EmptyCache]) -> None:
    """A negative number frees the oldest tensor; requests that failed are made again and may be given."""
    events: list[Event] = []
    alive: list[int] = []
    for number, move in enumerate(moves):
        if not isinstance(move, int):
            events.append(move)
        elif move > 0:
            events.append(Alloc(number, move, "activations", "x"))
            alive.append(number)
        elif alive:
            events.append(Free(alive.pop(0)))
    tape = Tape(tuple(events), "measured", {"capacity": str(90 * MIB), "total_memory": str(90 * MIB)})
    levels = memory_and_segments_of(tape, drawn=True)[2]
    capacity = None if levels.capacity == UNLIMITED else levels.capacity
    drawn = sample(tape, *reversed(made_with(tape)), capacity, go_on=True, levels=levels)
    played = sample(tape, *reversed(made_with(tape)), capacity, go_on=True)
    assert str(drawn.oom) == str(played.oom) and drawn == replace(played, oom=drawn.oom)


def test_a_column_keeps_the_most_that_was_reserved_in_it() -> None:
    """A stream takes a segment of its own while less is alive than before, and gives it back at once."""
    events = (Alloc(0, 30 * MIB), Free(0), Alloc(1, 20 * MIB, stream=1), Free(1), EmptyCache(), Mark("step", "forward"))
    drawing = sample(Tape(events * COLUMNS, "traced"), SETTINGS["plain"], TORCH)
    assert {(column.allocated, column.reserved) for column in drawing.columns} == {(30 * MIB, 50 * MIB)}


def test_the_card_s_line_and_the_end() -> None:
    assert "80.0 MiB usable" in page(TAPE, 80 * MIB)
    assert 'class="card"' in page(TAPE, 80 * MIB) and 'class="card"' not in page(TAPE, 800 * MIB)
    ended = page(TAPE, 64 * MIB)
    assert "CUDA out of memory. Tried to allocate 30.0 MiB" in ended
    assert "runs on" not in ended and "runs on 80.0 MiB" in page(TAPE, 80 * MIB)
    assert "CUDA out of memory" in page(Tape((Alloc(1, 5), Oom(90 * MIB)), "measured"), 60 * MIB)


def test_a_tape_without_events_is_a_page() -> None:
    assert data_in(page(Tape((), "traced")))["columns"] == []
