"""What several GPUs or host memory change: shares of the static bytes, and the buffers that gathering needs.

Sources: PyTorch 2.13 FSDP2 (_fsdp_collectives.py) and DDP measured over 8 ranks; DeepSpeed 0.19 stage_1_and_2.py.
"""

from __future__ import annotations

from dataclasses import replace

from memfit.architecture import Architecture
from memfit.formula.numerics import Numerics, adapted, adapter_weights
from memfit.formula.share import Gathered, Share, Streams, part
from memfit.formula.static import Static
from memfit.formula.zero import stage_0, stage_3, stages_1_and_2
from memfit.job import Recipe

NCCL_BYTES = 768 << 20  # one communicator on 8 NVLink cards takes 0.5 to 1 GB (measured range in public issues)


def share_of(a: Architecture, r: Recipe, n: Numerics, s: Static) -> Share:
    """How the static bytes of a recipe lie on one GPU."""
    weights = s.base + s.scales + s.upcast + s.adapter
    whole = Share(weights, s.gradients, s.states, s.master, NCCL_BYTES if r.num_gpus > 1 else 0)
    if r.shard == "parameters" and not r.zero:
        return _fsdp(a, r, n, s, whole)
    if r.shard == "parameters" or r.offload == "parameters":
        return stage_3(a, r, n, s, whole)
    if r.shard != "none" or r.offload != "none":
        return stages_1_and_2(a, r, n, s, whole)
    if r.zero:
        return stage_0(s, n, whole)
    return replace(whole, buckets=s.gradients if r.num_gpus > 1 else 0)


def _fsdp(a: Architecture, r: Recipe, n: Numerics, s: Static, whole: Share) -> Share:
    gathered, streams = _gathered(a, r, n, s)
    weights, gradients, states, master = (
        part(x, r.num_gpus) for x in (whole.weights, whole.gradients, whole.states, whole.master)
    )
    return Share(weights, gradients, states, master, whole.nccl, gathered=gathered, streams=streams, by_block=True)


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
        return whole, Streams(ends + block + block // r.num_gpus, share + full * ends // r.num_gpus, outputs, share)
    whole = Gathered(
        2 * embedding + embedding // r.num_gpus + block, 2 * block, 2 * head, head, 2 * block + head * full, 2 * block + reduced, block + embedding + reduced,
        embedding + reduced,
    )  # fmt: skip
    outputs = Gathered(embedding, block, head, 0, block, block, embedding, embedding)
    largest = max(head, embedding)
    return whole, Streams(largest + block + largest // r.num_gpus, share + full * largest // r.num_gpus, outputs, share)
