"""What SimpleTuner's examples train on: the denoiser's configuration, and the shapes that its caches give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from memfit.catalogue import config as catalogued
from memfit.catalogue import names

# Videos of the data set sayakpaul/video-dataset-disney-organized, of 49 frames. SimpleTuner rounds the edge of 480
# pixels to 512, as its buckets lie 64 apart, and both sides again. The videos' shape is not stated in what could be
# read: of 4:3, 3:2 and 16:9 only 16:9, whose bucket is 704 x 384, gives what Kandinsky took (not blind: chosen after
# seeing its cells). Of the 48 frames that each example asks for, SanaVideo's and LTXVideo's classes leave 41.
_TALL, _WIDE = 384, 704


@dataclass(frozen=True, slots=True)
class Case:
    """An example. denoiser: its configuration where it differs from the class's defaults. batch: what collate gives.

    key, whole, depths: the configuration's number of repeated blocks, its value, and the shallow ones that are traced.
    standing: attributes of SimpleTuner's model in place of what would come from the Hub.
    ignores: segments of blocks were not told apart when it was measured: their cells equal those of `layer`.
    plain: nothing was checkpointed when it was measured: the table's cells of `layer` equal those of `none`.
    """

    denoiser: Callable[[], dict[str, Any]]
    batch: Callable[[], dict[str, Any]]
    key: str = ""
    whole: int = 0
    depths: tuple[int, ...] = ()
    ignores: bool = False
    plain: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    standing: Callable[[], dict[str, Any]] = dict


def _known(name: str, part: str = "transformer") -> Callable[[], dict[str, Any]]:
    def config() -> dict[str, Any]:
        entry = names.find(name)
        assert entry is not None
        return dict(catalogued(entry)[part])

    return config


def _is(**config: Any) -> Callable[[], dict[str, Any]]:
    return lambda: config


def _given(
    latents: tuple[int, ...], words: tuple[int, int], pooled: int = 0, real: int = 0, **more: Tensor
) -> Callable[[], dict[str, Any]]:
    """Return a batch of latents and embeddings. words: tokens and their width. real: tokens that are no padding."""
    count, (length, width) = latents[0], words
    mask = torch.arange(length).expand(count, length) < (real or length)

    def batch() -> dict[str, Any]:
        made: dict[str, Any] = {
            "latent_batch": torch.zeros(latents),
            "prompt_embeds": torch.zeros(count, length, width),
        }
        if pooled:
            made["add_text_embeds"] = torch.zeros(count, pooled)
        return made | {"encoder_attention_mask": mask.clone()} | more

    return batch


def _one_word() -> dict[str, Any]:
    """OmniGen's processor of its prompt around the caption "minecraft", without a tokenizer."""
    from simpletuner.helpers.models.omnigen.collator import OmniGenTrainingCollator

    words = {"input_ids": [1] * 18, "pixel_values": None, "image_sizes": None}
    processor = SimpleNamespace(process_multi_modal_prompt=lambda *_, **__: words, collator=OmniGenTrainingCollator())
    return {"processor": processor}


_COSMOS = _is(num_attention_heads=16, rope_scale=(1.0, 4.0, 4.0), extra_pos_embed_type=None)

CASES: dict[str, Case] = {
    "cosmos2image.lycoris-lokr": Case(_COSMOS, _given((1, 16, 1, 64, 64), (512, 1024)), "num_layers", 28, (4, 8), True),
    "zlab-i1.peft-lora": Case(_is(), _given((1, 32, 128, 128), (256, 2304), real=6), "depth", 29, (5, 9)),
    "ltxvideo-0.9.5-t2v.peft-lora": Case(
        _is(), _given((1, 128, 6, _TALL // 32, _WIDE // 32), (128, 4096)), "num_layers", 28, (4, 8)
    ),
    "kolors.peft-lora": Case(
        _known("kolors", "unet"),
        _given((1, 4, 64, 64), (256, 4096), 4096, batch_time_ids=torch.zeros(1, 6, dtype=torch.bfloat16)), ignores=True,
    ),
    # the second, frozen adapter of the turbo model, whose file is not known, is left out
    "z-image-turbo.peft-lora": Case(
        _known("z-image-turbo"), _given((1, 16, 64, 64), (20, 2560)), "n_layers", 30, (6, 10),
        settings={"disable_assistant_lora": True},
    ),
    "kandinsky5-image-6b-t2i.lycoris-lokr": Case(
        _known("kandinsky-5-t2i-lite"), _given((3, 16, 128, 128), (10, 3584), 768), "num_visual_blocks", 50, (6, 10),
    ),
    "kandinsky5-video-2b-t2v.peft-lora": Case(
        _is(in_visual_dim=16, out_visual_dim=16, model_dim=1792, ff_dim=7168, visual_cond=True),
        _given((2, 16, 12, _TALL // 8, _WIDE // 8), (100, 3584), 768), "num_visual_blocks", 32, (4, 8),
    ),
    "omnigen.lycoris-lokr": Case(
        _known("omnigen-v1"),
        lambda: {"latent_batch": torch.zeros(1, 4, 64, 64), "prompt_embeds": None, "prompts": [""]},
        "num_layers", 32, (4, 8), standing=_one_word,
    ),
    "sanavideo-2b-480p.peft-lora": Case(
        _is(mlp_ratio=3.0), _given((1, 16, 11, _TALL // 8, _WIDE // 8), (300, 2304)), "num_layers", 20, (4, 8),
        plain=True, standing=lambda: {"_patch_scale_shift_table_shape": lambda: None},
    ),
    "sd3.peft-lora": Case(_known("stable-diffusion-3.5-medium"), _given((3, 16, 128, 128), (154, 4096), 2048)),
    "auraflow.peft-lora": Case(
        _known("auraflow-v0.3"), _given((1, 4, 64, 64), (120, 2048)), "num_single_dit_layers", 32, (4, 8)
    ),
    "qwen_image.peft-lora": Case(
        _known("qwen-image"), _given((1, 16, 128, 128), (1024, 3584)), "num_layers", 60, (4, 8), True
    ),
}  # fmt: skip
