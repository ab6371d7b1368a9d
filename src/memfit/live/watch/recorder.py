"""The recorder passes samples to log, alarm rules, sinks and screen, and keeps what a footprint needs."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from memfit.allocator.replay import highest
from memfit.documents import watch_log
from memfit.errors import BadInput
from memfit.footprints.band import Alarms
from memfit.live.watch.outputs import Screen, Sink
from memfit.nouns.footprint import Levels
from memfit.nouns.sample import Alarm, Header, Leak, Sample, Status, Watched
from memfit.nouns.tape import Phase, Role
from memfit.units import human

MOST_SAMPLES = 8192  # kept in memory; beyond these, neighbours of one phase are merged (the log has every sample)


def check_log(path: Path | None) -> None:
    """Raise BadInput for a file that holds anything but a log: appending would make both unreadable."""
    try:
        if path is None or not path.is_file():  # a new file, or a pipe
            return
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}", hint="name another log file") from None
    if head and not watch_log.known(head):
        raise BadInput(f"{path} is no log of memfit watch: nothing is appended to it", hint="name another log file")


class Log:
    """Appends JSON lines, each by one call: a crash loses nothing that was recorded before it."""

    def __init__(self, path: Path) -> None:
        check_log(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.cut = _cut_short(path)
            self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise BadInput(f"cannot write {path}: {error.strerror or error}", hint="name another log file") from None

    def write(self, line: bytes) -> None:
        """Write a line, on one of its own where the last one was cut short; a full disk ends the log, never the run."""
        if self.file < 0:
            return
        line = b"\n" * self.cut + line
        try:
            self.cut = os.write(self.file, line) < len(line)
        except OSError as error:
            self.close()
            with suppress(OSError):
                print(f"memfit watch: the log ends here: {error.strerror}", file=sys.stderr)

    def close(self) -> None:
        if self.file >= 0:
            os.close(self.file)
        self.file = -1


def _cut_short(path: Path) -> bool:
    """Return whether a file's last line has no end, because whoever wrote it was killed or the disk was full."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


class Recorder:
    """One watched run under way."""

    def __init__(self, header: Header, log: Path | None, sinks: Sequence[Sink], screen: Screen) -> None:
        self.header, self.sinks, self.screen = header, sinks, screen
        self.unread = False  # whether the screen's stream was closed by its reader
        self.alarm_rules = Alarms(header)
        self.samples: list[Sample] = []
        self.peaks: dict[Phase, Levels] = {}
        self.alarms: list[Alarm] = []
        self.leaks: list[Leak] = []
        self.shares: tuple[tuple[Role, int], ...] = ()
        self.log = Log(log) if log is not None else None
        self.run_id = secrets.token_hex(4)  # another watch may append to the same log meanwhile
        self._write(watch_log.line(header, self.run_id))

    def add(self, sample: Sample) -> None:
        """Record one more sample."""
        self.samples.append(sample)
        if len(self.samples) > MOST_SAMPLES:
            self.samples = thinned(self.samples)
        self.peaks[sample.phase] = highest(self.peaks.get(sample.phase, sample.peak), sample.peak)
        if self.log is not None:
            self._write(watch_log.line(sample, self.run_id))
        for sink in self.sinks:
            sink.sample(sample)
        for alarm in self.alarm_rules.look(sample):
            self.alarm(alarm)
        self._show(self.screen.show, self.status)

    def alarm(self, alarm: Alarm) -> None:
        """Record an alarm, and raise it everywhere."""
        self.alarms.append(alarm)
        self._write(watch_log.line(alarm, self.run_id))
        for sink in self.sinks:
            sink.alarm(alarm)
        self._show(self.screen.alarm, alarm)

    def leak(self, leak: Leak, phase: Phase) -> None:
        """Record a leak with its holders, and raise it as an alarm."""
        self.leaks.append(leak)
        self._write(watch_log.line(leak, self.run_id))
        text = f"live memory grows by {human(leak.per_step)} per {leak.unit}"
        self.alarm(Alarm("leak", leak.until, phase, leak.bytes, 0, text))
        self._show(self.screen.leak, leak)

    def share(self, shares: tuple[tuple[Role, int], ...]) -> None:
        """Record what lies on the card between steps, by role."""
        if shares != self.shares:
            self.shares = shares
            self._write(watch_log.shares_line(shares, self.run_id))

    @property
    def status(self) -> Status:
        return Status(self.header, self.samples[-1], self.peaks, tuple(self.alarms), tuple(self.leaks))

    def watched(self) -> Watched:
        """Return the run so far."""
        return Watched(self.header, tuple(self.samples), tuple(self.alarms), tuple(self.leaks), self.shares)

    def close(self) -> None:
        """End the run: close the screen, the sinks and the log."""
        self._show(self.screen.close, self.watched())
        for sink in self.sinks:
            sink.close()
        if self.log is not None:
            self.log.close()

    def _show(self, call: Callable[..., None], shown: object) -> None:
        """Show something, until the screen's stream is closed; the run then goes on without a screen."""
        if not self.unread:
            try:
                call(shown)
            except OSError:
                self.unread = True

    def _write(self, line: bytes) -> None:
        if self.log is not None:
            self.log.write(line)


def thinned(samples: Sequence[Sample]) -> list[Sample]:
    """Merge every two neighbours of one phase: keep the later one with counted tensors, and the higher peaks."""
    kept: list[Sample] = []
    for index, sample in enumerate(samples):
        before = kept[-1] if kept else None
        if index % 2 and before is not None and before.phase == sample.phase:
            peak = highest(before.peak, sample.peak)
            whole = sample.whole_card or before.whole_card
            kept[-1] = replace(sample if sample.counted or not before.counted else before, peak=peak, whole_card=whole)
        else:
            kept.append(sample)
    return kept
