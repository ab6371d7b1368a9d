"""Map a function over many inputs in forked processes, one a core, so that a sweep uses all of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

from memfit.virtual.process.end_with_parent import end_with_parent

Input = TypeVar("Input")
Output = TypeVar("Output")
MOST = 16  # processes
FEW = 12  # inputs that are not worth a fork, some 20 milliseconds each
SHARES = 4  # in which each process gets its inputs, so that none is left with the slow ones
_function: Callable[[Any], Any] | None = None  # of the process that forks, which the forked ones call


def forked_map(function: Callable[[Input], Output], inputs: Iterable[Input]) -> Iterator[Output]:
    """Yield the results in the order of the inputs; the first is made here, and fills the caches that are inherited."""
    global _function
    first, *rest = inputs
    yield function(first)
    count = min(_cores(), MOST)
    if count < 2 or len(rest) < FEW or "fork" not in multiprocessing.get_all_start_methods():
        yield from map(function, rest)
        return
    _function = function
    forking = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(count, mp_context=forking, initializer=begin) as pool:
        yield from pool.map(_call, rest, chunksize=max(len(rest) // (SHARES * count), 1))


def _cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def begin() -> None:
    """Leave interrupts to the parent, and end with it."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _call(value: Any) -> Any:
    assert _function is not None
    return _function(value)
