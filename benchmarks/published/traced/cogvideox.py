"""Run cogvideox-factory's trainings on latents and text embeddings prepared beforehand, and keep their peaks.

`python -m published.traced.cogvideox CSV [TEXT]` traces the runs whose key holds the text and writes cogvideox.json.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from published.cogvideox import DATA, Run, known, runs

STEPS = 2
FRAMES, HEIGHT, WIDTH, TOKENS = 13, 60, 90, 226  # latents of 49 frames of 480 x 720 pixels, and text
# transformer/config.json of THUDM/CogVideoX-2b and -5b, where it differs from diffusers' defaults
MODELS: dict[str, dict[str, Any]] = {
    "THUDM/CogVideoX-2b": {},
    "THUDM/CogVideoX-5b": {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True},
}
ENCODER = {
    "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu", "is_encoder_decoder": False, "tie_word_embeddings": False,
}  # fmt: skip


def train(run: Run) -> int:
    """Return the highest reserved bytes of a run on the current card, as the script counts them."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from diffusers import CogVideoXDPMScheduler, CogVideoXTransformer3DModel
    from diffusers.training_utils import cast_training_params

    half = torch.bfloat16 if "5b" in run.model else torch.float16
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision="bf16" if half == torch.bfloat16 else "fp16")
    beside = _frozen(half)
    with torch.device("meta"):
        model = CogVideoXTransformer3DModel(**MODELS[run.model]).to(half)
    model = model.to_empty(device="cuda")
    model.requires_grad_(False)
    if run.checkpointing:
        model.enable_gradient_checkpointing()
    _adapt(model, run.rank)
    cast_training_params([model], dtype=torch.float32)  # by PEFT of that time, in fp16 by the script
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, _optimizer(run, trained))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    del beside
    gc.collect()
    torch.cuda.empty_cache()
    scheduler = CogVideoXDPMScheduler()
    alphas = scheduler.alphas_cumprod.to("cuda", dtype=torch.float32)
    model.train()
    for _ in range(STEPS):
        loss = _loss(run, model, scheduler, alphas, half)
        accelerator.backward(loss)
        _norm(model)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        _norm(model)
        optimizer.step()
        optimizer.zero_grad()
    return int(torch.cuda.max_memory_reserved())


def _frozen(half: torch.dtype) -> list[Any]:
    """The text encoder and the VAE, which the script loads and deletes before it trains on prepared tensors."""
    from diffusers import AutoencoderKLCogVideoX
    from transformers import T5Config, T5EncoderModel

    with torch.device("meta"):
        made = [
            T5EncoderModel(T5Config(**ENCODER)),
            AutoencoderKLCogVideoX(
                down_block_types=("CogVideoXDownBlock3D",) * 4, up_block_types=("CogVideoXUpBlock3D",) * 4
            ),
        ]
    return [part.to(half).to_empty(device="cuda").requires_grad_(False) for part in made]


def _adapt(model: Any, rank: int) -> None:
    from peft import LoraConfig

    targets = ["to_k", "to_q", "to_v", "to_out.0"]
    model.add_adapter(LoraConfig(r=rank, lora_alpha=rank, init_lora_weights=True, target_modules=targets))


def _optimizer(run: Run, trained: list[Any]) -> Any:
    if run.optimizer == "AdamW 8-bit":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(trained, lr=1e-3)
    if run.optimizer == "AdamW offloaded":
        from torchao.optim import CPUOffloadOptimizer

        return CPUOffloadOptimizer(trained, torch.optim.AdamW, offload_gradients=True, lr=1e-3, fused=True)
    return torch.optim.AdamW(trained, lr=1e-3)


def _norm(model: Any) -> float:
    """get_gradient_norm: the norm of each gradient by itself."""
    total = 0.0
    for p in model.parameters():
        if p.grad is not None:
            total += p.grad.detach().data.norm(2).item() ** 2
    return total**0.5


def _loss(run: Run, model: Any, scheduler: Any, alphas: Any, half: torch.dtype) -> Any:
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    moments = torch.zeros((run.batch, 32, FRAMES, HEIGHT, WIDTH), dtype=half).to("cuda")
    latents = DiagonalGaussianDistribution(moments).sample() * 1.15258426
    latents = latents.permute(0, 2, 1, 3, 4).to(memory_format=torch.contiguous_format, dtype=half)
    prompts = torch.zeros((run.batch, TOKENS, 4096), dtype=half).to("cuda")
    noise = torch.randn_like(latents)
    steps = torch.randint(0, 1000, (run.batch,), dtype=torch.int64, device="cuda")
    rotary = None
    if MODELS[run.model].get("use_rotary_positional_embeddings"):
        rotary = tuple(torch.zeros(FRAMES * HEIGHT * WIDTH // 4, 64, device="cuda") for _ in range(2))
    noisy = scheduler.add_noise(latents, noise, steps)
    output = model(
        hidden_states=noisy, encoder_hidden_states=prompts, timestep=steps, image_rotary_emb=rotary, return_dict=False
    )[0]
    predicted = scheduler.get_velocity(output, noisy, steps)
    weights = 1 / (1 - alphas[steps])
    while len(weights.shape) < len(predicted.shape):
        weights = weights.unsqueeze(-1)
    return torch.mean((weights * (predicted - latents) ** 2).reshape(run.batch, -1), dim=1).mean()


@contextmanager
def _card() -> Iterator[None]:
    from memfit.catalogue.cards import find_gpu
    from memfit.virtual.virtual_gpu import virtual_gpu

    with virtual_gpu(find_gpu("a100-80gb")):
        yield


def main() -> None:
    """Command line: the CSV, and optionally a text that a run's key holds."""
    warnings.simplefilter("ignore")
    made, only = known(), sys.argv[2] if len(sys.argv) > 2 else ""
    for run in runs(Path(sys.argv[1])):
        if run.key in made or only not in run.key:
            continue
        try:
            with _card():
                made[run.key] = train(run)
        except (RuntimeError, ImportError) as error:
            print(f"{run.key}: {error}", flush=True)
            continue
        print(f"{run.key}: {made[run.key] / 2**30:.2f} of {run.measured:.2f}", flush=True)
        made = known() | {run.key: made[run.key]}  # another process may have written meanwhile
        DATA.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
