"""The forward pass of every denoiser of diffusers that is planned, from noisy latents and embeddings of texts.

One function a class, called as diffusers' training scripts call it, or its pipeline where it has no script.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Forward = Callable[[Any, dict[str, Any], Tensor, Tensor, Tensor], Tensor]


def _times(noisy: Tensor) -> Tensor:
    return torch.zeros(len(noisy), device=noisy.device)


def _mask(states: Tensor, more: int = 0) -> Tensor:
    return torch.ones(states.shape[0], states.shape[1] + more, dtype=torch.bool, device=states.device)


def _packed(noisy: Tensor) -> Tensor:
    """Return latents as tokens of 2 x 2 places."""
    count, channels, tall, wide = noisy.shape
    split = noisy.view(count, channels, tall // 2, 2, wide // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return split.reshape(count, tall * wide // 4, channels * 4)


def _unpacked(tokens: Tensor, noisy: Tensor) -> Tensor:
    """Return tokens of 2 x 2 places as latents of the shape of `noisy`."""
    count, channels, tall, wide = noisy.shape
    split = tokens.view(count, tall // 2, wide // 2, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return split.reshape(noisy.shape)


def _places(noisy: Tensor, axes: int) -> Tensor:
    return torch.zeros(noisy.shape[-2] * noisy.shape[-1] // 4, axes, device=noisy.device, dtype=noisy.dtype)


def _unet(model: Any, config: dict[str, Any], noisy: Tensor, states: Tensor, pooled: Tensor) -> Tensor:
    count = len(noisy)
    steps = torch.zeros(count, dtype=torch.long, device=noisy.device)
    added = {}
    if config["unet"].get("addition_embed_type") == "text_time":
        times = torch.zeros(count, 6, dtype=noisy.dtype, device=noisy.device)
        added = {"added_cond_kwargs": {"time_ids": times, "text_embeds": pooled}}
    return model(noisy, steps, states, **added, return_dict=False)[0]


def _sd3(model: Any, config: dict[str, Any], noisy: Tensor, states: Tensor, pooled: Tensor) -> Tensor:
    return model(
        hidden_states=noisy, timestep=_times(noisy), encoder_hidden_states=states, pooled_projections=pooled,
        return_dict=False,
    )[0]  # fmt: skip


def _flux(model: Any, config: dict[str, Any], noisy: Tensor, states: Tensor, pooled: Tensor) -> Tensor:
    guided = torch.ones(1, device=noisy.device).expand(len(noisy))
    found = model(
        hidden_states=_packed(noisy), timestep=_times(noisy), pooled_projections=pooled, encoder_hidden_states=states,
        guidance=guided if config["transformer"].get("guidance_embeds") else None, img_ids=_places(noisy, 3),
        txt_ids=torch.zeros(states.shape[1], 3, dtype=noisy.dtype, device=noisy.device), return_dict=False,
    )[0]  # fmt: skip
    return _unpacked(found, noisy)


def _chroma(model: Any, config: dict[str, Any], noisy: Tensor, states: Tensor, pooled: Tensor) -> Tensor:
    tokens = _packed(noisy)
    found = model(
        hidden_states=tokens, timestep=_times(noisy), encoder_hidden_states=states, img_ids=_places(noisy, 3),
        txt_ids=torch.zeros(states.shape[1], 3, dtype=noisy.dtype, device=noisy.device),
        attention_mask=_mask(states, tokens.shape[1]), return_dict=False,
    )[0]  # fmt: skip
    return _unpacked(found, noisy)


def _flux2(model: Any, config: dict[str, Any], noisy: Tensor, states: Tensor, pooled: Tensor) -> Tensor:
    count, axes = len(noisy), len(config["transformer"]["axes_dims_rope"])
    found = model(
        hidden_states=_packed(noisy), timestep=_times(noisy), encoder_hidden_states=states,
        guidance=torch.ones(1, device=noisy.device).expand(count), img_ids=_places(noisy, axes).expand(count, -1, -1),
        txt_ids=torch.zeros(count, states.shape[1], axes, dtype=noisy.dtype, device=noisy.device), return_dict=False,
    )[0]  # fmt: skip
    return _unpacked(found, noisy)


def _qwen_image(model: Any, config: dict[str, Any], noisy: Tensor, states: Tensor, pooled: Tensor) -> Tensor:
    count, _, tall, wide = noisy.shape
    found = model(
        hidden_states=_packed(noisy), timestep=_times(noisy), encoder_hidden_states=states,
        encoder_hidden_states_mask=_mask(states), img_shapes=[[(1, tall // 2, wide // 2)]] * count, return_dict=False,
    )[0]  # fmt: skip
    return _unpacked(found, noisy)


def _z_image(model: Any, config: dict[str, Any], noisy: Tensor, states: Tensor, pooled: Tensor) -> Tensor:
    images, texts = list(noisy.unsqueeze(2).unbind(0)), list(states.unbind(0))
    return torch.stack(model(images, _times(noisy), texts, return_dict=False)[0]).squeeze(2)


def _aura_flow(model: Any, config: dict[str, Any], noisy: Tensor, states: Tensor, pooled: Tensor) -> Tensor:
    return model(
        hidden_states=noisy, timestep=_times(noisy), encoder_hidden_states=states, return_dict=False
    )[0]  # fmt: skip


def _masked(model: Any, config: dict[str, Any], noisy: Tensor, states: Tensor, pooled: Tensor) -> Tensor:
    return model(
        hidden_states=noisy, timestep=_times(noisy), encoder_hidden_states=states,
        encoder_attention_mask=_mask(states), return_dict=False,
    )[0]  # fmt: skip


def _pixart(model: Any, config: dict[str, Any], noisy: Tensor, states: Tensor, pooled: Tensor) -> Tensor:
    found = model(
        hidden_states=noisy, timestep=_times(noisy), encoder_hidden_states=states,
        encoder_attention_mask=_mask(states), added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        return_dict=False,
    )[0]  # fmt: skip
    return found.chunk(2, dim=1)[0]  # the other half is the variance, which is not trained


_SAME_SIZE = SimpleNamespace(
    functional=SimpleNamespace(resize=lambda mask, size, **words: mask), InterpolationMode=SimpleNamespace(NEAREST=None)
)


def _cosmos(model: Any, config: dict[str, Any], noisy: Tensor, states: Tensor, pooled: Tensor) -> Tensor:
    module = sys.modules[type(model).__module__]
    if not hasattr(module, "transforms"):  # torchvision, which would resize a mask of the latents' size to itself
        module.transforms = _SAME_SIZE  # type: ignore[attr-defined]
    video, (tall, wide) = noisy.unsqueeze(2), noisy.shape[-2:]  # an image is one frame
    return model(
        hidden_states=video, timestep=_times(noisy), encoder_hidden_states=states,
        padding_mask=noisy.new_zeros(1, 1, tall, wide), return_dict=False,
    )[0].squeeze(2)  # fmt: skip


def _kandinsky(model: Any, config: dict[str, Any], noisy: Tensor, states: Tensor, pooled: Tensor) -> Tensor:
    part, image = config["transformer"], noisy.dim() == 4
    last = (noisy.unsqueeze(2) if image else noisy).permute(0, 2, 3, 4, 1)
    if part.get("visual_cond"):  # frames that are given, and a mask of them
        last = torch.cat([last, torch.zeros_like(last), torch.zeros_like(last[..., :1])], dim=-1)
    places = [torch.arange(n // p, device=noisy.device)
              for n, p in zip(last.shape[1:4], part["patch_size"], strict=True)]  # fmt: skip
    found = model(
        hidden_states=last, encoder_hidden_states=states, timestep=_times(noisy), pooled_projections=pooled,
        visual_rope_pos=places, text_rope_pos=torch.arange(states.shape[1], device=noisy.device), return_dict=False,
    ).permute(0, 4, 1, 2, 3)  # fmt: skip
    return found.squeeze(2) if image else found


def _omnigen(model: Any, config: dict[str, Any], noisy: Tensor, states: Tensor, pooled: Tensor) -> Tensor:
    (count, _, tall, wide), words = noisy.shape, states.shape[1]
    tokens, device = words + 1 + tall * wide // 4, noisy.device  # the time is one
    return model(
        hidden_states=noisy, timestep=_times(noisy), input_ids=states[..., 0].long(), input_img_latents=[],
        input_image_sizes={}, attention_mask=torch.ones(count, tokens, tokens, dtype=torch.long, device=device),
        position_ids=torch.zeros(count, tokens, dtype=torch.long, device=device), return_dict=False,
    )[0]  # fmt: skip


FORWARD: dict[str, Forward] = {
    "UNet2DConditionModel": _unet,
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
    "ChromaTransformer2DModel": _chroma,
    "Flux2Transformer2DModel": _flux2,
    "QwenImageTransformer2DModel": _qwen_image,
    "ZImageTransformer2DModel": _z_image,
    "AuraFlowTransformer2DModel": _aura_flow,
    "PixArtTransformer2DModel": _pixart,
    "SanaTransformer2DModel": _masked,
    "Lumina2Transformer2DModel": _masked,
    "CosmosTransformer3DModel": _cosmos,
    "Kandinsky5Transformer3DModel": _kandinsky,
    "OmniGenTransformer2DModel": _omnigen,
}
