"""Hold families against the real code: tiny variants of configs, built by transformers on the meta device, if any."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import memfit.catalogue
from memfit.models.families import architecture

MODELS = Path(memfit.catalogue.__file__).parent / "models"

pytestmark = pytest.mark.filterwarnings("ignore")  # those of other packages while they are imported

D = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 100}
G = {**D, "num_key_value_heads": 2}
E = {**G, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
X = {**G, "num_local_experts": 4, "num_experts_per_tok": 2}
MLA = {
    **D, "moe_intermediate_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "head_dim": 16,
}  # fmt: skip
FALCON = {key: D[key] for key in D if key != "intermediate_size"}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 100}
BERT = {**D, "max_position_embeddings": 32, "type_vocab_size": 2}
SIGLIP = {"model_type": "siglip_vision_model", **D, "image_size": 28, "patch_size": 14, "vision_use_head": False}
QWEN_EYE = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "out_hidden_size": 64, "patch_size": 4,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip

DISTIL = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96, "vocab_size": 100, "max_position_embeddings": 32}
EYE = {**D, "image_size": 28, "patch_size": 14}
PIXTRAL = {"model_type": "pixtral", **EYE}
CLIP = {"model_type": "clip_vision_model", **EYE}
GEMMA = {"model_type": "gemma", **G, "head_dim": 16}
SHARED = {"shared_expert_intermediate_size": 40}
T5 = {"d_model": 64, "d_kv": 8, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "vocab_size": 100}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
NARROW = {"ffn_dim": 80, "word_embed_proj_dim": 32, "do_layer_norm_before": False, "max_position_embeddings": 32}

VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "LlamaForCausalLM", {**G, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", "LlamaForCausalLM", {**G, "head_dim": 24, "num_key_value_heads": None}),
    ("llama", "LlamaModel", G),
    ("llama", "LlamaForSequenceClassification", {**G, "num_labels": 5}),
    ("mistral", "MistralForCausalLM", {**G, "head_dim": 32}),
    ("qwen2", "Qwen2ForSequenceClassification", G),
    ("qwen3", "Qwen3ForCausalLM", {**G, "attention_bias": True}),
    ("qwen3_moe", "Qwen3MoeForCausalLM", {**E, "decoder_sparse_step": 2, "mlp_only_layers": [3], "head_dim": 24}),
    ("qwen2_moe", "Qwen2MoeForCausalLM", {**E, **SHARED, "qkv_bias": False}),
    ("mixtral", "MixtralForCausalLM", {**X, "head_dim": 24}),
    ("phimoe", "PhimoeForCausalLM", {**X, "attention_bias": True, "lm_head_bias": True}),
    ("granitemoe", "GraniteMoeForCausalLM", {**X, "attention_bias": True}),
    ("gpt_oss", "GptOssForCausalLM", {**X, "head_dim": 16}),
    ("llama4_text", "Llama4ForCausalLM",
     {**X, "head_dim": 16, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 80}),
    ("glm4_moe", "Glm4MoeForCausalLM", {**MLA, "use_qk_norm": True, "attention_bias": True, "head_dim": 24}),
    ("deepseek_v2", "DeepseekV2ForCausalLM", {**MLA, "q_lora_rank": None, "attention_bias": True}),
    ("deepseek_v3", "DeepseekV3ForCausalLM", {**MLA, "attention_bias": True}),
    ("glm4_moe_lite", "Glm4MoeLiteForCausalLM", {**MLA, "mlp_layer_types": ["dense", "sparse"] * 2}),
    ("qwen3_next", "Qwen3NextForCausalLM", {**E, **LINEAR, **SHARED, "full_attention_interval": 2}),
    ("qwen3_5_text", "Qwen3_5ForCausalLM", {**G, **LINEAR, "full_attention_interval": 2}),
    ("gemma2", "Gemma2ForCausalLM", {**G, "attention_bias": True, "head_dim": 16}),
    ("gemma3_text", "Gemma3ForSequenceClassification", {**G, "head_dim": 16}),
    ("olmo2", "Olmo2ForCausalLM", {**G, "attention_bias": True}),
    ("phi3", "Phi3ForCausalLM", {**G, "tie_word_embeddings": True, "pad_token_id": 0}),
    ("cohere", "CohereForCausalLM", {**G, "use_qk_norm": True, "attention_bias": True}),
    ("cohere2", "Cohere2ForCausalLM", {**G, "attention_bias": True}),
    ("ernie4_5", "Ernie4_5ForCausalLM", {**G, "use_bias": True, "head_dim": 16}),
    ("exaone4", "Exaone4ForCausalLM", G),
    ("arcee", "ArceeForCausalLM", {**G, "attention_bias": True, "mlp_bias": True}),
    ("apertus", "ApertusForCausalLM", {**G, "attention_bias": True}),
    ("starcoder2", "Starcoder2ForCausalLM", {**G, "use_bias": False}),
    ("nemotron", "NemotronForCausalLM", {**G, "mlp_bias": True}),
    ("gpt2", "GPT2LMHeadModel", {**GPT, "n_inner": 80, "tie_word_embeddings": False}),
    ("gpt2", "GPT2ForSequenceClassification", GPT),
    ("gpt_bigcode", "GPTBigCodeForCausalLM", {**GPT, "multi_query": False}),
    ("gptj", "GPTJForCausalLM", {**GPT, "rotary_dim": 8, "n_inner": None}),
    ("codegen", "CodeGenForCausalLM", {**GPT, "rotary_dim": 8}),
    ("gpt_neox", "GPTNeoXForCausalLM", {**D, "use_parallel_residual": False, "attention_bias": False}),
    ("falcon", "FalconForCausalLM",
     {**FALCON, "bias": True, "alibi": True, "multi_query": False, "parallel_attn": False}),
    ("falcon", "FalconForCausalLM",
     {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    ("opt", "OPTModel", {**D, **NARROW}),
    ("opt", "OPTForCausalLM", {**D, "ffn_dim": 80, "enable_bias": False, "max_position_embeddings": 32}),
    ("stablelm", "StableLmForCausalLM", {**G, "use_parallel_residual": True, "use_qkv_bias": True}),
    ("bert", "BertModel", BERT),
    ("bert", "BertForPreTraining", BERT),
    ("bert", "BertForSequenceClassification", {**BERT, "num_labels": 3}),
    ("bert", "BertForTokenClassification", BERT),
    ("roberta", "RobertaForSequenceClassification", BERT),
    ("camembert", "CamembertForMaskedLM", BERT),
    ("distilbert", "DistilBertForSequenceClassification", DISTIL),
    ("deberta-v2", "DebertaV2ForSequenceClassification", {**BERT, **RELATIVE}),
    ("deberta-v2", "DebertaV2ForTokenClassification", {**BERT, "conv_kernel_size": 3, "type_vocab_size": 0}),
    ("modernbert", "ModernBertForSequenceClassification",
     {**D, "norm_bias": True, "attention_bias": True, "pad_token_id": 0}),
    ("t5", "T5ForConditionalGeneration", T5),
    ("mt5", "MT5ForConditionalGeneration", T5),
    ("vit", "ViTForImageClassification", {**D, "image_size": 28, "patch_size": 14, "qkv_bias": False}),
    ("qwen2_vl", "Qwen2VLForConditionalGeneration",
     {**G, "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4}}),
    ("qwen3_vl", "Qwen3VLForConditionalGeneration", {"text_config": {**G, "head_dim": 16}, "vision_config": QWEN_EYE}),
    ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration",
     {"text_config": {**E, "head_dim": 16}, "vision_config": QWEN_EYE}),
    ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration",
     {"text_config": {**E, **LINEAR, **SHARED}, "vision_config": QWEN_EYE}),
    ("paligemma", "PaliGemmaForConditionalGeneration",
     {"projection_dim": 64, "text_config": GEMMA, "vision_config": SIGLIP}),
    ("llava", "LlavaForConditionalGeneration", {"text_config": {"model_type": "llama", **G}, "vision_config": CLIP}),
    ("mistral3", "Mistral3ForConditionalGeneration", {
        "tie_word_embeddings": False, "multimodal_projector_bias": True, "vision_config": PIXTRAL,
        "text_config": {"model_type": "mistral", **G, "head_dim": 16},
    }),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "values"), VARIANTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_variant_equals_the_real_model(kind: str, name: str, values: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="5.0")
    from check_families import compare

    config = {"model_type": kind, "architectures": [name], **values, "eos_token_id": None, "bos_token_id": None}
    assert compare(config, kind)[0] == []


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.json")), ids=lambda path: path.stem)
def test_a_model_that_was_saved_again_is_the_same(path: Path) -> None:
    """transformers writes other keys than were published, and leaves out what its config class has by itself."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    published = json.loads(path.read_text())
    kind = published.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers has no {kind}: the model brings its own code")
    saved = json.loads(transformers.CONFIG_MAPPING[kind].from_dict(published).to_json_string(use_diff=True))
    saved["architectures"] = published.get("architectures")
    one, other = (architecture(config, path.stem) for config in (published, saved))
    if not one.max_positions:  # the config class has a number where the file has none
        other = replace(other, max_positions=0)
    assert [f.name for f in fields(one) if getattr(one, f.name) != getattr(other, f.name)] == []
