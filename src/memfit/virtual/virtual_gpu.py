"""The virtual GPU: real PyTorch code on a card that has an allocator and no memory."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from memfit._package import FOLDER
from memfit.catalogue.cards import find_gpu
from memfit.errors import Unsupported
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

__all__ = ["Answers", "Card", "alloc_conf_of_environment", "one_thread", "virtual_gpu"]

_LOCK = threading.Lock()  # held while a card is open, as PyTorch has one `cuda` per process
_OPEN: list[tuple[ExitStack, int, str]] = []  # the open card: what closes it, the thread and the line that opened it


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

    Raises Unsupported while another card is open in the process, in whatever thread.
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
        _active(card),
        third_party.remembering_no_device(),
        third_party.reading_in_order(),
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
        stack.enter_context(_alone(stack, facts))
        for layer in layers:
            stack.enter_context(layer)
        yield card


@contextmanager
def _alone(stack: ExitStack, gpu: Gpu) -> Iterator[None]:
    """Hold the process's only card, which `stack` closes: at the latest at exit, before modules are torn down."""
    if not _LOCK.acquire(blocking=False):
        where = f", since {_OPEN[0][2]}" if _OPEN else ""
        raise Unsupported(
            f"a virtual GPU is open already in this process{where}; asked for another: {gpu.name}",
            hint="leave the first one's `with` block before, or open the second one in a process of its own",
        )
    _OPEN.append((stack, threading.get_ident(), _caller()))
    atexit.register(stack.close)
    try:
        yield
    finally:
        atexit.unregister(stack.close)
        _OPEN.clear()
        _LOCK.release()


def _caller() -> str:
    """Return the line outside of memfit that opens a card."""
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename.startswith(FOLDER) or "contextlib" in frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _after_fork() -> None:
    """Close in a forked child the card of a thread that the child does not have."""
    if _OPEN and _OPEN[0][1] != threading.get_ident():
        _OPEN[0][0].close()


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def one_thread() -> Iterator[None]:
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
