"""The suite of public scripts: its rows, and how the table in docs/scripts.md keeps what was run."""

from __future__ import annotations

import json

import pytest

import scripts
from script_data import DATA
from scripts import Result, Row

ROW = Row("some script", "owner/name", "1234567890", "l4", "python a.py | tee log", refused="CUDA graphs")
ANSWER = {
    "verdict": "fits", "peak": {"reserved": 3 << 30},
    "notes": ["stopped after 2 optimizer steps", "reads of values, answered by defaults (--answer): item 3x"],
}  # fmt: skip


def test_every_row_names_data_that_can_be_made_and_no_name_is_used_twice() -> None:
    rows = scripts.rows()
    assert len({row.name for row in rows}) == len(rows) >= 40
    assert {name for row in rows for name in row.data} <= DATA.keys()
    assert all(len(patch) == 3 for row in rows for patch in row.patches)


@pytest.mark.parametrize(
    ("answer", "log", "outcome"),
    [
        (json.dumps(ANSWER), "", "runs: fits"),
        ("", "text\nerror: a.py:3: CUDA graphs are refused\nhint: leave them out", "refused"),
        ("", "error: a.py:3: CUDA graphs are refused", "FAILS"),  # a refusal has a hint
        ("", "error: a.py:3: KeyError: 'x'\nhint: see --debug", "FAILS"),
        ("", "Killed", "FAILS"),
    ],
)
def test_what_became_of_a_row_is_read_from_what_was_printed(answer: str, log: str, outcome: str) -> None:
    assert scripts.read(ROW, answer, log).outcome == outcome


def test_the_table_keeps_what_is_not_run_again() -> None:
    result = Result("runs: fits", "3.00", "12", "item 3x", "after its steps | the script failed", "2026-11-26")
    other = Row("other", "owner/name", "1234567890", "l4", "python b.py", about="patched")
    text = scripts.table([ROW, other], {ROW.name: result})
    assert scripts.kept(text) == {ROW.name: result}
    assert scripts.table([ROW, other], scripts.kept(text)) == text
