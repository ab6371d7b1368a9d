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
KANDINSKY = ("to_query", "to_key", "to_value", "out_layer")
KANDINSKY_BLOCKS = ("text_transformer_blocks", "visual_transformer_blocks")
BLOCKS = ("transformer_blocks", "single_transformer_blocks")
FLUX2 = (*ATTENTION, "to_qkv_mlp_proj", "single_transformer_blocks.*.attn.to_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How diffusers trains one class of pipeline."""

    key: str  # diffusers' class
    denoiser: str = "transformer"  # the component that is trained
    trained: str  # its class
    targets: tuple[str, ...] = ATTENTION  # modules with adapters; * is the number of a block
    vae_fp32: bool = False  # whether the VAE stays in fp32
    texts: tuple[int, ...] = ()  # tokens of each text encoder's input; (): latents and embeddings are always prepared
    encoders: tuple[str, ...] = ()  # classes of the text encoders
    states: int  # tokens of the embeddings that the denoiser reads
    width: str  # the key of the denoiser's config that says how wide they are
    varying: bool = False  # whether its texts are as long as they are, `states` at most; else all are padded to that
    downscale: int = 8  # pixels of an image's side for each of a latent's
    multiple: int = 8  # of which width and height are multiples
    # lists of blocks that SimpleTuner checkpoints in groups, which feed on these inputs, and those of which it chooses
    # single ones, whose numbers may go on from list to list
    segments: tuple[str, ...] = ()
    fed: tuple[int, ...] = (0,)
    alternating: tuple[str, ...] = ()
    numbered_on: bool = False

    @property
    def prepared(self) -> bool:
        """Return whether it is trained on prepared latents and embeddings alone."""
        return not self.texts


_PROJECTED = "CLIPTextModelWithProjection"
_UNET = "UNet2DConditionModel"
PIPELINES: dict[str, Pipeline] = {row.key: row for row in (
    Pipeline(key="StableDiffusionPipeline", denoiser="unet", trained=_UNET, texts=(TEXT_TOKENS,),
             encoders=("CLIPTextModel",), states=TEXT_TOKENS, width="cross_attention_dim"),
    Pipeline(key="StableDiffusionXLPipeline", denoiser="unet", trained=_UNET, vae_fp32=True, texts=(TEXT_TOKENS,) * 2,
             encoders=("CLIPTextModel", _PROJECTED), states=TEXT_TOKENS, width="cross_attention_dim"),
    Pipeline(key="StableDiffusion3Pipeline", trained="SD3Transformer2DModel", targets=JOINT,
             vae_fp32=True, texts=(TEXT_TOKENS,) * 3, encoders=(_PROJECTED, _PROJECTED, "T5EncoderModel"),
             states=2 * TEXT_TOKENS, width="joint_attention_dim", multiple=16,  # CLIP's and T5's, end to end
             segments=BLOCKS[:1], fed=(1, 0)),
    Pipeline(key="FluxPipeline", trained="FluxTransformer2DModel", targets=FLUX, texts=(TEXT_TOKENS, 512),
             encoders=("CLIPTextModel", "T5EncoderModel"), states=512, width="joint_attention_dim", multiple=16,
             segments=BLOCKS, fed=(1, 0)),
    # the longest texts that diffusers' scripts keep, or its pipeline where it has no script
    Pipeline(key="KolorsPipeline", denoiser="unet", trained=_UNET, states=256, width="encoder_hid_dim"),
    Pipeline(key="PixArtSigmaPipeline", trained="PixArtTransformer2DModel", states=300, width="caption_channels",
             multiple=16, segments=BLOCKS[:1]),
    Pipeline(key="SanaPipeline", trained="SanaTransformer2DModel", targets=ATTENTION[:3], states=300,
             width="caption_channels", downscale=32, multiple=32, alternating=BLOCKS[:1]),
    Pipeline(key="AuraFlowPipeline", trained="AuraFlowTransformer2DModel", states=256, width="joint_attention_dim",
             varying=True, multiple=16, alternating=("joint_transformer_blocks", BLOCKS[1])),
    Pipeline(key="Lumina2Pipeline", trained="Lumina2Transformer2DModel", states=256, width="cap_feat_dim",
             multiple=16, segments=("layers",)),
    Pipeline(key="ChromaPipeline", trained="ChromaTransformer2DModel", targets=FLUX, states=512,
             width="joint_attention_dim", multiple=16, alternating=BLOCKS),
    Pipeline(key="QwenImagePipeline", trained="QwenImageTransformer2DModel", states=1024, width="joint_attention_dim",
             varying=True, multiple=16, alternating=BLOCKS[:1]),
    Pipeline(key="ZImagePipeline", trained="ZImageTransformer2DModel", states=512, width="cap_feat_dim", varying=True,
             multiple=16, segments=("layers",)),
    Pipeline(key="Cosmos2TextToImagePipeline", trained="CosmosTransformer3DModel", states=512, width="text_embed_dim",
             multiple=16, alternating=BLOCKS[:1]),
    Pipeline(key="Kandinsky5T2IPipeline", trained="Kandinsky5Transformer3DModel", targets=KANDINSKY, states=512,
             width="in_text_dim", varying=True, multiple=16, alternating=KANDINSKY_BLOCKS, numbered_on=True),
    # which reads the ids of its words; diffusers sets them no limit
    Pipeline(key="OmniGenPipeline", trained="OmniGenTransformer2DModel", states=512, width="", varying=True,
             multiple=16),
    Pipeline(key="Flux2Pipeline", trained="Flux2Transformer2DModel", targets=FLUX2, states=512,
             width="joint_attention_dim", multiple=16, segments=BLOCKS, fed=(1, 0)),
)}  # fmt: skip


def pipeline(config: Mapping[str, Any]) -> Pipeline:
    """Return the row of a pipeline's config. Raises Unsupported."""
    name = str(config.get("_class_name"))
    if name not in PIPELINES:
        hint = f"memfit trace train.py runs your own script; planned are {', '.join(PIPELINES)}"
        raise Unsupported(f"no training loop is known for {name}", hint=hint)
    return PIPELINES[name]
