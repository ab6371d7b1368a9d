"""Tapes of deep models unrolled from shallow ones: equal to the tape traced whole, or not made at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("trl")

from memfit import Recipe, cli
from memfit.allocator.capacity import capacity
from memfit.footprints.footprint_of_trace import judged
from memfit.nouns.alloc_settings import parse_alloc_conf
from memfit.nouns.tape import Alloc, EmptyCache, Event, Free, Mark, RecordStream, Tape
from memfit.virtual.device.ledger import WARM_UP
from memfit.virtual.jobs import models
from memfit.virtual.jobs.recipe import setup_of
from memfit.virtual.repeated_blocks import depths
from memfit.virtual.repeated_blocks.unrolled import NotPeriodic, in_order_of_birth, unroll
from memfit.virtual.tracing import trace_recipe
from unrolling import A100, COMMON, LLAMA, MODELS, SLIDING, both, first_difference

pytestmark = pytest.mark.filterwarnings("ignore")

TRL: dict[str, Any] = {"trainer": "trl", "loss": "fused"}
QLORA = {"method": "qlora", "quantization": "nf4-double"}
FSDP = {"shard": "parameters", "num_gpus": 8}
RECIPES: tuple[dict[str, Any], ...] = (
    TRL,
    {**TRL, "method": "lora", "checkpointing": "full", "accumulation": 2},
    {**TRL, "method": "lora", "micro_batch": 2, "padding": "packing"},
    {**TRL, **QLORA, "checkpointing": "full"},
    {"trainer": "transformers", "precision": "bf16-mixed", "checkpointing": "full"},
    {"trainer": "transformers", "method": "lora", "precision": "fp16-mixed", "micro_batch": 2, "lora_dropout": 0.05},
    {"trainer": "transformers", **QLORA, "optimizer": "paged-adamw-8bit"},
    {"trainer": "transformers", "optimizer": "adamw-foreach", "alloc_conf": "expandable_segments:True"},
    {"trainer": "transformers", "optimizer": "adafactor", "accumulation": 3},
    {"trainer": "transformers", "attention": "flash", "micro_batch": 2},
    {"trainer": "transformers", **FSDP, "precision": "bf16-mixed", "checkpointing": "full"},
    {**TRL, **FSDP, "method": "lora"},
    {"trainer": "torch", "optimizer": "adamw-8bit"},
    {"trainer": "torch", "optimizer": "adamw-forloop", "accumulation": 2},
    {"trainer": "torch", "optimizer": "muon", "checkpointing": "full"},
    {"trainer": "torch", "optimizer": "sgd-momentum", "precision": "fp32", "attention": "eager"},
)


@pytest.fixture(autouse=True)
def small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deep enough for a test is not deep enough to save time."""
    monkeypatch.setattr(depths, "WORTH", 100.0)


@pytest.mark.parametrize("words", RECIPES, ids=lambda w: "-".join(map(str, w.values())))
def test_every_kind_of_recipe_unrolls_to_what_it_is_traced_whole(words: dict[str, Any]) -> None:
    assert first_difference(*both(LLAMA, **words)) is None


@pytest.mark.parametrize("name", list(MODELS)[1:])
def test_every_kind_of_model_unrolls_to_what_it_is_traced_whole(name: str) -> None:
    words = {"trainer": "torch", "method": "lora", "optimizer": "adamw-foreach", "checkpointing": "full"}
    assert first_difference(*both(MODELS[name], **words)) is None


LIGER = {"trainer": "transformers", "loss": "fused"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama", {}),
        ("llama", {"precision": "bf16-mixed", "micro_batch": 2, "accumulation": 2}),
        ("llama", {**FSDP, "checkpointing": "full"}),
        ("qwen3", {**QLORA}),
        ("gemma 3, every third, and a rest", {"method": "lora"}),
    ],
)
def test_ligers_layers_unroll_to_what_they_are_traced_whole(name: str, words: dict[str, Any]) -> None:
    pytest.importorskip("liger_kernel", reason="pip install liger-kernel")
    assert first_difference(*both(MODELS[name], **LIGER, **words)) is None


@pytest.mark.parametrize(("words", "limit"), [({}, "1.2MB"), ({"precision": "bf16-mixed"}, "2.4MB"), (FSDP, "1.2MB")])
def test_a_checkpoint_in_several_files_is_saved_and_resumed_as_one_in_one(
    words: dict[str, Any], limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which weights lie in which file is not a matter of blocks, and of no storage either."""
    from transformers import modeling_utils

    split, files = modeling_utils.split_torch_state_dict_into_shards, []

    def smaller(state: Any, **given: Any) -> Any:
        made = split(state, **{**given, "max_shard_size": limit})
        files.append(len(made.filename_to_tensors))
        return made

    monkeypatch.setattr(modeling_utils, "split_torch_state_dict_into_shards", smaller)
    assert first_difference(*both(LLAMA, trainer="transformers", **words)) is None
    *shallow, whole = files
    assert set(shallow) == {1} and whole > 1


def test_what_is_asked_for_before_loading_grows_to_what_is_left_of_the_card() -> None:
    """transformers warms the allocator up with the bytes it will load, or all but 1.2 GiB."""
    small = replace(A100, total_bytes=models.LEFT + 500_000)
    one, other = both(MODELS["llama"], gpu=small, trainer="transformers", **QLORA)
    assert first_difference(one, other) is None
    assert [e.size for e in one[0][1] if isinstance(e, Alloc) and e.label == WARM_UP] == [500_000]


IRREGULAR = [QLORA["quantization"], "parameters"]  # die in an order that no two depths explain; then all is traced


@pytest.mark.parametrize(
    "words",
    [{**w, **more} for w in RECIPES for more in ({}, {"num_gpus": 4}) if not set(IRREGULAR) & set(w.values())][::5],
    ids=lambda w: "-".join(map(str, w.values())),
)
def test_deaths_are_in_their_true_order_where_torch_breaks_ties_by_it(
    words: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depths, "torch_version", lambda _: (2, 12))
    wide = {**LLAMA, "hidden_size": 512} if "num_gpus" in words else LLAMA
    assert first_difference(*both(wide, tuple, **words)) is None


def test_a_trace_is_the_same_each_time() -> None:
    """Also where autocast's cache lets go of its casts, which it finds by their addresses."""
    recipe = Recipe(trainer="transformers", method="lora", precision="bf16-mixed", sequence_length=80)
    one, two = (trace_recipe(recipe, LLAMA, A100, full=True)[0] for _ in range(2))
    assert (one.events == two.events) is True


def test_the_smallest_card_and_where_its_bytes_go_are_the_same() -> None:
    recipe = Recipe(trainer="torch", sequence_length=80)
    one, two = (capacity(judged(trace_recipe(recipe, LLAMA, A100, full=f)[0]), parse_alloc_conf("")) for f in (0, 1))
    assert (one.smallest, one.other, one.slack) == (two.smallest, two.other, two.slack)


# --- where nothing is unrolled ---


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**LLAMA, "num_hidden_layers": 4}, {}),  # nothing is saved
        ({**COMMON, "model_type": "gemma3_text", "layer_types": [*SLIDING, *SLIDING[:1], *SLIDING[::-1]]}, {}),
    ],
    ids=["too few layers", "blocks in no order"],
)
def test_what_does_not_repeat_is_traced_whole(config: dict[str, Any], words: dict[str, Any]) -> None:
    recipe = replace(Recipe(trainer="torch", sequence_length=80), **words)
    assert depths.depths(setup_of(recipe, config)) is None


def three(*tapes: Tape, whole: int = 9) -> Any:
    """What `unrolled` makes of these tapes of models with two, three and four layers."""
    setup = setup_of(Recipe(trainer="torch"), LLAMA)
    plan = depths.Depths((setup, setup, setup), (2, 3, 4), whole, "layers")
    runs = iter(tapes)
    return depths.unrolled(plan, lambda _: (next(runs), {}, []))


def test_a_third_depth_that_says_otherwise_stops_it() -> None:
    made = [program(n, [512, 1024], [0]) for n in (2, 3, 4, 9)]
    found = three(*made[:3])
    assert found is not None and found[0].events == in_order_of_birth(made[3].events)
    odd = Tape((*made[0].events, EmptyCache()), "traced")
    assert three(odd, *made[1:3]) is None


def test_a_run_that_fails_when_it_is_shallow_is_left_to_the_whole_one() -> None:
    assert three() is None


# --- programs of blocks ---


def program(layers: int, sizes: list[int], kept: list[int], first: int = 0) -> Tape:
    """Weights, two passes forward and back with an optimizer's lists, a stack of one number per block."""
    events: list[Event] = [Mark("load", "load")]
    number = first

    def born(size: int, label: str, stream: int = 0) -> int:
        nonlocal number
        events.append(Alloc(number, size, "activations", label, stream))
        number += 1
        return number - 1

    weights = [born(s, f"model.layers.{i}.w{k}") for i in range(layers) for k, s in enumerate(sizes)]
    hidden = born(64, "embedding")
    for _ in range(2):
        events.append(Mark("step", "forward"))
        saved = []
        for i in range(layers):
            before, hidden = hidden, born(64, f"model.layers.{i}: add")
            here = [born(s + 8, f"model.layers.{i}: mm") for s in sizes]
            events.append(RecordStream(here[0], 1))
            saved.append([before, *(h for k, h in enumerate(here) if k in kept)])
            events += [Free(h) for k, h in enumerate(here) if k not in kept]
        events.append(Mark("step", "backward"))
        gradients = []
        for row in reversed(saved):
            gradients += [born(s, "mm", 1) for s in sizes]
            events += [Free(n) for n in row]
        stacked = born(4 * layers + 4, "stack")
        events += [Free(stacked), *(Free(n) for n in gradients), EmptyCache()]
    events += [Free(hidden), *(Free(w) for w in weights)]
    return Tape(tuple(events), "traced")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.sets(st.integers(0, 4)), st.integers(4, 12))
def test_a_program_of_blocks_unrolls_to_itself_or_is_refused(sizes: list[int], kept: set[int], layers: int) -> None:
    """Sizes that coincide may hide which storage is which; then it is refused, never wrong."""
    sizes = [512 * s for s in sizes]
    least, shallow, deep, whole = (program(n, sizes, sorted(kept)) for n in (2, 3, 4, layers))
    try:
        found = unroll(shallow, deep, (3, 4), "layers")
        if found.tape(2).events != in_order_of_birth(least.events):
            return
        made = found.tape(layers)
    except NotPeriodic:
        return
    assert made.events == in_order_of_birth(whole.events)


def test_only_whole_periods_and_alike_tapes_unroll() -> None:
    two, three_, four = (program(n, [512, 1024], [0]) for n in (2, 3, 4))
    found = unroll(three_, four, (3, 4), "layers")
    assert found.tape(4).events == in_order_of_birth(four.events)
    with pytest.raises(NotPeriodic, match="1 layers are not 3"):
        found.tape(1)
    with pytest.raises(NotPeriodic):
        unroll(three_, Tape((*four.events, Mark("eval", "forward")), "traced"), (3, 4), "layers")
    with pytest.raises(NotPeriodic, match="sizes"):
        unroll(two, program(3, [512, 2048, 4096], [0]), (2, 3), "layers")


# --- the command ---


def test_the_answer_says_what_was_traced_and_full_traces_all(tmp_path: Path, capsys: Any) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
    words = ["trace", str(config), "--gpu", "l4", "--trainer", "torch", "--sequence-length", "80", "--json"]
    said = []
    for more in ([], ["--full"]):
        assert cli.main([*words, *more]) == 0
        said.append(json.loads(capsys.readouterr().out))
    depth = "2, 3 and 4 of 7 layers traced, the rest unrolled"
    unrolled, whole = (str(document) for document in said)
    assert depth in unrolled and depth not in whole
    assert unrolled.replace(f", '{depth}'", "") == whole
    assert cli.main(["trace", "train.py", "--gpu", "l4", "--full"]) == 2
    assert "always traced whole" in capsys.readouterr().err
