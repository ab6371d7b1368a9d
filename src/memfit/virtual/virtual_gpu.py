"""The virtual GPU: real PyTorch code on a card that has an allocator and no memory."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace

from memfit.catalogue.cards import find_gpu
from memfit.nouns.alloc_settings import VARIABLES
from memfit.nouns.gpu import Gpu
from memfit.units import parse_size
from memfit.virtual.device import api, dispatch, engine
from memfit.virtual.device import device_guard as guard
from memfit.virtual.device.card import Card
from memfit.virtual.device.unknown_values import Answers
from memfit.virtual.libraries import cuda_libraries as libraries
from memfit.virtual.libraries import deepspeed, inductor, liger, triton
from memfit.virtual.process import loading

__all__ = ["Answers", "Card", "told_by_environment", "virtual_gpu"]


def told_by_environment() -> str:
    """The allocator's settings that PyTorch would read now."""
    return next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")


@contextmanager
def virtual_gpu(
    gpu: str | Gpu,
    *,
    capacity: int | str | None = -1,
    alloc_conf: str | None = None,
    answers: Answers | None = None,
    world_size: int = 1,
    launched: bool = False,
) -> Iterator[Card]:
    """While the context is open, `cuda` is the named card: its memory, its capability, no data.

    capacity: bytes its driver can hand out, or "8GiB" (None: any number; default: the card's own). A card that is named has
    no more than that; of one that is given as a noun others hold the rest. world_size: cards of its kind that
    torch.distributed finds, of which this one is rank 0's. launched: there is a process group even of one, which
    DeepSpeed asks for. alloc_conf: as PYTORCH_ALLOC_CONF says it; default: what that says in this process.
    """
    guard.install()
    alloc_conf = told_by_environment() if alloc_conf is None else alloc_conf
    size = parse_size(capacity) if isinstance(capacity, str) else capacity
    noun = find_gpu(gpu) if isinstance(gpu, str) else gpu
    if isinstance(gpu, str) and size is not None and size >= 0:
        noun = replace(noun, total_bytes=size + noun.context_bytes)
    limit = noun.usable_bytes() if size == -1 else size
    card = Card(noun, limit, alloc_conf, answers)
    layers = (
        engine.ready(lambda: _active(Card(noun, None, ""))),
        _active(card),
        libraries.installed(),
        loading.placed(),
        triton.launches_nothing(),
        liger.undone(),
        inductor.planned(card),
        deepspeed.hosted(),
        _world(world_size) if launched or world_size > 1 else nullcontext(),
    )
    with ExitStack() as stack:
        atexit.register(stack.close)  # a card that nobody closes is closed while there are modules
        stack.callback(atexit.unregister, stack.close)
        for layer in layers:
            stack.enter_context(layer)
        yield card


@contextmanager
def _active(card: Card) -> Iterator[None]:
    """`cuda` is this card."""
    with api.answered(card):
        dispatch.activate(card)
        try:
            yield
        finally:
            dispatch.deactivate(card)


def _world(size: int) -> AbstractContextManager[None]:
    from memfit.virtual.ranks.world import world  # torch.distributed takes its time

    return world(size)
