"""Distil recorded runs into tests/data/recorded_runs.json: the case, its versions, requested bytes of the second step.

usage: python benchmarks/distil_records.py FOLDER... --models FOLDER [--keep]   (record files as *.json; the configs
they ran with; --keep adds to the runs that are there already)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parents[1] / "tests" / "data" / "recorded_runs.json"
PHASES = ("batch", "forward", "backward")


def distilled(record: dict[str, Any]) -> dict[str, Any]:
    """What a test needs of one record."""
    phases = {p["phase"]: p for p in record["phases"]}
    second = {name: phases[f"s2.m1.{name}"] for name in PHASES}
    return {
        "id": record["id"], "case": record["case"], "versions": record["versions"],
        "before": second["batch"]["requested"], "forward": second["forward"]["requested_peak"],
        "after_forward": second["forward"]["requested"], "backward": second["backward"]["requested_peak"],
        "reserved": record["peak"]["reserved"],
    }  # fmt: skip


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--models", type=Path, required=True, help="the config.json files the runs were made with")
    parser.add_argument("--keep", action="store_true", help="add to the runs that are there already")
    asked = parser.parse_args()
    there = json.loads(TARGET.read_text()) if asked.keep else {"configs": {}, "runs": []}
    runs, configs = {run["id"]: run for run in there["runs"]}, there["configs"]
    for path in sorted(p for folder in asked.folders for p in folder.glob("*.json") if ".tape." not in p.name):
        record = json.loads(path.read_text())
        if record["outcome"] != "ok":
            continue
        name = record["case"]["model"]
        configs[name] = json.loads((asked.models / f"{name}.json").read_text())
        runs[record["id"]] = distilled(record)
    TARGET.write_text(
        json.dumps({"configs": configs, "runs": [runs[id] for id in sorted(runs)]}, separators=(",", ":")) + "\n"
    )
    print(f"{len(runs)} runs, {len(configs)} configs, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
