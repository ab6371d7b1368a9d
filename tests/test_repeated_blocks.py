"""A tape unrolled from shallow models equals the tape of the whole model, event by event, or is not made at all."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("trl")

from memfit import Recipe, cli, find_gpu
from memfit.nouns.gpu import Gpu
from memfit.nouns.tape import Alloc, EmptyCache, Event, Free, Mark, RecordStream, Tape
from memfit.virtual.device.ledger import WARM_UP
from memfit.virtual.jobs import models
from memfit.virtual.jobs.recipe import setup_of
from memfit.virtual.repeated_blocks import depths
from memfit.virtual.repeated_blocks.unroll import NotPeriodic, in_order_of_birth, unroll
from memfit.virtual.tracing import trace_recipe

pytestmark = pytest.mark.filterwarnings("ignore")

A100 = find_gpu("a100-80gb")
COMMON: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 16, "num_hidden_layers": 7, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = {**COMMON, "model_type": "llama"}
SLIDING = 2 * ["sliding_attention"] + ["full_attention"]
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "vocab_size": 1000, "n_embd": 64, "n_head": 4, "n_layer": 7, "n_positions": 512},
    "gemma 3, every third, and a rest": {
        **COMMON, "model_type": "gemma3_text", "num_hidden_layers": 14, "layer_types": (5 * SLIDING)[:14],
        "sliding_window": 64,
    },
    "gemma 3 with eyes": {
        "model_type": "gemma3",
        "text_config": {**COMMON, "model_type": "gemma3_text", "num_hidden_layers": 12, "layer_types": 4 * SLIDING,
        "sliding_window": 64},
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    },
    "qwen3 moe": {**COMMON, **EXPERTS, "model_type": "qwen3_moe", "num_experts": 4},
    "deepseek, whose first blocks are dense": {
        **COMMON, **EXPERTS, "model_type": "deepseek_v2", "first_k_dense_replace": 2, "n_routed_experts": 4,
        "n_shared_experts": 1, "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
        "v_head_dim": 16, "num_key_value_heads": 4, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
    },
    "gemma 4, whose embeddings grow with the depth": {
        **COMMON, "model_type": "gemma4_text", "layer_types": 7 * ["full_attention"], "hidden_size_per_layer_input": 28,
        "num_attention_heads": 5,
        "vocab_size_per_layer_input": 1000, "num_kv_shared_layers": 0, "sliding_window": 64,
    },
}  # fmt: skip
TRL: dict[str, Any] = {"trainer": "trl", "loss": "fused"}
TRAINER, LOOP = {"trainer": "transformers"}, {"trainer": "torch"}
QLORA = {"method": "qlora", "quantization": "nf4-double"}
FSDP = {"shard": "parameters", "num_gpus": 8}
RECIPES: tuple[dict[str, Any], ...] = (
    {**TRL, "method": "lora", "checkpointing": "full", "accumulation": 2},
    {**TRL, **QLORA, "checkpointing": "full"},
    {**TRAINER, "method": "lora", "precision": "fp16-mixed", "micro_batch": 2, "lora_dropout": 0.05},
    {**TRAINER, "optimizer": "adafactor", "accumulation": 3},
    {**TRAINER, "attention": "flash", "micro_batch": 2},
    {**TRAINER, **FSDP, "precision": "bf16-mixed", "checkpointing": "full"},
    {**LOOP, "optimizer": "muon", "checkpointing": "full"},
)
MORE: tuple[dict[str, Any], ...] = (  # whose mechanisms the others have in other combinations
    {**TRL, "method": "lora", "micro_batch": 2, "padding": "packing"},
    {**TRL, **FSDP, "method": "lora"},
    {**LOOP, "optimizer": "sgd-momentum", "precision": "fp32", "attention": "eager"},
)


@pytest.fixture(autouse=True)
def small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deep enough for a test is not deep enough to save time."""
    monkeypatch.setattr(depths, "WORTH", 100.0)


def names(words: dict[str, Any]) -> str:
    return "-".join(map(str, words.values()))


def check(config: dict[str, Any], gpu: Gpu = A100, **words: Any) -> Tape:
    """Assert that the unrolled tape is the traced one, save for the order of storages that die in a row."""
    recipe = Recipe(**{"sequence_length": 80, **words})
    (short, reads), (whole, all_reads) = (
        trace_recipe(recipe, config, gpu),
        traced_whole(recipe, json.dumps(config), gpu),
    )
    assert "layers traced, the rest unrolled" in short.about["depth"] and "depth" not in whole.about
    pairs = list(zip(short.events, in_order_of_birth(whole.events), strict=True))
    same = all(one == two or pickled(one) == pickled(two) for one, two in pairs)  # pytest would compare them in words
    assert same and reads == all_reads
    return short


@cache
def traced_whole(recipe: Recipe, config: str, gpu: Gpu) -> Any:
    """Return a tape of all layers, which several tests compare with, and the places that it read."""
    return trace_recipe(recipe, json.loads(config), gpu, full=True)


def pickled(event: Event) -> Event:
    """Return an object that ranks send each other in the allocator's units: names of layers make its pickle longer."""
    if isinstance(event, Alloc) and event.label == "copy" and event.role == "temporaries":
        return replace(event, size=-(-event.size // 512))
    return event


@pytest.mark.parametrize(
    "words", [*RECIPES, *(pytest.param(words, marks=pytest.mark.nightly) for words in MORE)], ids=names
)
def test_recipes_unroll_to_what_is_traced_whole(words: dict[str, Any]) -> None:
    check(LLAMA, **words)


# two variants of a pattern that others show, of six seconds each
LONG = ("gemma 3, every third, and a rest", "gemma 3 with eyes")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.nightly) if n in LONG else n for n in MODELS])
def test_models_unroll_to_what_is_traced_whole(name: str) -> None:
    check(MODELS[name], **LOOP, method="lora", optimizer="adamw-foreach", checkpointing="full")


def test_ligers_layers_unroll_to_what_is_traced_whole() -> None:
    pytest.importorskip("liger_kernel", reason="pip install liger-kernel")
    check(MODELS["gemma 3, every third, and a rest"], **TRAINER, loss="fused", method="lora")


def test_the_warm_up_before_loading_grows_to_what_is_left_of_the_card() -> None:
    """transformers allocates the bytes that it will load once beforehand, or all of the card but 1.2 GiB."""
    tape = check(LLAMA, replace(A100, total_bytes=models.LEFT + 530_000), **TRAINER, **QLORA)
    assert [e.size for e in tape.events if isinstance(e, Alloc) and e.label == WARM_UP] == [530_000]


@pytest.mark.parametrize("words", [RECIPES[0], RECIPES[3]], ids=names)
def test_deaths_keep_their_true_order_where_torch_breaks_ties_by_it(
    words: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depths, "torch_version", lambda _: (2, 12))
    recipe = Recipe(sequence_length=80, **words)
    short, whole = trace_recipe(recipe, LLAMA, A100)[0], traced_whole(recipe, json.dumps(LLAMA), A100)[0]
    assert "depth" in short.about and (short.events == whole.events) is True


# --- where nothing is unrolled ---


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**LLAMA, "num_hidden_layers": 4}, {}),  # nothing is saved
        ({**COMMON, "model_type": "gemma3_text", "layer_types": [*SLIDING, *SLIDING[:1], *SLIDING[::-1]]}, {}),
        (LLAMA, {"num_gpus": 4}),  # DDP's buckets end within blocks
    ],
    ids=["too few layers", "blocks in no order", "DDP"],
)
def test_what_does_not_repeat_is_traced_whole(config: dict[str, Any], words: dict[str, Any]) -> None:
    assert depths.depths(setup_of(Recipe(**LOOP, sequence_length=80, **words), config)) is None


def of_three(*tapes: Tape, whole: int = 9) -> Any:
    """Unroll these tapes of models with two, three and four layers."""
    setup = setup_of(Recipe(**LOOP), LLAMA)
    runs = iter(tapes)
    plan = depths.Depths((setup, setup, setup), (2, 3, 4), whole, "layers")
    return depths.unrolled(plan, lambda _: (next(runs), {}), A100)


def test_a_third_depth_that_differs_or_a_trace_that_fails_stops_it() -> None:
    two, three, four, nine = (program(n, [512, 1024], [0]) for n in (2, 3, 4, 9))
    found = of_three(two, three, four)
    assert found is not None and found[0].events == in_order_of_birth(nine.events)
    assert of_three(Tape((*two.events, EmptyCache()), "traced"), three, four) is None
    assert of_three(two, three) is None


# --- programs of blocks ---


def program(layers: int, sizes: list[int], kept: list[int]) -> Tape:
    """Weights, two passes forward and back with an optimizer's lists, a stack of one number per block."""
    events: list[Event] = [Mark("load", "load")]
    number = -1

    def born(size: int, label: str, stream: int = 0) -> int:
        nonlocal number
        number += 1
        events.append(Alloc(number, size, "activations", label, stream))
        return number

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
    return Tape(in_order_of_birth(events), "traced")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.sets(st.integers(0, 4)), st.integers(4, 12))
def test_a_program_of_blocks_unrolls_to_itself_or_is_refused(sizes: list[int], kept: set[int], layers: int) -> None:
    """Sizes that coincide may hide which storage is which; then it is refused, never wrong."""
    least, shallow, deep, whole = (program(n, [512 * s for s in sizes], sorted(kept)) for n in (2, 3, 4, layers))
    try:
        found = unroll(shallow, deep, (3, 4), "layers")
        if in_order_of_birth(found(2).events) != least.events:
            return
        made = found(layers)
    except NotPeriodic:
        return
    assert in_order_of_birth(made.events) == whole.events


def test_the_worked_example_of_the_package_is_true() -> None:
    def example(layers: int) -> Tape:
        births = [Alloc(0, 8, label="embedding"), *(Alloc(i + 1, 4, label=f"layers.{i}: h") for i in range(layers))]
        return Tape((*births, *(Free(i) for i in reversed(range(1, layers + 1))), Free(0)), "traced")

    found = unroll(example(2), example(3), (2, 3), "layers")
    assert found(5).events == example(5).events


def test_only_whole_periods_and_similar_tapes_unroll() -> None:
    two, three, four = (program(n, [512, 1024], [0]) for n in (2, 3, 4))
    with pytest.raises(NotPeriodic, match="1 layers are not 3"):
        unroll(three, four, (3, 4), "layers")(1)
    with pytest.raises(NotPeriodic):
        unroll(three, Tape((*four.events, Mark("eval", "forward")), "traced"), (3, 4), "layers")
    with pytest.raises(NotPeriodic, match="sizes"):
        unroll(two, program(3, [512, 2048, 4096], [0]), (2, 3), "layers")


# --- the command ---


def test_the_answer_says_what_was_traced_and_full_traces_all(tmp_path: Path, capsys: Any) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
    words = ["trace", str(config), "--gpu", "l4", "--trainer", "torch", "--sequence-length", "80", "--json"]
    documents = []
    for more in ([], ["--full"]):
        assert cli.main([*words, *more]) == 0
        documents.append(str(json.loads(capsys.readouterr().out)))
    depth = ", '2, 3 and 4 of 7 layers traced, the rest unrolled'"
    assert documents[0].replace(depth, "") == documents[1] != documents[0]
    assert cli.main(["trace", __file__, "--gpu", "l4", "--full"]) == 2
    assert "--full" in capsys.readouterr().err
