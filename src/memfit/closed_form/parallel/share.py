"""One GPU's share of a run on several: static bytes, and the buffers of every part of a pass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gathered:
    """Bytes of gathered weights and communication buffers in each part of a pass, under FSDP2 as accelerate wraps it.

    Embedding, each block, and final norm with head are groups; with tied embeddings, embedding and head are one group.
    So are they where Trainer.ends_in_root is set, because accelerate before 1.14 leaves both in the root's group. It is
    freed at the end of the forward, gathered again before the backward, and reduced at the end of the backward.
    A gathered group takes its weights and the all-gather's output they are copied out of. In the forward that output
    exists until the next group is gathered; after the model's forward only the last group's weights are left. In the
    backward it is freed at once, but the next group is prefetched and one reduce-scatter input is kept.
    Source, confirmed by recorded runs: torch 2.13 _fsdp_param_group.py, _fsdp_collectives.py; accelerate 1.15
    utils/fsdp_utils.py (fsdp2_prepare_model; its pull request 4015 took embedding and head out of the root).
    """

    entry: int  # the embedding's weights, its all-gather output, and this rank's share as it was sent
    forward: int  # a block's weights and its all-gather output
    loss: int
    loss_backward: int
    last: int  # backward of the last block, the first to run
    middle: int
    first: int
    embedding: int  # backward of the embedding


@dataclass(frozen=True, slots=True)
class Transitions:
    """Bytes of buffers while FSDP2 gathers a group, beside all-gather outputs and weights that exist by then."""

    first: int  # the first block, beside the embedding's
    last: int  # the last block, beside another block's
    head: int  # the head, beside the last block's; 0: the head is not a group of its own
    again: int = 0  # the root, between forward and backward; 0: it is not gathered again


@dataclass(frozen=True, slots=True)
class Streams:
    """Bytes in the pools of a framework's own streams; a stream cannot use memory that another has cached.

    One stream allocates all-gather outputs, another reduced gradients. `gathering` and `reducing` are their peaks,
    `gathered` the bytes of both in use in each part of a pass, which Gathered counts too, and `kept` the sharded
    gradients among the reduced.
    """

    gathering: int
    reducing: int
    gathered: Gathered
    kept: int = 0
    # events of the gathering stream: n > 0 allocates n bytes, n < 0 frees allocation -n, counted from 1
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
    whole_scales: bool = False  # FSDP2 shards 4-bit weights, and leaves their scales whole on every card
    flat: bool = False  # FSDP1: each unit is gathered into one flat tensor, and the root stays whole for a pass
    by_block: bool = False  # FSDP2: the gradients of a block are reduced together
    lasting_gradients: bool = False  # ZeRO-3 allocates sharded gradients at the beginning
    early_states: bool = False  # the optimizer's states exist from loading on
    loading: int = 0  # bytes beside the weights while DeepSpeed or DDP wraps the model
    late: tuple[int, ...] = ()  # buffers from the first gradient to the end of the backward
    step_tensors: tuple[tuple[int, ...], ...] = ()  # the large tensors of `step_bytes`; those of a group exist together
    step_bytes: int = 0  # copies of the gradients that the framework makes before the optimizer step


def part(size: int, gpus: int) -> int:
    """Return an equal share, rounded up."""
    return -(-size // gpus)
