"""Make PyTorch report CUDA devices without a GPU: a device guard, the CUDA hooks, and a thread for the backward.

A CPU wheel registers no CUDA device guard, and the autograd engine gets its accelerator from the CUDA hooks. Both are
C++ objects: the guard is registered through ctypes, then replaced by PyTorch's own no-op guard; the hooks object gets
a copy of its own virtual function table with a few entries replaced. Slot numbers are read from the headers that
ship in the wheel. Itanium C++ ABI only.

Autograd's engine makes its threads at its first backward, one per existing device; a card opened later has no thread.
Its backward then runs in the calling thread, which PyTorch supports. Only the thread that launches kernels differs, and
cuBLAS allocates one workspace per thread: so a backward counts as a thread of its own.

A thread of the engine releases a backward's state after that backward has returned, and needs the interpreter for it,
as the state holds a copy of the caller's context variables. If the process ends meanwhile, Python before 3.14 ends the
thread inside a destructor, which aborts the process (SIGABRT, exit code 134). So closing a card waits for the thread.
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from memfit.errors import BadInput
from memfit.virtual.supported import check_host

_KEPT: list[object] = []  # C++ points at these, so they must never be collected
_HOOKS = ("ATen/detail/AcceleratorHooksInterface.h", "ATen/detail/CUDAHooksInterface.h")
_GUARD = "c10/core/impl/DeviceGuardImplInterface.h"
_CUDA = 1  # c10::DeviceType::CUDA
CURRENT = [0]  # index of the device that C++ takes where none is named


def install() -> None:
    """Register the guard and patch the hooks, once per process. Raises BadInput where that is impossible."""
    if _KEPT:
        return
    check_host(torch.__version__)
    try:
        if torch.version.cuda is None:
            _register_guard()
        torch._C._ensureCUDADeviceGuardSet()  # replaces a guard that has no devices by PyTorch's own no-op guard
        _let_guard_know_the_device()
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


def _let_guard_know_the_device() -> None:
    """Register a copy of the guard whose getDevice returns the current device; the no-op guard has none."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_CUDA + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    functions = ctypes.c_void_p.from_address(guards[_CUDA] or 0).value or 0
    text = (Path(torch.__file__).parent / "include" / _GUARD).read_text()
    names = re.findall(r"\bvirtual\s+[^()]*?(~?\w+)\s*\(", re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S))
    count = len(names) + 1  # a destructor has two entries
    table = (ctypes.c_void_p * (count + 2)).from_buffer_copy(ctypes.string_at(functions - 16, 8 * (count + 2)))
    # a c10::Device is returned as two bytes: its type and its index
    device = ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_void_p)(lambda _: _CUDA | CURRENT[0] << 8)
    table[2 + names.index("getDevice")] = ctypes.cast(device, ctypes.c_void_p).value
    guard = (ctypes.c_void_p * 4)(ctypes.addressof(table) + 16, 0, 0, 0)
    register = library._ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE
    register.argtypes, register.restype = [ctypes.c_int8, ctypes.c_void_p], None
    register(_CUDA, ctypes.addressof(guard))
    _KEPT.extend([device, table, guard])


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


def _patch_hooks() -> None:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    getter = library._ZN2at6detail12getCUDAHooksEv
    getter.restype, getter.argtypes = ctypes.c_void_p, []
    hooks, slots = getter(), _slots()
    count = max(slots.values()) + 1
    old = ctypes.cast(hooks, ctypes.POINTER(ctypes.c_void_p))[0]
    source = ctypes.cast(old - 16, ctypes.POINTER(ctypes.c_void_p))  # the table begins with two words of its own
    table = (ctypes.c_void_p * (count + 2))(*[source[i] for i in range(count + 2)])
    answer = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    one, zero, index = answer(lambda _: 1), answer(lambda _: 0), answer(lambda _: CURRENT[0])
    core = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    core._ZN3c1015GetCPUAllocatorEv.restype = ctypes.c_void_p
    pageable = core._ZN3c1015GetCPUAllocatorEv()
    pinned = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: pageable)  # nothing is copied from the host
    ones = ("hasCUDA", "isAvailable", "isBuilt", "hasPrimaryContext", "deviceCount", "getNumGPUs", "isPinnedPtr")
    indices = ("getCurrentDevice", "current_device", "exchangeDevice", "maybeExchangeDevice")
    replaced: dict[str, Any] = {
        "getPinnedMemoryAllocator": pinned, **dict.fromkeys(ones, one), **dict.fromkeys(indices, index),
        **dict.fromkeys(("init", "setCurrentDevice"), zero),
    }  # fmt: skip
    for name, function in replaced.items():
        table[2 + slots[name]] = ctypes.cast(function, ctypes.c_void_p).value
    ctypes.cast(hooks, ctypes.POINTER(ctypes.c_void_p))[0] = ctypes.addressof(table) + 16
    _KEPT.extend([one, zero, index, pinned, table])


# --- the engine's threads ---

_LATE: list[bool] = []  # whether the engine had run before the first virtual card, once that is known
_CONTEXT = "context"  # what `torch.autograd.graph._engine_run_backward` calls the copy, in the versions that make one
_PATIENCE = 10.0  # seconds to wait for a thread; far more than a busy machine needed


@contextmanager
def backward_ready(scratch: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Make a backward on the card find a thread. scratch: opens a card for trial backwards."""
    if not _LATE:
        with scratch():
            _LATE.append(_runs_without_thread())
    if _LATE[0]:
        with torch.autograd.set_multithreading_enabled(False):
            yield
        return
    try:
        yield
    finally:
        with scratch():
            _let_go()


def _runs_without_thread() -> bool:
    try:
        _backward()
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):
            raise
        return True
    return False


def _let_go() -> None:
    """Run one more backward, before which the card's thread releases earlier states, and wait for the last state."""
    state = _backward()
    until = time.monotonic() + _PATIENCE
    while state() is not None and time.monotonic() < until:
        time.sleep(0.0001)


def _backward() -> Callable[[], object]:
    """Run the smallest backward on the card; return a function that gives None once its state is released."""
    states: list[Callable[[], object]] = [lambda: None]

    def note(grad: torch.Tensor) -> None:
        if torch._C._is_key_in_tls(_CONTEXT):
            states.append(weakref.ref(torch._C._get_obj_in_tls(_CONTEXT)))

    with torch.inference_mode(mode=False), torch.enable_grad():
        x = torch.zeros((), device="cuda", requires_grad=True)
        x.register_hook(note)
        (x * 1).backward()
    return states[-1]


def thread() -> tuple[int, bool]:
    """Return a key for the thread that would launch kernels on a real card."""
    late = bool(_LATE) and _LATE[0]
    return threading.get_ident(), late and torch._C._current_graph_task_id() != -1
