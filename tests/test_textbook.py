"""Every number printed in the articles the project began from comes out of the public API."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from memfit import Recipe, resolve_model, static_lines
from memfit.closed_form.rule_of_thumb import attention_scores, checkpointed_activations

TABLE = (Path(__file__).parent / "data" / "textbook_numbers.csv").read_text()
ROWS = {row["id"]: row for row in csv.DictReader(TABLE.splitlines())}
UNITS = {"GB": 10**9, "MiB": 2**20, "GiB": 2**30, "B": 1}


def part(parameters: int, role: str, recipe: Recipe, **adapter: int) -> int:
    lines = static_lines(parameters, recipe, **adapter)
    return sum(line.bytes for line in lines if line.role == role and "scales" not in line.label)


def total(parameters: int, recipe: Recipe, without: str = "nothing", **adapter: int) -> int:
    lines = static_lines(parameters, recipe, **adapter)
    return sum(line.bytes for line in lines if without not in line.label)


B4, B7, B1 = 4 * 10**9, 7 * 10**9, 10**9
BF16, FP32, MASTER = Recipe(precision="bf16"), Recipe(precision="fp32"), Recipe(precision="bf16-master")
MASTER8 = MASTER.but(optimizer="adamw-8bit")
STATES32 = BF16.but(optimizer="adamw-32bit")
LORA = Recipe(method="lora", precision="bf16")
ADAPTER = {"adapter_parameters": 20_000_000, "adapter_width": 2}
INT8 = Recipe(method="qlora", quantization="int8")
NF4 = Recipe(method="qlora", quantization="nf4")


def llama():  # type: ignore[no-untyped-def]
    return resolve_model("llama-2-7b")


COMPUTED: dict[str, Callable[[], float]] = {
    "t01": lambda: part(B4, "parameters", BF16),
    "t02": lambda: part(B4, "gradients", BF16),
    "t03": lambda: part(B4, "optimizer_states", BF16),
    "t04": lambda: total(B4, BF16),
    "t05": lambda: part(B4, "gradients", LORA, **ADAPTER),
    "t06": lambda: part(B4, "optimizer_states", LORA, **ADAPTER),
    "t07": lambda: total(B4, LORA, without="adapter weights", **ADAPTER),
    "t08": lambda: part(B7, "parameters", BF16),
    "t09": lambda: part(B7, "parameters", INT8),
    "t10": lambda: part(B7, "parameters", NF4),
    "t11": lambda: part(B7, "parameters", FP32),
    "t12": lambda: part(B7, "optimizer_states", FP32),
    "t13": lambda: part(B7, "gradients", FP32),
    "t14": lambda: part(B7, "gradients", BF16),
    "t15": lambda: checkpointed_activations(llama(), 1, 2048),
    "t16": lambda: checkpointed_activations(llama(), 8, 2048),
    "t17": lambda: attention_scores(llama(), 1, 2048),
    "t18": lambda: total(B1, MASTER) / B1,
    "t19": lambda: total(B7, MASTER),
    "t20": lambda: total(B1, MASTER8) / B1,
    "t21": lambda: total(B7, MASTER) - total(B7, MASTER8),
    "t22": lambda: total(B1, STATES32),
    "t23": lambda: part(B1, "parameters", BF16),
    "t24": lambda: part(B1, "optimizer_states", STATES32),
}


def test_every_row_is_computed() -> None:
    assert set(COMPUTED) == set(ROWS)


@pytest.mark.parametrize("id", ROWS)
def test_textbook_number(id: str) -> None:
    row = ROWS[id]
    expected = float(row["value"]) * UNITS[row["unit"]]
    # an int8 or 8-bit figure differs by its scales, which the tolerance of the row allows for
    assert COMPUTED[id]() == pytest.approx(expected, rel=float(row["relative_tolerance"]))
