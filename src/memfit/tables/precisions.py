"""The table of precisions: precision, backend and method -> the dtypes a run stores, computes and accumulates in.

The user chooses a precision; its meaning depends on the backend. DeepSpeed has no fp32 weights under autocast: it keeps
16-bit weights and gradients, shards an fp32 master copy of what is trained, and casts adapters to 16 bits as well. A
frozen base in fp16 is loaded in fp16, while fp16 training of all weights needs them in fp32. With fp16's loss scaler
and with accelerate's FSDP2 adapters are trained in fp32. FSDP2 trains bf16 weights only with mixed precision off:
fsdp2_prepare_model (accelerate 1.15, utils/fsdp_utils.py) makes trained weights fp32 wherever it is on.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

from memfit.nouns.job import Recipe

Dtype = Literal["bf16", "fp16", "fp32"]
Backend = Literal["plain", "ddp", "fsdp", "deepspeed"]
BYTES: dict[Dtype, int] = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class Meaning:
    """The dtypes of a run. Gradients of trained base weights are as wide as the weights."""

    stored: Dtype  # base weights that are not quantised
    computed: Dtype  # matrix products
    autocast: Literal["always", "if the trainer does", "never"]
    master: bool = False  # an fp32 copy of trained weights beside them
    # "fp32" under a trainer that autocasts; "stored" as the base; "library" as PEFT or the trainer decides
    adapters: Literal["library", "fp32", "stored"] = "library"


_HALF = Meaning("bf16", "bf16", "if the trainer does")
_FP16 = Meaning("fp16", "fp16", "always", adapters="fp32")
_SINGLE, _ADAPTED, _ALL = ("plain", "ddp"), ("lora", "qlora"), ("full", "lora", "qlora")
_ANYWHERE: tuple[Backend, ...] = ("plain", "ddp", "fsdp", "deepspeed")
_ROWS: tuple[tuple[str, tuple[str, ...], tuple[str, ...], Meaning], ...] = (
    ("fp32", _ANYWHERE, _ALL, Meaning("fp32", "fp32", "never")),
    ("bf16", (*_SINGLE, "deepspeed"), ("full",), _HALF),
    ("bf16", ("fsdp",), ("full",), Meaning("bf16", "bf16", "never")),
    ("bf16", _SINGLE, _ADAPTED, _HALF),
    ("bf16", ("fsdp",), ("lora",), Meaning("bf16", "bf16", "if the trainer does", adapters="fp32")),
    ("bf16", ("fsdp",), ("qlora",), _HALF),
    ("bf16", ("deepspeed",), _ADAPTED, Meaning("bf16", "bf16", "if the trainer does", master=True, adapters="stored")),
    ("bf16-mixed", (*_SINGLE, "fsdp"), _ALL, Meaning("fp32", "bf16", "always")),
    ("bf16-mixed", ("deepspeed",), _ALL, Meaning("bf16", "bf16", "always", master=True, adapters="stored")),
    ("bf16-master", _ANYWHERE, _ALL, Meaning("bf16", "bf16", "if the trainer does", master=True, adapters="stored")),
    ("fp16-mixed", (*_SINGLE, "fsdp"), ("full",), Meaning("fp32", "fp16", "always")),
    ("fp16-mixed", (*_SINGLE, "fsdp"), _ADAPTED, _FP16),
    ("fp16-mixed", ("deepspeed",), _ALL, Meaning("fp16", "fp16", "always", master=True, adapters="stored")),
)
PRECISIONS: dict[tuple[str, str, str], Meaning] = {
    (precision, backend, method): meaning
    for precision, backends, methods, meaning in _ROWS
    for backend, method in product(backends, methods)
}


def backend(recipe: Recipe) -> Backend:
    """Return the backend: FSDP2 for sharded parameters, DeepSpeed for other ZeRO stages, offload and master copies."""
    if recipe.zero:
        return "deepspeed"
    if recipe.shard == "parameters":
        return "fsdp"
    return "ddp" if recipe.num_gpus > 1 else "plain"


def meaning(recipe: Recipe, by: Backend | None = None) -> Meaning:
    """Return the meaning of a recipe's precision under its own backend, or under `by`."""
    return PRECISIONS[recipe.precision, by or backend(recipe), recipe.method]
