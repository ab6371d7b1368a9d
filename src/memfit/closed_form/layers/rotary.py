"""Rotary position embeddings: the variants of apply_rotary_pos_emb in transformers, on sized tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memfit.closed_form import ops
from memfit.closed_form.engine import Recorder, Tensor
from memfit.nouns.architecture import Attention


def rotate(rec: Recorder, q: Tensor, k: Tensor, a: Attention, table: int) -> tuple[Tensor, Tensor]:
    """Queries and keys with the rotated part of each head turned; a part that is not rotated is concatenated again.

    table: itemsize of cos and sin, which the model makes in the dtype of its hidden states.
    """
    row, q_type, k_type = ROTARY[a.rotary], q.itemsize, k.itemsize
    partial = row.concatenates or a.rotary_dim != a.head_dim
    table = 4 if row.wide_table else table
    if row.wide == "once":
        q, k = ops.cast(rec, q, 4, "fp32 queries"), ops.cast(rec, k, 4, "fp32 keys")
    q_rot, k_rot = q, k
    if partial:
        q_rot, q_pass = _parts(rec, q, a)
        k_rot, k_pass = _parts(rec, k, a)
    q_embed, k_embed = row.turn(rec, q_rot, row, table), row.turn(rec, k_rot, row, table)
    if partial:
        q_embed = ops.cat(rec, [q_embed, q_pass], "rotary concatenated")
        k_embed = ops.cat(rec, [k_embed, k_pass], "rotary concatenated")
    if not (row.wide or row.wide_table):
        return q_embed, k_embed
    return ops.cast(rec, q_embed, q_type, "rotated"), ops.cast(rec, k_embed, k_type, "rotated")


def rotate_one(rec: Recorder, x: Tensor, kind: str) -> Tensor:
    """Whole heads of queries or keys turned, by a row of ROTARY that computes in fp32."""
    row, itemsize = ROTARY[kind], x.itemsize
    return ops.cast(rec, row.turn(rec, ops.cast(rec, x, 4, "fp32 copy"), row, 4), itemsize, "rotated")


def _parts(rec: Recorder, x: Tensor, a: Attention) -> tuple[Tensor, Tensor]:
    heads = x.elements["T"] // a.head_dim
    first = ops.slice(rec, x, {"T": heads * a.rotary_dim}) if a.rotary_dim != a.head_dim else x
    return first, ops.slice(rec, x, {"T": heads * (a.head_dim - a.rotary_dim)})


def _halves(x: Tensor) -> dict[str, int]:
    return {basis: n // 2 for basis, n in x.elements.items()}


def _table(itemsize: int) -> Tensor:
    """cos or sin; products only ask for its dtype."""
    return ops.constant({"S": 1}, itemsize)


def _turn_half(rec: Recorder, x: Tensor, row: Rotary, itemsize: int) -> Tensor:
    """(x * cos) + (rotate_half(x) * sin) with rotate_half(x) = cat((-x2, x1))."""
    table = _table(itemsize)
    straight = ops.mul(rec, _wide(rec, x, row), table, "x * cos")
    return ops.add(
        rec, straight, ops.mul(rec, _rotate_half(rec, _wide(rec, x, row)), table, "rotated * sin"), "rotated"
    )


def _wide(rec: Recorder, x: Tensor, row: Rotary) -> Tensor:
    return ops.cast(rec, x, 4, "fp32 copy") if row.wide == "each" else x


def _rotate_half(rec: Recorder, x: Tensor) -> Tensor:
    x1, x2 = ops.slice(rec, x, _halves(x)), ops.slice(rec, x, _halves(x))
    return ops.cat(rec, [ops.negate(rec, x2), x1], "rotate_half")


def _turn_pairs(rec: Recorder, x: Tensor, row: Rotary, itemsize: int) -> Tensor:
    """cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin)), x1 and x2 the halves or the even and odd elements."""
    table = _table(itemsize)
    x1, x2 = ops.slice(rec, x, _halves(x)), ops.slice(rec, x, _halves(x))
    first = ops.sub(rec, ops.mul(rec, x1, table, "x1 * cos"), ops.mul(rec, x2, table, "x2 * sin"))
    second = ops.add(rec, ops.mul(rec, x2, table, "x2 * cos"), ops.mul(rec, x1, table, "x1 * sin"))
    return ops.cat(rec, [first, second], "rotated")


def _turn_complex(rec: Recorder, x: Tensor, row: Rotary, itemsize: int) -> Tensor:
    """Pairs of numbers seen as complex ones, times the table; the gradient is copied to be seen that way."""
    out, need = rec.like(x, "rotated"), x.requires_grad

    def backward(g: Tensor) -> list[Tensor | None]:
        pairs = rec.like(g, "complex gradient")
        return [rec.like(pairs, "unrotated gradient") if need else None]

    return rec.record(out, [x], [], backward)


@dataclass(frozen=True, slots=True)
class Rotary:
    """How one family rotates."""

    turn: Callable[[Recorder, Tensor, Rotary, int], Tensor]
    wide: str = ""  # "once": one fp32 copy of queries and keys; "each": a copy for each use
    concatenates: bool = False  # the part that is not rotated, even when there is none
    wide_table: bool = False  # cos and sin stay in fp32, which widens the products


ROTARY: dict[str, Rotary] = {
    "half": Rotary(_turn_half),  # also GLM's and GPT-J's even and odd elements: the same sizes
    "half_joined": Rotary(_turn_half, concatenates=True),  # Phi-3
    "half_fp32_table": Rotary(_turn_half, wide_table=True),  # OLMo 2
    "half_fp32": Rotary(_turn_half, "each"),  # ModernBERT
    "half_fp32_once": Rotary(_turn_half, "once"),  # Cohere
    "pairs": Rotary(_turn_pairs),  # gpt-oss, DeepSeek-V3
    "pairs_fp32": Rotary(_turn_pairs, "once"),  # torchtune
    "complex": Rotary(_turn_complex, "once"),  # Llama 4, DeepSeek-V2
}
