"""Recorded runs of benchmarks/ as a Tape: columns of one run's events, with the record of its phases beside them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Struct

from memfit.documents.snapshot.forward import completed
from memfit.errors import BadInput
from memfit.nouns.alloc_settings import LATEST_TORCH, AllocSettings
from memfit.nouns.tape import Alloc, Event, Free, Mark, Oom, Phase, SegmentAlloc, SegmentFree, Tape
from memfit.reading import bounds
from memfit.units import LARGEST

MOST_FACTS = 1 << 20  # bytes of the record beside a recording
UNIT = 512  # bytes of one unit of an address
SUFFIX = ".tape.json.gz"
LOADS = ("build", "to_device", "peft", "make_optimizer", "trainer_init")
_STEP = re.compile(r"s(\d+)\.(?:m\d+\.)?(\w+)")


Number = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]


class RecordColumns(Struct):
    """One entry per event: its letter, its bytes, its address (for O: the bytes that the driver still had)."""

    op: str
    size: list[Number]
    addr: list[Number]
    stream: list[Number] = []


class PhaseRecord(Struct, rename={"name": "phase"}):
    """A phase of the run: how many allocations and releases there had been at its end."""

    name: str
    n_alloc: int = 0
    n_free: int = 0


def known(content: bytes) -> bool:
    """Does the file begin like such a recording?"""
    return content.lstrip().startswith(b'{"format"')


def loads(content: bytes, path: Path) -> Tape:
    """Return the tape of a recording; NAME.json beside NAME.tape.json.gz may hold phases, card and settings."""
    try:
        columns = msgspec.json.decode(content, type=RecordColumns)
        record = _record(path)
        rows = msgspec.convert(record.get("phases", []), list[PhaseRecord])
        events, about = _events(columns, rows), _about(record)
    except (msgspec.ValidationError, msgspec.DecodeError, KeyError, ValueError, RecursionError) as error:
        raise BadInput(f"the recording is damaged: {error}", hint="copy it again") from None
    settings = AllocSettings(expandable_segments="alloc_conf" in about)
    return completed(Tape(tuple(events), "measured", about), (), settings, LATEST_TORCH)


def _record(path: Path) -> dict[str, Any]:
    beside = path.with_name(path.name.removesuffix(SUFFIX) + ".json")
    if not path.name.endswith(SUFFIX) or not beside.is_file():
        return {}
    return msgspec.json.decode(bounds.content_of(beside, MOST_FACTS, "copy it again"), type=dict[str, Any])


def _about(record: dict[str, Any]) -> dict[str, str]:
    about = {"torch": ".".join(map(str, LATEST_TORCH))}
    case, device = record.get("case"), record.get("device")
    if isinstance(case, dict):
        about["model"] = str(case.get("model", ""))
        if case.get("expandable"):
            about["alloc_conf"] = "expandable_segments:True"
    if isinstance(device, dict) and "total_memory" in device:
        about["capacity"] = about["total_memory"] = str(msgspec.convert(device["total_memory"], Number))
    return about


def _events(columns: RecordColumns, rows: list[PhaseRecord]) -> list[Event]:
    streams = columns.stream or [0] * len(columns.op)
    events: list[Event] = []
    alive: dict[int, int] = {}
    births = deaths = place = 0
    for op, size, address, stream in zip(columns.op, columns.size, columns.addr, streams, strict=True):
        while place < len(rows) and (not place or _over(rows[place - 1], births, deaths)):
            events.append(_mark(rows[place].name))
            place += 1
        if op == "A":
            alive[address] = births
            events.append(Alloc(births, size, stream=stream))
            births += 1
        elif op in "fc":
            events.append(Free(alive.pop(address)))
        elif op in "SM":
            events.append(SegmentAlloc(address * UNIT, size))
        elif op in "FU":
            events.append(SegmentFree(address * UNIT, size))
        elif op == "O":
            events.append(Oom(size, address))
        deaths += op in "fr"
    return events


def _over(row: PhaseRecord, births: int, deaths: int) -> bool:
    return births >= row.n_alloc and deaths >= row.n_free


def _mark(name: str) -> Mark:
    """Return the mark for a row of a record: "s1.m0.backward" belongs to the first step."""
    found = _STEP.fullmatch(name.removeprefix("oom:"))
    if found is None:
        phase: Phase = "eval" if name == "eval" else "load" if name in LOADS else "step"
        return Mark(phase, name)
    return Mark("first_step" if found[1] in ("0", "1") else "step", found[2])
