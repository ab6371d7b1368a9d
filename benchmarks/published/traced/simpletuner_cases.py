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
    folder: the example's folder, where SimpleTuner named it otherwise when it was measured.
    standing: attributes of SimpleTuner's model in place of what would come from the Hub.
    ignores: segments of blocks were not told apart when it was measured, or it was in these precisions: their cells
        equal those of `layer`.
    plain: nothing was checkpointed when it was measured: the table's cells of `layer` equal those of `none`.
    """

    denoiser: Callable[[], dict[str, Any]]
    batch: Callable[[], dict[str, Any]]
    key: str = ""
    whole: int = 0
    depths: tuple[int, ...] = ()
    ignores: bool | tuple[str, ...] = False
    plain: bool = False
    folder: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    standing: Callable[[], dict[str, Any]] = dict

    def told_apart(self, precision: str) -> bool:
        """Whether segments of blocks were checkpointed as such in a precision."""
        return not self.ignores if isinstance(self.ignores, bool) else precision not in self.ignores


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
# Of the published config.json; 10,292,556,288 weights, of a file of 20.6 GB
_BOOGU = {
    "hidden_size": 3360, "num_layers": 40, "num_double_stream_layers": 8, "num_attention_heads": 28, "num_kv_heads": 7,
    "instruction_feature_configs": {
        "instruction_feat_dim": 4096, "reduce_type": "mean", "num_instruction_feat_layers": 1,
    },
    "timestep_scale": 1000.0,
}  # fmt: skip

CASES: dict[str, Case] = {
    "cosmos2image.lycoris-lokr": Case(_COSMOS, _given((1, 16, 1, 64, 64), (512, 1024)), "num_layers", 28, (4, 8), True),
    "zlab-i1.peft-lora": Case(_is(), _given((1, 32, 128, 128), (256, 2304), real=6), "depth", 29, (5, 9)),
    "ltxvideo-0.9.5-t2v.peft-lora": Case(
        _is(), _given((1, 128, 6, _TALL // 32, _WIDE // 32), (128, 4096)), "num_layers", 28, (4, 8)
    ),
    "kolors.peft-lora": Case(
        _known("kolors", "unet"),
        _given((1, 4, 64, 64), (77, 4096), 4096, batch_time_ids=torch.zeros(1, 6, dtype=torch.bfloat16)), ignores=True,
    ),
    # the second, frozen adapter of the turbo model, whose file is not known, is left out
    "z-image-turbo.peft-lora": Case(
        _known("z-image-turbo"), _given((1, 16, 64, 64), (20, 2560)), "n_layers", 30, (6, 10),
        settings={"disable_assistant_lora": True},
    ),
    # traced whole: what shallow models leave unused of LoKr's first step does not lie on a line
    "kandinsky5-image-6b-t2i.lycoris-lokr": Case(
        _known("kandinsky-5-t2i-lite"), _given((3, 16, 128, 128), (256, 3584), 768), "num_visual_blocks", 50,
    ),
    "kandinsky5-video-2b-t2v.peft-lora": Case(
        _is(in_visual_dim=16, out_visual_dim=16, model_dim=1792, ff_dim=7168, visual_cond=True),
        _given((2, 16, 12, _TALL // 8, _WIDE // 8), (256, 3584), 768), "num_visual_blocks", 32, (4, 8),
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
    "sd3.peft-lora": Case(_known("stable-diffusion-3.5-medium"), _given((3, 16, 128, 128), (231, 4096), 2048)),
    "auraflow.peft-lora": Case(
        _known("auraflow-v0.3"), _given((1, 4, 64, 64), (120, 2048)), "num_single_dit_layers", 32, (4, 8)
    ),
    # segments of its blocks are told apart since 020314e67, with which its cells in int8 alone were measured; traced
    # whole, as double blocks peak in shallow models and single ones in deep models
    "boogu-image-v0.1.peft-lora": Case(
        _is(**_BOOGU), _given((1, 16, 128, 128), (27, 4096)), "num_layers", 40, ignores=("bf16", "fp8-torchao"),
    ),
    # traced with 9cef1010d: its distillation had the student's pass alone with gradients, and dropped out LoRA's
    # inputs. Captions of 128 tokens, padded to 512 after the frozen adapter; 2.1e9 weights, of a file of 4.18 GB
    "anima-anyflow-stage1.peft-lora": Case(
        _is(),
        _given(
            (1, 16, 128, 128), (128, 1024),
            t5xxl_ids=torch.ones(1, 128, dtype=torch.int32), t5xxl_weights=torch.ones(1, 128, 1),
        ),
        "num_layers", 28, (8, 12), True, folder="anima-anyflow.peft-lora",
    ),
    "qwen_image.peft-lora": Case(
        _known("qwen-image"), _given((1, 16, 128, 128), (1024, 3584)), "num_layers", 60, (4, 8), True
    ),
}  # fmt: skip
