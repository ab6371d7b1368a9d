"""Model families: `architecture(config, name)` turns a parsed config.json into an Architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import ParamSpec

from memfit.errors import TRACE_HINT, BadInput, Unsupported
from memfit.models.families.classic import CLASSICS
from memfit.models.families.dialect import decoder
from memfit.models.families.encoders import ENCODERS, t5, whisper
from memfit.models.families.gemma import GEMMAS
from memfit.models.families.latent import HYBRIDS, LATENTS
from memfit.models.families.llama_like import DECODERS
from memfit.models.families.towers import tower
from memfit.models.families.vision import MULTIMODALS, clip, multimodal, vit
from memfit.nouns.architecture import Architecture, TaskKind
from memfit.nouns.task import PLAIN, Shape, Task

P = ParamSpec("P")
MOST_KEPT = 64  # architectures, as the page has them in turn
Builder = Callable[[Mapping[str, object], str], Architecture]

DIALECTS = DECODERS | CLASSICS | LATENTS | HYBRIDS | GEMMAS | ENCODERS
FAMILIES: dict[str, Builder] = {
    **{kind: partial(decoder, d=d) for kind, d in DIALECTS.items()},
    **{kind: partial(multimodal, row=row) for kind, row in MULTIMODALS.items()},
    "t5": t5,
    "mt5": partial(t5, feed_forward="gated-gelu"),
    "whisper": whisper,
    "vit": vit,
    "clip": clip,
}

REFUSED: dict[str, str] = {  # known families that no row above counts rightly
    "gemma3n": "its vision and audio towers are not modelled; 'gemma3n_text' is",
    "gemma4": "its vision and audio towers are not modelled; 'gemma4_text' is",
    "llama4": "its vision tower is not modelled; 'llama4_text' is",
}


def _once(make: Callable[P, Architecture]) -> Callable[P, Architecture]:
    """Return a function that makes equal architectures once: many caches know them by identity."""
    made: dict[str, Architecture] = {}

    @wraps(make)
    def found(*args: P.args, **named: P.kwargs) -> Architecture:
        key = repr((args, named))
        if key not in made:
            if len(made) >= MOST_KEPT:
                made.clear()
            made[key] = make(*args, **named)
        return made[key]

    return found


# how the name of a class says what it is trained for; ForConditionalGeneration says nothing
_MADE_FOR: dict[str, TaskKind] = {
    "WithLMHeadModel": "masked-lm", "ForMaskedLM": "masked-lm", "ForCausalLM": "causal-lm", "LMHeadModel": "causal-lm",
    "GenerationDecoder": "causal-lm",
    "ForSequenceClassification": "classification", "ForTokenClassification": "token-classification",
    "ForImageClassification": "vision", "ForCTC": "ctc", "ForSpeechToText": "speech",
}  # fmt: skip
_HEARS = {"audio_config", "num_mel_bins", "sampling_rate", "input_feat_per_channel"}  # keys of models that take sound


@_once
def architecture(config: Mapping[str, object], name: str) -> Architecture:
    """Turn a parsed config.json into an Architecture.

    Raises Unsupported for an unknown family, BadInput for bad values.
    """
    model_type = config.get("model_type")
    if "_class_name" in config:
        reason = f"'{config['_class_name']}' is a diffusers model, which no formula models"
        planned = f"memfit plan {name}, or {TRACE_HINT}" if model_type == "diffusers" else TRACE_HINT
        raise Unsupported(f"{name}: {reason}", hint=planned)
    if model_type is None:
        raise BadInput(
            f"{name}: its config.json has no 'model_type'", hint="use the config.json of a transformers model"
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        reason = REFUSED.get(str(model_type), "no formula exists for it")
        raise Unsupported(f"{name}: model family '{model_type}': {reason}", hint=TRACE_HINT)
    return FAMILIES[model_type](config, name)


@_once
def trained_for(config: Mapping[str, object], name: str, task: Task, shape: Shape = PLAIN) -> Architecture:
    """Turn a config into the Architecture of the class that a task trains. Raises Unsupported, BadInput."""
    labels = 1 if task.sample == "pair" else shape.classes
    made_by = task.auto.removeprefix("Auto").replace("ImageTextToText", "ConditionalGeneration")  # "ModelForCausalLM"
    found = architecture({**config, "architectures": [made_by], "num_labels": labels, "id2label": None}, name)
    seen = tower(config, name, task, shape)
    unknown = "" if seen else found.trainable_memory
    return replace(found, trained_for=task.key, shape=shape, vision=seen, trainable_memory=unknown)


def without_formula(config: Mapping[str, object], name: str) -> Architecture:
    """Return an Architecture that only names a model, whose weights transformers knows and a trace counts."""
    model_type = str(config.get("model_type") or "")
    made_for = str(next(iter(config.get("architectures") or ()), ""))  # type: ignore[call-overload]
    kinds: tuple[tuple[bool, TaskKind], ...] = (
        (model_type == "diffusers", "diffusion"),
        *((made_for.endswith(suffix), kind) for suffix, kind in _MADE_FOR.items()),
        ("vision_config" in config or "vq_config" in config, "multimodal"),
        (not _HEARS.isdisjoint(config), "speech"),
        (bool(config.get("is_encoder_decoder")), "seq2seq-lm"),
        ("image_size" in config, "vision"),
    )
    kind: TaskKind = next((kind for applies, kind in kinds if applies), "encoder")
    return Architecture(
        name=name, model_type=model_type, family=model_type, task=kind, width=0, vocabulary=0, layers=(), embedding=(),
        final=(), head=(), tied=False, trainable_memory="no formula exists for it",
    )  # fmt: skip
