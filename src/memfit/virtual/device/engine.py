"""Autograd's engine makes its threads at its first backward, one per device there is; a card that comes later gets none.

Then the backward of the virtual card runs in the calling thread, as PyTorch itself offers. All that changes is which thread
a kernel finds itself in, and cuBLAS takes its workspace once per thread: so a backward counts as a thread of its own.

A thread of the engine lets go of a backward's state after that backward has returned, and needs the interpreter for it, as
the state holds a copy of the caller's context variables. Where the process ends meanwhile, Python before 3.14 ends the thread
inside a destructor, which aborts the process (SIGABRT, exit code 134). So a card closes when the thread has let go.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

_LATE: list[bool] = []  # whether the engine had run before the first virtual card, once that is known
_CONTEXT = "context"  # what `torch.autograd.graph._engine_run_backward` calls the copy, in the versions that make one
_PATIENCE = 10.0  # seconds for a thread to let go; far more than any busy machine was seen to need


@contextmanager
def ready(scratch: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """A backward on the card finds a thread. `scratch` opens a card to try it on, the first time."""
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
    """Wait until the thread of the card holds nothing of any backward: all before the last it has let go of to begin that one."""
    state = _backward()
    until = time.monotonic() + _PATIENCE
    while state() is not None and time.monotonic() < until:
        time.sleep(0.0001)


def _backward() -> Callable[[], object]:
    """The smallest backward on the card; what is returned tells None when its thread has let go of it."""
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
    """What tells the threads apart that a real card's kernels are launched from."""
    late = bool(_LATE) and _LATE[0]
    return threading.get_ident(), late and torch._C._current_graph_task_id() != -1
