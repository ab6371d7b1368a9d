"""The virtual GPU: real PyTorch code on a card that has an allocator and no memory."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from memfit.catalogue.cards import find_gpu
from memfit.nouns.alloc_settings import alloc_conf_in
from memfit.nouns.gpu import Gpu
from memfit.units import parse_size
from memfit.virtual.device import api, device_guard, dispatch
from memfit.virtual.device.card import Card
from memfit.virtual.device.values import Answers
from memfit.virtual.libraries import inductor, third_party, triton
from memfit.virtual.patching import patched
from memfit.virtual.process import files
from memfit.virtual.ranks.peers import Peers
from memfit.virtual.ranks.place import PER_NODE, Place

__all__ = ["Answers", "Card", "alloc_conf_of_environment", "virtual_gpu"]


def alloc_conf_of_environment() -> str:
    """Return the allocator settings that PyTorch would read from the environment now."""
    return alloc_conf_in(os.environ)


@contextmanager
def virtual_gpu(
    gpu: str | Gpu,
    *,
    capacity: int | str | None = -1,
    alloc_conf: str | None = None,
    answers: Answers | None = None,
    world_size: int = 1,
    launched: bool = False,
    place: Place | None = None,
    peers: Peers | None = None,
    cards: int = 1,
    nccl: int = 0,
) -> Iterator[Card]:
    """Make `cuda` the named card for the length of the block: its memory, its compute capability, no data.

    capacity: bytes its driver can hand out, or "8GiB" (None: any number; default: the card's own). For a card given by
    name this also sets its total memory; for a Gpu, other processes hold the rest. alloc_conf: a value of
    PYTORCH_ALLOC_CONF; default: the one of this process. world_size: ranks of torch.distributed, each with such a card;
    this one is rank 0's, and its process group is there. launched: open a process group even for one rank, which
    DeepSpeed needs. place: run as this rank instead, whose script makes the group. peers: its way to other ranks that
    are traced at the same time. cards: how many a process without a place sees. nccl: bytes of `capacity` that NCCL
    takes with the first collective.
    """
    device_guard.install()
    alloc_conf = alloc_conf_of_environment() if alloc_conf is None else alloc_conf
    size = parse_size(capacity) if isinstance(capacity, str) else capacity
    facts = find_gpu(gpu) if isinstance(gpu, str) else gpu
    if isinstance(gpu, str) and size is not None and size >= 0:
        facts = replace(facts, total_bytes=size + facts.context_bytes)
    limit = facts.usable_bytes() if size == -1 else size
    count = place.local_size if place else max(cards, min(world_size, PER_NODE))
    card = Card(facts, limit, alloc_conf, answers, count, nccl)
    layers = (
        _one_thread(),
        device_guard.backward_ready(lambda: _active(Card(facts, None, ""))),
        _active(card),
        third_party.bitsandbytes_on_card(),
        files.load_to_card(),
        triton.launches_nothing(),
        third_party.liger_undone(),
        inductor.compiling(card),
        third_party.deepspeed_on_card(),
        _world(place, peers, started=False)
        if place
        else _world(Place(0, world_size))
        if launched or world_size > 1
        else _no_world(),
    )
    with ExitStack() as stack:
        atexit.register(stack.close)  # closes a forgotten card before modules are torn down
        stack.callback(atexit.unregister, stack.close)
        for layer in layers:
            stack.enter_context(layer)
        yield card


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let one thread compute known values: several that wait for each other on a busy machine take 20 times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _active(card: Card) -> Iterator[None]:
    """Make `cuda` this card."""
    with api.torch_cuda_of(card):
        dispatch.activate(card)
        try:
            yield
        finally:
            dispatch.deactivate(card)


def _world(place: Place, peers: Peers | None = None, started: bool = True) -> AbstractContextManager[object]:
    from memfit.virtual.ranks.world import world  # torch.distributed.tensor is slow to import

    return world(place, peers, started)


def _number_of_process(name: str, words: dict[str, Any]) -> int:
    """Return the rank or the size of the world as init_process_group gets it: an argument, else from a variable."""
    given = words.get(name)
    if given in (None, -1):
        given = os.environ.get(name.upper())
    if given is None:
        raise ValueError(
            "Error initializing torch.distributed using env:// rendezvous: "
            f"environment variable {name.upper()} expected, but not set"
        )
    return int(given)


@contextmanager
def _no_world() -> Iterator[None]:
    """Open a world only when a process that no launcher started makes a process group."""
    from torch import distributed

    with ExitStack() as stack:

        def init(*args: Any, **words: Any) -> None:
            if not distributed.is_initialized():
                rank, size = (_number_of_process(name, words) for name in ("rank", "world_size"))
                stack.enter_context(_world(Place(rank, max(size, rank + 1)), started=False))
                distributed.init_process_group(*args, **words)

        with patched(distributed, {"init_process_group": init}):
            yield
