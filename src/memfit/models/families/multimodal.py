"""Models that read images: a decoder of another family below `text_config`, a vision tower and a projector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import memfit.models.families.vision as vision
from memfit.models.families.classic import CLASSICS
from memfit.models.families.decoder import decoder
from memfit.models.families.dialect import Dialect
from memfit.models.families.fields import Fields
from memfit.models.families.gemma import GEMMAS
from memfit.models.families.hybrid import HYBRIDS
from memfit.models.families.llama_like import DECODERS, QWEN2, QWEN3
from memfit.models.families.parts import Weights, linear, norm, other, prefixed
from memfit.nouns.architecture import Architecture

# Names that a decoder bears only inside such a model
_TEXT: dict[str, Dialect] = {
    **DECODERS, **CLASSICS, **HYBRIDS, **GEMMAS,
    "qwen2_vl_text": QWEN2, "qwen2_5_vl_text": QWEN2, "qwen3_vl_text": QWEN3,
    "qwen3_vl_moe_text": DECODERS["qwen3_moe"],
}  # fmt: skip

Outside = Callable[[Fields, int], Weights]  # (top-level config, width of the decoder) -> tower and projector


@dataclass(frozen=True, kw_only=True)
class Multimodal:
    """One row: which decoder, what stands outside it, and the class defaults its nested config may leave out."""

    text: str  # model_type of the decoder, where its config does not say
    outside: Outside
    tied: bool = False
    defaults: Mapping[str, object] = field(default_factory=dict)


def multimodal(config: Mapping[str, object], name: str, row: Multimodal) -> Architecture:
    """Text is what is trained and modelled; the tower counts as weights."""
    top = Fields(config, name)
    flat = top.raw("text_config") is None  # Qwen2-VL files keep the decoder's keys on top
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
    inner = Fields(image, top.name, {}, vision.SIGLIP.defaults).size("hidden_size")
    projector = other("mm_input_projection_weight", inner, width) + norm("mm_soft_emb_norm", inner)
    return prefixed("vision_tower", vision.siglip(image, top.name)) + prefixed("multi_modal_projector", projector)


def _paligemma(top: Fields, width: int) -> Weights:
    image = top.section("vision_config")
    inner = Fields(image, top.name, {}, vision.SIGLIP.defaults).size("hidden_size")
    projector = linear("linear", top.size("projection_dim", width), inner, bias=True)
    return prefixed("vision_tower", vision.siglip(image, top.name)) + prefixed("multi_modal_projector", projector)


def _mistral3(top: Fields, width: int) -> Weights:
    image, bias = top.section("vision_config"), top.flag("multimodal_projector_bias")
    inner = Fields(image, top.name, {}, vision.PIXTRAL.defaults).size("hidden_size")
    merged = inner * top.size("spatial_merge_size", 2) ** 2
    projector = norm("norm", inner) + linear("patch_merger.merging_layer", inner, merged)
    projector += linear("linear_1", width, inner * _feature_layers(top), bias) + linear("linear_2", width, width, bias)
    return prefixed("vision_tower", vision.pixtral(image, top.name)) + prefixed("multi_modal_projector", projector)


def _llava(top: Fields, width: int) -> Weights:
    image, bias = top.section("vision_config"), top.flag("multimodal_projector_bias", True)
    f = Fields(image, top.name, {}, vision.CLIP_VISION.defaults)
    if f.text("model_type", "clip_vision_model") != "clip_vision_model":
        raise top.unsupported(f"its vision tower '{f.raw('model_type')}' is not modelled")
    inner = f.size("hidden_size") * _feature_layers(top)
    projector = linear("linear_1", width, inner, bias) + linear("linear_2", width, width, bias)
    return prefixed("vision_tower", vision.clip_vision(image, top.name)) + prefixed("multi_modal_projector", projector)


def _feature_layers(top: Fields) -> int:
    chosen = top.raw("vision_feature_layer")
    return len(chosen) if isinstance(chosen, list | tuple) else 1


def _qwen_visual(make: Callable[[Mapping[str, object], str], Weights], top: Fields, width: int) -> Weights:
    return prefixed("visual", make(top.section("vision_config"), top.name))


_GEMMA3_4B: dict[str, object] = {  # the published 4B file leaves out what equals the class's defaults
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 131072,
}  # fmt: skip
_DEEPSTACK = partial(_qwen_visual, partial(vision.qwen3_vision, deepstack=True))
_PLAIN = partial(_qwen_visual, partial(vision.qwen3_vision, deepstack=False))

MULTIMODALS: dict[str, Multimodal] = {
    "gemma3": Multimodal(text="gemma3_text", outside=_gemma3, tied=True, defaults=_GEMMA3_4B),
    "paligemma": Multimodal(text="gemma", outside=_paligemma, tied=True),
    "mistral3": Multimodal(text="mistral", outside=_mistral3, tied=True, defaults={"vocab_size": 32000}),
    "llava": Multimodal(text="llama", outside=_llava, defaults={
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }),
    "qwen2_vl": Multimodal(text="qwen2_vl_text", outside=partial(_qwen_visual, vision.qwen2_vision)),
    "qwen2_5_vl": Multimodal(text="qwen2_5_vl_text", outside=partial(_qwen_visual, vision.qwen2_5_vision)),
    "qwen3_vl": Multimodal(text="qwen3_vl_text", outside=_DEEPSTACK),
    "qwen3_vl_moe": Multimodal(text="qwen3_vl_moe_text", outside=_DEEPSTACK),
    "qwen3_5": Multimodal(text="qwen3_5_text", outside=_PLAIN),
    "qwen3_5_moe": Multimodal(text="qwen3_5_moe_text", outside=_PLAIN),
}  # fmt: skip
