"""A run whose micro-batches differ in length, replayed through the allocator: what fragmentation reserves on top.

Sequences of many lengths leave cached blocks of many sizes. A request that none of them can hold takes new memory from
the driver, so what is reserved grows over a run, often to twice the highest allocated level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from memfit.allocator import Allocator, OutOfMemory, PlainAllocator
from memfit.closed_form.layers.program import Program, ProgramPart
from memfit.closed_form.run.account import Account
from memfit.closed_form.run.micro_step import MicroStep, SizeMeter
from memfit.closed_form.run.timeline import load, optimizer_step
from memfit.closed_form.run.unroll import Pass
from memfit.nouns.alloc_settings import LATEST_TORCH, AllocSettings, Torch, parse_alloc_conf
from memfit.nouns.footprint import Levels

Cache = Allocator | PlainAllocator


def levels_over(
    account: Account, lengths: Sequence[int], *, capacity: int | None = None, torch: Torch = LATEST_TORCH,
    empty_every: int = 0,
) -> Levels:  # fmt: skip
    """Return the highest levels of a run over micro-batches of these lengths, in this order; device = reserved.

    capacity: bytes the driver can hand out; when they are used up the cache is given back, as on a card. empty_every:
    steps between two calls of empty_cache by the loop. Raises OutOfMemory where the card would.
    """
    allocator = Allocator(capacity, parse_alloc_conf(account.recipe.alloc_conf, torch), torch)
    _play(account, lengths, allocator, empty_every)
    return Levels(allocator.requested_peak, allocator.allocated_peak, allocator.reserved_peak, allocator.reserved_peak)


def reserved_over(account: Account, lengths: Sequence[int], *, capacity: int, torch: Torch = LATEST_TORCH) -> int:
    """Return the bytes reserved by such a run; `capacity` where the card is full to the last block.

    While the card has room the quick allocator is played, which takes less time. It breaks ties as torch 2.13 does,
    whatever `torch` is: of the published runs no order that was tried reserves a byte more or less for that.
    """
    if parse_alloc_conf(account.recipe.alloc_conf, torch) == AllocSettings():
        plain = PlainAllocator()
        _play(account, lengths, plain)
        if plain.reserved_peak <= capacity:
            return plain.reserved_peak
    try:
        return levels_over(account, lengths, capacity=capacity, torch=torch).reserved
    except OutOfMemory:
        return capacity


def _play(account: Account, lengths: Sequence[int], allocator: Cache, empty_every: int = 0) -> None:
    load(account.static.stored, allocator)
    if account.recipe.method == "qlora" and account.trainer.kbit_prepare:
        allocator.empty_cache()
    passes = [thinned(account.micro(accumulating=later)) for later in (False, True)]
    dims, every = account.meter.dims, 1 if account.released else account.recipe.accumulation
    gradients: list[Any] = []
    batch: list[Any] = []
    for number, length in enumerate(lengths):
        fresh = [allocator.malloc(8 * dims.batch * length) for _ in range(3)]
        for old in batch:
            allocator.free(old)
        batch = fresh
        one = Pass(allocator, SizeMeter(replace(dims, sequence=length)), passes[number % every > 0])
        one.run(account.workspace if number == 0 else 0)
        gradients += one.gradients
        if (number + 1) % every == 0:
            _step(allocator, account, first=number < every)
            for gradient in gradients:
                allocator.free(gradient)
            gradients = []
            if empty_every and (number + 1) // every % empty_every == 0:
                allocator.empty_cache()


WHOLE_BLOCKS = 1  # at the end of the model whose working tensors are replayed; all others would find the same cache


def thinned(micro: MicroStep) -> MicroStep:
    """Return the pass in which blocks before the last only make what they keep and free what they kept before."""
    thin: dict[int, Program] = {}
    last = len(micro.blocks) - WHOLE_BLOCKS
    blocks = [
        p if p.index >= last else replace(p, program=thin.setdefault(id(p.program), _thin(p.program)))
        for p in micro.blocks
    ]
    return MicroStep(micro.embedding, tuple(blocks), micro.head)


def _thin(program: Program) -> Program:
    def kept(whole: ProgramPart) -> ProgramPart:
        brief = {e for e in whole.events if e > 0} & {-e for e in whole.events if e < 0}
        return ProgramPart.of([e for e in whole.marked if abs(e) not in brief], program.sizes, program.roles)

    forward, leave, out, backward = map(kept, (program.forward, program.leave, program.exit, program.backward))
    return replace(program, forward=forward, leave=leave, exit=out, backward=backward)


def _step(allocator: Cache, account: Account, *, first: bool) -> None:
    if first:
        for group in account.static.state_tensors:
            for size in group:
                allocator.malloc(size)
    optimizer_step(account.static.step_groups, allocator)
