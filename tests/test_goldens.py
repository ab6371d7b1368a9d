"""Megatron-LM's recorded tests as command lines of a trace, and how their figures are compared; without Megatron-LM."""

from __future__ import annotations

import csv
import json
import struct
from array import array
from pathlib import Path
from typing import Any

import pytest

import goldens

ARGUMENTS: dict[str, Any] = {
    "--num-layers": 12, "--bf16": True, "--transformer-impl": "local", "--data-path": "${DATA_PATH}/text",
    "--save": "${CHECKPOINT_SAVE_PATH}", "--recompute-modules": "[mlp moe_act]", "--moe-layer-freq": "([0]*1+[1]*15)",
    "--data-blend": "1 a",
}  # fmt: skip
RECORDED = {"dev_dgx_a100": (2000, 500), "dev_dgx_h100": (1000, 400)}


def case(recorded: dict[str, tuple[int, int]] = RECORDED, **arguments: Any) -> goldens.Case:
    return goldens.Case("gpt", "some_case", {**ARGUMENTS, **arguments}, {"A": 1}, recorded, 2, 4)


def test_files_become_mock_data_and_everything_else_stays() -> None:
    found = goldens.words(case(), Path("data"))
    assert found[:11] == [
        "--num-layers", "12", "--bf16", "--transformer-impl", "local", "--recompute-modules", "mlp", "moe_act",
        "--moe-layer-freq", "([0]*1+[1]*15)", "--data-blend",
    ]  # fmt: skip
    assert "--mock-data" in found and not any("${" in word for word in found)
    # NullTokenizer adds a token to GPT-2's 50,257 less its last; a row's own size counts its last, too
    for given, wanted in ((None, "50256"), (8193, "8192")):
        argument = {} if given is None else {"--vocab-size": given}
        found = goldens.words(case(**argument), Path("data"))
        assert found.count("--vocab-size") == 1 and found[found.index("--vocab-size") + 1] == wanted


def test_the_command_names_machines_cards_and_the_last_rank() -> None:
    found = goldens.command(case(), answers=["routing=1.1"])
    assert found[found.index("--answer") + 1] == "routing=1.1"
    start = found.index("--")
    assert found[found.index("--gpu") + 1] == "8xh100" and found[found.index("--ranks") + 1] == "last"
    assert found[start + 1 : start + 7] == ["torchrun", "--nnodes", "2", "--nproc_per_node", "4", "pretrain_gpt.py"]


def test_a_family_without_mock_data_gets_an_indexed_dataset(tmp_path: Path) -> None:
    goldens.write_data("t5", tmp_path)
    words = goldens.words(goldens.Case("t5", "t", ARGUMENTS, {}, RECORDED), tmp_path)
    assert words[words.index("--data-path") + 1] == str(tmp_path / "data") and "--mock-data" not in words
    vocabulary = Path(words[words.index("--vocab-file") + 1]).read_text().split()
    index, tokens = (tmp_path / "data.idx").read_bytes(), array("i", (tmp_path / "data.bin").read_bytes())
    magic, _, kind, sequences, documents = struct.unpack_from("<9sQBQQ", index)
    assert (magic, kind, len(index)) == (b"MMIDIDX\0\0", 4, 34 + 12 * sequences + 8 * documents)
    lengths, ends = array("i", index[34 : 34 + 4 * sequences]), array("q", index[-8:])
    assert sum(lengths) == len(tokens) and ends[0] == sequences and max(tokens) < len(vocabulary) == 28996


@pytest.mark.parametrize(
    ("change", "runs"),
    [
        ({}, True),
        ({"--transformer-impl": "transformer_engine"}, False),
        ({"--fp8-format": "hybrid"}, True),
        ({"--spec": "${SPEC}"}, False),
        ({"--expert-model-parallel-size": 4, "--tensor-model-parallel-size": 2}, True),
        ({"--expert-model-parallel-size": 8, "--pipeline-model-parallel-size": 4}, False),
    ],
)
def test_what_does_not_run_has_a_reason(tmp_path: Path, change: dict[str, str], runs: bool) -> None:
    assert goldens.why_not(case(), tmp_path)  # a clone without the script
    (tmp_path / "pretrain_gpt.py").touch()
    assert (goldens.why_not(case(**change), tmp_path) == "") is runs
    engine = {"--transformer-impl": "transformer_engine"}
    assert goldens.why_not(case(**engine), tmp_path, tmp_path) == ""  # its Python is given


def answers(*traced: int) -> list[goldens.Answer]:
    return [goldens.Answer(case(), ((high, 1),)) for high in traced]


def test_a_trace_is_held_to_the_nearest_environment() -> None:
    near, far = answers(1001, 1890)
    assert (near.nearest, far.nearest) == ("dev_dgx_h100", "dev_dgx_a100")
    assert near.error == pytest.approx(0.001) and far.error == pytest.approx(-0.055)


@pytest.mark.parametrize(("traced", "met"), [((1001,), True), ((1001, 1002), False), ((), False)])
def test_bars_are_about_the_cases_that_they_name(traced: tuple[int, ...], met: bool) -> None:
    found = answers(*traced) or [goldens.Answer(case(), reason="it failed")]
    lines = {line.split(" | ")[0].strip("| "): done for line, done in goldens.judged(found)}
    assert lines["local dense"] is met
    assert lines["rows that do not run"] is bool(traced)
    assert "fp8" not in lines


def test_a_log_gives_both_figures_of_each_iteration() -> None:
    def lines(step: int, high: int, now: int) -> str:
        return "".join(
            json.dumps(line) + "\n" for line in ([step, goldens.CURRENT, now], [step, goldens.HIGHEST, high])
        )

    assert goldens.logged(lines(2, 30, 20) + lines(1, 10, 20)) == ((10, 20), (30, 20))
    assert goldens.logged("") == ()


def test_rows_of_one_test_are_one_case(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    figures = {f"{goldens.HIGHEST}.max": "1000.0", f"{goldens.CURRENT}.max": ""}
    row = {"family": "gpt", "all_args": json.dumps(ARGUMENTS), "env_vars": "", **figures}
    rows = [
        {**row, "case": "a", "env": "lts", "nodes": "", "gpus_per_node": ""},
        {**row, "case": "a", "env": "dev_dgx_h100", "nodes": "2", "gpus_per_node": "4"},
        {**row, "case": "b", "env": "lts", "nodes": "", "gpus_per_node": "", f"{goldens.HIGHEST}.max": ""},
    ]
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    (found,) = goldens.read_cases(file)
    assert (found.nodes, found.per_node, found.card) == (2, 4, "h100")
    assert found.recorded == {"lts": (1000, 0), "dev_dgx_h100": (1000, 0)}
