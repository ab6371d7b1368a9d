"""The noun Finding: one explained cause of an out-of-memory, with its evidence in bytes, who held them, and remedies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from memfit.nouns.tape import Alloc, Role

Cause = Literal[
    "capacity", "activations", "logits", "attention", "kv-cache", "long-sample", "image-tokens", "pairs", "group-batch",
    "reference-model", "optimizer-states", "optimizer-step", "eval-logits", "eval-batch", "eval-generate", "eval-leftovers",
    "eval-graph", "resume-states", "stale-checkpoint", "save-gather", "merge", "two-copies", "wrong-dtype", "kbit-upcast",
    "fsdp-upcast", "modules-to-save", "dequantized", "quantize-peak", "load-peak", "replicated", "zero3-init",
    "quantized-unsharded", "fsdp-wrap", "companion-models", "ranks-on-one-gpu", "data-parallel", "inference-engine",
    "other-process", "nccl", "buckets", "fragmentation", "leak", "exception", "temporaries", "host-ram", "spill", "input-grads", "not-known",
]  # fmt: skip
Confidence = Literal["certain", "likely", "possible"]
Part = Role | Literal["unknown"]  # unknown: older than the recording or without a stack, and nothing tells what it is


def part_of(alloc: Alloc) -> Part:
    """The role of an allocation; one that is neither labelled nor known to be more than a temporary is unknown."""
    return "unknown" if alloc.role == "temporaries" and not alloc.label else alloc.role


CAUSES: dict[Cause, str] = {
    "capacity": "weights, gradients and optimizer states alone are more than the card has, or nearly all of it",
    "activations": "what the forward pass keeps for the backward pass is the largest share",
    "logits": "the loss makes all logits at once, and copies of them in fp32",
    "attention": "attention writes its score matrix, which grows with the square of the sequence",
    "kv-cache": "keys and values of a generation cache are kept, in training for nothing",
    "long-sample": "one batch is longer than the ones before it: it fails where it comes, not at step 1",
    "image-tokens": "images become more tokens than planned",
    "pairs": "chosen and rejected answers go through the model as one batch of twice the size",
    "group-batch": "all generations of a group go through the model together",
    "reference-model": "a second, frozen model lies beside the trained one",
    "optimizer-states": "optimizer states do not exist before the first step; from then on they stay",
    "optimizer-step": "the optimizer step makes temporaries as large as the weights",
    "eval-logits": "evaluation keeps the logits of every batch on the card until its end",
    "eval-batch": "evaluation runs with a batch size of its own, larger than that of training",
    "eval-generate": "evaluation generates text: a KV cache, and with sharding gathered weights",
    "eval-leftovers": "evaluation leaves blocks of other shapes behind, or weights gathered",
    "eval-graph": "evaluation runs with gradients on: every batch keeps its activations",
    "resume-states": "resuming loads the optimizer's states onto the card, beside what is there",
    "stale-checkpoint": "the loaded checkpoint is still referenced, so its tensors stay on the card",
    "save-gather": "saving gathers the whole model on one card",
    "merge": "merging or exporting writes the base out in 16 bits on the card",
    "two-copies": "the model lies on the card twice",
    "wrong-dtype": "the weights are in more bits than they need: loaded in 32, or made in 64",
    "kbit-upcast": "preparing for k-bit training casts everything that is not quantised to 32 bits",
    "fsdp-upcast": "FSDP keeps trained weights in 32 bits",
    "modules-to-save": "whole embeddings and heads are trained: fp32 copies, gradients and states of them",
    "dequantized": "the quantised checkpoint is unpacked to 16 bits when it is loaded",
    "quantize-peak": "quantising while loading holds the original beside the result",
    "load-peak": "loading needs more on each card than training does",
    "replicated": "every process holds the whole model",
    "zero3-init": "ZeRO-3 is not yet active when the model is made: every rank loads all of it",
    "quantized-unsharded": "4-bit weights are not sharded: every card holds all of them",
    "fsdp-wrap": "FSDP gathers one huge unit instead of a layer at a time",
    "companion-models": "text encoders, VAE and the like stay on the card beside the trained model",
    "ranks-on-one-gpu": "several processes put tensors or contexts on the same card",
    "data-parallel": "nn.DataParallel gathers inputs, outputs and gradients on the first card",
    "inference-engine": "an inference engine in the same card keeps its share of it",
    "other-process": "another process holds memory of the card",
    "nccl": "communication buffers and contexts, which PyTorch's numbers do not show",
    "buckets": "DeepSpeed's communication buckets are large against the model",
    "fragmentation": "enough is free, but not in one piece",
    "leak": "tensors of earlier steps are kept, so that every step starts with more than the last",
    "exception": "the traceback of an earlier error keeps its frames' tensors alive",
    "temporaries": "tensors the program itself makes and holds, kept for no backward pass",
    "host-ram": "the host's memory ran out, not the card's",
    "spill": "the driver moved memory of the card into the host's",
    "input-grads": "checkpointing is without effect: no input of a checkpointed block requires a gradient",
    "not-known": "what was recorded does not say enough",
}
# the same of a history in which nothing failed, where it reads otherwise: what its highest instant is made of
PEAKS: dict[Cause, str] = {
    "capacity": "weights, gradients and optimizer states make most of the peak",
    "activations": "what the forward pass keeps for the backward pass makes most of the peak",
    "fragmentation": "memory is reserved that no tensor has",
    "not-known": "nothing tells what most of the peak is",
}
assert set(CAUSES) == set(get_args(Cause))


@dataclass(frozen=True, slots=True)
class Proof:
    """One line of evidence; `bytes` where it is a size."""

    text: str
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Holder:
    """Who held memory when it ran out: `count` tensors of one role, born in one module at one line."""

    role: Part
    module: str  # "layers.3.mlp", or the operator where no module is known
    line: str  # "train.py:41", "" where not recorded
    bytes: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to set. `change` are the fields of a Recipe it alters, with which a planner can price it."""

    text: str
    cost: str
    change: tuple[tuple[str, str | int], ...] = ()
    saves: int | None = None  # bytes of the reserved peak, by the planner's estimate; None: not computed


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause. `line` is the user's own line it happens at, as far as it is known."""

    cause: Cause
    title: str
    evidence: tuple[Proof, ...] = ()
    holders: tuple[Holder, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    confidence: Confidence = "possible"
    line: str = ""
