"""Families: exact parameter counts of the catalogue, traits as in the modeling code, refusal instead of guessing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit import catalogue
from memfit.catalogue import Entry
from memfit.errors import BadInput, MemfitError, Unsupported
from memfit.models.families import DIALECTS, FAMILIES, architecture
from memfit.nouns.architecture import Architecture

ENTRIES = catalogue.entries()
MODELLED = [entry for entry in ENTRIES if entry.parameters is not None]
BY_STEM = {entry.stem: entry for entry in ENTRIES}

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 100, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip


def read(stem: str, **changes: object) -> Architecture:
    return architecture({**catalogue.config(BY_STEM[stem]), **changes}, stem)


def names_of(model: Architecture) -> list[str]:
    inside = [f"{n}.{w.name}" for n, layer in zip(model.layer_names, model.layers, strict=True) for w in layer.weights]
    return [w.name for w in (*model.embedding, *model.final, *model.head, *model.tower)] + inside


@pytest.mark.parametrize("entry", MODELLED, ids=lambda entry: entry.stem)
def test_catalogued_count_is_exact(entry: Entry) -> None:
    """The index holds the totals of the real models, built by transformers."""
    model = architecture(catalogue.config(entry), entry.id)
    assert model.parameters == entry.parameters
    names = names_of(model)
    assert len(set(names)) == len(names)
    assert len({id(layer) for layer in model.layers}) == len(set(model.layers)), "equal layers are one object"
    assert all(n > 0 for w in model.weights for n in w.shape)
    assert model.model_type == entry.family


# The public model cards and safetensors totals of models whose code is not in transformers, or whose class defaults
# are not the published file
@pytest.mark.parametrize(
    ("stem", "published"),
    [
        ("llama-2-7b", 6_738_415_616), ("llama-3.1-8b", 8_030_261_248), ("mistral-7b-v0.1", 7_241_732_096),
        ("qwen2.5-7b", 7_615_616_512), ("gpt2", 124_439_808), ("gemma-2-2b", 2_614_341_888),
        ("qwen-1_8b", 1_836_828_672), ("qwen-7b", 7_721_324_544), ("qwen-14b", 14_167_290_880),
        ("qwen-72b", 72_287_920_128), ("chatglm3-6b", 6_243_584_000), ("baichuan2-7b", 7_505_973_248),
        ("baichuan2-13b", 13_896_668_160), ("internlm2-7b", 7_737_708_544), ("mpt-7b", 6_649_286_656),
        ("deepseek-v2-lite", 15_706_484_224), ("glm-4.5-air", 106_852_245_504), ("phi-3.5-moe", 41_873_153_344),
        ("roberta-base", 124_697_433), ("stablelm-base-alpha-3b", 3_637_321_728), ("phi-1.5", 1_418_270_720),
    ],
)  # fmt: skip
def test_published_counts(stem: str, published: int) -> None:
    assert read(stem).parameters == published


@pytest.mark.parametrize(
    ("stem", "facts"),
    [
        ("llama-3.1-8b", {"kv_heads": 8, "head_dim": 128, "rotary_dim": 128, "window": None, "sdpa": True}),
        ("qwen2.5-7b", {"bias": True, "out_bias": False, "qk_norm": "none"}),
        ("qwen3-8b", {"bias": False, "qk_norm": "head"}),
        ("olmo-2-1124-7b", {"qk_norm": "full"}),
        ("phi-3-mini-4k", {"fused_qkv": True}),
        ("pythia-1b", {"fused_qkv": True, "rotary_dim": 64, "bias": True}),
        ("gpt-j-6b", {"rotary_dim": 64, "sdpa": False}),
        ("gpt2", {"rotary_dim": 0, "dropout": 0.1}),
        ("phi-2", {"rotary_dim": 32}),
        ("bloom-7b1", {"alibi": True, "rotary_dim": 0, "sdpa": False}),
        ("mpt-7b", {"alibi": True, "bias": False}),
        ("baichuan2-13b", {"alibi": True, "rotary_dim": 0}),
        ("baichuan2-7b", {"alibi": False, "rotary_dim": 128}),
        ("falcon-7b", {"kv_heads": 1, "heads": 71}),
        ("falcon-40b", {"kv_heads": 8}),
        ("starcoder", {"kv_heads": 1, "heads": 48}),
        ("mistral-7b-v0.1", {"window": 4096}),
        ("mistral-7b-v0.3", {"window": None}),
        ("gemma-2-2b", {"softcap": True, "sdpa": False}),
        ("gpt-oss-20b", {"sinks": True, "bias": True, "window": 128}),
        ("bert-base-uncased", {"causal": False, "dropout": 0.1}),
        ("deepseek-v3-671b", {"kind": "mla", "head_dim": 192, "value_dim": 128, "rotary_dim": 64, "q_lora_rank": 1536}),
        ("deepseek-v2-lite", {"kind": "mla", "q_lora_rank": 0, "kv_lora_rank": 512}),
        ("qwen3-next-80b-a3b", {"kind": "linear", "heads": 32, "kv_heads": 16, "conv": 4}),
    ],
)
def test_first_attention(stem: str, facts: dict[str, object]) -> None:
    attention = read(stem).layers[0].attention
    assert {key: getattr(attention, key) for key in facts} == facts


@pytest.mark.parametrize(
    ("stem", "norm", "placement", "norms", "mlp"),
    [
        ("llama-2-7b", "rms", "pre", 2, "gated"),
        ("gemma-7b", "rms_gemma", "pre", 2, "gated"),
        ("gemma-2-9b", "rms_gemma", "sandwich", 4, "gated"),
        ("olmo-2-1124-7b", "rms_gemma", "post_inner", 2, "gated"),
        ("command-r-35b", "layer_fp32", "parallel", 1, "gated"),
        ("falcon-7b", "layer", "parallel", 1, "plain"),
        ("falcon-40b", "layer", "parallel", 2, "plain"),
        ("falcon-rw-1b", "layer", "pre", 2, "plain"),
        ("pythia-1b", "layer", "parallel", 2, "plain"),
        ("gpt2", "layer", "pre", 2, "plain"),
        ("opt-1.3b", "layer", "pre", 2, "plain"),
        ("opt-350m", "layer", "post", 2, "plain"),
        ("bert-base-uncased", "layer", "post", 2, "plain"),
        ("mixtral-8x7b", "rms", "pre", 2, "moe"),
    ],
)
def test_blocks(stem: str, norm: str, placement: str, norms: int, mlp: str) -> None:
    layer = read(stem).layers[0]
    assert (layer.norm.kind, layer.placement, layer.norms, layer.mlp.kind) == (norm, placement, norms, mlp)


@pytest.mark.parametrize(
    ("stem", "windows"),
    [
        ("gemma-2-2b", [4096, None] * 13),
        ("gemma-3-1b-text", ([512] * 5 + [None]) * 4 + [512, 512]),
        ("gpt-oss-20b", [128, None] * 12),
        ("qwen2.5-7b", [None] * 28),
        ("modernbert-base", ([None] + [128] * 2) * 7 + [None]),
        ("gpt-neo-125m", [None, 256] * 6),
    ],
)
def test_windows(stem: str, windows: list[int | None]) -> None:
    assert [layer.attention.window for layer in read(stem).layers] == windows


def test_layers_without_rotation() -> None:
    rotated = [layer.attention.rotary_dim for layer in read("smollm3-3b").layers]
    assert rotated == [128, 128, 128, 0] * 9


def test_hybrid_layers() -> None:
    kinds = [layer.attention.kind for layer in read("kimi-linear-48b-a3b").layers]
    assert [i + 1 for i, kind in enumerate(kinds) if kind == "mla"] == [4, 8, 12, 16, 20, 24, 27]
    assert read("qwen3.5-9b").layers[3].attention.gated


def test_experts() -> None:
    model = read("deepseek-v3-671b")
    assert [layer.mlp.kind for layer in model.layers[:4]] == ["gated", "gated", "gated", "moe"]
    mlp = model.layers[-1].mlp
    assert (mlp.experts, mlp.experts_per_token, mlp.width, mlp.shared_width) == (256, 8, 2048, 2048)
    fused = [w for w in model.layers[-1].weights if w.kind == "experts"]
    assert [w.shape for w in fused] == [(256, 4096, 7168), (256, 7168, 2048)]
    assert read("llama-4-scout-text").layers[0].mlp.every_token


def test_shared_keys_of_gemma() -> None:
    layers = read("gemma-3n-e2b-text").layers
    assert [layer.attention.shared_kv for layer in layers] == [False] * 20 + [True] * 10
    assert not any("k_proj" in w.name for w in layers[-1].weights)


@pytest.mark.parametrize(
    ("architectures", "head", "task", "stem"),
    [
        (["LlamaForCausalLM"], 6400, "causal-lm", "model."),
        (None, 6400, "causal-lm", "model."),
        (["LlamaModel"], 0, "encoder", ""),
        (["LlamaForSequenceClassification"], 128, "classification", "model."),
    ],
)
def test_heads(architectures: list[str] | None, head: int, task: str, stem: str) -> None:
    model = architecture({**TINY, "architectures": architectures}, "tiny")
    assert (sum(w.numel for w in model.head), model.task) == (head, task)
    assert model.embedding[0].name == f"{stem}embed_tokens.weight"
    assert model.layer_names == (f"{stem}layers.0", f"{stem}layers.1")


def test_labels_widen_the_classifier() -> None:
    labels = {str(i): f"class {i}" for i in range(7)}
    model = read("bert-base-uncased", architectures=["BertForSequenceClassification"], id2label=labels)
    assert [w.shape for w in model.head if w.name == "classifier.weight"] == [(7, 768)]


@pytest.mark.parametrize("name", ["LlamaForQuestionAnswering", "LlamaForTokenClassification", "LlamaForMaskedLM"])
def test_unknown_head_is_refused(name: str) -> None:
    with pytest.raises(Unsupported, match="not modelled"):
        architecture({**TINY, "architectures": [name]}, "tiny")


@pytest.mark.parametrize("stem", ["vit-base-patch16-224", "clip-vit-base-patch32"])
def test_untrained_families_say_so(stem: str) -> None:
    assert "not modelled" in read(stem).trainable_memory


@pytest.mark.parametrize("stem", ["llama-2-7b", "gpt2", "bert-base-uncased", "mixtral-8x7b", "gemma-3-4b"])
def test_trained_families(stem: str) -> None:
    assert read(stem).trainable_memory == ""


def test_tower_counts_apart() -> None:
    model = read("gemma-3-4b")
    assert model.task == "multimodal"
    assert sum(w.numel for w in model.tower) == 4_300_079_472 - 3_880_263_168  # less the text decoder with its rows


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mamba2"}, "mamba2"),
        ({"_class_name": "UNet2DConditionModel"}, "diffusers"),
        ({"hidden_size": 8}, "model_type"),
        ({"model_type": ["llama"]}, "model family"),
        ({"model_type": "gemma3n"}, "towers"),
    ],
)
def test_refusals(config: dict[str, object], words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        architecture(config, "some/model")
    assert caught.value.hint


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
@pytest.mark.parametrize("value", [None, "absent", 0, -1, 1.5, "64", True, [64], 10**12, float("nan"), float("inf")])
def test_dimensions_are_never_guessed(key: str, value: object) -> None:
    config = {**TINY, key: value}
    if value == "absent":
        del config[key]
    with pytest.raises(BadInput, match=key) as caught:
        architecture(config, "tiny")
    assert caught.value.hint


@pytest.mark.parametrize(
    ("stem", "key"),
    [
        ("gpt2", "n_embd"), ("gpt2", "n_layer"), ("bloom-560m", "n_head"), ("falcon-7b", "num_attention_heads"),
        ("opt-1.3b", "ffn_dim"), ("mixtral-8x7b", "num_local_experts"), ("qwen3-30b-a3b", "moe_intermediate_size"),
        ("deepseek-v3-671b", "kv_lora_rank"), ("deepseek-v3-671b", "q_lora_rank"), ("t5-small", "d_kv"),
        ("whisper-tiny", "num_mel_bins"), ("gpt-oss-20b", "num_experts_per_tok"), ("mpt-7b", "d_model"),
    ],
)  # fmt: skip
def test_missing_key_is_named_as_the_file_writes_it(stem: str, key: str) -> None:
    config = catalogue.config(BY_STEM[stem])
    del config[key]
    with pytest.raises(BadInput, match=key):
        architecture(config, stem)


@given(
    width=st.integers(1, 64), inner=st.integers(1, 200), depth=st.integers(1, 6), groups=st.integers(1, 4),
    kv=st.integers(1, 4), head=st.integers(1, 32), vocabulary=st.integers(1, 500), tied=st.booleans(),
    bias=st.booleans(),
)  # fmt: skip
def test_llama_count_in_closed_form(
    width: int, inner: int, depth: int, groups: int, kv: int, head: int, vocabulary: int, tied: bool, bias: bool
) -> None:
    heads = groups * kv
    config = {
        "model_type": "llama", "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": depth,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head, "vocab_size": vocabulary,
        "tie_word_embeddings": tied, "attention_bias": bias,
    }  # fmt: skip
    attention = 2 * width * heads * head + 2 * width * kv * head + bias * (heads * head + 2 * kv * head + width)
    layer = attention + 3 * width * inner + 2 * width
    expected = depth * layer + width + vocabulary * width * (1 if tied else 2)
    model = architecture(config, "x")
    assert model.parameters == expected


hostile = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just(""),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2), st.lists(st.text(max_size=3), max_size=40),
)  # fmt: skip


@pytest.mark.parametrize("family", sorted(FAMILIES))
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_hostile_configs_end_in_our_errors(family: str, data: st.DataObject) -> None:
    """Any value under any key of any family: an Architecture or a MemfitError with a hint, nothing else."""
    example = next((entry for entry in MODELLED if entry.family == family), None)
    config = catalogue.config(example) if example else {**TINY, "model_type": family}
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), max_size=4, unique=True)):
        config[key] = data.draw(hostile)
    config["num_hidden_layers" if "num_hidden_layers" in config else "n_layer"] = data.draw(st.integers(-1, 3))
    try:
        assert architecture(config, "hostile").parameters >= 0
    except MemfitError as error:
        assert error.hint


def test_every_decoder_row_has_a_catalogued_model_or_a_live_check() -> None:
    catalogued = {entry.family for entry in MODELLED}
    inside = {
        str(catalogue.config(entry).get("text_config", {}).get("model_type"))  # type: ignore[attr-defined]
        for entry in MODELLED
    }
    live = {"arcee", "camembert", "codegen", "ernie4_5", "exaone4", "granitemoe", "kimi_k2", "qwen3_5_moe_text"}
    assert set(DIALECTS) - catalogued - inside <= live
