"""What the Python of earlier releases of Transformer Engine calls otherwise: fewer arguments, as others came later.

pybind.cpp and attention.cpp of 2.10 to 2.17. Quantised formats changed too much between them: they need 2.17.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from memfit.virtual.libraries.transformer_engine import attention
from memfit.virtual.libraries.transformer_engine.enums import ENUMS, layout_name
from memfit.virtual.libraries.transformer_engine.quantizers import empty

Release = tuple[int, ...]
OLDEST: Release = (2, 10)
_NOT_SET = int(ENUMS["NVTE_QKV_Format"]["NVTE_QKV_Format_NOT_SET"])
_FORMATS: Release = (2, 15)  # attention takes formats of its outputs and gradients, no longer the gradients' dtype
_ROUTED: Release = (2, 13)  # a router's backward writes into a gradient that Python made
_DIAGONAL: Release = (2, 12)  # attention takes which diagonal its mask follows, and whether it must be deterministic
_QUANTISED: Release = (2, 17)  # the classes of quantised tensors are made as the stand-in makes them

_QUANTISERS = (
    "quantize", "dequantize", "multi_tensor_quantize", "split_quantize", "bulk_allocate", "fp8_transpose",
    "bgrad_quantize", "create_empty_quantized_tensor",
)  # fmt: skip


def _format_of(layout: int) -> int:
    """Return the format of a layout's queries."""
    queries = layout_name(layout).split("_")[0].replace("3", "").replace("2", "")
    return int(ENUMS["NVTE_QKV_Format"][f"NVTE_{queries}"])


def _forward(diagonal: Iterable[Any]) -> Callable[..., Any]:
    """Return fused_attn_fwd without formats. diagonal: what is missing after the window."""
    attend: Callable[..., Any] = attention.fused_attn_fwd

    def call(*args: Any) -> Any:
        formats = _format_of(args[6]), _NOT_SET
        return attend(*args[:7], *formats, *args[7:11], *diagonal, *args[11:])

    return call


def _backward(diagonal: Iterable[Any]) -> Callable[..., Any]:
    """Return fused_attn_bwd without formats, and with the gradients' dtype behind that of the inputs."""
    attend: Callable[..., Any] = attention.fused_attn_bwd

    def call(*args: Any) -> Any:
        own = _format_of(args[5])
        at = next(i for i, x in enumerate(args) if isinstance(x, torch.dtype)) + 1
        kept = (*args[6:10], *diagonal, *args[10:at], *args[at + 1 :])
        return attend(*args[:6], own, own, args[5], _NOT_SET, _NOT_SET, *kept)

    return call


def _scores(num_tokens: int, num_experts: int, routing_map: Tensor, intermediate_output: Tensor, *_: Any) -> Tensor:
    """fused_topk_with_score_function_bwd: return a new gradient of the router's logits."""
    return empty((num_tokens, num_experts), intermediate_output.dtype)


def _auxiliary(num_tokens: int, num_experts: int, intermediate_output: Tensor, **_: Any) -> Tensor:
    """fused_score_for_moe_aux_loss_bwd: return a new gradient of the router's logits."""
    return empty((num_tokens, num_experts), intermediate_output.dtype)


def earlier(release: Release, refused: Callable[[str], Any]) -> dict[str, Any]:
    """Return the functions of a release that differ from those of the stand-in."""
    found: dict[str, Any] = {}
    if release < _QUANTISED:
        found |= {name: refused(name) for name in _QUANTISERS}
    if release < _FORMATS:
        diagonal = (False,) if release < _DIAGONAL else ()
        found |= {"fused_attn_fwd": _forward(diagonal), "fused_attn_bwd": _backward(diagonal)}
    if release < _ROUTED:
        found |= {"fused_topk_with_score_function_bwd": _scores, "fused_score_for_moe_aux_loss_bwd": _auxiliary}
    if release < _DIAGONAL:
        found["get_fused_attn_backend"] = functools.partial(attention.get_fused_attn_backend, deterministic=False)
    return found
