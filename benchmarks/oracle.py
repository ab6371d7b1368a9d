"""The virtual GPU against recorded runs of PyTorch's CUDA build, phase by phase: `python benchmarks/oracle.py [DIR]`.

DIR holds records (`*.json`, as ../shared/data/oracle_runs). Prints a line for every record and phase that is out of
bounds, and a summary; exits with 1 if any is.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DEFAULT = HERE.parent.parent / "shared" / "data" / "oracle_runs"
MODELS = HERE.parent.parent / "shared" / "data" / "models"
SUMMARY = HERE / "published" / "oracle.json"  # read by the accuracy page
LEVELS = ("requested", "allocated", "reserved")
BOUNDS = {"requested": 0.001, "allocated": 0.005, "reserved": 0.02}
CARDS = {80: "a100-80gb", 86: "rtx-3090", 89: "rtx-4090", 90: "h100", 100: "b200", 120: "rtx-5090"}
Peaks = dict[str, tuple[int, int, int]]  # phase -> requested, allocated, reserved


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run's peaks by phase, in order, and the phase it ran out of memory in."""

    peaks: Peaks
    oom: str | None


def phase_of(label: str) -> str:
    """Map a record's label to a phase that both sides have: load, s1.m1.forward, s1.m1.backward, s1.optimizer ..."""
    if "." not in label:
        return {"eval": "eval", "train_end": "end"}.get(label, "load")
    step, *rest = label.split(".")
    kind = rest[-1]
    if kind in ("forward", "backward"):
        return label
    return f"{step}.optimizer" if kind == "optimizer" else f"{step}.between"


def recorded(record: dict[str, Any]) -> Outcome:
    peaks: Peaks = {}
    for row in record["phases"]:
        label = row["phase"].removeprefix("oom:")
        _raise(peaks, phase_of(label), tuple(row[f"{level}_peak"] for level in LEVELS))
    oom = phase_of(record["error"]["phase"]) if record["outcome"] == "oom" else None
    return Outcome(peaks, oom)


def _raise(peaks: Peaks, phase: str, levels: tuple[int, ...]) -> None:
    before = peaks.get(phase, (0, 0, 0))
    peaks[phase] = tuple(max(pair) for pair in zip(before, levels, strict=True))  # type: ignore[assignment]


def setup_of(case: dict[str, Any], models: Path) -> Any:
    from memfit.virtual.jobs.recipe import Setup

    config = json.loads((models / f"{case['model']}.json").read_text())
    tune, _, targets = case["tune"].partition("_")
    method = "qlora" if tune.startswith("qlora") else "lora" if tune.startswith("lora") else "full"
    default = {"gpt2": ("c_attn",), "gpt_neox": ("query_key_value",)}.get(config["model_type"], ("q_proj", "v_proj"))
    nested = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    rank = int(tune.removeprefix("q").removeprefix("lora")) if method != "full" else 16
    loads = {"to": "host", "pretrained": "checkpoint"}
    return Setup(
        config=config, trainer={"torch": "torch", "trainer": "transformers", "sft": "trl"}[case["method"]],
        method=method,
        dtype=case["weights"], autocast="bf16" if case["autocast"] else "",
        quantization=nested if method == "qlora" else {},
        prepare_kbit=case["kbit_prepare"], rank=rank, alpha=2 * rank, dropout=case["lora_dropout"],
        targets="all-linear" if targets == "all" else default, optimizer=case["optim"], checkpointing=case["ckpt"],
        attention=case["attn"], micro_batch=case["mb"], sequence=case["seq"], accumulation=case["accum"],
        clip=case["clip"],
        steps=case["steps"], evaluate=case["eval"], mask={"pad": "padded"}.get(case["mask"], case["mask"]),
        load="checkpoint" if method == "qlora" else loads.get(case["load"], case["load"]),
        labelled=case["label_frac"], holds_outputs=case["hold"] == "outputs", use_cache=case["use_cache"],
    )  # fmt: skip


def _card_of(case: dict[str, Any], record: dict[str, Any]) -> Any:
    """Return the recorded card, all of whose memory the allocator may take."""
    from memfit.catalogue.cards import find_gpu

    memory = int(case["total_gib"] * 2**30)
    return replace(
        find_gpu(CARDS[case["cc"]]), total_bytes=memory, context_bytes=0, sm_count=record["device"]["sm_count"]
    )


def _run(setup: Any, gpu: Any, alloc_conf: str, capacity: int | None) -> tuple[Any, dict[str, int]]:
    """Run a job on a virtual card to its end or until it is out of memory; return its tape and its reads."""
    import torch

    from memfit.virtual.jobs import run
    from memfit.virtual.observer import Observer
    from memfit.virtual.virtual_gpu import Answers, virtual_gpu

    with virtual_gpu(gpu, capacity=capacity, alloc_conf=alloc_conf, answers=Answers.of(["routing=first"])) as card:
        observer = Observer(card)
        try:
            with observer.watching():
                run(setup, observer)
        except torch.OutOfMemoryError:
            pass
        return observer.tape({}), dict(card.answers.reads)


def traced(record: dict[str, Any], models: Path, unroll: bool = False) -> Outcome | None:
    """Trace a record's job. unroll: from shallow models; None where blocks do not repeat."""
    from memfit.nouns.alloc_settings import parse_alloc_conf

    case = record["case"]
    gpu = _card_of(case, record)
    conf = "expandable_segments:True" if case["expandable"] else ""
    setup = setup_of(case, models)
    if unroll:
        from memfit.virtual.repeated_blocks import depths

        depths.WORTH = 100.0  # however few layers there are
        plan = depths.depths(setup)
        found = depths.unrolled(plan, lambda s: _run(s, gpu, conf, None), gpu) if plan else None
        if found is None:
            return None
        tape = found[0]
    else:
        tape, _ = _run(setup, gpu, conf, -1)
    return Outcome(*peaks_of(tape, gpu.total_bytes, parse_alloc_conf(conf)))


def peaks_of(tape: Any, capacity: int, settings: Any) -> tuple[Peaks, str | None]:
    """Return a tape's peaks by the phases of `phase_of`, and the phase it ran out of memory in."""
    from memfit.allocator.replay import replay

    timeline = replay(tape.events, capacity=capacity, settings=settings)
    peaks: Peaks = {}
    last = ""
    names = _names(tape.events)
    for span in timeline.spans:
        last = names[span.first]
        _raise(peaks, last, (span.peak.requested, span.peak.allocated, span.peak.reserved))
    return peaks, last if timeline.oom else None


def _names(events: Any) -> dict[int, str]:
    """Return the phase, as `phase_of` names it, of every mark on a tape, by position."""
    from memfit.nouns.tape import Mark

    names, step, micro, stepped = {}, 1, 0, False
    for position, event in enumerate(events):
        if not isinstance(event, Mark):
            continue
        kind = event.instant
        if event.phase in ("load", "eval"):
            names[position] = event.phase
            continue
        if kind == "forward":
            step, micro, stepped = (step + 1, 1, False) if stepped else (step, micro + 1, False)
        stepped = stepped or kind == "optimizer step"
        names[position] = {
            "forward": f"s{step}.m{micro}.forward", "backward": f"s{step}.m{micro}.backward",
            "optimizer step": f"s{step}.optimizer",
        }.get(kind, f"s{step}.between")  # fmt: skip
    return names


def compare(real: Outcome, ours: Outcome) -> list[tuple[str, str, int, int]]:
    """Return (phase, level, real, ours) of what is out of bounds."""
    wrong = []
    for phase, peaks in real.peaks.items():
        if phase in ("end",) or phase.endswith("between") or phase not in ours.peaks:
            continue  # where one side marks an instant later, peaks of the quiet phases between differ
        for level, a, b in zip(LEVELS, peaks, ours.peaks[phase], strict=True):
            if abs(b - a) > BOUNDS[level] * max(a, 1):
                wrong.append((phase, level, a, b))
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT)
    parser.add_argument(
        "--models", type=Path, default=MODELS, help="folder of config.json files named after the models"
    )
    parser.add_argument("--only", default="", help="records whose name contains this")
    parser.add_argument(
        "--unrolled", action="store_true", help="unroll tapes of shallow models instead of tracing whole ones"
    )
    parser.add_argument("--write", action="store_true", help="keep the summary for docs/accuracy.md")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    paths = sorted(
        p for p in options.folder.glob("*.json") if options.only in p.name and not p.name.endswith(".tape.json")
    )
    if not paths:
        print(f"no records in {options.folder}", file=sys.stderr)
        return 2
    good = same = whole = 0
    began = time.perf_counter()
    for path in paths:
        record = json.loads(path.read_text())
        real = recorded(record)
        try:
            ours = traced(record, options.models, options.unrolled)
        except Exception as error:  # a record that cannot be traced counts as a failure
            print(f"{record['id']}: {type(error).__name__}: {str(error)[:200]}")
            continue
        if ours is None:
            whole += 1
            continue
        wrong = compare(real, ours)
        for phase, level, a, b in wrong:
            print(f"{record['id']}: {phase} {level} {a:,} recorded, {b:,} traced ({(b - a) / max(a, 1):+.2%})")
        if real.oom != ours.oom:
            print(f"{record['id']}: out of memory at {real.oom} recorded, {ours.oom} traced")
        elif not wrong:
            good += 1
            same += real.peaks.get("s2.m1.backward") == ours.peaks.get("s2.m1.backward")
        gc.collect()
    if whole:
        print(f"{whole} records do not unroll")
    print(
        f"{good} of {len(paths) - whole} records within {', '.join(f'{k} {v:.1%}' for k, v in BOUNDS.items())}; "
        f"{same} equal to the byte in the backward of the second step; {time.perf_counter() - began:.0f} s"
    )
    if options.write:
        SUMMARY.write_text(json.dumps({"records": len(paths), "within": good, "equal": same}) + "\n", encoding="utf-8")
    return 0 if good == len(paths) - whole else 1


if __name__ == "__main__":
    sys.exit(main())
