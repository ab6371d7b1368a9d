"""What lies on the card between steps: parameters, adapters, quantised payload and scales, gradients, states."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from memfit.architecture import Architecture, Weight
from memfit.formula.numerics import Numerics, adapter_weights, lora_modules
from memfit.job import Recipe
from memfit.optimizers import Optimizer
from memfit.quantization import QUANTIZATIONS


@dataclass(frozen=True, slots=True)
class Static:
    """Bytes; every field is one line of the account."""

    base: int  # weights as stored (payload only when quantised)
    scales: int  # block scales and tables of a quantised base
    upcast: int  # extra bytes of prepare_model_for_kbit_training's fp32 copies (part of what is stored)
    adapter: int
    master: int
    gradients: int  # when all exist
    states: int
    step: int  # temporaries of optimizer.step()
    buffers: int  # rotary inverse frequencies and the like
    trained: int  # number of trained elements
    largest_quantised: int  # elements of the largest quantised matrix


@lru_cache(maxsize=2048)
def static_bytes(architecture: Architecture, method: str, quantization: str, rank: int, targets: tuple[str, ...],
                 n: Numerics, optimizer: Optimizer, embeddings_32bit: bool) -> Static:  # fmt: skip
    """Exact bytes of everything that is not an activation; lru_cache because searches ask for the same few again."""
    weights = architecture.weights
    base = scales = upcast = largest = 0
    linears = {id(w) for layer in architecture.layers for w in layer.weights if w.kind == "linear"}
    row = QUANTIZATIONS.get(quantization) if quantization != "none" else None
    for w in weights:
        if row is not None and id(w) in linears:
            base += row.payload(w.numel)
            scales += row.scales(w.numel, w.shape[0])
            largest = max(largest, w.numel)
        else:
            width = n.other if row is not None else n.weight
            base += w.numel * width
            upcast += w.numel * (width - n.weight) if row is not None else 0
    trained = _trained(architecture, method, rank, targets, n)
    adapter = 0 if method == "full" else sum(w.numel * size for w, size in trained)
    state_width = [(w, n.state if method == "full" else size) for w, size in trained]
    states = optimizer.total_state_bytes(state_width)
    if embeddings_32bit and optimizer.package == "bitsandbytes" and method == "full":
        states += _embedding_extra(architecture, optimizer, n)
    gradients = sum(w.numel * size for w, size in trained)
    return Static(
        base=base, scales=scales, upcast=upcast, adapter=adapter, master=sum(w.numel * n.master for w, _ in trained),
        gradients=gradients, states=states, step=optimizer.step_bytes(trained), buffers=0,
        trained=sum(w.numel for w, _ in trained), largest_quantised=largest,
    )  # fmt: skip


def _trained(architecture: Architecture, method: str, rank: int, targets: tuple[str, ...], n: Numerics) -> list[tuple[Weight, int]]:
    if method == "full":
        return [(w, n.weight) for w in architecture.weights]
    modules = lora_modules(architecture, targets)
    return [(w, n.adapter) for layer in architecture.layers for w in adapter_weights(layer, modules, rank)]


def _embedding_extra(architecture: Architecture, optimizer: Optimizer, n: Numerics) -> int:
    """transformers registers nn.Embedding weights for 32-bit states with bitsandbytes' 8-bit optimizers."""
    if optimizer.width is None or optimizer.width >= 4:
        return 0
    tables = [w for w in architecture.embedding if w.kind == "embedding"]
    return sum(optimizer.moments * 4 * w.numel - optimizer.state_bytes(w, n.weight) for w in tables)


def of(architecture: Architecture, recipe: Recipe, n: Numerics, optimizer: Optimizer, embeddings_32bit: bool) -> Static:
    """`static_bytes` for a recipe."""
    quantization = recipe.quantization if recipe.method == "qlora" else "none"
    return static_bytes(architecture, recipe.method, quantization, recipe.lora_rank, recipe.lora_targets, n, optimizer, embeddings_32bit)
