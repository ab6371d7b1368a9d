"""Run PEFT's comparison on images: its run.py on FLUX.2 klein, as it was in June and July 2026.

The script takes the peak over its training steps alone, above the 2 MiB that its first tensor had reserved. Before them
its text encoder and VAE fill the caches of texts and latents; after every hundred it evaluates and empties its cache.
What lies on the card at these two moments decides how later blocks lie. The evaluation itself leaves nothing there.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from published.case import NotCovered
from published.rows import Row
from published.traced.experiments import adapted, experiment_of, stated
from published.traced.peft import optimizer_of

PACKAGES = ("diffusers", "peft")
STEPS, EMPTIED = 10, 8  # of training; the step after which the cache is emptied: gradients have found their places
IMAGES = 14  # trained on, of the 20 of its data set; their latents and texts stay on the card
REPEATS = 1000  # of the images' numbers, which lie on the card
# black-forest-labs/FLUX.2-klein-base-4B: 3,875,544,576 weights, as the row of the full fine-tune states
KLEIN = {
    "num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680,
    "guidance_embeds": False,
}  # fmt: skip
# its text encoder is Qwen3-4B; a few of its 36 blocks leave the same on the card, and the transformer reads three
QWEN = {
    "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 4,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip
LAYERS = (1, 2, 3)  # whose outputs are a text
WORDS = 20  # of a prompt, whose rest is padding


def run(row: Row) -> dict[str, int]:
    """Train; return the peak of what is reserved, as the script measures it."""
    sizes = re.fullmatch(r"(\d+)px, text (\d+)", row.seq_len)
    if sizes is None:
        raise NotCovered(f"'{row.seq_len}' is no size of images and texts")
    torch.nn.Linear(1, 1).to("cuda")
    before = torch.cuda.max_memory_reserved()
    experiment, pipeline = experiment_of(row, "image"), _pipeline()
    pipeline.transformer = _adapted(pipeline.transformer, experiment, row)
    order = torch.cat([torch.randperm(IMAGES, device="cuda") for _ in range(REPEATS)])
    judge = _judge()
    model = pipeline.transformer.train().to("cuda")
    optimizer = optimizer_of(model, experiment["train"])
    side, length, count = int(sizes[1]), int(sizes[2]), int(row.number("micro_batch", 1))
    texts, text_ids = _texts(pipeline, length)
    images = _images(pipeline, side, count)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    losses: list[Tensor] = []  # the script keeps them all
    for step in range(1, STEPS + 1):
        chosen = order[(step - 1) * count : step * count].to(device="cuda", dtype=torch.long)
        latents, prompts = images.index_select(0, chosen), texts.index_select(0, chosen)
        ids = text_ids.index_select(0, chosen)
        image_ids = pipeline._prepare_latent_ids(latents).to(latents.device)
        noise = torch.randn_like(latents)
        timesteps = torch.zeros(count).to("cuda")
        sigmas = torch.zeros((count, 1, 1, 1), dtype=latents.dtype).to("cuda")
        noisy = (1.0 - sigmas) * latents + sigmas * noise
        packed = pipeline._pack_latents(noisy)
        optimizer.zero_grad(set_to_none=True)
        predicted = model(
            hidden_states=packed, timestep=timesteps / 1000, guidance=None, encoder_hidden_states=prompts, txt_ids=ids,
            img_ids=image_ids, return_dict=False,
        )[0]  # fmt: skip
        predicted = predicted[:, : packed.size(1)]
        predicted = pipeline._unpack_latents_with_ids(predicted, image_ids)
        weighting = torch.ones_like(sigmas)
        target = noise - latents
        loss = torch.mean(
            (weighting.float() * (predicted.float() - target.float()) ** 2).reshape(target.shape[0], -1), 1
        )
        loss = loss.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if experiment["config"].get("peft_type") == "ADALORA":
            model.base_model.update_and_allocate(step)
        losses.append(loss)
        if step == EMPTIED:
            torch.cuda.empty_cache()
    peaks = torch.cuda.max_memory_reserved() - before, torch.cuda.max_memory_allocated()
    del judge
    return dict(zip(("reserved", "allocated"), peaks, strict=True))


def _without_data(kind: Any, *args: Any, dtype: torch.dtype = torch.bfloat16, **words: Any) -> Any:
    """Make a model on the host, in memory that is never written."""
    with torch.device("meta"):
        model = kind(*args, **words).to(dtype)
    return model.to_empty(device="cpu")


def _pipeline() -> Any:
    """The parts of FLUX.2 klein, on the host."""
    from diffusers import (
        AutoencoderKLFlux2,
        FlowMatchEulerDiscreteScheduler,
        Flux2KleinPipeline,
        Flux2Transformer2DModel,
    )
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = _without_data(Flux2Transformer2DModel, **KLEIN)
    model.enable_gradient_checkpointing()
    vae, reader = _without_data(AutoencoderKLFlux2), _without_data(Qwen3ForCausalLM, Qwen3Config(**QWEN))
    reader.tie_weights()
    for part in (vae, reader):
        part.requires_grad_(False).eval()
    return Flux2KleinPipeline(FlowMatchEulerDiscreteScheduler(), vae, reader, None, model)


def _adapted(model: Any, experiment: dict[str, Any], row: Row) -> Any:
    if not experiment["config"]:
        model.requires_grad_(True)
    model = adapted(model, experiment)
    stated(row, model)
    return model


def _judge() -> Any:
    """facebook/dinov2-base in fp32, which compares images when the script evaluates, and lies on the card all along."""
    from transformers import Dinov2Config, Dinov2Model

    return Dinov2Model(Dinov2Config(image_size=518)).to("cuda")


class _Tokenizer:
    """Prompts of WORDS tokens, filled up."""

    def apply_chat_template(self, *_: Any, **__: Any) -> str:
        return ""

    def __call__(self, *_: Any, max_length: int, **__: Any) -> dict[str, Tensor]:
        mask = (torch.arange(max_length) < WORDS).long()[None]
        return {"input_ids": torch.zeros_like(mask), "attention_mask": mask}


def _texts(pipeline: Any, length: int) -> tuple[Tensor, Tensor]:
    """precompute_prompt_caches of the script."""
    from diffusers.training_utils import offload_models

    pipeline.tokenizer = _Tokenizer()
    texts, ids = [], []
    with torch.no_grad(), offload_models(pipeline.text_encoder, device="cuda", offload=True):
        for _ in range(IMAGES):
            text, text_ids = pipeline.encode_prompt(
                prompt="", max_sequence_length=length, text_encoder_out_layers=LAYERS
            )
            texts.append(text)
            ids.append(text_ids)
    return torch.cat(texts, dim=0).to("cuda"), torch.cat(ids, dim=0).to("cuda")


def _images(pipeline: Any, side: int, count: int) -> Tensor:
    """precompute_latent_cache of the script."""
    from diffusers.training_utils import offload_models

    vae, cache = pipeline.vae, []
    mean = vae.bn.running_mean.view(1, -1, 1, 1)
    deviation = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
    with torch.no_grad(), offload_models(vae, device="cuda", offload=True):
        mean, deviation = mean.to(vae.device), deviation.to(vae.device)
        for _ in range(0, IMAGES, count):
            pixels = torch.zeros(count, 3, side, side).to(device=vae.device, dtype=torch.bfloat16)
            latents = vae.encode(pixels).latent_dist.mode()
            latents = pipeline._patchify_latents(latents)
            latents = (latents - mean) / deviation
            cache.append(latents.to("cuda"))
    return torch.cat(cache, dim=0)
