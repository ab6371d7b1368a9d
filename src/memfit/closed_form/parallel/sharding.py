"""What sharding and offloading change: shares of the static bytes, and buffers for gathered weights.

Sources: PyTorch 2.13 FSDP2 (_fsdp_collectives.py) and DDP measured over 8 ranks; DeepSpeed 0.19 stage_1_and_2.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from memfit.closed_form.numerics import Numerics, adapted, adapter_weights
from memfit.closed_form.parallel.share import Gathered, Share, Streams, Transitions, part
from memfit.closed_form.parallel.zero import stage_0, stage_3, stages_1_and_2
from memfit.closed_form.static import Static
from memfit.nouns.architecture import Architecture, Weight
from memfit.nouns.job import Recipe
from memfit.tables.combinations import head_apart
from memfit.tables.loading import loading_of
from memfit.tables.quantization import CHECKPOINTS, QUANTIZATIONS, Quantization
from memfit.tables.trainers import holds_unit_inputs, trainer
from memfit.units import gib

BROADCAST_BUCKET = 250 << 20  # bytes: broadcast_bucket_size of torch 2.13 nn/parallel/distributed.py
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes: its bucket_cap_mb, and the first bucket's
NCCL_BYTES = 768 << 20  # one communicator on 8 NVLink cards takes 0.5 to 1 GB (measured range in public issues)
# a lone rank's first communicator and each further one, before any peer: an H100, NCCL 2.28 (benchmarks/measured)
NCCL_LEAST, NCCL_LEAST_MORE, NCCL_MOST = 562 << 20, 390 << 20, 1 << 30


def nccl_range(nccl: int) -> str:
    """Say between which sizes NCCL's buffers lie where `nccl` bytes are counted for them."""
    communicators = nccl // NCCL_BYTES
    least = NCCL_LEAST + NCCL_LEAST_MORE * (communicators - 1)
    return f"NCCL buffers {gib(least)} to {gib(NCCL_MOST * communicators)} GiB"


def nccl_bytes(processes: int, communicators: int = 1) -> int:
    """Return the bytes counted for NCCL's buffers on the card of one of `processes`; at least one communicator's."""
    return NCCL_BYTES * max(1, communicators) if processes > 1 else 0


def share_of(a: Architecture, r: Recipe, n: Numerics, s: Static, *, ends_in_root: bool = False) -> Share:
    """Return one GPU's share of the static bytes of a recipe; `ends_in_root`: see Trainer."""
    weights = s.base + s.scales + s.upcast + s.adapter
    groups = (r.num_gpus > 1) + (r.context_parallel > 1)  # a communicator each
    whole = Share(weights, s.gradients, s.states, s.master, NCCL_BYTES * groups)
    if r.shard == "parameters" and not r.zero:
        return _fsdp(a, r, n, s, whole, ends_in_root)
    if r.shard == "parameters" or r.offload == "parameters":
        return stage_3(a, r, n, s, whole)
    if r.shard != "none" or r.offload != "none":
        return stages_1_and_2(a, r, n, s, whole)
    if r.zero:
        return stage_0(s, n, whole)
    if r.num_gpus == 1:
        return whole
    sent = max(map(sum, pairwise([0, *broadcast(s)])), default=0)
    return replace(whole, buckets=s.gradients, loading=max(sent, s.gradients))


def _fsdp(a: Architecture, r: Recipe, n: Numerics, s: Static, whole: Share, ends_in_root: bool) -> Share:
    flat = holds_unit_inputs(r)
    gathered, streams, between = _flat(a, r, n, s) if flat else _gathered(a, r, n, s, ends_in_root)
    sizes = (whole.weights - s.scales, whole.gradients, whole.states, whole.master)
    # CPUOffloadPolicy: shards, gradients and states are on the host
    weights, gradients, states, master = (0 if r.offloaded_by_fsdp else part(x, r.num_gpus) for x in sizes)
    share = Share(
        weights, gradients, states, master, whole.nccl, gathered=gathered, transitions=between, streams=streams,
        whole_scales=True, by_block=True, flat=flat
    )  # fmt: skip
    if a.tied or ends_in_root or between is None or head_apart(r, a):
        return share
    # from its second batch on, an evaluation starts with the head still gathered from the batch before
    head = sum(w.numel for w in (*a.final, *a.head)) * (n.autocast or n.weight)
    later = replace(
        gathered, entry=gathered.entry + head, forward=gathered.forward + head,
        loss=max(gathered.loss, head + gathered.forward // 2),
    )  # fmt: skip
    left = Transitions(between.first + head, between.last and between.last + head, 0)
    return replace(share, evaluated=replace(share, gathered=later, transitions=left))


def _flat(a: Architecture, r: Recipe, n: Numerics, s: Static) -> tuple[Gathered, Streams, None]:
    """Return FSDP1's gathered weights: embedding, final norm and head for a whole pass, beside one block.

    A unit is gathered in place, and the one before is prefetched in the backward: see layers.program._prefetched.
    """
    names, row = adapted(a, r.lora_targets), (QUANTIZATIONS | CHECKPOINTS).get(r.quantization)
    compute = n.autocast or n.weight
    adapters = max(sum(w.numel for w in adapter_weights(x.weights, names, r.lora_rank)) for x in a.kinds) * compute
    block = max(_block_bytes(x.weights, row if r.method == "qlora" else None, compute) for x in a.kinds) + adapters
    root = sum(w.numel for w in (*a.embedding, *a.final, *a.head)) * compute
    both = root + block
    buffers = Gathered(root, both, root, both, both, both, both, root)
    share = s.gradients // r.num_gpus
    return buffers, Streams(root + 2 * block, share, buffers, share), None


def whole_at_load(a: Architecture, r: Recipe, n: Numerics, s: Static) -> int:
    """Return the bytes of whole weights on a card while FSDP2 shards them (tables/loading.py)."""
    way = loading_of(r)
    if way == "whole":
        return s.base
    if way == "sharded":  # one weight, the head last; a tied one has two names, and its share is kept for both
        return s.largest * n.weight + part(s.largest * n.weight, r.num_gpus) * a.tied
    # accelerate holds embedding and head until the end
    tables = (w for part in (a.embedding, () if a.tied else a.head) for w in part if w.kind != "norm")
    row = (QUANTIZATIONS | CHECKPOINTS).get(r.quantization) if r.method == "qlora" else None
    ends = sum(w.numel for w in tables) * n.weight
    return max(ends, max(_block_bytes(x.weights, row, n.weight) for x in a.kinds))


def broadcast(s: Static) -> list[int]:
    """Return the bytes of the flat copies in which DDP sends the weights of rank 0, two of which exist at once.

    Weights of one dtype share a bucket until it is full, and buckets are sent in the order of their first weights; one
    that is alone in its bucket is not copied. Source: torch 2.13 csrc/distributed/c10d/comm.cpp (broadcast_coalesced),
    reducer.cpp (compute_bucket_assignment_by_size) and csrc/utils/tensor_flatten.h.
    """
    flat: list[tuple[int, int]] = []  # place of the first weight, bytes
    filling: dict[tuple[bool, int], tuple[int, int, int]] = {}  # quantised, width -> place of the first, bytes, tensors
    for place, item in enumerate(sorted(s.stored, key=lambda item: item.place)):
        key = len(item.stays) > 1, item.width
        first, size, count = filling.pop(key, (place, 0, 0))
        size, count = size + (item.widened or item.stays[0]), count + 1
        if size < BROADCAST_BUCKET:
            filling[key] = first, size, count
        else:
            flat.append((first, size * (count > 1)))
    flat += [(first, size * (count > 1)) for first, size, count in filling.values()]
    return [size for _, size in sorted(flat)]


def buckets(trained: Sequence[tuple[Weight, int]]) -> list[int]:
    """Return the bytes of the buckets in which DDP reduces gradients of (weight, bytes per element), the last first."""
    filled, found = 0, list[int]()
    for w, width in reversed(trained):
        filled += w.numel * width
        if filled >= (BUCKET if found else FIRST_BUCKET):
            found.append(filled)
            filled = 0
    return [*found, filled] if filled else found


def _block_bytes(weights: Sequence[Weight], row: Quantization | None, width: int) -> int:
    """Return the bytes of a block's weights as they are gathered: 4-bit payload, and the others in `width` bytes."""
    sizes = (row.payload(w.numel) if row and w.kind == "linear" else w.numel * width for w in weights)
    return sum(sizes)


def _gathered(
    a: Architecture, r: Recipe, n: Numerics, s: Static, ends_in_root: bool
) -> tuple[Gathered, Streams, Transitions]:
    """Return FSDP2's gathered weights in each part of a pass, its streams' pools, and the levels between groups."""
    compute = n.autocast or n.weight
    names, full = adapted(a, r.lora_targets), r.method == "full"
    row = (QUANTIZATIONS | CHECKPOINTS).get(r.quantization) if r.method == "qlora" else None
    adapters = 0 if full else max(sum(w.numel for w in adapter_weights(x.weights, names, r.lora_rank)) for x in a.kinds)
    block = max(_block_bytes(x.weights, row, compute) for x in a.kinds) + adapters * compute
    reduced = block if full else adapters * compute  # the input of a block's reduce-scatter
    head = sum(w.numel for w in (*a.final, *a.head)) * compute
    embedding = sum(w.numel for w in a.embedding) * compute
    share, several = s.gradients // r.num_gpus, len(a.layers) > 1
    # the last block is gathered before the backward of the head
    early = block if ends_in_root or trainer(r.trainer).head(r.loss) == "fused" else 0
    if a.tied or ends_in_root:
        ends = head + embedding
        whole = Gathered(
            2 * ends + ends // r.num_gpus, ends + 2 * block, ends + block, ends + early, ends + 2 * block,
            ends + 2 * block + reduced, ends + block + reduced, ends + reduced,
        )  # fmt: skip
        outputs = Gathered(ends, block, block, 0, block, block, 0, 0)
        # a block's all-gather input is copied together while the outputs of two groups exist
        streams = Streams(ends + block + block // r.num_gpus, share + full * ends // r.num_gpus, outputs, share)
        between = Transitions(2 * (ends + block), (ends + 3 * block) * several, 0, 2 * ends * ends_in_root)
        return whole, streams, between
    whole = Gathered(
        2 * embedding + embedding // r.num_gpus, 2 * block, 2 * head, head + early, 2 * block + head * full,
        2 * block + reduced, block + embedding + reduced, embedding + reduced,
    )  # fmt: skip
    outputs = Gathered(embedding, block, head, 0, block, block, embedding, embedding)
    largest, next_to_head = max(head, embedding), block + 2 * head
    if head_apart(r, a):  # gathered by the loss, beside the last block's all-gather output
        head = 0 if r.offloaded_by_fsdp else head
        whole = replace(whole, loss=head + block, loss_backward=head + early)
        outputs = replace(outputs, loss=block)
        largest, next_to_head = embedding, 0
    streams = Streams(largest + block + largest // r.num_gpus, share + full * largest // r.num_gpus, outputs, share)
    return whole, streams, Transitions(max(2 * embedding, embedding + 2 * block), 3 * block * several, next_to_head)
