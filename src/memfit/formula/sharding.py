"""What several GPUs or host memory change: shares of the static bytes, and the buffers that gathering needs.

Sources: PyTorch 2.13 FSDP2 (_fsdp_collectives.py) and DDP measured over 8 ranks; DeepSpeed 0.19 stage_1_and_2.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.architecture import Architecture
from memfit.formula.numerics import Numerics
from memfit.formula.static import Static
from memfit.job import Recipe

# FSDP2: blocks that exist whole at once. Forward: the current block, its all-gather output while it is copied out,
# and the prefetched next one (measured: 2.7 blocks). Backward adds the block's whole gradients and the input of its
# reduce-scatter (measured: 4.0 blocks above the end of the forward).
GATHERED_FORWARD = 3
GATHERED_BACKWARD = 3
BUCKET_ELEMENTS = (
    50_000_000  # ZeRO reduce_bucket_size as memfit's exports write it (DeepSpeed's default: 5e8), used twice
)
NCCL_BYTES = 768 << 20  # one communicator on 8 NVLink cards takes 0.5 to 1 GB (measured range in public issues)


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
    release_gradients: bool  # whole gradients live only inside their block


def share_of(a: Architecture, r: Recipe, n: Numerics, s: Static) -> Share:
    """How the static bytes of a recipe lie on one GPU."""
    gpus = r.num_gpus
    weights = s.base + s.scales + s.upcast + s.adapter
    gradients, states, master = s.gradients, s.states, s.master
    buckets = forward = backward = 0
    release = False
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
        release = True
        forward, backward = _gathering(a, r, n, s)
    if r.offload != "none":
        states = master = 0
        gradients, release = 0, True
        backward = max(backward, 2 * bucket)
        if r.offload == "parameters":
            weights = 0
            forward, backward = _gathering(a, r, n, s)
    nccl = NCCL_BYTES if gpus > 1 else 0
    return Share(weights, gradients, states, master, buckets, forward, backward, nccl, release)


def _part(size: int, gpus: int) -> int:
    return -(-size // gpus)


def _gathering(a: Architecture, r: Recipe, n: Numerics, s: Static) -> tuple[int, int]:
    """Whole blocks during forward and backward; the ends (embedding, final norm, head) stay gathered in between."""
    compute = n.autocast or n.weight
    per_element = (s.base + s.scales) / s.parameters if r.method == "qlora" else compute
    block = max(layer.parameters for layer in a.kinds)
    ends = sum(w.numel for w in (*a.embedding, *a.final, *a.head))
    whole = int(block * per_element)
    root = int(ends * compute)
    gradient = block * n.gradient * 2 if r.method == "full" else 0
    return root + GATHERED_FORWARD * whole, root + GATHERED_BACKWARD * whole + gradient
