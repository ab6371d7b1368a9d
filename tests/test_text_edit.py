"""Editing single keys of a text: the content is as wanted, and every other line stays as it was."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import BadInput
from memfit.frameworks.text_edit import REMOVED, applied, edited

WORDS = st.text("abz _-:#'\"\n{[é", max_size=8)
NAMES = st.sampled_from("abcdefgh")
SCALARS = st.none() | st.booleans() | st.integers(-9, 99) | st.floats(allow_nan=False, allow_infinity=False) | WORDS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
FILES = st.dictionaries(NAMES, VALUES, min_size=1, max_size=6)
CHANGES = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=3).map(tuple), VALUES | st.just(REMOVED), min_size=1, max_size=4
)


def load(text: str) -> Any:
    return json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)


@settings(deadline=None)
@given(FILES, CHANGES, st.sampled_from(["yaml", "json", "tabs", "flow", "one line"]))
def test_the_content_is_the_data_with_the_changes(data: dict[str, Any], changes: Any, style: str) -> None:
    text = {
        "yaml": yaml.safe_dump(data, sort_keys=False, allow_unicode=True),
        "json": json.dumps(data, indent=2),
        "tabs": json.dumps(data, indent="\t"),
        "flow": "# YAML, not JSON\n" + yaml.safe_dump(data, default_flow_style=True, width=9),
        "one line": json.dumps(data),
    }[style]
    before = load(text)
    wanted = applied(before, changes)
    found = edited(text, before, changes)
    assert (load(found) or {}) == wanted
    assert not wanted or edited(found, wanted, {}) == found


@settings(deadline=None)
@given(FILES, NAMES, SCALARS)
def test_other_lines_stay_as_they_are(data: dict[str, Any], name: str, value: Any) -> None:
    """Comments above and behind other keys, blank lines and their own way of writing values."""
    parts = {key: yaml.safe_dump({key: one}, allow_unicode=True) for key, one in data.items()}
    blocks = {key: f"# above {key}\n{text}\n" for key, text in parts.items()}
    found = edited("".join(blocks.values()), load("".join(blocks.values())), {(name,): value})
    assert load(found) == load("".join(blocks.values())) | {name: value}
    for key, block in blocks.items():
        if key != name:
            assert block.rstrip("\n") in found


WRITTEN = """# my run
base_model: m   # the model

learning_rate: 2e-4
warmup: 1_000
nested:
    # deep
    first: 0x10   # kept
    second: off
list: [1,
       2]  # two lines
"""


@pytest.mark.parametrize(
    ("changes", "gone", "come"),
    [
        ({("base_model",): "n"}, ["base_model: m   # the model"], ["base_model: n   # the model"]),
        ({("nested", "second"): REMOVED}, ["    second: off"], []),
        ({("nested", "third"): "x: y"}, [], ["    third: 'x: y'"]),
        ({("list",): REMOVED}, ["list: [1,", "       2]  # two lines"], []),
        ({("new",): True}, [], ["new: true"]),
        ({("nested", "first"): REMOVED, ("nested", "second"): REMOVED},
         ["nested:", "    # deep", "    first: 0x10   # kept", "    second: off"], []),
        ({("learning_rate",): 1e-05}, ["learning_rate: 2e-4"], ["learning_rate: 1.0e-05"]),
    ],
)  # fmt: skip
def test_only_the_changed_lines_differ(changes: Any, gone: list[str], come: list[str]) -> None:
    found = edited(WRITTEN, load(WRITTEN), changes)
    lines = WRITTEN.splitlines()
    assert [line for line in lines if line not in found.splitlines()] == gone
    assert [line for line in found.splitlines() if line not in lines] == come


def test_anchors_and_merge_keys_are_written_out() -> None:
    text = "base: &b {x: 1, y: 2}\ncopy: *b\nmore:\n  <<: *b\n  z: 3\n"
    for changes in ({("copy",): 5}, {("more", "x"): REMOVED}, {("base",): 7}, {("copy", "x"): 3}):
        assert load(edited(text, load(text), changes)) == applied(load(text), changes)


def test_toml_stays_toml() -> None:
    found = edited("a = 1\n[t]\nx = 2\n", {"a": 1, "t": {"x": 2}}, {("t", "x"): 3})
    assert tomllib.loads(found) == {"a": 1, "t": {"x": 3}}


def test_what_unfolds_to_too_much_is_refused() -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 8)}]\n" for i in range(1, 30))
    with pytest.raises(BadInput, match="unfolds"):
        edited(bomb, load(bomb), {("b",): 1})
