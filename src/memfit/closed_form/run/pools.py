"""Reserved bytes of a DeepSpeed run: the default stream's allocations played, the pools of other streams added to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memfit.allocator import Allocator, PlainAllocator, QuickAllocator
from memfit.closed_form.parallel.share import Share
from memfit.closed_form.run.account import Account
from memfit.closed_form.run.unroll import Heap, Pass
from memfit.nouns.tape import Phase


def reserved(account: Account, allocator: Allocator | QuickAllocator) -> Iterator[tuple[Phase, int]]:
    """Reserved bytes after the first step, a later one and an evaluation, on a fresh allocator."""
    share = account.share
    for size in _lasting(account):
        allocator.malloc(size)
    pools = _Pools()
    for phase in ("first_step", "step"):
        _step(account, allocator, states=phase == "first_step")
        pools.play(share.first or share if phase == "first_step" else share)
        yield phase, allocator.reserved_peak + pools.reserved
    Pass(allocator, account.meter, account.micro(train=False)).run(0)
    pools.play(share.evaluated or share)
    yield "eval", allocator.reserved_peak + pools.reserved


class _Pools:
    """What streams beside the default one cache: gathered weights on one, reduced gradients on another."""

    def __init__(self) -> None:
        self.gathering, self.reducing = PlainAllocator(), PlainAllocator()
        self.beside = 0  # what stays, and what no bucket holds

    @property
    def reserved(self) -> int:
        return self.gathering.reserved_peak + self.reducing.reserved_peak + self.beside

    def play(self, share: Share) -> None:
        """One pass."""
        streams = share.streams
        if streams is None:
            return
        live: dict[int, int] = {}
        born = 0
        for event in streams.events:
            if event > 0:
                born += 1
                live[born] = self.gathering.malloc(event)
            else:
                self.gathering.free(live.pop(-event))
        for block in live.values():
            self.gathering.free(block)
        for size in streams.reduced:
            self.reducing.free(self.reducing.malloc(size))
        self.beside = max(self.beside, streams.reducing - max(streams.reduced, default=0))


def _lasting(account: Account) -> list[int]:
    """What is there from loading on, as DeepSpeed flattens it."""
    share = account.share
    gradients = share.gradients if share.lasting_gradients else 0
    return [share.weights, share.master, gradients, share.buckets, account.static.buffers]


def _step(account: Account, memory: Heap, *, states: bool) -> None:
    """The passes of one step, then the step itself, which makes the optimizer's states the first time."""
    gradients: list[Any] = []
    for number in range(1 if account.released else min(account.recipe.accumulation, 2)):
        batch = [memory.malloc(8 * account.recipe.tokens) for _ in range(3)]
        one = Pass(memory, account.meter, account.micro(accumulating=bool(number)), late=account.share.late)
        one.run(account.workspace if states and number == 0 else 0)
        gradients += one.gradients
        for block in batch:
            memory.free(block)
    for group in account.share.step_tensors:
        held = [memory.malloc(size) for size in group]
        if states and group is account.share.step_tensors[-1]:
            for _ in range(2):
                memory.malloc(account.share.states // 2)
        for block in held:
            memory.free(block)
    for gradient in gradients:
        memory.free(gradient)
