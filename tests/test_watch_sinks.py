"""Sinks: TensorBoard, Weights & Biases and Prometheus get what the log gets; their own libraries where installed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.request import urlopen

import pytest

from memfit.errors import BadInput
from memfit.live.watch.outputs import SINKS, open_sinks
from memfit.nouns.footprint import Levels
from memfit.nouns.sample import Alarm, Header, Sample

HEADER = Header("train.py", "cuda")
SAMPLE = Sample(1.0, 7, "step", Levels(1, 2, 3, 4), Levels(5, 6, 7, 8))
ALARM = Alarm("band", 7, "step", 8, 7, "left the predicted band")
VALUES = {f"{level}_{when}": size for when, sizes in (("now", (1, 2, 3, 4)), ("peak", (5, 6, 7, 8)))
          for level, size in zip(("requested", "allocated", "reserved", "device"), sizes, strict=True)}  # fmt: skip


class Recorded:
    """A library that records how it is called: ("add_scalar", (...), {...})."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


def feed(spec: str) -> None:
    (sink,) = open_sinks([spec], HEADER)
    sink.sample(SAMPLE)
    sink.alarm(ALARM)
    sink.close()


def test_tensorboard_by_a_recorded_library(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Recorded()
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = lambda folder: found if folder == "runs/a" else None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    feed("tensorboard:runs/a")
    scalars = {args[0]: args[1:] for name, args, _ in found.calls if name == "add_scalar"}
    assert scalars == {f"memfit/{name}_bytes": (size, 7) for name, size in VALUES.items()}
    assert [name for name, *_ in found.calls[-2:]] == ["add_text", "close"]


@pytest.mark.filterwarnings("ignore")  # protobuf's own
def test_tensorboard_itself(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    feed(f"tensorboard:{tmp_path}")
    read = events.EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("memfit/reserved_peak_bytes")] == [(7, 7.0)]


@pytest.mark.parametrize("active", [True, False])
def test_wandb_by_a_recorded_library(monkeypatch: pytest.MonkeyPatch, active: bool) -> None:
    run, module = Recorded(), ModuleType("wandb")
    module.run = run if active else None  # type: ignore[attr-defined]
    module.init = lambda project: run if project == "mine" else None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    feed("wandb:mine")
    (logged,) = (args[0] for name, args, _ in run.calls if name == "log")
    assert logged == {f"memfit/{name}_bytes": size for name, size in VALUES.items()} | {"memfit/step": 7}
    assert ("alert" in {name for name, *_ in run.calls}) and (("finish" in {n for n, *_ in run.calls}) != active)


@pytest.mark.filterwarnings("ignore")
def test_wandb_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="memfit-test")
    feed("wandb")
    assert run.summary["memfit/reserved_peak_bytes"] == 7
    run.finish()


def test_prometheus_itself() -> None:
    library = pytest.importorskip("prometheus_client")
    assert library.CollectorRegistry
    (sink,) = open_sinks(["prometheus:0"], HEADER)
    try:
        sink.sample(SAMPLE)
        sink.alarm(ALARM)
        port = sink.server.server_address[1]  # type: ignore[attr-defined]
        text = urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    finally:
        sink.close()
    assert 'memfit_memory_bytes{level="reserved",run="train.py",when="peak"} 7.0' in text
    assert 'memfit_alarms_total{kind="band",run="train.py"} 1.0' in text


def test_prometheus_by_a_recorded_library(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[tuple[str, ...], float] = {}
    served: list[int] = []

    class Metric:
        def __init__(self, name: str, *_: Any, **__: Any) -> None:
            self.key: tuple[str, ...] = (name,)

        def labels(self, *labels: str) -> Metric:
            made = Metric(self.key[0])
            made.key = (self.key[0], *labels)
            return made

        def set(self, value: float) -> None:
            values[self.key] = value

        def inc(self) -> None:
            values[self.key] = values.get(self.key, 0) + 1

    module = ModuleType("prometheus_client")
    module.Gauge = module.Counter = Metric  # type: ignore[attr-defined]
    module.CollectorRegistry = object  # type: ignore[attr-defined]
    module.start_http_server = (  # type: ignore[attr-defined]
        lambda port, registry: (served.append(port), (Recorded(), None))[1]
    )
    monkeypatch.setitem(sys.modules, "prometheus_client", module)
    feed("prometheus")
    assert served == [9400]
    assert values["memfit_memory_bytes", "train.py", "device", "peak"] == 8
    assert values["memfit_alarms", "train.py", "band"] == 1 and values["memfit_step", "train.py"] == 7


def test_a_port_that_cannot_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client")
    with pytest.raises(BadInput, match="cannot serve on port seven"):
        open_sinks(["prometheus:seven"], HEADER)


def test_only_the_level_that_is_known_from_outside() -> None:
    from memfit.live.watch.outputs import _series

    assert dict(_series(Header("x", "nvml"), SAMPLE)) == {"device_now": 4, "device_peak": 8}
    seldom = Sample(1.0, 7, "step", Levels(0, 0, 0, 4), Levels(0, 0, 0, 8), counted=False)
    assert dict(_series(Header("x", "tensors"), seldom)) == {"device_now": 4, "device_peak": 8}
    assert set(SINKS) == {"tensorboard", "wandb", "prometheus"}
