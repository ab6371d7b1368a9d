"""Vision models: ViT, CLIP, and decoders with a vision tower (SigLIP, CLIP, Pixtral, Qwen-VL)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from memfit.models.families.blocks import gated_mlp, plain_mlp
from memfit.models.families.classic import CLASSICS
from memfit.models.families.dialect import (
    Dialect,
    Weights,
    blocks,
    conv,
    decoder,
    embedding,
    linear,
    no_rotary,
    norm,
    other,
    prefixed,
)
from memfit.models.families.encoders import both_ways
from memfit.models.families.fields import Fields
from memfit.models.families.gemma import GEMMAS
from memfit.models.families.latent import HYBRIDS
from memfit.models.families.llama_like import DECODERS, QWEN2, QWEN3
from memfit.nouns.architecture import Architecture, Norm

UNMODELLED = "training memory of vision models is not modelled"

SIGLIP = Dialect(
    attention=both_ways, mlp=plain_mlp, norm="layer", norm_bias=True, rotary=no_rotary,
    defaults={"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
              "num_channels": 3, "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh",
              "vision_use_head": True},
    body=("layer_norm1", "@attention", "layer_norm2", "@mlp"), attention_order=("k", "v", "q", "o"), o="out_proj",
    qkv_bias=True, out_bias=True, up="fc1", down="fc2", mlp_bias=True,
)  # fmt: skip
CLIP_VISION = replace(
    SIGLIP, defaults={**SIGLIP.defaults, "patch_size": 32, "hidden_act": "quick_gelu", "projection_dim": 512},
    body=("@attention", "layer_norm1", "@mlp", "layer_norm2"),
)  # fmt: skip
CLIP_TEXT = replace(
    CLIP_VISION, defaults={"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 49408,
                           "num_attention_heads": 8, "max_position_embeddings": 77, "hidden_act": "quick_gelu"},
)  # fmt: skip
VIT = replace(
    SIGLIP, defaults={"hidden_act": "gelu", "num_channels": 3, "qkv_bias": True}, layers="layers",
    attention_module="attention", attention_order=("q", "k", "v", "o"), o="o_proj", qkv_bias="qkv_bias",
    body=("@attention", "layernorm_before", "layernorm_after", "@mlp"),
    attention_dropout="attention_probs_dropout_prob", residual_dropout="hidden_dropout_prob",
)  # fmt: skip
PIXTRAL = Dialect(
    attention=both_ways, mlp=gated_mlp, body=("attention_norm", "@mlp", "@attention", "ffn_norm"),
    defaults={"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
              "num_channels": 3, "patch_size": 16, "hidden_act": "gelu"},
    attention_module="attention", attention_order=("k", "v", "q", "o"), mlp_module="feed_forward",
)  # fmt: skip
_QWEN_KEYS = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}
QWEN3_VISION = replace(
    SIGLIP, aliases=_QWEN_KEYS, body=("norm1", "norm2", "@attention", "@mlp"), attention_module="attn", qkv="qkv",
    o="proj", attention_order=("qkv", "o"), up="linear_fc1", down="linear_fc2",
    defaults={"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "in_channels": 3,
              "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584,
              "num_position_embeddings": 2304, "hidden_act": "gelu_pytorch_tanh"},
)  # fmt: skip
_PATCHES: dict[str, object] = {
    "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 16, "depth": 32,
    "hidden_size": 3584, "out_hidden_size": 3584,
}  # fmt: skip
QWEN2_5_VISION = replace(
    QWEN3_VISION, mlp=gated_mlp, norm="rms", norm_bias=False, gate="gate_proj", up="up_proj", down="down_proj",
    defaults={**_PATCHES, "intermediate_size": 3420, "hidden_act": "silu", "window_size": 112,
              "fullatt_block_indexes": (7, 15, 23, 31)},
)  # fmt: skip
QWEN2_VISION = replace(
    QWEN3_VISION, aliases={**_QWEN_KEYS, "hidden_size": "embed_dim", "intermediate_size": "unused"}, mlp_ratio=4,
    up="fc1", down="fc2", defaults={**_PATCHES, "embed_dim": 1280, "hidden_act": "quick_gelu"},
)  # fmt: skip


def stack(f: Fields, d: Dialect, prefix: str) -> Weights:
    """Return the weights of all blocks of a tower, under their module names."""
    return tuple(w for i, layer in enumerate(blocks(f, d)) for w in prefixed(f"{prefix}.{i}", layer.weights))


def _patches(f: Fields) -> int:
    return (f.size("image_size") // f.size("patch_size")) ** 2


def siglip(config: Mapping[str, object], name: str) -> Weights:
    """Return the weights of SigLIP without its pooling head."""
    f = Fields(config, name, SIGLIP.aliases, SIGLIP.defaults)
    width, patch = f.size("hidden_size"), f.size("patch_size")
    if f.flag("vision_use_head") and f.has("vision_use_head"):
        raise f.unsupported("SigLIP's pooling head is not modelled")
    below = conv("patch_embedding", width, f.size("num_channels"), patch, patch, bias=True)
    below += embedding("position_embedding", _patches(f), width)
    return prefixed("embeddings", below) + stack(f, SIGLIP, "encoder.layers") + norm("post_layernorm", width, True)


def clip_vision(config: Mapping[str, object], name: str) -> Weights:
    """Return the weights of CLIP's image encoder without its projection."""
    f = Fields(config, name, CLIP_VISION.aliases, CLIP_VISION.defaults)
    return _clip_vision_outer(f) + stack(f, CLIP_VISION, "encoder.layers")


def _clip_vision_outer(f: Fields) -> Weights:
    width, patch = f.size("hidden_size"), f.size("patch_size")
    below = other("class_embedding", width) + conv("patch_embedding", width, f.size("num_channels"), patch, patch)
    below = prefixed("embeddings", below + embedding("position_embedding", _patches(f) + 1, width))
    return below + norm("pre_layrnorm", width, True) + norm("post_layernorm", width, True)  # transformers' spelling


def pixtral(config: Mapping[str, object], name: str) -> Weights:
    f = Fields(config, name, PIXTRAL.aliases, PIXTRAL.defaults)
    width, patch = f.size("hidden_size"), f.size("patch_size")
    below = conv("patch_conv", width, f.size("num_channels"), patch, patch) + norm("ln_pre", width)
    return below + stack(f, PIXTRAL, "transformer.layers")


def _qwen_patches(f: Fields, bias: bool) -> Weights:
    patch, channels = f.size("patch_size"), f.size("in_channels")
    shape = (f.size("hidden_size"), channels, f.size("temporal_patch_size"), patch, patch)
    return conv("patch_embed.proj", *shape, bias=bias)


def qwen2_vision(config: Mapping[str, object], name: str) -> Weights:
    """Return the weights of Qwen2-VL's tower, which projects to `hidden_size` of its config."""
    f = Fields(config, name, QWEN2_VISION.aliases, QWEN2_VISION.defaults)
    merger = prefixed("merger", merger_of(f, QWEN2_VISION))
    return _qwen_patches(f, bias=False) + stack(f, QWEN2_VISION, "blocks") + merger


def qwen2_5_vision(config: Mapping[str, object], name: str) -> Weights:
    f = Fields(config, name, QWEN2_5_VISION.aliases, QWEN2_5_VISION.defaults)
    merger = prefixed("merger", merger_of(f, QWEN2_5_VISION))
    return _qwen_patches(f, bias=False) + stack(f, QWEN2_5_VISION, "blocks") + merger


def merger_of(f: Fields, d: Dialect) -> Weights:
    """Return the weights that make one token of several patches; Qwen2-VL's `hidden_size` is that of the tokens."""
    plain = Fields(f.values, f.name, {}, _PATCHES)
    out = plain.size("hidden_size" if d is QWEN2_VISION else "out_hidden_size")
    width = f.size("hidden_size")
    joint = width * f.size("spatial_merge_size") ** 2
    weights = norm("ln_q", width, d.norm_bias) + linear("mlp.0", joint, joint, bias=True)
    return weights + linear("mlp.2", out, joint, bias=True)


def qwen3_vision(config: Mapping[str, object], name: str, deepstack: bool) -> Weights:
    """Return the tower of Qwen3-VL and Qwen3.5; Qwen3-VL also feeds three inner layers to the decoder."""
    f = Fields(config, name, QWEN3_VISION.aliases, {**QWEN3_VISION.defaults, "deepstack_visual_indexes": (8, 16, 24)})
    width, out = f.size("hidden_size"), f.size("out_hidden_size")
    joint = width * f.size("spatial_merge_size") ** 2
    mlp = linear("linear_fc1", joint, joint, bias=True) + linear("linear_fc2", out, joint, bias=True)
    weights = _qwen_patches(f, bias=True) + embedding("pos_embed", f.size("num_position_embeddings"), width)
    weights += stack(f, QWEN3_VISION, "blocks") + prefixed("merger", norm("norm", width, True) + mlp)
    for i in range(len(f.items("deepstack_visual_indexes", int) or ()) if deepstack else 0):
        weights += prefixed(f"deepstack_merger_list.{i}", norm("norm", joint, True) + mlp)
    return weights


def vit(config: Mapping[str, object], name: str) -> Architecture:
    """Build ViT as a bare model or with an image classifier."""
    f = Fields(config, name, VIT.aliases, VIT.defaults)
    width, patch, kind = f.size("hidden_size"), f.size("patch_size"), f.head_class()
    stem = "" if kind == "model" else "vit"
    below = other("cls_token", 1, 1, width) + other("position_embeddings", 1, _patches(f) + 1, width)
    below += conv("patch_embeddings.projection", width, f.size("num_channels"), patch, patch, bias=True)
    head = linear("pooler.dense", f.size("pooler_output_size", width), width, bias=True)
    if kind == "classification":
        head = linear("classifier", f.labels(), width, bias=True)
    layers = blocks(f, VIT)
    return Architecture(
        name=name, model_type="vit", family="vit", task="vision", width=width, vocabulary=0, layers=layers,
        embedding=prefixed(stem, prefixed("embeddings", below)), final=prefixed(stem, norm("layernorm", width, True)),
        head=head, tied=False, final_norm=Norm("layer"), learned_positions=True, trainable_memory=UNMODELLED,
        layer_names=tuple(f"{stem}.layers.{i}".removeprefix(".") for i in range(len(layers))),
    )  # fmt: skip


def clip(config: Mapping[str, object], name: str) -> Architecture:
    """Build CLIP: a text and an image encoder with a projection each."""
    top = Fields(config, name, {}, {"projection_dim": 512})
    text = Fields(top.section("text_config"), name, {}, CLIP_TEXT.defaults)
    image = Fields(top.section("vision_config"), name, {}, CLIP_VISION.defaults)
    width, joint = text.size("hidden_size"), top.size("projection_dim")
    below = embedding("token_embedding", text.size("vocab_size"), width)
    below += embedding("position_embedding", text.size("max_position_embeddings"), width)
    tower = prefixed("vision_model", _clip_vision_outer(image) + stack(image, CLIP_VISION, "encoder.layers"))
    layers = blocks(text, CLIP_TEXT)
    head = linear("visual_projection", joint, image.size("hidden_size")) + linear("text_projection", joint, width)
    return Architecture(
        name=name, model_type="clip", family="clip", task="vision", width=width, layers=layers,
        vocabulary=text.size("vocab_size"), embedding=prefixed("text_model.embeddings", below),
        final=prefixed("text_model", norm("final_layer_norm", width, True)), head=other("logit_scale") + head,
        tied=False, tower=tower, learned_positions=True, final_norm=Norm("layer"), trainable_memory=UNMODELLED,
        layer_names=tuple(f"text_model.encoder.layers.{i}" for i in range(len(layers))),
    )  # fmt: skip


# decoders by model_type, with the names that exist only inside a multimodal config
_TEXT: dict[str, Dialect] = {
    **DECODERS, **CLASSICS, **HYBRIDS, **GEMMAS,
    "qwen2_vl_text": QWEN2, "qwen2_5_vl_text": QWEN2, "qwen3_vl_text": QWEN3,
    "qwen3_vl_moe_text": DECODERS["qwen3_moe"],
}  # fmt: skip

Outside = Callable[[Fields, int], Weights]  # (top-level config, width of the decoder) -> tower and projector


@dataclass(frozen=True, kw_only=True)
class Multimodal:
    """One row: the decoder, the weights outside it, and class defaults that its nested config may leave out."""

    text: str  # model_type of the decoder if the config does not name it
    outside: Outside
    tied: bool = False
    defaults: Mapping[str, object] = field(default_factory=dict)


def multimodal(config: Mapping[str, object], name: str, row: Multimodal) -> Architecture:
    """Build the decoder as a language model; the vision tower counts only as weights."""
    top = Fields(config, name)
    flat = top.raw("text_config") is None  # Qwen2-VL files keep the decoder's keys at the top level
    text = {**config} if flat else {**top.section("text_config")}
    kind = row.text if flat else text.get("model_type", row.text)
    if kind not in _TEXT:
        raise top.unsupported(f"its decoder '{kind}' is not modelled")
    tied = top.raw("tie_word_embeddings")
    text |= {
        "model_type": kind,
        "architectures": config.get("architectures"),
        "tie_word_embeddings": text.get("tie_word_embeddings", row.tied) if tied is None else tied,
    }
    if not str((top.items("architectures") or ("ForConditionalGeneration",))[0]).endswith("ForConditionalGeneration"):
        raise top.unsupported("only the ForConditionalGeneration class of this family is modelled")
    dialect = replace(_TEXT[kind], stem="model.language_model")
    dialect = replace(dialect, defaults={**dialect.defaults, **row.defaults})
    inner = decoder(text, name, dialect)
    model_type = top.text("model_type")
    tower = prefixed("model", row.outside(top, inner.width))
    return replace(inner, model_type=model_type, family=model_type, task="multimodal", tower=tower)


def _gemma3(top: Fields, width: int) -> Weights:
    image = top.section("vision_config")
    inner = Fields(image, top.name, {}, SIGLIP.defaults).size("hidden_size")
    projector = other("mm_input_projection_weight", inner, width) + norm("mm_soft_emb_norm", inner)
    return prefixed("vision_tower", siglip(image, top.name)) + prefixed("multi_modal_projector", projector)


def _paligemma(top: Fields, width: int) -> Weights:
    image = top.section("vision_config")
    inner = Fields(image, top.name, {}, SIGLIP.defaults).size("hidden_size")
    projector = linear("linear", top.size("projection_dim", width), inner, bias=True)
    return prefixed("vision_tower", siglip(image, top.name)) + prefixed("multi_modal_projector", projector)


def _mistral3(top: Fields, width: int) -> Weights:
    image, bias = top.section("vision_config"), top.flag("multimodal_projector_bias")
    inner = Fields(image, top.name, {}, PIXTRAL.defaults).size("hidden_size")
    merged = inner * top.size("spatial_merge_size", 2) ** 2
    projector = norm("norm", inner) + linear("patch_merger.merging_layer", inner, merged)
    projector += linear("linear_1", width, inner * _feature_layers(top), bias) + linear("linear_2", width, width, bias)
    return prefixed("vision_tower", pixtral(image, top.name)) + prefixed("multi_modal_projector", projector)


def _llava(top: Fields, width: int) -> Weights:
    image, bias = top.section("vision_config"), top.flag("multimodal_projector_bias", True)
    f = Fields(image, top.name, {}, CLIP_VISION.defaults)
    if f.text("model_type", "clip_vision_model") != "clip_vision_model":
        raise top.unsupported(f"its vision tower '{f.raw('model_type')}' is not modelled")
    inner = f.size("hidden_size") * _feature_layers(top)
    projector = linear("linear_1", width, inner, bias) + linear("linear_2", width, width, bias)
    return prefixed("vision_tower", clip_vision(image, top.name)) + prefixed("multi_modal_projector", projector)


def _feature_layers(top: Fields) -> int:
    chosen = top.raw("vision_feature_layer")
    return len(chosen) if isinstance(chosen, list | tuple) else 1


def _qwen_visual(make: Callable[[Mapping[str, object], str], Weights], top: Fields, width: int) -> Weights:
    return prefixed("visual", make(top.section("vision_config"), top.name))


_GEMMA3_4B: dict[str, object] = {  # the published 4B file leaves out the class's defaults
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 131072,
}  # fmt: skip
_DEEPSTACK = partial(_qwen_visual, partial(qwen3_vision, deepstack=True))
_PLAIN = partial(_qwen_visual, partial(qwen3_vision, deepstack=False))

MULTIMODALS: dict[str, Multimodal] = {
    "gemma3": Multimodal(text="gemma3_text", outside=_gemma3, tied=True, defaults=_GEMMA3_4B),
    "paligemma": Multimodal(text="gemma", outside=_paligemma, tied=True),
    "mistral3": Multimodal(text="mistral", outside=_mistral3, tied=True, defaults={"vocab_size": 32000}),
    "llava": Multimodal(text="llama", outside=_llava, defaults={
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }),
    "qwen2_vl": Multimodal(text="qwen2_vl_text", outside=partial(_qwen_visual, qwen2_vision)),
    "qwen2_5_vl": Multimodal(text="qwen2_5_vl_text", outside=partial(_qwen_visual, qwen2_5_vision)),
    "qwen3_vl": Multimodal(text="qwen3_vl_text", outside=_DEEPSTACK),
    "qwen3_vl_moe": Multimodal(text="qwen3_vl_moe_text", outside=_DEEPSTACK),
    "qwen3_5": Multimodal(text="qwen3_5_text", outside=_PLAIN),
    "qwen3_5_moe": Multimodal(text="qwen3_5_moe_text", outside=_PLAIN),
}  # fmt: skip
