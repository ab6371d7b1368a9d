"""Where samples go besides the log: TensorBoard, Weights & Biases, Prometheus, each through its own library.

A new one is one class and one row of SINKS. Values are bytes, as in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from memfit.errors import BadInput, UnknownName
from memfit.nouns.sample import METERS, Alarm, Header, Sample

PREFIX = "memfit"


class Sink(Protocol):
    """What takes samples and alarms."""

    def sample(self, sample: Sample) -> None: ...

    def alarm(self, alarm: Alarm) -> None: ...

    def close(self) -> None: ...


def _series(header: Header, sample: Sample) -> Iterator[tuple[str, int]]:
    """Name -> bytes of every level the meter knows and that was read, now and at its highest."""
    tensors = METERS[header.meter].roles and sample.counted
    for when in ("now", "peak"):
        for level, size in asdict(getattr(sample, when)).items():
            if level == "device" or tensors:
                yield f"{level}_{when}", size


class TensorBoard:
    """argument: the folder of the run, by default TensorBoard's own choice."""

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
    """The run that is active, else a new one in the project `argument`; with a step axis of its own."""

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
    """argument: the port to answer scrapes on, 9400 by default."""

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
class Row:
    """A sink, and what to install for it."""

    make: Callable[[Header, str], Sink]
    packages: str


SINKS: dict[str, Row] = {
    "tensorboard": Row(TensorBoard, "tensorboard"),
    "wandb": Row(WeightsAndBiases, "wandb"),
    "prometheus": Row(Prometheus, "prometheus-client"),
}


def check(specs: Iterable[str]) -> None:
    """Refuse sinks that are in no table, before anything is opened."""
    for spec in specs:
        if spec.partition(":")[0] not in SINKS:
            raise UnknownName("sink", spec.partition(":")[0], SINKS, hint=f"one of {', '.join(SINKS)}")


def open_sinks(specs: Iterable[str], header: Header) -> tuple[Sink, ...]:
    """'tensorboard:runs/a', 'wandb', 'prometheus:9400' -> sinks. Raises BadInput naming the package that is missing."""
    specs = tuple(specs)
    check(specs)
    made: list[Sink] = []
    for spec in specs:
        name, _, argument = spec.partition(":")
        try:
            made.append(SINKS[name].make(header, argument))
        except ImportError as error:
            raise BadInput(
                f"{name} needs a package that is not installed ({error})", hint=f"pip install {SINKS[name].packages}"
            ) from None
    return tuple(made)
