"""Make a PyTorch without a GPU believe it has CUDA devices: a device guard and the answers of the CUDA hooks.

A CPU wheel registers no CUDA device guard, and the autograd engine asks the CUDA hooks for an accelerator. Both are
C++ objects: the guard is registered through ctypes, then replaced by PyTorch's own no-op guard; the hooks object gets
a copy of its own table of virtual functions with a few entries of ours. Slot numbers are read from the headers that
ship in the wheel. Itanium C++ ABI only.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import torch

from memfit.errors import BadInput
from memfit.virtual.supported import check_host

_KEPT: list[object] = []  # what C++ points at must never be collected
_HOOKS = ("ATen/detail/AcceleratorHooksInterface.h", "ATen/detail/CUDAHooksInterface.h")
_CUDA = 1  # c10::DeviceType::CUDA


def install() -> None:
    """Register the guard and patch the hooks, once per process. Raises BadInput where that is impossible."""
    if _KEPT:
        return
    check_host(torch.__version__)
    try:
        if torch.version.cuda is None:
            _register_guard()
        torch._C._ensureCUDADeviceGuardSet()  # seeing a guard of no devices, PyTorch puts its own no-op guard there
        _patch_hooks()
    except (AttributeError, OSError, ValueError) as error:
        raise BadInput(
            f"this build of PyTorch ({torch.__version__}) cannot host a virtual GPU: {error}",
            hint="trace needs one of PyTorch's own wheels; memfit estimate answers without PyTorch",
        ) from error


def _register_guard() -> None:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    register = library._ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE
    register.argtypes, register.restype = [ctypes.c_int8, ctypes.c_void_p], None
    none = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
    table = (ctypes.c_void_p * 64)(*[ctypes.cast(none, ctypes.c_void_p).value] * 64)
    guard = (ctypes.c_void_p * 4)(ctypes.addressof(table), 0, 0, 0)
    _KEPT.extend([none, table, guard])
    register(_CUDA, ctypes.addressof(guard))


def _virtual_functions(header: str, name: str) -> list[str]:
    text = (Path(torch.__file__).parent / "include" / header).read_text()
    body = re.sub(r"//[^\n]*|/\*.*?\*/", "", text[text.index(f"struct TORCH_API {name}") :], flags=re.S)
    return re.findall(r"\bvirtual\s+[^()]*?(~?\w+)\s*\(", body)


def _slots() -> dict[str, int]:
    """Virtual function -> slot: two destructors, then the functions in the order they are first declared."""
    base, own = (_virtual_functions(h, Path(h).stem) for h in _HOOKS)
    names = [n for n in base if not n.startswith("~")]
    names += [n for n in own if not n.startswith("~") and n not in names]
    return {name: number + 2 for number, name in enumerate(names)}


def _patch_hooks() -> None:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    getter = library._ZN2at6detail12getCUDAHooksEv
    getter.restype, getter.argtypes = ctypes.c_void_p, []
    hooks, slots = getter(), _slots()
    count = max(slots.values()) + 1
    old = ctypes.cast(hooks, ctypes.POINTER(ctypes.c_void_p))[0]
    source = ctypes.cast(old - 16, ctypes.POINTER(ctypes.c_void_p))  # two words before the table belong to it
    table = (ctypes.c_void_p * (count + 2))(*[source[i] for i in range(count + 2)])
    answer = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    one, zero = answer(lambda _: 1), answer(lambda _: 0)
    core = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    core._ZN3c1015GetCPUAllocatorEv.restype = ctypes.c_void_p
    pageable = core._ZN3c1015GetCPUAllocatorEv()
    pinned = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: pageable)  # nothing is copied from the host
    answers: dict[str, Any] = {
        "getPinnedMemoryAllocator": pinned,
        **dict.fromkeys(
            ("hasCUDA", "isAvailable", "isBuilt", "hasPrimaryContext", "deviceCount", "getNumGPUs", "isPinnedPtr"), one
        ),
        **dict.fromkeys(("init", "setCurrentDevice", "getCurrentDevice", "current_device"), zero),
        **dict.fromkeys(("exchangeDevice", "maybeExchangeDevice"), zero),
    }
    for name, function in answers.items():
        table[2 + slots[name]] = ctypes.cast(function, ctypes.c_void_p).value
    ctypes.cast(hooks, ctypes.POINTER(ctypes.c_void_p))[0] = ctypes.addressof(table) + 16
    _KEPT.extend([one, zero, pinned, table])
