"""Where the page's questions are answered: in processes of their own, each question once, with what was said kept.

A question is a kind ("plan", "estimate", ...) and its words; `Answerer` is a function of a module, so that it can be
sent to a process. Short questions share a pool with one process a core. A long one gets a process that is killed, with
all that it started, when nobody waits for it any more.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from memfit.reading.bounds import IDLE

Question = dict[str, str]
Tell = Callable[[str, float], None]
Answerer = Callable[[str, Question, Tell], dict[str, Any]]

KEPT = 512  # answers that are kept, of some 20 KB each
LONG_AT_ONCE = 2  # traces and files that are read at the same time; others wait
PATIENCE = 60.0  # seconds for which a file that was read ahead waits for its question, which a page asks at once
CRASHED = {"error": "the process that answered died", "hint": "ask again; memfit plan in a terminal shows why"}


def _quiet(text: str, share: float) -> None:
    """Tell nobody."""


def _answered(answerer: Answerer, kind: str, question: Question) -> dict[str, Any]:
    return answerer(kind, question, _quiet)


def _end_with_parent(end: Callable[[], None]) -> None:
    """Call `end` when the server's process has ended, even if it was killed."""
    parent = parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            end()

    threading.Thread(target=wait, daemon=True, name=IDLE).start()


def _warm(answerer: Answerer) -> None:
    _end_with_parent(lambda: os._exit(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends its processes
    answerer("warm", {}, _quiet)
    gc.collect()
    gc.freeze()  # modules and tables live for ever, and a look through them delays an answer by some 50 ms


def _sent(connection: Connection, answerer: Answerer, before: Question, patience: float) -> None:
    """Answer the question that comes, in a process of its own, sending progress and then the answer.

    before: a question of kind "ahead" that is answered first; empty for none. The process ends, and gives back what it
    has read, if that file is not sent to its end or nobody asks about it for `patience` seconds.
    """
    os.setsid()  # so that what a trace starts is killed with it
    _end_with_parent(lambda: _kill(os.getpid()))
    gc.disable()  # as in a command; a look through the millions of events of a snapshot takes an eighth of the time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if before:
        answerer("ahead", before, _quiet)
        sent = any(Path(before[name]).exists() for name in ("part", "file"))  # in the order of their lives
        if not (sent and connection.poll(patience)):
            return
    with suppress(EOFError, BrokenPipeError):
        kind, question = connection.recv()
        found = answerer(kind, question, lambda text, share: connection.send({"progress": text, "share": share}))
        connection.send(found)


class Workers:
    """Answers questions for many askers at once."""

    def __init__(self, answerer: Answerer, processes: int | None = None) -> None:
        self._answerer = answerer
        self._context = get_context("spawn")
        self._processes = processes or os.cpu_count() or 1
        self._pool = self._started()
        self._kept: OrderedDict[tuple[Any, ...], dict[str, Any]] = OrderedDict()
        self._asked: dict[tuple[Any, ...], asyncio.Future[dict[str, Any]]] = {}
        self._long = asyncio.Semaphore(LONG_AT_ONCE)
        self._ahead: tuple[str, BaseProcess, Connection] | None = None  # a file, and the process that reads it

    def _started(self) -> ProcessPoolExecutor:
        pool = ProcessPoolExecutor(
            self._processes, mp_context=self._context, initializer=_warm, initargs=(self._answerer,)
        )
        for _ in range(self._processes):  # it starts a process when there is something to do
            pool.submit(_quiet, "", 0.0)
        return pool

    async def ask(self, kind: str, question: Question) -> dict[str, Any]:
        """Return the answer to a short question; the same question of several askers is answered once."""
        key = (kind, *sorted(question.items()))
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        if key not in self._asked:
            self._asked[key] = asyncio.ensure_future(self._computed(key, kind, question))
        return await asyncio.shield(self._asked[key])  # who leaves must not take the answer from the others

    async def do(self, kind: str, question: Question) -> dict[str, Any]:
        """Return the answer to a question that changes something: every asker's is done, and nothing is kept."""
        return await self._in_pool(kind, question)

    async def _in_pool(self, kind: str, question: Question) -> dict[str, Any]:
        loop, pool = asyncio.get_running_loop(), self._pool
        try:
            return await loop.run_in_executor(pool, _answered, self._answerer, kind, question)
        except BrokenProcessPool:  # one died, for example for want of memory, and all its questions with it
            if self._pool is pool:
                self._pool = self._started()
            return CRASHED

    async def _computed(self, key: tuple[Any, ...], kind: str, question: Question) -> dict[str, Any]:
        try:
            found = await self._in_pool(kind, question)
        finally:
            self._asked.pop(key, None)
        self._keep(key, found)
        return found

    def _keep(self, key: tuple[Any, ...], found: dict[str, Any]) -> None:
        if "error" not in found:
            self._kept[key] = found
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)

    async def stream(self, kind: str, question: Question, keep: bool = True) -> AsyncIterator[dict[str, Any]]:
        """Yield the progress of a long question and then its answer. Closing the iterator ends the work."""
        key = (kind, *sorted(question.items()))
        if key in self._kept:
            yield self._kept[key]
            return
        if self._long.locked():
            yield {"progress": "waiting for another to end", "share": 0.0}
        async with self._long:
            process, ours = self._process_for(question)
            try:
                with suppress(OSError):  # it died, and `_next` says so
                    ours.send((kind, question))
                while True:
                    said = await asyncio.to_thread(_next, ours)
                    if said is None:
                        continue  # nothing yet; whoever waits may have left in the meantime
                    yield said
                    if "progress" not in said:
                        if keep:
                            self._keep(key, said)
                        return
            finally:
                _kill(process.pid)
                process.join(5)
                ours.close()

    def read_ahead(self, path: Path, part: Path, size: int) -> None:
        """Read a file of `size` bytes in the process that will be asked about it, while it is written as `part`."""
        self._stop_reading()
        file = str(path)
        self._ahead = (file, *self._begun({"file": file, "part": str(part), "size": str(size)}))

    def _stop_reading(self) -> None:
        if self._ahead is not None:
            _, process, ours = self._ahead
            if process.is_alive():
                _kill(process.pid)
            ours.close()
            self._ahead = None

    def _begun(self, before: Question) -> tuple[BaseProcess, Connection]:
        """Start the process of a long question."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_sent, args=(theirs, self._answerer, before, PATIENCE))
        process.start()
        theirs.close()
        return process, ours

    def _process_for(self, question: Question) -> tuple[BaseProcess, Connection]:
        """Return the process that has begun to read the file of a question, else a new one."""
        files = question.get("file", "").split("\n")
        if self._ahead is not None and files == [self._ahead[0]] and self._ahead[1].is_alive():
            (_, process, ours), self._ahead = self._ahead, None
            return process, ours
        if self._ahead is not None and self._ahead[0] in files:  # it reads one of several, or has ended
            self._stop_reading()
        return self._begun({})

    def close(self) -> None:
        """End all processes."""
        self._stop_reading()
        for process in list((self._pool._processes or {}).values()):  # a question that runs is not waited for
            with suppress(OSError):
                process.kill()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _next(connection: Connection) -> dict[str, Any] | None:
    """Return what was sent; None where nothing came within half a second."""
    try:
        return connection.recv() if connection.poll(0.5) else None
    except EOFError:
        return CRASHED


def _kill(pid: int | None) -> None:
    if pid:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
