"""Mixtures of experts in Transformer Engine: routing, permuting, padding (router.cpp, permutation.cpp, padding.cpp)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memfit.virtual.device.dispatch import current
from memfit.virtual.libraries.transformer_engine.quantizers import empty

# --- the router ---


def _routing_map(logits: Tensor, topk: int, routing_map_format: int, groups: tuple[int, int] = (1, 1)) -> Tensor:
    experts = logits.shape[-1]
    if int(routing_map_format):
        return empty((*logits.shape[:-1], -(-experts // 8)), torch.uint8)
    card = current()
    return card.answers.routing_map(card.values, empty(logits.shape, torch.bool), topk, groups)


def fused_topk_with_score_function_fwd(
    logits: Tensor, topk: int, use_pre_softmax: bool, num_groups: int | None, group_topk: int | None,
    scaling_factor: float | None, score_function: str, expert_bias: Tensor | None, routing_map_format: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return probabilities, the map of which expert a token takes, and scores in fp32."""
    probabilities, values = empty(logits.shape, logits.dtype), current().values
    taken = _routing_map(logits, topk, routing_map_format, (num_groups or 1, group_topk or 1))
    if taken.dtype == torch.bool and (known := values.of(taken)) is not None:
        values.set_pattern(probabilities, known)
    return probabilities, taken, empty(logits.shape, torch.float32)


def fused_score_for_moe_aux_loss_fwd(
    logits: Tensor, topk: int, score_function: str, routing_map_format: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores in fp32, the map, and what the backward pass needs."""
    scores = empty(logits.shape, torch.float32)
    return scores, _routing_map(logits, topk, routing_map_format), empty(logits.shape, torch.float32)


def fused_moe_aux_loss_fwd(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int, num_experts: int, num_rows: int, num_cols: int,
    topk: int, coeff: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the loss and two constants for its gradient."""
    return empty((), probs.dtype), empty((2,), torch.float32)


def fused_moe_aux_loss_bwd(
    constants: Tensor, tokens_per_expert: Tensor, num_rows: int, num_cols: int, grad_aux_loss: Tensor
) -> Tensor:
    """Return the gradient of the probabilities."""
    return empty((num_rows, num_cols), grad_aux_loss.dtype)


# --- permuting by indices; by maps it is Triton's ---


def moe_permute_fwd(
    input: Tensor, dtype: Any, indices: Tensor, num_out_tokens: int, workspace: list[Tensor], max_expanded: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return rows sorted by expert, where each row went, and the buffers of the sort, which the caller keeps."""
    expanded = input.shape[0] * indices.shape[1]
    if not workspace:
        first = empty((max_expanded,), torch.int32)
        rows = torch.arange(max_expanded, dtype=torch.int32, device="cuda")
        workspace = [first, rows, empty((max_expanded,), torch.int32), empty((8 * max_expanded,), torch.uint8)]
    permuted = empty((num_out_tokens if num_out_tokens > 0 else expanded, input.shape[1]), input.dtype)
    return permuted, empty((expanded,), torch.int32), workspace


def moe_unpermute_fwd(
    input: Tensor, dtype: Any, row_id_map: Tensor, prob: Tensor, num_tokens: int, topk: int
) -> Tensor:
    """Return the rows of all tokens, those of their experts added up; moe_permute_bwd does the same."""
    return empty((num_tokens, input.shape[1]), input.dtype)


def moe_unpermute_bwd(
    input_bwd: Tensor, input_fwd: Tensor, dtype: Any, row_id_map: Tensor, prob: Tensor
) -> tuple[Tensor, Tensor]:
    """Return gradients of the permuted rows and of the probabilities."""
    shape = tuple(prob.shape[:2]) if prob.numel() else (row_id_map.shape[0], 1)
    return empty((input_fwd.shape[0], input_bwd.shape[1]), input_bwd.dtype), empty(shape, torch.float32)


# --- offsets ---


def splits_to_offsets(first_dims: Tensor, logical_last_dim: int) -> Tensor:
    """Return where each part begins, and the end."""
    return empty((first_dims.numel() + 1,), torch.int64)


def splits_to_offsets_multi(
    split_sizes: Tensor, device: Any, *, strides: Sequence[int], include_leading_zero: Sequence[bool],
    dtypes: Sequence[torch.dtype], bulk_allocate: bool = False,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Return the sizes on the card, and several running sums of them."""
    sizes = split_sizes.to(torch.int64).to(device)
    made = [
        empty((sizes.numel() + zero,), dtype, device) for zero, dtype in zip(include_leading_zero, dtypes, strict=True)
    ]
    return sizes, made
