"""Files of safetensors with names, shapes and dtypes whose data is a hole that takes no room on the disk."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memfit.virtual.process.host import LARGE, room

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_OURS = "memfit"  # a key of the metadata


def write(
    path: Path, tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: dict[str, str] | None = None
) -> None:
    """Write a file of tensors without data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {}), _OURS: "shapes only"}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def header(path: Path) -> dict[str, Any]:
    """Return the header of a file: its metadata and what it says of each tensor."""
    with path.open("rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        return dict(json.loads(file.read(size)))


def is_one(path: Path) -> bool:
    """Return whether `write` made a file."""
    try:
        return _OURS in header(path).get("__metadata__", {})
    except (OSError, ValueError, struct.error):
        return False


def read(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file; large ones of floating point hold zeros, others what the file holds."""
    from safetensors import safe_open

    about = header(path)
    with safe_open(str(path), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            dtype, shape = DTYPES.get(about[name]["dtype"]), about[name]["shape"]
            if dtype is not None and dtype.is_floating_point and math.prod(shape) * dtype.itemsize >= LARGE:
                yield name, room(shape, dtype)
            else:
                yield name, file.get_tensor(name)
