"""What one GPU holds of a run on several: its share of the static bytes, and the buffers of every part of a pass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gathered:
    """Bytes of gathered weights and communication buffers while the parts of a pass run, under FSDP2 as accelerate
    wraps it.

    Embedding, blocks, and (norm, head) are groups of their own; tied, the ends are one group. Source, and what the
    recorded runs confirm: torch 2.13 _fsdp_param_group.py, _fsdp_collectives.py; accelerate 1.15 utils/fsdp_utils.py.
    A gathered group is its weights and the all-gather's output they are copied out of. In the forward that output lives
    until the next group has gathered its own; after the model's forward nothing but the last group's weights is left.
    In the backward it dies at once, but the next group is prefetched and one reduce-scatter input is kept.
    """

    entry: int  # the embedding's group, its all-gather output, and this rank's share as it was sent
    forward: int  # a block: its weights, its all-gather output
    loss: int
    loss_backward: int
    last: int  # backward of the last block, the first to run
    middle: int
    first: int
    embedding: int  # backward of the embedding


@dataclass(frozen=True, slots=True)
class Transitions:
    """Bytes of buffers while FSDP2 gathers a group beside the all-gather output of the one before, and whole ends."""

    first: int  # the first block, beside the embedding's
    last: int  # the last block, beside another block's
    head: int  # the head, beside the last block's; 0: it is not gathered by itself


@dataclass(frozen=True, slots=True)
class Streams:
    """Bytes in the pools of a framework's own streams: no other stream can use what one has cached.

    All-gather outputs come from one stream's pool and reduced gradients from another's; `gathering` and `reducing` are
    their highest levels, `gathered` what of both is in use in each part of a pass and so counted in Gathered, and
    `kept` the sharded gradients among the reduced.
    """

    gathering: int
    reducing: int
    gathered: Gathered
    kept: int = 0
    # of the gathering stream: n > 0 allocates n bytes, n < 0 frees allocation -n, counted from 1
    events: tuple[int, ...] = ()
    reduced: tuple[int, ...] = ()  # buffers of the reducing stream, one after the other


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes that one GPU holds of a run."""

    weights: int
    gradients: int
    states: int
    master: int
    nccl: int
    buckets: int = 0  # permanent communication buffers
    release_gradients: bool = False  # whole gradients are freed as soon as they are reduced
    gathered: Gathered | None = None  # buffers that come and go in a pass
    transitions: Transitions | None = None  # between the parts of a pass, under FSDP2
    streams: Streams | None = None
    first: Share | None = None  # while DeepSpeed still records the order of the modules
    evaluated: Share | None = None  # during evaluation, where it differs
    by_block: bool = False  # FSDP2: the gradients of a block are reduced together
    lasting_gradients: bool = False  # ZeRO-3: sharded gradients have a place of their own from the beginning on
    early_states: bool = False  # the optimizer's states exist from loading on
    loading: int = 0  # what DeepSpeed needs beside the weights while it wraps the model
    late: tuple[int, ...] = ()  # buffers from the first gradient to the end of the backward
    step_tensors: tuple[tuple[int, ...], ...] = ()  # the large ones among `step_bytes`; those of a group exist together
    step_bytes: int = 0  # copies that the framework makes of its gradients before it steps


def part(size: int, gpus: int) -> int:
    """Return an equal share, rounded up."""
    return -(-size // gpus)
