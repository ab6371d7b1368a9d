"""Read PyTorch's native_functions.yaml: which operators have a CUDA kernel that a build without CUDA lacks."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

# Operators with one C++ kernel for every device that looks for a CUDA kernel inside; _linalg_svd asks whether the build
# has cuSOLVER, which returns V^H row by row: a slice of its first rows is contiguous and keeps all of it alive.
_SPECIAL = ("copy_", "silu_backward", "convolution", "convolution_backward", "_linalg_svd")


def operator(name: str) -> Any:
    """Return the overload of ATen that `add.out` or `relu` names."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def title(name: str) -> str:
    """Shorten `aten.mm.out` to `mm`."""
    library, _, rest = name.partition(".")
    short = rest.partition(".")[0]
    return short if library == "aten" else f"{library}.{short}"


@lru_cache(maxsize=1)
def _entries() -> dict[str, str]:
    """Return the entry of each operator in native_functions.yaml, by name."""
    from torchgen import __file__ as torchgen

    text = (Path(torchgen).parent / "packaged/ATen/native/native_functions.yaml").read_text()
    entries = re.split(r"\n(?=- func: )", text)[1:]
    return {re.match(r"- func: ([\w.]+)", entry)[1]: entry for entry in entries}  # type: ignore[index]


@lru_cache(maxsize=1)
def structured() -> frozenset[str]:
    """Return operators whose output shapes C++ computes before the kernel runs, such as `add.out`."""
    return frozenset(name for name, entry in _entries().items() if "\n  structured: True" in entry)


@lru_cache(maxsize=1)
def delegates() -> dict[str, str]:
    """Return structured delegates: `add.Tensor` and `add_.Tensor` run `add.out` on an output made for it."""
    found = ((name, re.search(r"\n  structured_delegate: (\S+)", entry)) for name, entry in _entries().items())
    return {name: delegate[1] for name, delegate in found if delegate}


@lru_cache(maxsize=1)
def shadowed() -> tuple[str, ...]:
    """Return operators with a CUDA kernel for which a build without CUDA would run a composite of other operators.

    A structured operator's composite is exactly what its CUDA kernel does around the launch, and is kept.
    """
    has = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    own = torch._C._dispatch_has_kernel_for_dispatch_key
    found = []
    for name, entry in _entries().items():
        dispatch = re.search(r"\n  dispatch:\n((?:    .*\n?)+)", entry)
        if name in _SPECIAL or (dispatch and re.search(r"^[^#]*\bCUDA\b[^#]*:", dispatch[1], re.M)):
            full = f"aten::{name}"
            structured_default = own(full, "CompositeExplicitAutogradNonFunctional")
            if has(full, "CUDA") and (name in _SPECIAL or not structured_default):
                found.append(name)
    return tuple(found)


@lru_cache(maxsize=1)
def registered() -> tuple[str, ...]:
    """Return ATen operators that this build has CUDA kernels for: none in a build without CUDA."""
    if not torch.backends.cuda.is_built():
        return ()
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    return tuple(sorted({name.removeprefix("aten::") for name in names if name.startswith("aten::")}))


@lru_cache(maxsize=1)
def missing() -> tuple[str, ...]:
    """Return ATen operators without any kernel for CUDA; to be called before a fallback is registered."""
    has = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return tuple(name.removeprefix("aten::") for name in names if not has(name, "CUDA"))
