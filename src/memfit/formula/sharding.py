"""What several GPUs or host memory change: shares of the static bytes, and the buffers that gathering needs.

Sources: PyTorch 2.13 FSDP2 (_fsdp_collectives.py) and DDP measured over 8 ranks; DeepSpeed 0.19 stage_1_and_2.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.architecture import Architecture
from memfit.formula.numerics import Numerics, adapted, adapter_weights
from memfit.formula.static import Static
from memfit.job import Recipe

# DeepSpeed ZeRO-3: blocks that exist whole at once, the running one and what is prefetched for it. Source: PyTorch's
# FSDP2 measured over 8 ranks; DeepSpeed's stage3_max_live_parameters (1e9 elements) only bounds it from above.
GATHERED = 3
BUCKET_ELEMENTS = (
    50_000_000  # ZeRO reduce_bucket_size as memfit's exports write it (DeepSpeed's default: 5e8), used twice
)
NCCL_BYTES = 768 << 20  # one communicator on 8 NVLink cards takes 0.5 to 1 GB (measured range in public issues)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Bytes of gathered weights and communication buffers while the parts of a pass run, under FSDP2 as accelerate wraps it.

    Embedding, blocks, and (norm, head) are groups of their own; tied, the ends are one group. Source, and what the
    recorded runs confirm: torch 2.13 _fsdp_param_group.py, _fsdp_collectives.py; accelerate 1.15 utils/fsdp_utils.py.
    A gathered group is its weights and the all-gather's output they are copied out of. In the forward that output lives
    until the next group has gathered its own; after the model's forward nothing but the last group's weights is left.
    In the backward it dies at once, but the next group is prefetched and one reduce-scatter input is kept.
    """

    entry: int  # the embedding's group whole, beside its all-gather output and this rank's share of it as it was sent
    forward: int  # a block: its weights, its all-gather output
    loss: int
    loss_backward: int
    last: int  # backward of the last block, the first to run
    middle: int
    first: int
    embedding: int  # backward of it


@dataclass(frozen=True, slots=True)
class Streams:
    """Bytes that the pools of FSDP's own streams hold: what one stream has cached, no other can use.

    All-gather outputs come from one stream's pool and reduced gradients from another's; `gathering` and `reducing` are
    their highest levels, `gathered` what of the first is in use in each part of a pass and so counted in Gathered.
    """

    gathering: int
    reducing: int
    gathered: Gathered


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes of one GPU. `forward` and `backward` are buffers that live only there."""

    weights: int
    gradients: int
    states: int
    master: int
    buckets: int  # permanent communication buffers
    forward: int
    backward: int
    nccl: int
    release_gradients: bool  # whole gradients die as soon as they exist
    gathered: Gathered | None = None  # FSDP2: in place of forward and backward; gradients die with their block
    streams: Streams | None = None


def share_of(a: Architecture, r: Recipe, n: Numerics, s: Static) -> Share:
    """How the static bytes of a recipe lie on one GPU."""
    gpus = r.num_gpus
    weights = s.base + s.scales + s.upcast + s.adapter
    gradients, states, master = s.gradients, s.states, s.master
    buckets = forward = backward = 0
    release, gathered, streams = False, None, None
    bucket = min(BUCKET_ELEMENTS, max(s.trained, 1)) * n.gradient
    if r.shard == "none":
        buckets = gradients if gpus > 1 else 0
    elif r.shard in ("optimizer", "gradients"):
        states, master = _part(states, gpus), _part(master, gpus)
        backward = 2 * bucket
        if r.shard == "gradients":
            gradients, release = _part(gradients, gpus), True
    else:
        weights, gradients, states, master = (_part(x, gpus) for x in (weights, gradients, states, master))
        if r.zero:
            release, forward = True, _gathering(a, r, n, s)
            backward = forward
        else:
            gathered, streams = _gathered(a, r, n, s)
    if r.offload != "none":
        states = master = 0
        gradients, release = 0, True
        backward = max(backward, 2 * bucket)
        if r.offload == "parameters":
            weights = 0
            forward = backward = _gathering(a, r, n, s)
    nccl = NCCL_BYTES if gpus > 1 else 0
    return Share(weights, gradients, states, master, buckets, forward, backward, nccl, release, gathered, streams)


def _part(size: int, gpus: int) -> int:
    return -(-size // gpus)


def _width(r: Recipe, n: Numerics, s: Static) -> float:
    """Bytes per gathered element."""
    return (s.base + s.scales) / s.parameters if r.method == "qlora" else n.autocast or n.weight


def _gathered(a: Architecture, r: Recipe, n: Numerics, s: Static) -> tuple[Gathered, Streams]:
    """See there."""
    compute = n.autocast or n.weight
    names, full = adapted(a, r.lora_targets), r.method == "full"
    adapters = 0 if full else max(sum(w.numel for w in adapter_weights(x.weights, names, r.lora_rank)) for x in a.kinds)
    block = int(max(x.parameters for x in a.kinds) * _width(r, n, s)) + adapters * compute
    reduced = block if full else adapters * compute  # the input of a block's reduce-scatter
    head = sum(w.numel for w in (*a.final, *a.head)) * compute
    embedding = sum(w.numel for w in a.embedding) * compute
    share = s.gradients // r.num_gpus
    if a.tied:
        ends = head + embedding
        whole = Gathered(
            2 * ends + ends // r.num_gpus + block, ends + 2 * block, ends + block, ends, ends + 2 * block, ends + 2 * block + reduced,
            ends + block + reduced, ends + reduced,
        )  # fmt: skip
        outputs = Gathered(ends, block, block, 0, block, block, 0, 0)
        # the block's inputs are copied together while two outputs exist
        return whole, Streams(ends + block + block // r.num_gpus, share + full * ends // r.num_gpus, outputs)
    whole = Gathered(
        2 * embedding + embedding // r.num_gpus + block, 2 * block, 2 * head, head, 2 * block + head * full, 2 * block + reduced, block + embedding + reduced,
        embedding + reduced,
    )  # fmt: skip
    outputs = Gathered(embedding, block, head, 0, block, block, embedding, embedding)
    largest = max(head, embedding)
    return whole, Streams(largest + block + largest // r.num_gpus, share + full * largest // r.num_gpus, outputs)


def _gathering(a: Architecture, r: Recipe, n: Numerics, s: Static) -> int:
    """Whole blocks under ZeRO-3; the ends (embedding, final norm, head) stay gathered in between."""
    block = max(layer.parameters for layer in a.kinds)
    ends = sum(w.numel for w in (*a.embedding, *a.final, *a.head))
    gradient = block * n.gradient * 2 if r.method == "full" else 0
    return int(ends * (n.autocast or n.weight)) + GATHERED * int(block * _width(r, n, s)) + gradient
