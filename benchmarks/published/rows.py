"""The noun Row: one published measurement, read from the CSV with nothing but its text parsed."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

GIB = 1 << 30
DEFAULT = Path(__file__).resolve().parents[3] / "shared" / "data" / "measured_runs.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the CSV. Field names are its column names."""

    id: str = ""
    source: str = ""
    model: str = ""
    params_b: str = ""
    method: str = ""
    lora_rank: str = ""
    lora_targets: str = ""
    weight_dtype: str = ""
    quant: str = ""
    optimizer: str = ""
    micro_batch: str = ""
    grad_accum: str = ""
    seq_len: str = ""
    checkpointing: str = ""
    attention: str = ""
    loss_kernel: str = ""
    framework: str = ""
    framework_version: str = ""
    gpu: str = ""
    n_gpus: str = ""
    sharding: str = ""
    measured_gib: str = ""
    unit_note: str = ""
    quantity: str = ""
    quality: str = ""
    notes: str = ""
    note: str = ""
    verdict: str = ""

    @property
    def measured(self) -> int:
        """Bytes; 0 when the row gives none."""
        return round(float(self.measured_gib) * GIB) if self.measured_gib else 0

    @property
    def group(self) -> str:
        """The source's short name: the id without its number."""
        return self.id.rsplit("-", 1)[0]

    @property
    def bound(self) -> bool:
        """Whether the lengths of its samples are not published, so that a prediction at the longest is a bound."""
        return self.seq_len.startswith(("<=", "alpaca"))

    def stated(self, name: str) -> int:
        """The whole number that the notes give as `name=...`; 0 where they do not."""
        found = re.search(rf"\b{name}=(\d+)", self.notes)
        return int(found[1]) if found else 0

    def number(self, column: str, default: int = 0) -> int:
        """The first whole number in a column."""
        found = re.search(r"\d+", str(getattr(self, column)))
        return int(found.group()) if found else default

    def version(self, package: str) -> tuple[int, ...]:
        """'torch 2.1.1' in framework_version -> (2, 1, 1); () when the package is not named."""
        found = re.search(rf"\b{package}[ =]?(\d+(?:\.\d+)*)", self.framework_version)
        return tuple(map(int, found[1].split("."))) if found else ()


_COLUMNS = {f.name for f in fields(Row)}
# source -> what its figures are where the CSV infers it. nanotron logs what is allocated and reserved: five of its
# six runs without tensor parallelism reserve in a trace what the plot shows, to 1.4 %, and allocate 3 to 18 % less
QUANTITIES = {"ultrascale": "reserved"}


def read_rows(path: Path) -> list[Row]:
    """Every row of a CSV; columns that are not known are left out."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [Row(**{k: v or "" for k, v in line.items() if k in _COLUMNS}) for line in csv.DictReader(file)]
    return [replace(row, quantity=QUANTITIES.get(row.group, row.quantity)) for row in rows]
