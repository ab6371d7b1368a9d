"""Processes that a script starts itself by torch.multiprocessing: the one of this rank runs here, the others do not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.multiprocessing

from memfit.virtual.patching import patched
from memfit.virtual.ranks.place import Place


class _Ended:
    """What `spawn(join=False)` returns: all processes have ended."""

    processes: tuple[Any, ...] = ()

    def join(self, *_: Any, **__: Any) -> bool:
        return True

    def pids(self) -> list[int]:
        return []


@contextmanager
def in_this_process(place: Place) -> Iterator[None]:
    """Let torch.multiprocessing.spawn call its function here, as the process of this rank on its machine."""

    def start_processes(
        fn: Any, args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any
    ) -> _Ended | None:
        fn(min(place.local_rank, nprocs - 1), *args)
        return None if join else _Ended()

    words = {"spawn": start_processes, "start_processes": start_processes}
    module: Any = sys.modules["torch.multiprocessing.spawn"]  # as an attribute that name is the function
    with patched(torch.multiprocessing, words), patched(module, words):
        yield
