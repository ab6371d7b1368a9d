"""Make PyTorch report CUDA devices without a GPU: a device guard, the CUDA hooks, and backward passes without a thread.

A CPU wheel registers no CUDA device guard, and the autograd engine gets its accelerator from the CUDA hooks. Both are
C++ objects: a guard is registered through ctypes, then replaced by PyTorch's own no-op guard; of it and of the hooks
object, copies of the table of virtual functions are made with a few entries replaced. They are in use while a card is
active; afterwards both objects are as they were. Slot numbers are read from the headers that ship in the wheel. Itanium
C++ ABI only. What PyTorch calls is machine code, as it may call it without the interpreter's lock.

Autograd's engine makes its threads at its first backward, one per device that exists then. `install` runs that backward
before there is a device, so that there is no thread for the card: a process that had one could never fork and train
afterwards, and a thread that still releases a backward's state when the process ends aborts it. A backward on the card
runs in the calling thread, which PyTorch supports. Only the thread that launches kernels differs, and cuBLAS allocates
one workspace per thread: so a backward counts as a thread of its own.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from memfit.errors import BadInput
from memfit.virtual.device.storage import mapped
from memfit.virtual.patching import patched
from memfit.virtual.supported import check_host

_KEPT: list[object] = []  # C++ points at these, so they must never be collected
_SWAPPED: list[tuple[ctypes.c_void_p, int]] = []  # a pointer of PyTorch's, its value while a card is active
_HOOKS = ("ATen/detail/AcceleratorHooksInterface.h", "ATen/detail/CUDAHooksInterface.h")
_GUARD = "c10/core/impl/DeviceGuardImplInterface.h"
_CUDA = 1  # c10::DeviceType::CUDA
CURRENT = (ctypes.c_int32 * 1)()  # index of the device that C++ takes where none is named
_COUNT = (ctypes.c_int32 * 1)()  # devices that there are


def install() -> None:
    """Prepare the guard and the hooks, once per process. Raises BadInput where that is impossible."""
    if _KEPT:
        return
    check_host(torch.__version__)
    try:
        with torch.inference_mode(mode=False), torch.enable_grad():
            torch.ones((), device="cpu", requires_grad=True).backward()
        functions = _functions()
        _SWAPPED.extend([_guard(functions), _hooks(functions)])
    except (AttributeError, OSError, ValueError) as error:
        raise BadInput(
            f"this build of PyTorch ({torch.__version__}) cannot host a virtual GPU: {error}",
            hint="trace needs one of PyTorch's own wheels; memfit estimate answers without PyTorch",
        ) from error


@contextmanager
def on_card(count: int) -> Iterator[None]:
    """Let C++ find `count` CUDA devices for the length of the block."""
    install()
    before, index = [pointer.value for pointer, _ in _SWAPPED], CURRENT[0]
    CURRENT[0], _COUNT[0] = 0, count
    for pointer, ours in _SWAPPED:
        pointer.value = ours
    engine = _InCallingThread(torch.autograd.Variable._execution_engine)
    try:
        with patched(torch.autograd.Variable, {"_execution_engine": engine}):
            yield
    finally:
        for (pointer, _), value in zip(_SWAPPED, before, strict=True):
            pointer.value = value
        CURRENT[0], _COUNT[0] = index, 0


def make_current(index: int) -> None:
    """Let C++ take this device where none is named; there are as many as the highest that was."""
    CURRENT[0], _COUNT[0] = index, max(_COUNT[0], index + 1)


# --- what PyTorch calls ---

# functions that return a constant, an int32 at an address, the c10::Device of that index
_POINTER, _NUMBER, _DEVICE = (
    b"\x48\xb8%b\xc3",  # mov rax, constant; ret
    b"\x48\xb8%b\x8b\x00\xc3",  # mov rax, address; mov eax, [rax]; ret
    b"\x48\xb8%b\x8b\x00\xc1\xe0\x08\x83\xc8\x01\xc3",  # ...; shl eax, 8; or eax, 1 (CUDA); ret
)


def _functions() -> dict[str, int]:
    """Return the addresses of functions by what they return."""
    core = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    core._ZN3c1015GetCPUAllocatorEv.restype = ctypes.c_void_p
    index = ctypes.addressof(CURRENT)
    bodies = {
        "one": (_POINTER, 1), "zero": (_POINTER, 0), "index": (_NUMBER, index), "device": (_DEVICE, index),
        "count": (_NUMBER, ctypes.addressof(_COUNT)),
        "pageable": (_POINTER, core._ZN3c1015GetCPUAllocatorEv()),  # nothing is copied from the host
    }  # fmt: skip
    at, addresses = mapped(4096, executable=True), {}
    for name, (body, number) in bodies.items():
        code = body % struct.pack("<Q", number)
        ctypes.memmove(at, code, len(code))
        addresses[name], at = at, at + 32
    _KEPT.extend([CURRENT, _COUNT])
    return addresses


def _guard(functions: dict[str, int]) -> tuple[ctypes.c_void_p, int]:
    """Return the guard of CUDA in c10's registry, and a copy of PyTorch's no-op guard that knows the current device.

    Where there was none, the copy stays, without a device: tensors that outlive their card would abort the process.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * (_CUDA + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    pointer = ctypes.c_void_p.from_address(ctypes.addressof(registry) + 8 * _CUDA)
    before = pointer.value or 0
    if not before:
        table = (ctypes.c_void_p * 64)(*[functions["zero"]] * 64)
        empty = (ctypes.c_void_p * 4)(ctypes.addressof(table), 0, 0, 0)
        _KEPT.extend([table, empty])
        pointer.value = ctypes.addressof(empty)
    torch._C._ensureCUDADeviceGuardSet()  # replaces a guard that has no devices by PyTorch's own no-op guard
    old = ctypes.c_void_p.from_address(pointer.value or 0).value or 0
    text = (Path(torch.__file__).parent / "include" / _GUARD).read_text()
    names = re.findall(r"\bvirtual\s+[^()]*?(~?\w+)\s*\(", re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S))
    # a destructor has two entries
    answers = {"getDevice": "device", "deviceCount": "count"}
    table = _changed(old, len(names) + 1, {names.index(name): functions[answer] for name, answer in answers.items()})
    guard = (ctypes.c_void_p * 4)(ctypes.addressof(table) + 16, 0, 0, 0)
    _KEPT.extend([table, guard])
    pointer.value = before or ctypes.addressof(guard)
    return pointer, ctypes.addressof(guard)


def _changed(functions: int, count: int, replaced: dict[int, int]) -> Any:
    """Return a copy of a table of virtual functions, which begins with two words of its own."""
    table = (ctypes.c_void_p * (count + 2)).from_buffer_copy(ctypes.string_at(functions - 16, 8 * (count + 2)))
    for slot, address in replaced.items():
        table[2 + slot] = address
    return table


def _virtual_functions(header: str, name: str) -> list[str]:
    text = (Path(torch.__file__).parent / "include" / header).read_text()
    body = re.sub(r"//[^\n]*|/\*.*?\*/", "", text[text.index(f"struct TORCH_API {name}") :], flags=re.S)
    return re.findall(r"\bvirtual\s+[^()]*?(~?\w+)\s*\(", body)


def _slots() -> dict[str, int]:
    """Return the slot of each virtual function: two destructors, then functions in the order of first declaration."""
    base, own = (_virtual_functions(h, Path(h).stem) for h in _HOOKS)
    names = [n for n in base if not n.startswith("~")]
    names += [n for n in own if not n.startswith("~") and n not in names]
    return {name: number + 2 for number, name in enumerate(names)}


_ANSWERS = {  # function of the hooks -> what it returns
    **dict.fromkeys(("hasCUDA", "isAvailable", "isBuilt", "hasPrimaryContext", "isPinnedPtr"), "one"),
    **dict.fromkeys(("deviceCount", "getNumGPUs"), "count"),
    **dict.fromkeys(("getCurrentDevice", "current_device", "exchangeDevice", "maybeExchangeDevice"), "index"),
    **dict.fromkeys(("init", "setCurrentDevice"), "zero"),
    "getPinnedMemoryAllocator": "pageable",
}


def _hooks(functions: dict[str, int]) -> tuple[ctypes.c_void_p, int]:
    """Return the pointer of the CUDA hooks to their functions, and a table in which _ANSWERS are replaced."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    getter = library._ZN2at6detail12getCUDAHooksEv
    getter.restype, getter.argtypes = ctypes.c_void_p, []
    pointer, slots = ctypes.c_void_p.from_address(getter()), _slots()
    before = pointer.value or 0
    replaced = {slots[name]: functions[answer] for name, answer in _ANSWERS.items()}
    table = _changed(before, max(slots.values()) + 1, replaced)
    _KEPT.append(table)
    return pointer, ctypes.addressof(table) + 16


# --- backward passes ---


class _InCallingThread:
    """Autograd's engine, which runs every node in the thread that calls it, also for code that calls it directly."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def run_backward(self, *args: Any, **words: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return self._engine.run_backward(*args, **words)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def thread() -> tuple[int, bool]:
    """Return a key for the thread that would launch kernels on a real card."""
    return threading.get_ident(), torch._C._current_graph_task_id() != -1
