"""Where a watched run is shown: plain lines on stderr, a live view in a terminal, or nowhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from memfit.live.watch.recorder import Screen
from memfit.nouns.sample import Alarm, Leak, Status, Watched

REFRESH = 0.5  # seconds between two pictures


class Quiet:
    """Shows nothing."""

    def show(self, status: Status) -> None: ...

    def alarm(self, alarm: Alarm) -> None: ...

    def leak(self, leak: Leak) -> None: ...

    def close(self, watched: Watched) -> None: ...


class Plain(Quiet):
    """Warnings when they come, a summary at the end: one fact a line, nothing on the lines of others."""

    def __init__(self, file: TextIO | None = None) -> None:
        self.file = file

    def alarm(self, alarm: Alarm) -> None:
        from memfit.report.watching import alarm_line

        if alarm.kind != "leak":  # that comes with its holders
            self._print(alarm_line(alarm))

    def leak(self, leak: Leak) -> None:
        from memfit.report.watching import leak_lines

        for line in leak_lines(leak):
            self._print(line)

    def close(self, watched: Watched) -> None:
        from memfit.report.watching import closing_view

        _console(self.file).print(closing_view(watched))

    def _print(self, line: str) -> None:
        print(f"memfit watch: {line}", file=self.file or sys.stderr, flush=True)


class Live:
    """A picture at the bottom of the terminal; what the program prints scrolls above it."""

    def __init__(self, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.live import Live as RichLive

        self.clock, self._shown = clock, -REFRESH
        self.console = _console(file)
        self.live: Any = RichLive(console=self.console, auto_refresh=False, transient=True)

    def show(self, status: Status) -> None:
        if self.clock() - self._shown < REFRESH:
            return
        from memfit.report.watching import live_view

        if not self.live.is_started:
            self.live.start()
        self.live.update(live_view(status), refresh=True)
        self._shown = self.clock()

    def alarm(self, alarm: Alarm) -> None:
        self._shown = -REFRESH  # the next picture has it

    def leak(self, leak: Leak) -> None: ...

    def close(self, watched: Watched) -> None:
        from memfit.report.watching import closing_view

        self.live.stop()
        self.console.print(closing_view(watched))


def screen_for(live: bool, quiet: bool = False) -> Screen:
    """The live view where it was asked for and there is a terminal; else plain lines."""
    if quiet:
        return Quiet()
    return Live() if live and sys.stderr.isatty() else Plain()


def _console(file: TextIO | None) -> Any:
    from memfit.report.layout import Output

    made = Output(file=file, stderr=file is None, highlight=False, markup=False, emoji=False)
    if not made.is_terminal:
        made.width = 10_000  # nothing is wrapped in a pipe
    return made
