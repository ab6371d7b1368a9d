"""The shape of a snapshot of torch.cuda.memory, from torch 2.1 to 2.13; keys that older versions lack have defaults."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import msgspec
from msgspec import Struct

from memfit.errors import BadInput
from memfit.nouns.alloc_settings import K_LARGE_BUFFER, LATEST_TORCH, Torch

Pool = tuple[int, int]
LONGEST = 4096  # characters of a path, a name or a setting; Linux has no longer paths
MAX_ADDRESS = 1 << 57  # five-level page tables; the allocator's tie-break keeps 56 bits of a distance between addresses


class TraceEntry(Struct, gc=False):
    """One event of a device's history; sizes in bytes: requested for tensors, whole for segments."""

    action: str
    size: int = 0
    addr: int = 0  # absent from oom
    stream: int = 0
    time_us: int = 0
    device_free: int = 0  # oom only
    pool_id: Pool = (0, 0)
    user_metadata: Any = ""
    frames: Any = ()


FREE_REQUESTED = TraceEntry("free_requested")  # nothing else is read of these, so one object stands for all


class BlockRecord(Struct):
    """A block of a segment. Blocks lie one after the other; torch 2.1 records no address of each."""

    size: int
    state: str
    requested_size: int | None = None
    frames: Any = ()

    @property
    def requested(self) -> int:
        return self.size if self.requested_size is None else self.requested_size


class SegmentRecord(Struct):
    """A segment, or one contiguous mapped range of an expandable one."""

    address: int
    total_size: int
    blocks: list[BlockRecord]
    segment_type: str
    device: int = 0
    stream: int = 0
    segment_pool_id: Pool = (0, 0)
    is_expandable: bool = False


class Note(Struct):
    """A mark of the profiler or of user code."""

    name: str
    stage: str = ""
    device: int = -1
    time_us: int = 0


class RecordedSettings(Struct):
    """The allocator's settings; sizes in bytes, -1 for none."""

    text: str = msgspec.field(name="PYTORCH_CUDA_ALLOC_CONF", default="")
    max_split_size: int = -1
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    roundup_power2_divisions: dict[str, int] = {}


class Snapshot(Struct):
    """The whole file."""

    segments: list[SegmentRecord]
    device_traces: list[list[TraceEntry]] = []
    allocator_settings: RecordedSettings = msgspec.field(default_factory=RecordedSettings)
    external_annotations: list[Note] = []


def shaped(data: Any) -> Snapshot:
    """Return plain data as a Snapshot. Raises BadInput naming the place that is wrong."""
    _check_references(data)
    try:
        found = msgspec.convert(data, Snapshot, strict=True)
    except (msgspec.ValidationError, RecursionError, OverflowError, UnicodeError) as error:
        what = f"this is no snapshot of torch.cuda.memory: {error}"
        raise BadInput(what, hint="torch.cuda.memory._dump_snapshot writes one") from None
    for segment in found.segments:
        sizes = [block.size for block in segment.blocks]
        if not 0 <= segment.address <= MAX_ADDRESS or not 0 < segment.total_size <= MAX_ADDRESS:
            raise BadInput("the size or address of a segment is out of range", hint="record it again")
        if segment.total_size != sum(sizes) or min(sizes, default=0) <= 0:
            raise BadInput(f"the blocks of the segment at {segment.address:#x} do not fill it", hint="record it again")
        if not all(0 <= b.requested <= b.size for b in segment.blocks if b.state != "inactive"):
            raise BadInput(f"a block of the segment at {segment.address:#x} is too small", hint="record it again")
    columns = (map(attrgetter(name), t) for t in found.device_traces for name in ("size", "addr", "device_free"))
    if any(column and not 0 <= min(column) <= max(column) <= MAX_ADDRESS for column in map(list, columns)):
        raise BadInput("a size or address in the history is out of range", hint="record it again")
    return found


def _check_references(data: Any) -> None:
    """Refuse lists of blocks or events that several segments or cards share: each of them would be built anew."""
    if not isinstance(data, dict):
        return
    segments, traces = data.get("segments"), data.get("device_traces")
    blocks = [one.get("blocks") for one in segments if isinstance(one, dict)] if isinstance(segments, list) else []
    for lists in (blocks, traces if isinstance(traces, list) else []):
        filled = [id(one) for one in lists if isinstance(one, list) and one]
        if len(set(filled)) < len(filled):
            what = "this is no snapshot of torch.cuda.memory: it refers to the same list again and again"
            raise BadInput(what, hint="torch.cuda.memory._dump_snapshot writes one")


def text_of(value: Any, *, end: bool = False) -> str:
    """Return at most LONGEST characters of a text, from its beginning or to its end, as UTF-8 can encode them.

    Paths may hold bytes that Python reads as surrogates. What is no text is "".
    """
    if not isinstance(value, str):
        return ""
    text = value[-LONGEST:] if end else value[:LONGEST]
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def torch_of(data: Any) -> Torch:
    """Return the version whose tie-break and settings apply, by the keys that each version added.

    2.10 to 2.12 write the same keys and are read as 2.11, though 2.12 orders free blocks in its own way.
    """
    traces = data.get("device_traces") or []
    keys = {key for trace in traces for entry in trace[:1] if isinstance(entry, dict) for key in entry} | set(
        data.get("allocator_settings") or ()
    )
    for key, torch in (("pool_id", LATEST_TORCH), ("max_round_threshold", LATEST_TORCH), ("user_metadata", (2, 11)),
                       ("compile_context", (2, 9))):  # fmt: skip
        if key in keys:
            return torch
    return 2, 7


def conf_of(settings: RecordedSettings) -> str:
    """Return the settings as PYTORCH_ALLOC_CONF writes them; a text that was recorded goes first."""
    if settings.text:
        return text_of(settings.text)
    parts = []
    if settings.expandable_segments:
        parts.append("expandable_segments:True")
    if K_LARGE_BUFFER <= settings.max_split_size < MAX_ADDRESS:
        parts.append(f"max_split_size_mb:{settings.max_split_size >> 20}")
    if settings.garbage_collection_threshold > 0:
        parts.append(f"garbage_collection_threshold:{settings.garbage_collection_threshold:g}")
    if any(settings.roundup_power2_divisions.values()):
        ways = ",".join(f"{size}:{n}" for size, n in settings.roundup_power2_divisions.items())
        parts.append(f"roundup_power2_divisions:[{ways}]")
    return ",".join(parts)
