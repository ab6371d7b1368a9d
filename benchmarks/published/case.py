"""The noun Case: a published row as memfit's own nouns, and the parsing that every framework's mapping shares."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from memfit.catalogue.cards import find_gpu
from memfit.errors import MemfitError
from memfit.models.hub import resolve_model
from memfit.nouns.architecture import Architecture
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Recipe
from memfit.tables.trainers import Trainer
from published.rows import Row

Compared = Literal["allocated", "reserved", "device"]


class NotCovered(Exception):
    """A row the closed form does not describe; the message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What to estimate and which level to compare."""

    architecture: Architecture
    recipe: Recipe
    gpu: Gpu
    profile: Trainer
    compared: Compared
    padded: bool = False
    orders: tuple[tuple[int, ...], ...] = ()  # lengths of successive micro-batches, of several possible runs
    torch: tuple[int, ...] = ()  # whose allocator rules hold; (): the latest
    remark: str = ""  # what had to be assumed, said in the listing

    @property
    def described(self) -> str:
        """The recipe in a few words."""
        r = self.recipe
        base = "" if r.quantization == "none" else f" {r.quantization}"
        kept = {"none": "", "full": ", checkpointing", "offload": ", offloaded checkpoints"}[r.checkpointing]
        lengths = f"lengths up to {r.sequence_length}" if self.orders else f"length {r.sequence_length}"
        return f"{r.method}{base}, batch {r.micro_batch}, {lengths}{kept}, {r.optimizer}"


COMPARED: dict[str, Compared] = {"allocated": "allocated", "reserved": "reserved", "smi": "device"}


def compared_of(row: Row) -> Compared:
    """The level a row measured. Raises NotCovered for a quantity that is none of ours."""
    if row.quantity not in COMPARED:
        raise NotCovered(f"quantity '{row.quantity}' is not stated by the source")
    return COMPARED[row.quantity]


def architecture_of(name: str) -> Architecture:
    """The model as the catalogue knows it. Raises NotCovered."""
    try:
        found = resolve_model(re.sub(r"\s*\(.*\)$", "", name), offline=True)
    except MemfitError as error:
        raise NotCovered(f"model: {error.message}") from error
    if found.trainable_memory:
        raise NotCovered(f"model: {found.trainable_memory}")
    if found.task not in ("causal-lm", "classification", "masked-lm"):
        raise NotCovered(f"model: {found.task} is not a language model of the closed form")
    return found


def gpu_of(row: Row, default: str = "") -> Gpu:
    """The card; `default` stands in where the source says nothing and the figure does not depend on it."""
    try:
        return find_gpu(re.sub(r"\s*(\d+GB)?$", "", row.gpu) if "3090" in row.gpu else row.gpu)
    except MemfitError as error:
        if default:
            return find_gpu(default)
        raise NotCovered(f"card: {error.message}") from error


def one_gpu(row: Row) -> None:
    """Raise NotCovered for anything on several cards."""
    if row.number("n_gpus", 1) > 1:
        raise NotCovered(f"{row.n_gpus} GPUs: {row.sharding}")
    if row.sharding not in ("", "none"):
        raise NotCovered(f"sharding: {row.sharding}")


def fixed_length(row: Row) -> int:
    """A sequence length that is a plain number. Raises NotCovered."""
    if not row.seq_len.isdigit():
        raise NotCovered(f"sequence length '{row.seq_len}' is not known")
    return int(row.seq_len)


def optimizer_of(table: tuple[tuple[str, str], ...], text: str) -> str:
    """The optimizer of the first pattern that `text` holds. Raises NotCovered."""
    for pattern, key in table:
        if re.search(pattern, text):
            return key
    raise NotCovered(f"optimizer '{text}' is not known")


def accumulation(row: Row) -> int:
    """Micro-batches per step on one card; 1 when the source does not say."""
    one = re.search(r"(\d+) for 1 GPU", row.grad_accum)
    return max(int(one[1]) if one else row.number("grad_accum", 1), 1)
