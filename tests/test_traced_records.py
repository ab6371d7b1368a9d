"""The virtual GPU against recorded runs of PyTorch's CUDA build: the same trainers' code, to the byte."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import oracle
from memfit.virtual.repeated_blocks import depths
from smoke import smoke

DATA = json.loads((Path(__file__).parent / "data" / "recorded_runs.json").read_text())
SMALL = ("smollm2-135m", "qwen2.5-0.5b", "pythia-410m", "gpt2", "qwen3-0.6b", "bert-base-uncased", "llama-3.2-1b")
MULTIPROCESSORS = {80: 108, 89: 128, 90: 132}


def _chosen() -> list[dict[str, Any]]:
    """One recorded run for every model, method, optimizer and kind of checkpointing among the small ones."""
    chosen: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in DATA["runs"]:
        case = run["case"]
        if case["model"] in SMALL and case["ckpt"] in ("none", "nonreentrant", "reentrant"):
            key = (
                case["model"] if case["tune"] == "full" else "",
                case["method"],
                case["tune"],
                case["optim"],
                case["ckpt"],
            )
            chosen.setdefault(key, run)
    return list(chosen.values())


def _kinds(run: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return what a run is one of: trainer x tuning x precision, a model, an optimizer, a kind of checkpointing."""
    case = run["case"]
    return [
        (case["method"], case["tune"], case["weights"], case["autocast"]),
        ("model", case["model"]),
        ("optim", case["optim"]),
        ("ckpt", case["method"], case["ckpt"]),
    ]


def _record(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The run as a record of the oracle, with its model's config in the folder."""
    case = run["case"]
    (folder / f"{case['model']}.json").write_text(json.dumps(DATA["configs"][case["model"]]))
    return {"case": case, "device": {"sm_count": MULTIPROCESSORS[case["cc"]]}}


def _wrong(run: dict[str, Any], peaks: oracle.Peaks) -> list[tuple[str, int, int]]:
    """(what, traced, recorded) of what is not the recorded run's."""
    pairs = [(kind, peaks[f"s2.m1.{kind}"][0], run[kind], 1e-4) for kind in ("forward", "backward")]
    pairs.append(("reserved", max(reserved for _, _, reserved in peaks.values()), run["reserved"], 0.02))
    return [(what, ours, real) for what, ours, real, off in pairs if ours != pytest.approx(real, rel=off)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("run", smoke(_chosen(), _kinds), ids=lambda run: run["id"])
def test_the_traced_run_is_the_recorded_one(run: dict[str, Any], tmp_path: Path) -> None:
    outcome = oracle.traced(_record(run, tmp_path), tmp_path)
    assert outcome is not None and _wrong(run, outcome.peaks) == []


@pytest.mark.filterwarnings("ignore")
def test_the_benchmark_unrolls_two_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python benchmarks/oracle.py --unrolled` on a full and a LoRA run: all phases, the second step to the byte."""
    for model in ("gpt2", "llama-3.2-1b"):
        (tmp_path / f"{model}.json").write_text(json.dumps(DATA["configs"][model]))
    records = Path(__file__).parent / "data" / "oracle"
    monkeypatch.setattr(depths, "WORTH", depths.WORTH)  # the benchmark changes it for the process
    monkeypatch.setattr(sys, "argv", ["oracle.py", str(records), "--models", str(tmp_path), "--unrolled"])
    assert oracle.main() == 0
    printed = capsys.readouterr().out
    assert "2 of 2 records" in printed and "2 equal to the byte" in printed
