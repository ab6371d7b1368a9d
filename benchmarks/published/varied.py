"""A run whose micro-batches differ in length, replayed through the allocator: what fragmentation reserves on top.

Sequences of many lengths leave cached blocks of many sizes. A request that none of them can hold takes new memory from
the driver, so what is reserved grows over a run, often to twice the highest allocated level.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Any

from memfit.allocator import Allocator, OutOfMemory
from memfit.allocator.blocks import K_SMALL_SIZE
from memfit.closed_form.layers.program import Program, ProgramPart
from memfit.closed_form.run.account import Account
from memfit.closed_form.run.micro_step import MicroStep, SizeMeter
from memfit.closed_form.run.timeline import load, optimizer_step
from memfit.closed_form.run.unroll import Pass, free_all
from memfit.nouns.alloc_settings import LATEST_TORCH, Torch, parse_alloc_conf
from memfit.nouns.footprint import Levels


class VariedRun:
    """Runs of one recipe over micro-batches of many lengths."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.every = 1 if account.released else account.recipe.accumulation
        self.passes = [thinned(account.micro(accumulating=later)) for later in (False, True)]
        self._meters: dict[int, SizeMeter] = {}

    def levels(self, lengths: Sequence[int], *, capacity: int | None = None, torch: Torch = LATEST_TORCH) -> Levels:
        """Return the highest levels of a run over micro-batches of these lengths, in this order; device = reserved.

        capacity: bytes the driver can hand out; when they are used up the cache is given back, as on a card. Raises
        OutOfMemory where the card would.
        """
        return self._play(lengths, range(len(lengths)), capacity, torch)

    def reserved(self, lengths: Sequence[int], *, capacity: int, torch: Torch = LATEST_TORCH) -> int:
        """Return the bytes reserved by such a run; `capacity` where the card is full to the last block."""
        unlimited = self._play(lengths, self.growing(lengths), None, torch).reserved
        if unlimited <= capacity:
            return unlimited
        try:
            return self.levels(lengths, capacity=capacity, torch=torch).reserved
        except OutOfMemory:
            return capacity

    def growing(self, lengths: Sequence[int]) -> Sequence[int]:
        """Return the indices of the micro-batches that can add to what is reserved.

        Once the states exist and gradients have come and gone, a micro-batch finds the blocks that a longer one left,
        unless it is nearly as long, or more of its tensors are so small that they come from the small pool. Gradients
        of a full fine-tune lie elsewhere in every step, so all its micro-batches are played.
        """
        if self.account.recipe.method == "full":
            return range(len(lengths))
        found: list[int] = []
        longest, limits = defaultdict[int, int](int), self.limits
        for number, length in enumerate(lengths):
            small = bisect_right(limits, length)
            if number < SETTLING * self.every or length >= NEAR * longest[small]:
                found += [number - number % self.every, number]  # the step's first one makes the gradients
            longest[small] = max(longest[small], length)
        return sorted(set(found))

    @cached_property
    def limits(self) -> list[int]:
        """Return the lengths, in order, up to which tensors of a micro-batch come from the small pool."""
        longest = range(self.account.recipe.sequence_length)
        meters = {length: SizeMeter(replace(self.account.meter.dims, sequence=length)) for length in longest}
        programs = {part.program for micro in self.passes for part in (micro.embedding, *micro.blocks, micro.head)}
        sizes = [size for program in programs for size in program.sizes.values()]
        return sorted({bisect_right(longest, K_SMALL_SIZE, key=lambda n: meters[n].bytes(size)) for size in sizes})

    def _play(self, lengths: Sequence[int], played: Sequence[int], capacity: int | None, torch: Torch) -> Levels:
        account, every = self.account, self.every
        allocator = Allocator(capacity, parse_alloc_conf(account.recipe.alloc_conf, torch), torch)
        load(account.static.stored, allocator)
        if account.recipe.method == "qlora" and account.trainer.kbit_prepare:
            allocator.empty_cache()
        batch: list[Any] = []
        for step, numbers in groupby(played, key=lambda number: number // every):
            gradients: list[Any] = []
            for number in numbers:
                length = lengths[number]
                fresh = [allocator.malloc(8 * account.meter.dims.batch * length) for _ in range(3)]
                free_all(allocator, batch)
                batch = fresh
                if length not in self._meters:
                    self._meters[length] = SizeMeter(replace(account.meter.dims, sequence=length))
                one = Pass(allocator, self._meters[length], self.passes[number % every > 0])
                one.run(account.workspace if number == 0 else 0)
                gradients += one.gradients
            if (step + 1) * every <= len(lengths):
                _step(allocator, account, first=step == 0)
                free_all(allocator, gradients)
        reserved = allocator.reserved_peak
        return Levels(allocator.requested_peak, allocator.allocated_peak, reserved, reserved)


SETTLING = 2  # optimizer steps of a LoRA run that are played whole
NEAR = 0.98  # of the longest before it: a micro-batch of this length may add to what is reserved
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


def _step(allocator: Allocator, account: Account, *, first: bool) -> None:
    if first:
        for group in account.static.state_tensors:
            for size in group:
                allocator.malloc(size)
    optimizer_step(account.static.step_groups, allocator)
