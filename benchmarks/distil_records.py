"""Distil recorded runs into tests/data/recorded_runs.json: the case, its versions, and requested bytes of the second step.

usage: python benchmarks/distil_records.py FOLDER... --models FOLDER   (record files as *.json; the configs they ran with)
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
    asked = parser.parse_args()
    runs, configs = [], {}
    for path in sorted(p for folder in asked.folders for p in folder.glob("*.json") if ".tape." not in p.name):
        record = json.loads(path.read_text())
        if record["outcome"] != "ok":
            continue
        name = record["case"]["model"]
        configs[name] = json.loads((asked.models / f"{name}.json").read_text())
        runs.append(distilled(record))
    TARGET.write_text(
        json.dumps({"configs": configs, "runs": sorted(runs, key=lambda r: r["id"])}, separators=(",", ":")) + "\n"
    )
    print(f"{len(runs)} runs, {len(configs)} configs, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
