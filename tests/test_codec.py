"""JSON documents: written ones are read back equal, the schema file is fresh, wrong documents are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit import Job, Recipe, estimate, find_gpu, make_plan, resolve_model
from memfit.closed_form.run.account import Account
from memfit.closed_form.why import explain
from memfit.documents import codec
from memfit.errors import BadInput
from memfit.nouns.job import Training
from memfit.nouns.plan import Plan, judge
from memfit.nouns.tape import ROLES
from memfit.planner import techniques

DOCS = Path(__file__).parent.parent / "docs"
MODEL, CARD = resolve_model("qwen2.5-0.5b"), find_gpu("rtx-4060")


@pytest.fixture(scope="module")
def plan() -> Plan:
    wanted = (("lora_targets", ("q_proj", "v_proj")), ("sequence_length", 1024))
    return make_plan(
        Job(
            architecture=MODEL,
            gpu=CARD,
            sequence_length=1024,
            wanted=wanted,
            longest_sample=900,
            training=Training(epochs=3.0),
        )
    )


@pytest.fixture(scope="module")
def estimate_text() -> str:
    recipe = Recipe(micro_batch=2, sequence_length=512)
    footprint = estimate(MODEL, recipe, CARD)
    why = explain(Account(MODEL, recipe, CARD), footprint.peak)
    return codec.dumps(codec.estimate_doc(MODEL, recipe, CARD, footprint, judge(footprint, CARD), why))


def test_a_plan_comes_back_equal(plan: Plan) -> None:
    document = codec.plan_doc(plan)
    text = codec.dumps(document)
    found = codec.loads(text)
    wanted = {key: list(value) if isinstance(value, tuple) else value for key, value in document.job.wanted.items()}
    assert found == replace(document, job=replace(document.job, wanted=wanted))
    assert codec.footprint_of(found) == plan.footprint
    assert codec.dumps(found) == text


def test_an_estimate_comes_back_equal(estimate_text: str) -> None:
    found = codec.loads(estimate_text)
    again = estimate(MODEL, found.recipe, CARD)
    assert codec.footprint_of(found) == again
    judged = judge(again, CARD)
    assert (found.verdict, found.need, found.usable) == (judged.verdict, judged.need, judged.usable)


def test_the_promised_keys_are_there_with_their_types(plan: Plan, estimate_text: str) -> None:
    promised = {
        "schema": str, "model": str, "gpu": dict, "recipe": dict, "source": str, "peak": dict, "peak_phase": str,
        "by_role": dict,
        "phases": list, "fits": bool, "verdict": str, "headroom": int, "assumptions": list, "unknowns": list,
    }  # fmt: skip
    extra = {"chosen": dict, "ladder": list, "refused": list, "alternatives": list, "largest": dict, "notes": list}
    planned = json.loads(codec.dumps(codec.plan_doc(plan)))
    for document, keys in ((json.loads(estimate_text), promised), (planned, promised | extra)):
        for key, kind in keys.items():
            assert type(document[key]) is kind, key
        assert {"name", "usable_bytes"} <= document["gpu"].keys()
        assert next(iter(document)) == "schema"


def test_sizes_are_whole_bytes_that_add_up(estimate_text: str) -> None:
    found = json.loads(estimate_text)
    peak = found["peak"]
    assert list(peak) == ["requested", "allocated", "reserved", "device"]
    assert list(peak.values()) == sorted(peak.values())
    assert sum(found["by_role"].values()) == peak["device"]
    assert set(found["by_role"]) <= set(ROLES)
    assert found["headroom"] == found["usable"] - found["need"]
    for phase in found["phases"]:
        assert sum(line["bytes"] for line in phase["lines"]) == phase["levels"]["device"]
    for reason in found["why"]:
        assert sum(term["bytes"] for term in reason["terms"]) == reason["bytes"]
    assert sum(reason["bytes"] for reason in found["why"]) == peak["device"]


def test_every_rung_of_the_cheat_sheet_is_an_estimate() -> None:
    job = Job(architecture=MODEL, gpu=CARD)
    rungs, plan = techniques(job), make_plan(job)
    found = codec.loads(codec.dumps(codec.techniques_doc(plan, rungs)))
    assert (found.recipe, found.verdict, found.need) == (plan.recipe, plan.judgement.verdict, plan.judgement.need)
    assert found.techniques == tuple(map(codec.rung_doc, rungs))


def test_the_schema_file_is_fresh() -> None:
    assert (DOCS / "schema.json").read_text() == codec.schema_text(), (
        "write docs/schema.json again: codec.schema_text()"
    )


def test_every_key_is_explained() -> None:
    page = (DOCS / "json.md").read_text()
    for schema, shape in codec.DOCUMENTS.items():
        assert f"`{schema}`" in page
        for name in shape.__struct_fields__:
            assert f"`{name}`" in page, f"{name} of {schema}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not valid JSON"),
        ("[1]", "memfit document"),
        ('{"schema": "memfit.plan/999"}', "memfit document"),
        ('{"schema": 1}', "memfit document"),
        ('{"schema": "memfit.estimate/1"}', "missing required field"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_wrong_documents_are_refused_with_a_hint(text: str, problem: str) -> None:
    with pytest.raises(BadInput, match=problem) as caught:
        codec.loads(text)
    assert caught.value.hint


@given(
    path=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    value=st.sampled_from([None, -1, "x", [], {}, 1e308, True, 2**70]),
)
def test_a_damaged_document_is_refused_or_read_but_never_crashes(
    estimate_text: str, path: list[int], value: Any
) -> None:
    data = json.loads(estimate_text)
    place: Any = data
    for step in path[:-1]:
        keys = list(place) if isinstance(place, dict) else list(range(len(place))) if isinstance(place, list) else []
        if not keys:
            break
        inner = place[keys[step % len(keys)]]
        if not isinstance(inner, dict | list) or not inner:
            break
        place = inner
    keys = list(place) if isinstance(place, dict) else list(range(len(place)))
    place[keys[path[-1] % len(keys)]] = value
    try:
        codec.loads(json.dumps(data))
    except BadInput as error:
        assert error.hint


def test_a_document_from_a_later_memfit_with_new_keys_is_still_read(estimate_text: str) -> None:
    data = json.loads(estimate_text) | {"new_key": 1}
    assert codec.loads(json.dumps(data)) == codec.loads(estimate_text)
