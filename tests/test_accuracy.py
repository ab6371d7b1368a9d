"""Published measurements: mapped by what their columns say, predicted within what docs/accuracy.md states."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

import verdicts  # noqa: E402
from memfit.tables.optimizers import OPTIMIZERS  # noqa: E402
from published import main as page  # noqa: E402
from published.case import NotCovered  # noqa: E402
from published.frameworks import case_of  # noqa: E402
from published.lengths import DATASETS, drawn  # noqa: E402
from published.predict import predict  # noqa: E402
from published.rows import Row, read_rows  # noqa: E402
from published.verdict_cases import fits, out_of_memory  # noqa: E402

DATA = ROOT / "tests" / "data"
ROWS = {row.id: row for row in read_rows(DATA / "published_runs.csv")}
SLOW = {"swift-003", "swift-019"}  # hundreds of micro-batches are replayed for each

# source -> how far a prediction may be off; under-prediction is the worse error
BOUNDS = {
    "litgpt_rt": (-0.01, 0.03), "litgpt_hub": (-0.01, 0.03), "litgpt_thunder": (-0.01, 0.01), "peft": (-0.05, 0.08),
    "torchtune": (-0.05, 0.08), "hfdoc": (-0.05, 0.08), "qwen": (-0.05, 0.05), "swift": (-0.12, 0.12),
}  # fmt: skip


def covered(row: Row) -> bool:
    try:
        case_of(row)
    except NotCovered:
        return False
    return True


COVERED = [row for row in ROWS.values() if covered(row)]


@pytest.mark.parametrize("row", [r for r in COVERED if r.id not in SLOW], ids=lambda r: r.id)
def test_predictions_stay_within_the_bounds_of_their_source(row: Row) -> None:
    low, high = BOUNDS[row.group]
    assert low <= predict(case_of(row)) / row.measured - 1 <= high


def test_a_run_over_many_lengths_is_predicted_from_what_is_known_of_its_data() -> None:
    case = case_of(ROWS["swift-019"])
    fewer = replace(case, orders=tuple(order[:100] for order in case.orders[:2]))
    assert predict(fewer) / ROWS["swift-019"].measured - 1 == pytest.approx(0, abs=0.12)


REASONS = {
    "litgpt_rt-019": "prompts", "litgpt_rt-031": "2 GPUs", "litgpt_thunder-007": "compiled", "peft-043": "dora",
    "torchtune-003": "compiled", "torchtune-020": "2 GPUs", "swift-008": "bitsandbytes",
    "op_cce-001": "operator", "gpumemnet-014": "own layers",
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_rows_that_are_not_covered_say_why(name: str) -> None:
    with pytest.raises(NotCovered, match=REASONS[name]):
        case_of(ROWS[name])


def test_every_row_of_the_excerpt_is_either_predicted_or_refused() -> None:
    assert {row.id for row in COVERED} | set(REASONS) == set(ROWS)
    assert {row.group for row in COVERED} == set(BOUNDS)


@pytest.mark.parametrize("row", COVERED, ids=lambda r: r.id)
def test_the_mapping_reads_columns_and_neither_the_id_nor_the_figure(row: Row) -> None:
    case, other = case_of(row), case_of(replace(row, id="x-1", measured_gib="1.0"))
    assert (case.recipe, case.gpu, case.profile, case.orders) == (other.recipe, other.gpu, other.profile, other.orders)


def test_drawn_lengths_are_the_same_every_time_and_a_batch_is_as_long_as_its_longest() -> None:
    data = DATASETS["cls-fudan-news-zh"]
    one, two = drawn(data, 300, 2048, 1), drawn(data, 300, 2048, 2)
    assert one == drawn(data, 300, 2048, 1)
    assert all(data.shortest <= n <= 2048 for order in (*one, *two) for n in order)
    assert [len(order) // 2 for order in one] == pytest.approx([len(order) for order in two], abs=1)
    assert sum(map(sum, two)) > sum(map(sum, one)) / 2


def test_the_page_names_every_source_and_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["accuracy.py", str(DATA / "published_runs.csv"), "--only", "litgpt_rt"])
    assert page.main() == 0
    said = capsys.readouterr().out
    assert "| litgpt_rt | A |" in said
    assert "FSDP full shard" in said
    assert "| litgpt_rt-011 |" in said


def test_a_missing_csv_is_an_error_with_a_hint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["accuracy.py", "nowhere.csv"])
    assert page.main() == 2
    assert "hint:" in capsys.readouterr().err


def test_no_published_verdict_is_contradicted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ["--oom", str(DATA / "published_oom.csv"), "--fits", str(DATA / "published_fits.csv")]
    monkeypatch.setattr(sys, "argv", ["verdicts.py", *files])
    assert verdicts.main() == 0
    assert "| out of memory | 0 |" in capsys.readouterr().out


def test_a_contradicted_verdict_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "verdict", lambda run: ("fits", run.name))
    files = ["--oom", str(DATA / "published_oom.csv"), "--fits", str(DATA / "published_fits.csv")]
    monkeypatch.setattr(sys, "argv", ["verdicts.py", *files])
    assert verdicts.main() == 1
    assert "but it ran out of memory" in capsys.readouterr().out


def test_the_presets_of_the_runs_that_fitted_have_the_printed_number_of_parameters() -> None:
    printed = {"350m": 355985408, "1b": 1315950592, "7b": 6658859008}
    for run in fits(DATA / "published_fits.csv"):
        size = run.architecture.name.removeprefix("mpt-")
        if size in printed and run.recipe.sequence_length == 2048:
            assert run.architecture.parameters == printed[size]


def test_runs_on_parallelism_that_is_not_modelled_are_refused() -> None:
    rows = read_rows(DATA / "published_oom.csv")
    refused = [row for row in rows if "EP" in row.sharding or "TP" in row.sharding]
    assert refused
    for row in refused:
        with pytest.raises(NotCovered, match="sharding"):
            out_of_memory(row)


ODD = ("", "weird", "-1", "0", "7 things", "x+y", "1e9", "none, then on")


@pytest.mark.parametrize("row", {row.group: row for row in ROWS.values()}.values(), ids=lambda r: r.group)
def test_a_row_unlike_all_others_is_read_or_not_covered(row: Row) -> None:
    for field in fields(Row):
        for odd in ODD if field.name != "id" else ():
            try:
                case_of(replace(row, **{field.name: odd}))
            except NotCovered as reason:
                assert str(reason)


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("torchtune-001", {"optimizer": "SGD"}),
        ("torchtune-001", {"method": "lora", "lora_targets": "w1+w2"}),
        ("peft-001", {"method": "lora", "lora_targets": "no_such_proj"}),
        ("hfdoc-001", {"optimizer": "Lion"}),
    ],
)
def test_what_a_source_never_had_before_is_not_covered(name: str, cells: dict[str, str]) -> None:
    row = ROWS.get(name) or next(r for r in ROWS.values() if r.group == name.rsplit("-", 1)[0])
    with pytest.raises(NotCovered):
        case_of(replace(row, **cells))


def test_a_row_that_breaks_is_reported_and_the_others_are_scored(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = [r for r in COVERED if r.group == "litgpt_rt"][:2]
    real = page.predict
    monkeypatch.setattr(
        page, "predict", lambda case: real(case) if case.described == case_of(good).described else 1 // 0
    )
    (result, _), (nothing, (row, reason)) = page._one(good), page._one(bad)
    assert result is not None and result.predicted > 0
    assert nothing is None and row == bad.id and bad.id in reason and "ZeroDivisionError" in reason
    assert bad.id in capsys.readouterr().err
    assert page._one(replace(good, measured_gib=""))[0] is None


def test_nothing_trained_has_no_temporaries() -> None:
    assert all(row.step_temporaries([]) == () and row.step_bytes([]) == 0 for row in OPTIMIZERS.values())
