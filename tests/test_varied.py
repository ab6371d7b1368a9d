"""Runs over varied lengths: middle blocks may be left out, and older PyTorch's and accelerate's copies are counted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from memfit.catalogue.cards import find_gpu
from memfit.closed_form.run.account import Account
from memfit.closed_form.run.estimate import estimate, longer_row
from memfit.closed_form.size import Dims
from memfit.closed_form.style import CODES, Code
from memfit.models.hub import resolve_model
from memfit.nouns.job import Recipe
from published import varied
from published.lengths import DATASETS, drawn
from published.profiles.legacy import SWIFT, shifted_head

MODEL = resolve_model("qwen-1_8b-chat", offline=True)
LENGTHS = (700, 1500, 301, 1999, 64, 1204, 2000, 512)
BASE = Recipe(
    method="lora",
    precision="bf16",
    sequence_length=2048,
    checkpointing="full",
    attention="flash",
    trainer="transformers",
)


def account(recipe: Recipe = BASE, *, padded: bool = False, code: str = SWIFT.code) -> Account:
    return Account(MODEL, recipe, find_gpu("a100-80gb"), padded, replace(SWIFT, code=code))


def old_and_new(
    monkeypatch: pytest.MonkeyPatch, new: Code, recipe: Recipe, lengths: tuple[int, ...], *, padded: bool = False
) -> tuple[int, int]:
    """Requested bytes with the code of that time, and with `new`."""
    monkeypatch.setitem(CODES, "new", new)
    old, now = (
        varied.VariedRun(account(recipe, padded=padded, code=code)).levels(lengths).requested
        for code in (SWIFT.code, "new")
    )
    return old, now


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("checkpointing", ["full", "none"])
def test_leaving_out_middle_blocks_changes_nothing(
    method: str, checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = account(replace(BASE, method=method, checkpointing=checkpointing, accumulation=2))
    thin = varied.VariedRun(run).levels(LENGTHS)
    monkeypatch.setattr(varied, "WHOLE_BLOCKS", len(MODEL.layers))
    whole = varied.VariedRun(run).levels(LENGTHS)
    assert thin.requested == whole.requested
    assert thin.reserved == pytest.approx(whole.reserved, rel=0.01)


def test_the_order_of_the_same_lengths_changes_what_is_reserved_and_not_what_is_requested() -> None:
    rising, falling = (varied.VariedRun(account()).levels(sorted(LENGTHS, reverse=down)) for down in (False, True))
    assert rising.requested == pytest.approx(falling.requested, rel=1e-3)
    assert rising.reserved > falling.reserved


def test_micro_batches_shorter_than_one_before_add_nothing_to_what_is_reserved() -> None:
    run = varied.VariedRun(account(replace(BASE, accumulation=2)))
    lengths = drawn(DATASETS["cls-fudan-news-zh"], 200, 2048, 1)[3]
    reserved = run.reserved(lengths, capacity=1 << 40)
    assert len(run.growing(lengths)) < len(lengths) / 2
    assert reserved == pytest.approx(run.levels(lengths).reserved, abs=8 << 20)
    assert run.reserved(lengths, capacity=reserved - 1) < reserved


def test_a_padded_mask_is_copied_for_every_head_only_where_its_rows_are_ragged() -> None:
    dims = Dims(2, 1001)
    assert dims.value(("mask", 16, 16)) == 2 * 16 * 1001 * 1008
    assert Dims(2, 1008).value(("mask", 16, 16)) == 2 * 1008 * 1008


def test_pytorch_2_1_keeps_a_mask_per_head_and_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(BASE, attention="sdpa", checkpointing="none")
    new_code = replace(CODES[SWIFT.code], mask=None)
    old, new = old_and_new(monkeypatch, new_code, recipe, (1001,) * 2, padded=True)
    heads = MODEL.layers[0].attention.heads
    assert old - new == pytest.approx(len(MODEL.layers) * 2 * 1001 * (heads * 1008 - 1001), rel=0.1)


def test_the_returned_cache_is_copied_to_fp32_without_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(BASE, checkpointing="none")
    new_code = replace(CODES[SWIFT.code], head=partial(shifted_head, returns_cache=False))
    returned, without = old_and_new(monkeypatch, new_code, recipe, (1000,) * 2)
    assert returned - without == pytest.approx(len(MODEL.layers) * 2 * 4 * 1000 * MODEL.width, rel=0.2)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_longer_packed_row_reserves_at_most_what_is_told(method: str) -> None:
    recipe = replace(BASE, method=method, padding="packing", trainer="trl==1.3", loss="full")
    run = Account(MODEL, recipe, find_gpu("a100-80gb"))
    same, grown = (varied.VariedRun(run).levels(rows).reserved for rows in ((2048, 2048), (2040, 2048)))
    assert same < grown <= same + longer_row(run)
    told = [text for text in estimate(MODEL, recipe, run.gpu).unknowns if "packed rows" in text]
    assert len(told) == 1


@pytest.mark.parametrize(
    "change", [{"trainer": "axolotl"}, {"padding": "longest"}, {"alloc_conf": "expandable_segments:True"}]
)
def test_rows_of_one_length_and_segments_that_expand_have_no_longer_row(change: dict[str, str]) -> None:
    recipe = replace(BASE, **{"padding": "packing", "trainer": "trl", **change})
    assert longer_row(Account(MODEL, recipe, find_gpu("a100-80gb"))) == 0
