"""Count the parameters of a checkpoint from its safetensors headers; no weight is read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path

from memfit.errors import TRACE_HINT, BadInput, Unsupported
from memfit.nouns.architecture import Architecture
from memfit.reading import bounds
from memfit.units import LARGEST

MAX_HEADER = 64 << 20  # bytes; a header of a published model takes well under 10 MiB
MAX_SHARDS = 512
TOLERANCE = 0.02
_REAL = frozenset(("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"))
# buffers of older checkpoints, and heads that transformers does not load
_NOT_PARAMETERS = re.compile(
    r"(\.attn\.(masked_)?bias|\.attention\.(masked_)?bias|inv_freq|position_ids|_score_correction_bias|_scale_inv)$"
    r"|^(model\.)?mtp\.|^cls\.seq_relationship"
)
_LAYER = re.compile(r"layers\.(\d+)\.")

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]  # tensor name -> (dtype, shape)


def header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors a safetensors file declares. Raises BadInput when the header is damaged or too large."""
    size = bounds.size_of(path, 1 << 62, "download it again")
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER, size):
                raise BadInput(f"{path}: not a safetensors file (header of {length} bytes)", hint="download it again")
            declared = json.loads(file.read(length))
        declared.pop("__metadata__", None)
        found = {name: (str(t["dtype"]), tuple(int(n) for n in t["shape"])) for name, t in declared.items()}
        if any(not 0 <= n <= LARGEST for _, shape in found.values() for n in shape):
            raise ValueError("a dimension is out of range")
        return found
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadInput(f"{path}: unreadable safetensors header", hint=str(error)) from error


def shapes_in(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    """Return all tensors of a folder's safetensors files; None if there are no or too many files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files or len(files) > MAX_SHARDS:
        return None
    if any(file.name.startswith("model") for file in files):  # not optimizer.safetensors, adapter_model.safetensors ...
        files = [file for file in files if file.name.startswith("model")]
    return {name: tensor for file in files for name, tensor in header(file).items()}


def count(shapes: Shapes, model: Architecture) -> int | None:
    """Count the parameters that the model would load; None for packed, quantised checkpoints."""
    kept = {name: tensor for name, tensor in shapes.items() if not _ignored(name, model)}
    if not kept or any(dtype not in _REAL for dtype, _ in kept.values()):
        return None
    total = sum(prod(shape) for _, shape in kept.values())
    return total if total <= LARGEST else None


def _ignored(name: str, model: Architecture) -> bool:
    layer = _LAYER.search(name)
    beyond = layer is not None and int(layer.group(1)) >= len(model.layers)  # multi-token prediction
    return beyond or bool(_NOT_PARAMETERS.search(name)) or (model.tied and name == "lm_head.weight")


def agrees(found: int, model: Architecture) -> bool:
    """Return whether a count is within TOLERANCE of the model's parameters."""
    return abs(found - model.parameters) <= TOLERANCE * model.parameters


def refuse(found: int, model: Architecture, where: str) -> Unsupported:
    """Return the error for a checkpoint that does not hold what its config describes."""
    return Unsupported(
        f"{model.name}: {where} holds {found:,} parameters, its config.json describes {model.parameters:,}",
        hint=f"it has parts that memfit does not model, so its count would be a guess; {TRACE_HINT}",
    )


def total_of_index(values: Mapping[str, object], dtype_bytes: int | None) -> int | None:
    """Return the parameter count in model.safetensors.index.json; older files give bytes instead."""
    metadata = values.get("metadata")
    if not isinstance(metadata, Mapping):
        return None
    total, size = metadata.get("total_parameters"), metadata.get("total_size")
    if isinstance(total, int) and 0 < total <= LARGEST:
        return total
    if not isinstance(size, int | float) or not 0 < size <= LARGEST:
        return None
    return int(size) // dtype_bytes if dtype_bytes else None
