"""What DDP lays out by size in tapes of deep models: rows of buckets and broadcasts, as they are when the whole is traced."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from memfit import Recipe  # noqa: E402
from memfit.nouns.tape import Alloc, Free, Mark, Tape  # noqa: E402
from memfit.virtual.device.ledger import BROADCAST, BUCKET, BUCKET_SIZES  # noqa: E402
from memfit.virtual.device.rows import Row  # noqa: E402
from memfit.virtual.jobs.recipe import setup_of  # noqa: E402
from memfit.virtual.jobs.setup import Setup  # noqa: E402
from memfit.virtual.repeated_blocks import depths  # noqa: E402
from memfit.virtual.repeated_blocks.folded import fold, rows_of, unfold  # noqa: E402
from memfit.virtual.repeated_blocks.unrolled import NotPeriodic, in_order_of_birth  # noqa: E402
from memfit.virtual.tracing import _traced, as_in_a_run, quiet, trace_recipe  # noqa: E402
from unrolling import A100, LLAMA, MODELS, both, first_difference  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
# a head of more than the first bucket, buckets of 25 MiB that end within blocks
WIDE = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 2000}
DEEP = {**LLAMA, **WIDE, "num_hidden_layers": 14}
HEAVY = {**DEEP, "intermediate_size": 5500}  # 250 MiB and more, which are broadcast in several pieces
RECIPES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    (DEEP, {"trainer": "torch"}),
    (DEEP, {"trainer": "torch", "checkpointing": "full", "accumulation": 2, "precision": "bf16-mixed"}),
    (DEEP, {"trainer": "torch", "method": "lora", "lora_rank": 64}),
    (HEAVY, {"trainer": "transformers"}),
    (DEEP, {"trainer": "transformers", "method": "lora", "precision": "bf16-mixed"}),
    (DEEP, {"trainer": "transformers", "checkpointing": "full", "accumulation": 2}),
    (DEEP, {"trainer": "trl", "loss": "fused", "method": "qlora", "quantization": "nf4-double", "checkpointing": "full"}),
    ({**MODELS["qwen2, tied"], **WIDE}, {"trainer": "torch"}),
    ({**MODELS["gemma 2, every second attention full"], **WIDE}, {"trainer": "torch"}),
    ({**MODELS["gemma 3 with eyes"]}, {"trainer": "transformers"}),
    ({**MODELS["qwen3 moe"], **WIDE}, {"trainer": "torch"}),
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depths, "WORTH", 100.0)


@pytest.mark.parametrize(
    ("config", "words"), RECIPES, ids=lambda w: "-".join(map(str, [w["model_type"]] if "model_type" in w else w.values()))
)  # fmt: skip
def test_replicas_unroll_to_what_they_are_traced_whole(config: dict[str, Any], words: dict[str, Any]) -> None:
    assert first_difference(*both(config, num_gpus=4, **words)) is None


TORCH, TRAINER = Recipe(trainer="torch", num_gpus=4), Recipe(trainer="transformers", num_gpus=4)
SETUPS: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "gradients that lie in the buckets": (TORCH, {"bucket_view": True, "steps": 3}),
    "and are accumulated": (TORCH, {"bucket_view": True, "accumulation": 2, "autocast": "bf16", "dtype": "fp32"}),
    "reduced after every micro-batch": (TORCH, {"sync_each": True, "accumulation": 2}),
    "buckets of 4 MiB": (TRAINER, {"arguments": {"ddp_bucket_cap_mb": 4, "ddp_find_unused_parameters": False}}),
    "of 4 MiB that stay as they are": (TRAINER, {"arguments": {"ddp_bucket_cap_mb": 4}}),
}


@pytest.mark.parametrize(("recipe", "words"), SETUPS.values(), ids=SETUPS)
def test_other_words_of_ddp_do(recipe: Recipe, words: dict[str, Any]) -> None:
    setup = replace(setup_of(replace(recipe, sequence_length=80), DEEP), **words)
    plan, once = depths.depths(setup), partial(_traced, gpu=A100, alloc_conf="")
    assert plan is not None
    with quiet(), as_in_a_run(setup, lean=False):
        found, (whole, asked, _) = depths.unrolled(plan, once), once(setup)
    assert found is not None
    assert found[1] == asked
    assert (found[0].events == in_order_of_birth(whole.events)) is True


def test_a_first_bucket_that_is_full_at_another_depth_alone_is_traced_whole() -> None:
    """Where it fills, the buckets of before die; adapters so small fill it with the tenth block's."""
    recipe = Recipe(trainer="torch", num_gpus=4, method="lora", lora_rank=8, sequence_length=80)
    assert "depth" not in trace_recipe(recipe, DEEP, A100)[0].about


# --- rows ---


@pytest.fixture(scope="module")
def traced() -> tuple[Tape, list[Row]]:
    setup: Setup = setup_of(replace(TORCH, sequence_length=80), {**HEAVY, "num_hidden_layers": 16})
    with quiet(), as_in_a_run(setup, lean=False):
        tape, _, rows = _traced(setup, A100, "")
    return tape, rows


def test_rows_are_named_folded_and_laid_out_again(traced: tuple[Tape, list[Row]]) -> None:
    tape, rows = traced
    labels = [e.label for e in tape.events if isinstance(e, Alloc)]
    first, *_, again = (row for row in rows if row.label == BUCKET)
    assert (len(first.sizes()), len(again.sizes())) == (1, labels.count(BUCKET) - 1)
    assert len(again.sizes()) > 10 and sum(again.sizes()) == sum(first.sizes())
    assert labels.count(BUCKET_SIZES) == 1 and labels.count(BROADCAST) > 2
    folded = fold(tape, rows)
    sizes = [e.size for e in folded.events if isinstance(e, Alloc) and e.label == BUCKET]
    assert sizes == 2 * [sum(first.sizes())]
    assert unfold(folded, rows).events == in_order_of_birth(tape.events)


def test_two_broadcasts_are_under_way_at_once() -> None:
    row = Row(BROADCAST, 4 * ((torch.float32, 10),) + ((torch.float16, 5), (torch.float16, 5)), (80,))
    assert row.sizes() == [80, 80, 20]
    assert list(row.living()) == [(True, 0), (True, 1), (False, 0), (True, 2), (False, 1), (False, 2)]
    alone = Row(BROADCAST, ((torch.float32, 30), (torch.float32, 2), (torch.float32, 3)), (80,))
    assert alone.sizes() == [20]  # one tensor is sent from where it lies


def test_buckets_fill_in_the_order_of_modules_or_of_arrival() -> None:
    pieces = tuple((torch.float32, n) for n in (1, 2, 3, 4))
    assert Row(BUCKET, pieces, (8, 16)).sizes() == [28, 12]
    arrived = Row(BUCKET, pieces, (8, 16), arrived=True)
    assert (arrived.sizes(), arrived.first()) == ([12, 28], 2)


PAIR = Row(BUCKET, ((torch.float32, 2), (torch.float32, 2)), (8,))  # two buckets of 8 bytes


def buckets(*sizes: int) -> list[Any]:
    return [Alloc(i, size, label=BUCKET) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    "events",
    [
        buckets(8),
        buckets(8, 12),
        buckets(8, 8, 8),
        [*buckets(8), Mark("step", "forward"), Alloc(1, 8, label=BUCKET)],
        [*buckets(8, 8), Free(0), Mark("step", "forward"), Free(1)],
        [Alloc(0, 8, label=BROADCAST), *buckets(8, 8)[1:]],
    ],
    ids=["one is missing", "another size", "one too many", "torn apart", "dead apart", "another name"],
)
def test_what_is_not_a_row_is_refused(events: list[Any]) -> None:
    with pytest.raises(NotPeriodic):
        fold(Tape(tuple(events), "traced"), [PAIR])


def test_rows_that_do_not_repeat_are_refused() -> None:
    def row(*elements: int, limit: int = 8) -> list[Row]:
        return [Row(BUCKET, tuple((torch.float32, n) for n in elements), (limit,))]

    three = [row(9, *(n * (5,)), 1) for n in (2, 3, 4)]
    assert [n for _, n in rows_of(three, (2, 3, 4), 7)[0].pieces] == [9, *(7 * [5]), 1]
    for odd in ([], row(9, 5, 6, 1), row(9, 5, 5, 1, limit=4)):
        with pytest.raises(NotPeriodic):
            rows_of([odd, *three[1:]], (2, 3, 4), 7)
