"""The outputs of a watched run besides its log: a screen, and sinks that each write through a library of their own.

A new sink is one class and one row of SINKS. Values are bytes, as in the log.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TextIO

from memfit.errors import BadInput, UnknownName
from memfit.nouns.sample import METERS, Alarm, Header, Leak, Sample, Status, Watched

PREFIX = "memfit"  # begins the names of metrics
REFRESH = 0.5  # seconds between two updates of a live view


class Sink(Protocol):
    """Takes samples and alarms."""

    def sample(self, sample: Sample) -> None: ...

    def alarm(self, alarm: Alarm) -> None: ...

    def close(self) -> None: ...


def _series(header: Header, sample: Sample) -> Iterator[tuple[str, int]]:
    """Yield (name, bytes) of the current and the peak value of every level that was read."""
    tensors = METERS[header.meter].roles and sample.counted
    for when in ("now", "peak"):
        for level, size in asdict(getattr(sample, when)).items():
            if level == "device" or tensors:
                yield f"{level}_{when}", size


class TensorBoard:
    """Writes into the folder `argument`, by default the one that TensorBoard chooses."""

    def __init__(self, header: Header, argument: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.header = header
        self.writer: Any = SummaryWriter(argument or None)  # type: ignore[no-untyped-call, unused-ignore]

    def sample(self, sample: Sample) -> None:
        for name, size in _series(self.header, sample):
            self.writer.add_scalar(f"{PREFIX}/{name}_bytes", size, sample.step)

    def alarm(self, alarm: Alarm) -> None:
        self.writer.add_text(f"{PREFIX}/{alarm.kind}", alarm.text, alarm.step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Logs to the active run, else to a new one in the project `argument`, with a step axis of its own."""

    def __init__(self, header: Header, argument: str) -> None:
        import wandb

        self.header = header
        self.owns = wandb.run is None
        self.run: Any = wandb.run or wandb.init(project=argument or PREFIX)
        self.run.define_metric(f"{PREFIX}/step")
        self.run.define_metric(f"{PREFIX}/*", step_metric=f"{PREFIX}/step")

    def sample(self, sample: Sample) -> None:
        values = {f"{PREFIX}/{name}_bytes": size for name, size in _series(self.header, sample)}
        self.run.log(values | {f"{PREFIX}/step": sample.step})

    def alarm(self, alarm: Alarm) -> None:
        self.run.alert(title=f"memfit: {alarm.kind}", text=alarm.text)

    def close(self) -> None:
        if self.owns:
            self.run.finish()


class Prometheus:
    """Answers scrapes on the port `argument`, by default 9400."""

    def __init__(self, header: Header, argument: str) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

        self.header = header
        registry = CollectorRegistry()
        self.bytes = Gauge("memfit_memory_bytes", "Memory of the run", ["run", "level", "when"], registry=registry)
        self.step = Gauge("memfit_step", "Finished optimizer steps", ["run"], registry=registry)
        self.alarms = Counter("memfit_alarms", "Warnings so far", ["run", "kind"], registry=registry)
        self.registry = registry
        try:
            self.server, _ = start_http_server(int(argument or 9400), registry=registry)
        except (OSError, ValueError, OverflowError) as error:
            raise BadInput(f"cannot serve on port {argument or 9400}: {error}", hint="prometheus:9401") from None

    def sample(self, sample: Sample) -> None:
        for name, size in _series(self.header, sample):
            level, _, when = name.rpartition("_")
            self.bytes.labels(self.header.name, level, when).set(size)
        self.step.labels(self.header.name).set(sample.step)

    def alarm(self, alarm: Alarm) -> None:
        self.alarms.labels(self.header.name, alarm.kind).inc()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@dataclass(frozen=True, slots=True)
class SinkKind:
    """How to open a sink, and which packages to install for it."""

    make: Callable[[Header, str], Sink]
    packages: str


SINKS: dict[str, SinkKind] = {
    "tensorboard": SinkKind(TensorBoard, "tensorboard"),
    "wandb": SinkKind(WeightsAndBiases, "wandb"),
    "prometheus": SinkKind(Prometheus, "prometheus-client"),
}


def open_sinks(specs: Iterable[str], header: Header) -> tuple[Sink, ...]:
    """Open sinks given as 'tensorboard:runs/a', 'wandb', 'prometheus:9400'.

    Raises UnknownName before anything is opened, and BadInput for a missing package.
    """
    parts = [spec.partition(":") for spec in specs]
    for name, _, _ in parts:
        if name not in SINKS:
            raise UnknownName("sink", name, SINKS, hint=f"one of {', '.join(SINKS)}")
    made: list[Sink] = []
    for name, _, argument in parts:
        try:
            made.append(SINKS[name].make(header, argument))
        except ImportError as error:
            raise BadInput(
                f"{name} needs a package that is not installed ({error})", hint=f"pip install {SINKS[name].packages}"
            ) from None
    return tuple(made)


# --- screens ---


class Screen(Protocol):
    """Shows a run: a live view, or plain lines."""

    def show(self, status: Status) -> None: ...

    def alarm(self, alarm: Alarm) -> None: ...

    def leak(self, leak: Leak) -> None: ...

    def close(self, watched: Watched) -> None: ...


class Quiet:
    """Shows nothing."""

    def show(self, status: Status) -> None: ...

    def alarm(self, alarm: Alarm) -> None: ...

    def leak(self, leak: Leak) -> None: ...

    def close(self, watched: Watched) -> None: ...


class Plain(Quiet):
    """Prints warnings as they come and a summary at the end, one fact per line, and overwrites nothing."""

    def __init__(self, file: TextIO | None = None) -> None:
        self.file = file

    def alarm(self, alarm: Alarm) -> None:
        from memfit.report.watching import alarm_line

        if alarm.kind != "leak":  # `leak` prints those, with their holders
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


class Live(Quiet):
    """Draws a view at the bottom of the terminal; what the program prints scrolls above it."""

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
        self._shown = -REFRESH  # the next call of `show` draws it

    def close(self, watched: Watched) -> None:
        from memfit.report.watching import closing_view

        self.live.stop()
        self.console.print(closing_view(watched))


def screen_for(live: bool, quiet: bool = False) -> Screen:
    """Return the live view where it is wanted and there is a terminal; else plain lines."""
    if quiet:
        return Quiet()
    return Live() if live and sys.stderr.isatty() else Plain()


def _console(file: TextIO | None) -> Any:
    from memfit.report.layout import Output

    console = Output(file=file, stderr=file is None, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 10_000  # nothing is wrapped in a pipe
    return console
