"""Distil recorded FSDP2 and DDP runs into tests/data/sharded_runs.json: case, versions, and levels of the last step.

usage: python benchmarks/distil_sharded.py FOLDER --models FOLDER   (record files as *.json; the configs they ran with)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parents[1] / "tests" / "data" / "sharded_runs.json"


def distilled(record: dict[str, Any]) -> dict[str, Any]:
    """Requested peaks of the last micro-batch of step 2, and the highest reserved level."""
    phases = {p["phase"]: p for p in record["phases"]}
    last = f"s2.m{record['case']['accum']}"
    return {
        "id": record["id"], "case": record["case"], "versions": record["versions"],
        "forward": phases[f"{last}.forward"]["requested_peak"],
        "backward": phases[f"{last}.backward"]["requested_peak"],
        "step": phases["s2.optimizer"]["requested_peak"], "reserved": max(p["reserved_peak"] for p in record["phases"]),
    }  # fmt: skip


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", type=Path, required=True, help="the config.json files the runs were made with")
    asked = parser.parse_args()
    records = [json.loads(p.read_text()) for p in sorted(asked.folder.glob("*.json")) if ".tape." not in p.name]
    runs = [distilled(r) for r in records if r["outcome"] == "ok"]
    configs = {
        n: json.loads((asked.models / f"{n}.json").read_text()) for n in sorted({r["case"]["model"] for r in runs})
    }
    TARGET.write_text(json.dumps({"configs": configs, "runs": runs}, separators=(",", ":")) + "\n")
    print(f"{len(runs)} runs, {len(configs)} configs, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
