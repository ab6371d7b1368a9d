"""Run PEFT's comparison on images: the training loop of its run.py on FLUX.2 klein, with latents and texts cached.

The script takes the peak over its training steps alone, above the 2 MiB that its first tensor had reserved.
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
STEPS, EMPTIED = 4, 2  # of training; the step after which the cache is emptied, as the script does every ten
IMAGES = 14  # trained on, of the 20 of its data set; their latents and texts stay on the card
# black-forest-labs/FLUX.2-klein-base-4B: 3,875,544,576 weights, as the row of the full fine-tune states
KLEIN = {
    "num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680,
    "guidance_embeds": False,
}  # fmt: skip
LATENTS = 128  # channels of a packed latent, which stands for 16 x 16 pixels


def run(row: Row) -> dict[str, int]:
    """Train; return the peak of what is reserved, as the script measures it."""
    sizes = re.fullmatch(r"(\d+)px, text (\d+)", row.seq_len)
    if sizes is None:
        raise NotCovered(f"'{row.seq_len}' is no size of images and texts")
    torch.nn.Linear(1, 1).to("cuda")
    before = torch.cuda.max_memory_reserved()
    judge = _judge()
    experiment = experiment_of(row, "image")
    model = _model(experiment, row)
    side, length = int(sizes[1]) // 16, int(sizes[2])
    model.train()
    model.to("cuda")
    optimizer = optimizer_of(model, experiment["train"])
    texts = torch.zeros((IMAGES, length, KLEIN["joint_attention_dim"]), dtype=torch.bfloat16, device="cuda")
    text_ids = torch.zeros((IMAGES, length, 4), dtype=torch.long, device="cuda")
    images = torch.zeros((IMAGES, LATENTS, side, side), dtype=torch.bfloat16, device="cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held: list[Tensor] = []  # the variables of the loop, which live until the next step sets them
    for step in range(1, STEPS + 1):
        chosen = torch.arange(row.number("micro_batch", 1)).to("cuda")
        batch = [cache.index_select(0, chosen) for cache in (images, texts, text_ids)]
        optimizer.zero_grad(set_to_none=True)
        held = _loss(model, *batch)
        held[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if experiment["config"].get("peft_type") == "ADALORA":
            model.base_model.update_and_allocate(step)
        if step == EMPTIED:
            torch.cuda.empty_cache()
    peaks = torch.cuda.max_memory_reserved() - before, torch.cuda.max_memory_allocated()
    del held, judge
    return dict(zip(("reserved", "allocated"), peaks, strict=True))


def _judge() -> Any:
    """facebook/dinov2-base in fp32, which compares images when the script evaluates, and lies on the card all along."""
    from transformers import Dinov2Config, Dinov2Model

    return Dinov2Model(Dinov2Config(image_size=518)).to("cuda")


def _model(experiment: dict[str, Any], row: Row) -> Any:
    """The transformer with its adapters, made on the host as the script does."""
    from diffusers import Flux2Transformer2DModel

    with torch.device("meta"):
        model = Flux2Transformer2DModel(**KLEIN).to(torch.bfloat16)
    model.to_empty(device="cpu")  # memory that is never written
    model.enable_gradient_checkpointing()
    if not experiment["config"]:
        model.requires_grad_(True)
    model = adapted(model, experiment)
    stated(row, model)
    return model


def _loss(model: Any, latents: Tensor, texts: Tensor, text_ids: Tensor) -> list[Tensor]:
    """The flow-matching loss of one batch, and the tensors that the script still holds in its backward."""
    from diffusers import Flux2KleinPipeline as Pipeline

    image_ids = Pipeline._prepare_latent_ids(latents).to(latents.device)
    noise = torch.randn_like(latents)
    sigmas = torch.zeros((len(latents), 1, 1, 1), dtype=latents.dtype).to("cuda")
    timesteps = torch.zeros(len(latents)).to("cuda")
    packed = Pipeline._pack_latents((1.0 - sigmas) * latents + sigmas * noise)
    predicted = model(
        hidden_states=packed, timestep=timesteps / 1000, guidance=None, encoder_hidden_states=texts,
        txt_ids=text_ids, img_ids=image_ids, return_dict=False,
    )[0]  # fmt: skip
    predicted = Pipeline._unpack_latents_with_ids(predicted[:, : packed.size(1)], image_ids)
    weighting = torch.ones_like(sigmas)
    target = noise - latents
    squared = (weighting.float() * (predicted.float() - target.float()) ** 2).reshape(target.shape[0], -1)
    loss = torch.mean(squared, 1).mean()
    return [loss, latents, texts, text_ids, image_ids, noise, sigmas, timesteps, packed, predicted, weighting, target]
