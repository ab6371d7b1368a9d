"""Autograd's engine makes its threads at its first backward, one per device there is; a card that comes later gets none.

Then the backward of the virtual card runs in the calling thread, as PyTorch itself offers. All that changes is which thread
a kernel finds itself in, and cuBLAS takes its workspace once per thread: so a backward counts as a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

_LATE: list[bool] = []  # whether the engine had run before the first virtual card, once that is known


@contextmanager
def ready(scratch: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """A backward on the card finds a thread. `scratch` opens a card to try it on, the first time."""
    if not _LATE:
        with scratch():
            _LATE.append(_runs_without_thread())
    if not _LATE[0]:
        yield
        return
    with torch.autograd.set_multithreading_enabled(False):
        yield


def _runs_without_thread() -> bool:
    x = torch.zeros((), device="cuda", requires_grad=True)
    try:
        (x * 1).backward()
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):
            raise
        return True
    return False


def thread() -> tuple[int, bool]:
    """What tells the threads apart that a real card's kernels are launched from."""
    late = bool(_LATE) and _LATE[0]
    return threading.get_ident(), late and torch._C._current_graph_task_id() != -1
