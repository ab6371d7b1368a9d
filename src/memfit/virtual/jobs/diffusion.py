"""Text-to-image models, trained as diffusers' example scripts do: a UNet or DiT beside a VAE and text encoders.

The loop is that of train_text_to_image(_lora)(_sdxl).py and train_dreambooth_lora_*.py (diffusers 0.39): the
frozen parts lie on the card in the weights' dtype, each step encodes images and texts, and the loss is the mean squared
error of the predicted noise. `Shape.cached` leaves both out, as --cache_latents and precomputed embeddings do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor

from memfit.errors import BadInput, Unsupported
from memfit.tables.pipelines import PIPELINES, Pipeline, pipeline
from memfit.virtual.jobs import checkpointed_blocks, frozen_linears
from memfit.virtual.jobs.denoisers import FORWARD
from memfit.virtual.jobs.models import DTYPES, make_optimizer, no_init_weights
from memfit.virtual.repeated_steps import SHOWN

if TYPE_CHECKING:
    from memfit.nouns.task import Shape
    from memfit.virtual.jobs.recipe import Setup
    from memfit.virtual.observer import Observer


def check(setup: Setup) -> None:
    """Refuse what diffusers' scripts cannot run. Raises BadInput and Unsupported."""
    wide, tall = resolution(setup.config, setup.shape)
    kind = pipeline(setup.config)
    if wide % kind.multiple or tall % kind.multiple:
        up = [(n + kind.multiple - 1) // kind.multiple * kind.multiple for n in (wide, tall)]
        raise BadInput(
            f"width and height must be multiples of {kind.multiple}, not {wide}x{tall}",
            hint=f"--resolution {up[0]}x{up[1]}",
        )
    refused = (
        (
            bool(setup.quantization.get("load_in_8bit")),
            "a denoiser in bitsandbytes' 8 bits",
            "--quantization nf4-double, or one of torchao's and SDNQ's",
        ),
        (
            setup.checkpointing in ("selective", "offload"),
            f"{setup.checkpointing} checkpointing: diffusers' models have one",
            "--checkpointing full",
        ),
        (
            setup.interval > 1 and not (kind.segments or kind.alternating),
            f"checkpoints of {setup.interval} blocks: SimpleTuner has none for {kind.key}",
            "--checkpoint-interval 1",
        ),
        (setup.world_size > 1, "several GPUs in a text-to-image plan", "memfit trace train.py runs your own script"),
    )
    for wrong, what, hint in refused:
        if wrong:
            raise Unsupported(f"trace cannot run {what}", hint=hint)


def resolution(config: dict[str, Any], shape: Shape) -> tuple[int, int]:
    """Return width and height of an image: the given ones, else those that the model was trained for."""
    side = config["vae"]["sample_size"]
    return shape.image if all(shape.image) else (side, side)


# --- parts ---


def made(part: dict[str, Any]) -> Any:
    """Return one component of a pipeline on the current device."""
    given = dict(part)
    if name := given.pop("_class_name", ""):
        import diffusers

        return getattr(diffusers, name).from_config(given)
    name = given.pop("architectures")[0]
    return getattr(transformers, name)(transformers.AutoConfig.for_model(given.pop("model_type"), **given))


def _placed(part: dict[str, Any], dtype: torch.dtype, setup: Setup, quantised: bool = False) -> Any:
    """Return a component on the card in `dtype`; `setup.load` "device": it is built there in fp32 first.

    Else its weights alone are empty until then, as from_pretrained makes it: tables that are no buffers stay on the
    host. quantised: its linear layers are stored as the job says.
    """
    with torch.device("cuda") if setup.load == "device" else init_empty_weights(), no_init_weights():
        placed = made(part).to(dtype)
    if setup.load != "device":
        placed = frozen_linears.on_card(placed, setup) if quantised else placed.to_empty(device="cuda")
        if hasattr(placed, "tie_weights"):
            placed.tie_weights()
    return placed


@dataclass(slots=True)
class Parts:
    """The components of a job."""

    kind: Pipeline
    denoiser: Any
    vae: Any  # None where latents are cached
    texts: list[Any]  # text encoders; empty where embeddings are cached


def _parts(setup: Setup, half: torch.dtype) -> Parts:
    """Load all components; half: the dtype of those that are frozen."""
    kind, config = pipeline(setup.config), setup.config
    frozen, texts = [], []
    if not (setup.shape.cached or kind.prepared):
        frozen = [_placed(config["vae"], torch.float32 if kind.vae_fp32 else half, setup)]
        named = ("text_encoder", "text_encoder_2", "text_encoder_3")[: len(kind.texts)]
        texts = [_placed(config[name], half, setup) for name in named]
    for part in (*frozen, *texts):
        part.requires_grad_(False)
    trained = DTYPES[setup.dtype] if setup.method == "full" else half
    denoiser = _placed(config[kind.denoiser], trained, setup, setup.method == "qlora")
    if setup.method != "full":
        _adapt(setup, denoiser, kind, half)
    if setup.checkpointing != "none":
        checkpointed_blocks.enable(denoiser, setup, kind)
    return Parts(kind, denoiser, frozen[0] if frozen else None, texts)


def _adapt(setup: Setup, denoiser: Any, kind: Pipeline, half: torch.dtype) -> None:
    """Freeze the denoiser and add adapters; fp16's scaler needs them in fp32, else they are as the base."""
    from peft import LoraConfig, inject_adapter_in_model

    denoiser.requires_grad_(False)
    if setup.adapter == "lokr":
        from memfit.virtual.jobs import lycoris

        whole = (type(denoiser).__name__,)
        lycoris.adapt(denoiser, whole if setup.targets == "all-linear" else tuple(setup.targets), setup.rank, half)
        return
    named = kind.targets if setup.targets == "all-linear" else setup.targets
    blocks = setup.config[kind.denoiser].get("num_single_layers", 0)
    targets = [name.replace("*", str(i)) for name in named for i in range(blocks if "*" in name else 1)]
    config = LoraConfig(r=setup.rank, lora_alpha=setup.alpha, lora_dropout=setup.dropout, target_modules=targets)
    with no_init_weights():
        if hasattr(denoiser, "add_adapter"):
            denoiser.add_adapter(config)
        else:
            inject_adapter_in_model(config, denoiser)
    for weight in denoiser.parameters():
        if weight.requires_grad and (setup.widen or setup.autocast == "fp16"):
            weight.data = weight.data.float()


# --- one step ---


def _pixels(parts: Parts, setup: Setup) -> Tensor | None:
    """Return a batch of images, which its loader keeps on the card through the step; None where latents are cached."""
    wide, tall = resolution(setup.config, setup.shape)
    return None if parts.vae is None else torch.zeros(setup.micro_batch, 3, tall, wide).to("cuda")


def _latents(parts: Parts, setup: Setup, half: torch.dtype, pixels: Tensor | None) -> Tensor:
    """Return a batch of latents, from images by the VAE unless they are cached."""
    vae = setup.config["vae"]
    if pixels is None:
        wide, tall = resolution(setup.config, setup.shape)
        side = parts.kind.downscale
        shape = (setup.micro_batch, vae["latent_channels"], tall // side, wide // side)
        return torch.zeros(shape, dtype=half, device="cuda")
    latents = parts.vae.encode(pixels.to(parts.vae.dtype)).latent_dist.sample()
    return ((latents - vae.get("shift_factor", 0.0)) * vae["scaling_factor"]).to(half)


def _ids(count: int, tokens: int) -> Tensor:
    return torch.zeros(count, tokens, dtype=torch.long).to("cuda")


def _embeddings(parts: Parts, setup: Setup, half: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the embeddings of a batch of texts, and the pooled ones, where they are not cached by the encoders."""
    count, kind = setup.micro_batch, parts.kind
    if not parts.texts:
        tokens, width, pooled = _widths(setup, kind)
        return (
            torch.zeros(count, tokens, width, dtype=half, device="cuda"),
            torch.zeros(count, pooled, dtype=half, device="cuda"),
        )
    inputs = [_ids(count, tokens) for tokens in kind.texts]
    clips = [(m, i) for m, i in zip(parts.texts, inputs, strict=True) if m.config.model_type != "t5"]
    wide = [(m, i) for m, i in zip(parts.texts, inputs, strict=True) if m.config.model_type == "t5"]
    if len(parts.texts) == 1:
        return clips[0][0](clips[0][1], return_dict=False)[0], torch.zeros(0)
    found = [model(ids, output_hidden_states=True, return_dict=False) for model, ids in clips]
    long = [model(ids, return_dict=False)[0] for model, ids in wide]
    if kind is PIPELINES["FluxPipeline"]:
        return long[0], found[0][1]
    states = torch.cat([out[-1][-2] for out in found], dim=-1)
    if not long:  # SDXL, whose pooled text is that of its last encoder
        return states, found[-1][0]
    filled = torch.nn.functional.pad(states, (0, long[0].shape[-1] - states.shape[-1]))
    return torch.cat([filled, *long], dim=-2), torch.cat([out[0] for out in found], dim=-1)


def _widths(setup: Setup, kind: Pipeline) -> tuple[int, int, int]:
    """Return tokens and width of the embeddings, and the width of the pooled ones."""
    part = setup.config[kind.denoiser]
    pooled = part.get("pooled_projection_dim", part.get("in_text_dim2", 0))
    if kind.denoiser == "unet":
        pooled = part.get("projection_class_embeddings_input_dim", 0) - 6 * part.get("addition_time_embed_dim", 0)
    return _text_tokens(setup, kind), part[kind.width] if kind.width else 1, pooled


def _text_tokens(setup: Setup, kind: Pipeline) -> int:
    """Return the tokens of a text, which `setup.sequence` cuts where they are not all padded to one length."""
    if setup.shape.cached and setup.shape.text:
        return setup.shape.text
    return min(kind.states, setup.sequence) if kind.varying else kind.states


def predicted(model: Any, setup: Setup, noisy: Tensor, states: Tensor, pooled: Tensor) -> Tensor:
    """Return the noise that the denoiser predicts."""
    part = setup.config[pipeline(setup.config).denoiser]
    return FORWARD[part["_class_name"]](model, setup.config, noisy, states, pooled)


def run(setup: Setup, observer: Observer) -> None:
    """Load a pipeline, and train `setup.steps` optimizer steps of its denoiser."""
    half = DTYPES[setup.autocast or setup.dtype]
    parts = _parts(setup, half)
    parts.denoiser.train()
    weights = [p for p in parts.denoiser.parameters() if p.requires_grad]
    optimizer = make_optimizer(setup.optimizer, weights)
    # accelerate runs the denoiser under autocast, and the frozen parts without
    autocast = torch.autocast("cuda", half) if half != torch.float32 else nullcontext()
    section = observer.section if setup.sections else lambda: None
    for step in range(SHOWN if setup.sections else setup.steps):
        for _ in range(1 if setup.sections and step else setup.accumulation):
            section()
            pixels = _pixels(parts, setup)
            latents = _latents(parts, setup, half, pixels)
            noise = torch.randn_like(latents)
            states, pooled = _embeddings(parts, setup, half)
            with autocast:
                found = predicted(parts.denoiser, setup, latents + noise, states, pooled)
            loss = torch.nn.functional.mse_loss(found.float(), noise.float())
            if setup.accumulation > 1:
                loss = loss / setup.accumulation
            loss.backward()
        section()
        if setup.clip:
            observer.mark(observer.phase, "clip")
            torch.nn.utils.clip_grad_norm_(weights, setup.clip)
        optimizer.step()
        observer.mark(observer.phase, "zero_grad")
        optimizer.zero_grad(set_to_none=not setup.keep_gradients)
    section()


# --- work ---


def tokens(setup: Setup) -> int:
    """Return the tokens of one sample in a transformer that makes one of 2 x 2 places of its latents."""
    kind, (wide, tall) = pipeline(setup.config), resolution(setup.config, setup.shape)
    return wide * tall // (2 * kind.downscale) ** 2 + _text_tokens(setup, kind)


def forward_on_meta(setup: Setup) -> tuple[Any, Callable[[], Any]]:
    """Return the denoiser without memory, and a function that runs its forward pass of one sample."""
    kind = pipeline(setup.config)
    with torch.device("meta"), no_init_weights():
        model = made(setup.config[kind.denoiser])
    wide, tall = resolution(setup.config, setup.shape)
    tokens, width, pooled = _widths(setup, kind)
    given = [
        torch.zeros(shape, device="meta")
        for shape in (
            (1, setup.config["vae"]["latent_channels"], tall // kind.downscale, wide // kind.downscale),
            (1, tokens, width),
            (1, pooled),
        )
    ]
    return model, lambda: predicted(model, setup, *given)
