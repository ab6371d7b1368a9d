"""The watch of a run: memory.jsonl in its folder, and what it sees handed on as events."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from memfit.live.watch.outputs import REFRESH
from memfit.live.watch.transformers import MemfitCallback
from memfit.nouns.footprint import Levels
from memfit.nouns.sample import METERS, Alarm, Leak, Status, Watched
from memfit.nouns.tape import Phase
from memfit.train.folder import MEMORY_FILE, Run
from memfit.train.outcome import Event


class Telling:
    """A screen elsewhere: pictures, warnings and leaks become events."""

    def __init__(self, tell: Callable[[Event], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.tell, self.clock, self._shown = tell, clock, -REFRESH

    def show(self, status: Status) -> None:
        if self.clock() - self._shown >= REFRESH:
            self._shown = self.clock()
            self._tell("memory", status)

    def alarm(self, alarm: Alarm) -> None:
        if alarm.kind != "leak":  # that comes with its holders
            self._tell("alarm", alarm)

    def leak(self, leak: Leak) -> None:
        self._tell("leak", leak)

    def close(self, watched: Watched) -> None: ...

    def _tell(self, kind: str, noun: Any) -> None:
        self.tell({"event": kind, kind: msgspec.to_builtins(noun)})


def watcher(run: Run, tell: Callable[[Event], None]) -> MemfitCallback:
    """Holds the run against its plan."""
    return MemfitCallback(
        predicted=run.plan.footprint, log=run.path / MEMORY_FILE, name=run.path.name, screen=Telling(tell)
    )


def closed(callback: MemfitCallback | None) -> dict[Phase, Levels]:
    """End the watch, which an error leaves open; returns the peaks it saw on a card, by phase."""
    if callback is None or callback.watch is None:
        return {}
    callback.watch.close()
    recorder = callback.watch.recorder
    return recorder.peaks if METERS[recorder.header.meter].compared else {}
