"""One GPU's share under DeepSpeed's ZeRO, with the settings that memfit exports: buckets, gathered weights, copies.

Source: DeepSpeed 0.19.8 stage_1_and_2.py and stage3.py, traced and recorded (tests/data/deepspeed_runs.json).
"""

from __future__ import annotations

from dataclasses import replace

from memfit.closed_form.numerics import Numerics, adapted, adapter_weights
from memfit.closed_form.parallel import zero3 as coordinator
from memfit.closed_form.parallel.share import Gathered, Share, Streams, part
from memfit.closed_form.static import Static
from memfit.nouns.architecture import Architecture
from memfit.nouns.job import Recipe

NORM_BYTES = 8  # per element: the norm of the gradients is taken in fp64 (get_norm_dtype), one weight's part at a time
SUB_GROUP = 1_000_000_000  # sub_group_size, DeepSpeed's default: elements that ZeRO-3 steps at once
NOTHING = Gathered(*[0] * 8)


def in_backward(held: Gathered, size: int) -> Gathered:
    """The same with `size` bytes more in every part of the backward that blocks take part in."""
    return replace(
        held, last=held.last + size, middle=held.middle + size, first=held.first + size, embedding=held.embedding + size
    )


def stage_0(s: Static, n: Numerics, whole: Share) -> Share:
    """BF16_Optimizer, which steps once while it is made; it widens all gradients before it steps."""
    widened = s.trained * n.master
    return replace(whole, gradients=s.gradients + widened, early_states=True, loading=s.base + widened)


def stages_1_and_2(a: Architecture, r: Recipe, n: Numerics, s: Static, whole: Share) -> Share:
    """Whole weights; both buckets exist from the first gradient to the end of the backward.

    ZeRO-1 reduces gradients, as ZeRO-2 does, at the end of an accumulation, and until then keeps them whole. A gradient
    that no bucket holds is copied whole for the part of it that stays.
    """
    away = r.offload != "none"
    released = r.shard == "gradients" or away or r.accumulation == 1
    share, largest = part(s.trained, r.num_gpus), _largest_trained(a, r, s)
    cut = max((largest - share) * n.gradient, _apart_in_blocks(a, r, n)) if largest > coordinator.BUCKET else 0
    shared = 0 if away else share * n.gradient + cut if released else s.gradients
    apart, waiting = _apart(a, r, n, s)
    reduced, at_end = _reduced(n, s)
    buckets = 2 * coordinator.BUCKET * n.gradient
    copied = max(reduced, _apart_in_blocks(a, r, n))
    late = buckets + waiting + copied
    gathered = replace(in_backward(NOTHING, late), last=late + apart, embedding=late + apart)
    used = in_backward(NOTHING, copied)
    norm = NORM_BYTES * min(largest, share)
    kept = shared if released else 0
    return replace(
        whole, gradients=shared, states=_left(r, whole.states), master=_left(r, whole.master), release_gradients=released,
        buckets=largest * n.gradient if away else 0,  # temp_grad_buffer_for_gpu_offload
        gathered=gathered, streams=Streams(0, kept + copied + at_end + norm * away, used, kept, reduced=_fills(a, r, n)),
        step_bytes=max(at_end + buckets, norm + buckets * away, _widened(r, n, s)), loading=_flattened(r, s),
        late=(buckets // 2, buckets // 2, waiting), step_tensors=() if away else ((norm,), _parts_and_whole(r, n, s)),
    )  # fmt: skip


def stage_3(a: Architecture, r: Recipe, n: Numerics, s: Static, whole: Share) -> Share:
    """Weights in shares; one bucket and the shares of the gradients exist from the beginning on."""
    on_card = r.offload == "none"
    bucket = coordinator.BUCKET * n.gradient
    apart, waiting = _apart(a, r, n, s)
    reduced, at_end = _reduced(n, s)
    # of each offloaded gradient there is a copy on the card, and one in fp64 for its norm
    norm = 0 if on_card else (NORM_BYTES + n.gradient) * part(_largest_trained(a, r, s), r.num_gpus)
    after = at_end + norm * bool(at_end)
    norm = 0 if at_end else norm
    found = replace(
        whole, weights=0 if r.offload == "parameters" else part(whole.weights, r.num_gpus),
        gradients=part(whole.gradients, r.num_gpus) if on_card else 0, states=_left(r, whole.states),
        master=_left(r, whole.master), buckets=bucket, release_gradients=True, lasting_gradients=True,
        step_bytes=_widened(r, n, s), loading=_sharding(r, n, s, bucket),
        late=(waiting,), step_tensors=(_parts_and_whole(r, n, s),) if on_card else (),
    )  # fmt: skip

    def during(*, recorded: bool, evaluated: bool = False) -> Share:
        live, events = _live(a, r, n, s, recorded=recorded, evaluated=evaluated)
        held = Gathered(*(level.running for level in live))
        beside = reduced + norm
        gathered, used = in_backward(held, waiting + beside + apart), in_backward(held, beside)
        pools = Streams(
            max(level.fetching for level in live), beside + after, used, events=events, reduced=_fills(a, r, n)
        )
        # the bucket that never filled is reduced while the embedding is still whole
        step = max(found.step_bytes, (after + held.embedding) * bool(after))
        return replace(found, gathered=gathered, streams=pools, step_bytes=step)

    steady = during(recorded=True)
    persisting = coordinator.persisting(a, *_adapters(a, r)) * n.weight
    return replace(
        steady, buckets=bucket + persisting, first=during(recorded=r.accumulation > 1),
        evaluated=during(recorded=True, evaluated=True),
    )  # fmt: skip


def _live(
    a: Architecture, r: Recipe, n: Numerics, s: Static, *, recorded: bool, evaluated: bool
) -> tuple[list[coordinator.Level], tuple[int, ...]]:
    """Bytes of gathered weights in the parts of a pass; of 4-bit ones, as if all were as wide as they are on average."""
    width = (s.base + s.scales) / s.parameters if r.method == "qlora" else n.weight
    found, events = coordinator.levels(a, r.num_gpus, *_adapters(a, r), r.checkpointing != "none", recorded, evaluated)
    levels = [coordinator.Level(*(int(numel * width) for numel in found[stage])) for stage in coordinator.STAGES]
    return levels, tuple(int(event * width) if event > 0 else event for event in events)


def _adapters(a: Architecture, r: Recipe) -> tuple[int, frozenset[str]]:
    return (0, frozenset()) if r.method == "full" else (r.lora_rank, adapted(a, r.lora_targets))


def _left(r: Recipe, size: int) -> int:
    """What is left on the card of the optimizer's."""
    return part(size, r.num_gpus) if r.offload == "none" else 0


def _apart(a: Architecture, r: Recipe, n: Numerics, s: Static) -> tuple[int, int]:
    """The largest gradient that no bucket holds, and a tied embedding's, which waits for its second half."""
    if r.method != "full":
        return 0, 0
    largest = s.largest * n.gradient
    return largest if s.largest > coordinator.BUCKET else 0, largest if a.tied else 0


def _apart_in_blocks(a: Architecture, r: Recipe, n: Numerics) -> int:
    """The largest gradient of a block, where no bucket holds it."""
    largest = max(w.numel for layer in a.kinds for w in layer.weights) if r.method == "full" else 0
    return largest * n.gradient if largest > coordinator.BUCKET else 0


def _parts_and_whole(r: Recipe, n: Numerics, s: Static) -> tuple[int, int]:
    """The parts of the gradients put together, and again in the width of the master copy; ZeRO-3 goes by sub-groups."""
    share = part(s.trained, r.num_gpus)
    share = min(share, SUB_GROUP) if r.shard == "parameters" else share
    return share * n.gradient, share * n.master


def _widened(r: Recipe, n: Numerics, s: Static) -> int:
    return sum(_parts_and_whole(r, n, s)) if r.offload == "none" else 0


def _largest_trained(a: Architecture, r: Recipe, s: Static) -> int:
    """Elements of the largest weight that gets a gradient."""
    if r.method == "full":
        return s.largest
    return max((w.numel for w in adapter_weights(a.weights, adapted(a, r.lora_targets), r.lora_rank)), default=0)


def _flattened(r: Recipe, s: Static) -> int:
    """ZeRO-1 and -2 hold what they train twice while they flatten it, before there is a master copy."""
    trained = s.base if r.method == "full" else s.adapter
    return max(trained - (part(s.master, r.num_gpus) if r.offload == "none" else 0), 0)


def _sharding(r: Recipe, n: Numerics, s: Static, bucket: int) -> int:
    """A whole weight at a time and its share on the way to the host, beside the bucket where all weights are trained."""
    whole = s.base + s.scales if r.method == "qlora" else s.largest * n.weight
    arriving = whole + (part(whole, r.num_gpus) if r.offload == "parameters" else 0)
    if r.method != "full":
        return max(bucket, arriving)
    # the master copy is made of a copy, before there are gradients and a bucket
    copied = min(part(s.trained, r.num_gpus), SUB_GROUP) * n.master if r.offload == "none" else 0
    return max(bucket + arriving, copied - part(s.gradients, r.num_gpus))


def _reduced(n: Numerics, s: Static) -> tuple[int, int]:
    """What is copied out of a full bucket on a stream of its own: during the backward, or at its end, if none fills before."""
    size = min(coordinator.BUCKET, s.trained) * n.gradient
    return (size, 0) if s.trained > coordinator.BUCKET else (0, size)


def _fills(a: Architecture, r: Recipe, n: Numerics) -> tuple[int, ...]:
    return tuple(numel * n.gradient for numel in coordinator.fills(a)) if r.method == "full" else ()
