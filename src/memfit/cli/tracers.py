"""Trace recipes in processes that are forked after the imports, so that a plan by traces uses several cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from types import TracebackType

from memfit.cli.forked import begin
from memfit.errors import Unsupported
from memfit.nouns.job import Recipe
from memfit.planner.traced import Answer, Measure

MOST = 2  # processes: a search seldom knows more than two recipes that it will need, and each takes 1 to 2 GB
_measure: Measure | None = None  # of the process that forks, which the forked ones run


class Tracers:
    """Measures recipes, several at a time; `known` answers from the cache, `prepare` imports before the forks."""

    def __init__(
        self, measure: Measure, known: Callable[[Recipe], Answer | None], prepare: Callable[[Recipe], None]
    ) -> None:
        self._measure, self._known, self._prepare = measure, known, prepare
        self._pool: ProcessPoolExecutor | None = None
        self._futures: list[Future[Answer]] = []
        self._alone: bool | None = None  # whether recipes are measured here, one after another; None: not decided

    def __enter__(self) -> Tracers:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        """End the processes; what they still trace is not needed."""
        if self._pool is None:
            return
        self._pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.terminate()

    def begin(self, recipe: Recipe) -> Callable[[], Answer]:
        """Begin to measure a recipe; return a function that waits for the answer."""
        found = self._known(recipe)
        if found is not None:
            return lambda: found
        if self._alone is None:
            self._pool = self._forked(recipe)
            self._alone = self._pool is None
        if self._pool is None:
            return lambda: self._measure(recipe)
        with _loss_explained():
            future = self._pool.submit(_run, recipe)

        self._futures.append(future)

        def wait() -> Answer:
            with _loss_explained():
                return future.result()

        return wait

    def busy(self) -> int:
        """Return how many recipes are being measured, or wait for a process."""
        return sum(not future.done() for future in self._futures)

    def _forked(self, recipe: Recipe) -> ProcessPoolExecutor | None:
        """Return the processes; None where there is one core, or autograd has run here, which no fork survives."""
        global _measure
        if (os.cpu_count() or 1) < 2:
            return None
        _measure = self._measure
        self._prepare(recipe)
        forking = multiprocessing.get_context("fork")
        pool = ProcessPoolExecutor(MOST, mp_context=forking, initializer=begin)
        if pool.submit(_can_train).result():
            return pool
        pool.shutdown()
        return None


def _can_train() -> bool:
    """Return whether autograd runs in this process."""
    import torch

    try:
        torch.zeros(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


def _run(recipe: Recipe) -> Answer:
    assert _measure is not None
    return _measure(recipe)


@contextmanager
def _loss_explained() -> Iterator[None]:
    children = multiprocessing.active_children()
    try:
        yield
    except BrokenProcessPool:
        for child in children:
            child.join(1)
        own = next((code for child in children if (code := child.exitcode) and code > 0), None)
        if own is None:
            problem = "the system ended a process that traced a recipe, most likely for its memory"
            hint = "close other programs, or name the recipe: --method lora --micro-batch 1"
        else:  # a native library called exit()
            problem = f"a library ended the process that traced a recipe, with exit code {own}"
            hint = "memfit trace with the same flags shows what it printed"
        raise Unsupported(problem, hint=hint) from None
