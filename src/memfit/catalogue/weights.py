"""The noun Weights: a fitted linear model by the names of its features, and its bytes."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from typing import Any

RANGE = 127  # of a weight, in the unit that the model's user chose


@dataclass(frozen=True, slots=True)
class Weights:
    """`idf`: name -> how rare it is; `rows`: name -> a signed byte for each class, as hex; `about`: what it was fitted to."""

    classes: tuple[str, ...]
    bias: tuple[int, ...]
    idf: dict[str, float]
    rows: dict[str, str]
    about: dict[str, Any]

    def weights(self, name: str) -> memoryview:
        """Of one feature, for each class."""
        return memoryview(bytes.fromhex(self.rows[name])).cast("b")

    @classmethod
    def of(
        cls, classes: list[str], bias: list[int], features: dict[str, tuple[float, list[int]]], about: dict[str, Any]
    ) -> Weights:
        """From whole numbers, which are cut to the range of a byte."""
        rows = {
            name: bytes(max(-RANGE, min(RANGE, weight)) & 0xFF for weight in row).hex()
            for name, (_, row) in features.items()
        }
        return cls(tuple(classes), tuple(bias), {name: idf for name, (idf, _) in features.items()}, rows, about)

    @classmethod
    def loads(cls, content: bytes) -> Weights:
        """A line of JSON, then a feature a line: name, rarity, weights, with tabs between them; compressed."""
        head, *lines = gzip.decompress(content).decode().splitlines()
        told = json.loads(head)
        split = [line.split("\t") for line in lines]
        idf, rows = {name: float(rare) for name, rare, _ in split}, {name: row for name, _, row in split}
        return cls(tuple(told["classes"]), tuple(told["bias"]), idf, rows, told["about"])

    def dumps(self) -> bytes:
        """The same bytes for the same weights."""
        head = json.dumps({"about": self.about, "classes": self.classes, "bias": self.bias})
        lines = (f"{name}\t{self.idf[name]:g}\t{row}" for name, row in self.rows.items())
        return gzip.compress("\n".join([head, *lines, ""]).encode(), mtime=0)
