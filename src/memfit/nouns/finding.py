"""The noun Finding: one cause of an out-of-memory error, with evidence in bytes, holders of memory and remedies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from memfit.nouns.tape import Alloc, Role

Cause = Literal[
    "capacity", "oversized", "not-in-effect", "activations", "logits", "attention", "kv-cache", "long-sample",
    "image-tokens", "pairs", "group-batch",
    "reference-model", "optimizer-states", "optimizer-step", "eval-logits", "eval-batch", "eval-generate",
    "eval-leftovers",
    "eval-graph", "resume-states", "stale-checkpoint", "save-gather", "merge", "two-copies", "wrong-dtype",
    "kbit-upcast",
    "fsdp-upcast", "modules-to-save", "dequantized", "quantize-peak", "load-peak", "replicated", "zero3-init",
    "quantized-unsharded", "fsdp-wrap", "companion-models", "ranks-on-one-gpu", "data-parallel", "inference-engine",
    "other-process", "nccl", "buckets", "fragmentation", "leak", "exception", "temporaries", "host-ram", "spill",
    "input-grads", "not-known",
]  # fmt: skip
Confidence = Literal["certain", "likely", "possible"]
Part = Role | Literal["unknown"]  # unknown: allocated before the recording, or recorded without a stack


def part_of(alloc: Alloc) -> Part:
    """Return the role of an allocation; one without a label that is known only as a temporary is unknown."""
    return "unknown" if alloc.role == "temporaries" and not alloc.label else alloc.role


CAUSES: dict[Cause, str] = {
    "capacity": "weights, gradients and optimizer states alone need more than the card has, or nearly all of it",
    "oversized": "one tensor is larger than the card, or than one allocation may be",
    "not-in-effect": "the run held more than its settings need, so one of them was not in effect",
    "activations": "what the forward pass keeps for the backward pass needs more than the card has left",
    "logits": "the loss makes all logits at once, and copies of them in fp32",
    "attention": "attention writes its score matrix, which grows with the square of the sequence",
    "kv-cache": "the keys and values of a generation cache are kept; training does not need them",
    "long-sample": "one batch is longer than the ones before it, so the run fails when it comes and not at step 1",
    "image-tokens": "images become more tokens than planned",
    "pairs": "chosen and rejected answers go through the model as one batch of twice the size",
    "group-batch": "all generations of a group go through the model together",
    "reference-model": "a second, frozen model is on the card beside the trained one",
    "optimizer-states": "the first step allocates the optimizer states, and they stay from then on",
    "optimizer-step": "the optimizer step allocates temporaries as large as the weights",
    "eval-logits": "evaluation keeps the logits of every batch on the card until its end",
    "eval-batch": "evaluation runs with a batch size of its own, larger than that of training",
    "eval-generate": "evaluation generates text, which needs a KV cache and, with sharding, gathered weights",
    "eval-leftovers": "evaluation starts beside gradients of training, or leaves blocks of other shapes behind",
    "eval-graph": "evaluation runs with gradients enabled, so every batch keeps its activations",
    "resume-states": "resuming loads the optimizer states onto the card, beside the model",
    "stale-checkpoint": "the loaded checkpoint is still referenced, so its tensors stay on the card",
    "save-gather": "saving gathers the whole model on one card",
    "merge": "merging or exporting writes the base out in 16 bits on the card",
    "two-copies": "the model is on the card twice",
    "wrong-dtype": "the weights have more bits than they need: loaded in 32, or created in 64",
    "kbit-upcast": "preparing for k-bit training casts everything that is not quantised to 32 bits",
    "fsdp-upcast": "FSDP keeps trained weights in 32 bits",
    "modules-to-save": "whole embeddings and heads are trained, with fp32 copies, gradients and states",
    "dequantized": "the quantised checkpoint is unpacked to 16 bits when it is loaded",
    "quantize-peak": "quantising while loading holds the original beside the result",
    "load-peak": "loading needs more on each card than training does",
    "replicated": "every process holds the whole model",
    "zero3-init": "ZeRO-3 is not yet active when the model is created, so every rank loads all of it",
    "quantized-unsharded": "the 4-bit weights are not sharded, so every card holds all of them",
    "fsdp-wrap": "FSDP gathers one huge unit instead of a layer at a time",
    "companion-models": "text encoders, VAE and the like stay on the card beside the trained model",
    "ranks-on-one-gpu": "several processes put tensors or contexts on the same card",
    "data-parallel": "nn.DataParallel gathers inputs, outputs and gradients on the first card",
    "inference-engine": "an inference engine on the same card keeps its share of the memory",
    "other-process": "another process holds memory of the card",
    "nccl": "communication buffers and contexts, which PyTorch's numbers do not show",
    "buckets": "DeepSpeed's communication buckets are large against the model",
    "fragmentation": "enough is free, but not in one piece",
    "leak": "tensors of earlier steps are kept, so every step starts with more than the last",
    "exception": "the traceback of an earlier error keeps its frames' tensors alive",
    "temporaries": "the program itself allocates and holds tensors that no backward pass needs",
    "host-ram": "the host's memory ran out, not the card's",
    "spill": "the driver moved memory of the card into the host's",
    "input-grads": "checkpointing has no effect: no input of a checkpointed block requires a gradient",
    "not-known": "what was given does not show the cause",
}
# titles for a history without a failure: they describe its peak
PEAKS: dict[Cause, str] = {
    "capacity": "weights, gradients and optimizer states make most of the peak",
    "activations": "what the forward pass keeps for the backward pass makes most of the peak",
    "fragmentation": "memory is reserved that no tensor has",
    "not-known": "what most of the peak is made of is not recorded",
}
assert set(CAUSES) == set(get_args(Cause))


@dataclass(frozen=True, slots=True)
class Proof:
    """One line of evidence, with its size in bytes where it has one."""

    text: str
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Holder:
    """Tensors that held memory when it ran out: `count` of one role, allocated in one module at one line."""

    role: Part
    module: str  # "layers.3.mlp", or the operator where no module is known
    line: str  # "train.py:41", "" where not recorded
    bytes: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class Remedy:
    """A setting to change. `change` holds the Recipe fields it alters, for computing what it saves."""

    text: str
    cost: str
    change: tuple[tuple[str, str | int], ...] = ()
    saves: int | None = None  # bytes of the reserved peak, by the planner's estimate; None: not computed


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause. `line` is the user's own line where it happens, "" if unknown."""

    cause: Cause
    title: str
    evidence: tuple[Proof, ...] = ()
    holders: tuple[Holder, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    confidence: Confidence = "possible"
    line: str = ""
