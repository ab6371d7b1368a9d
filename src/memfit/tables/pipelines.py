"""Text-to-image pipelines: one row a class of diffusers, with the component that is trained and those beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memfit.errors import Unsupported

TEXT_TOKENS = 77  # of CLIP's texts, to which all are padded
ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")
JOINT = tuple(f"attn.{name}" for name in (*ATTENTION, "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out"))
FLUX = (*JOINT, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How diffusers trains one class of pipeline."""

    key: str  # diffusers' class
    denoiser: str = "unet"  # the component that is trained
    trained: str = "UNet2DConditionModel"  # its class
    targets: tuple[str, ...] = ATTENTION  # modules with adapters
    vae_fp32: bool = False  # whether the VAE stays in fp32
    texts: tuple[int, ...] = (TEXT_TOKENS,)  # tokens of each text encoder's input
    encoders: tuple[str, ...] = ("CLIPTextModel",)  # classes of the text encoders
    multiple: int = 8  # of which width and height are multiples


_PROJECTED = "CLIPTextModelWithProjection"
PIPELINES: dict[str, Pipeline] = {row.key: row for row in (
    Pipeline(key="StableDiffusionPipeline"),
    Pipeline(key="StableDiffusionXLPipeline", vae_fp32=True, texts=(TEXT_TOKENS,) * 2,
             encoders=("CLIPTextModel", _PROJECTED)),
    Pipeline(key="StableDiffusion3Pipeline", denoiser="transformer", trained="SD3Transformer2DModel", targets=JOINT,
             vae_fp32=True, texts=(TEXT_TOKENS,) * 3, encoders=(_PROJECTED, _PROJECTED, "T5EncoderModel"),
             multiple=16),
    Pipeline(key="FluxPipeline", denoiser="transformer", trained="FluxTransformer2DModel", targets=FLUX,
             texts=(TEXT_TOKENS, 512), encoders=("CLIPTextModel", "T5EncoderModel"), multiple=16),
)}  # fmt: skip


def pipeline(config: Mapping[str, Any]) -> Pipeline:
    """Return the row of a pipeline's config. Raises Unsupported."""
    name = str(config.get("_class_name"))
    if name not in PIPELINES:
        hint = f"memfit trace train.py runs your own script; planned are {', '.join(PIPELINES)}"
        raise Unsupported(f"no training loop is known for {name}", hint=hint)
    return PIPELINES[name]
