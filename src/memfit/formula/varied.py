"""A run whose micro-batches differ in length, replayed through the allocator: what fragmentation reserves on top.

Sequences of many lengths leave cached blocks of many sizes. A request that none of them can hold takes new memory from
the driver, so what is reserved grows over a run, often to twice the highest allocated level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from memfit.alloc_conf import LATEST_TORCH, Torch, parse_alloc_conf
from memfit.allocator import Allocator, Block
from memfit.footprint import Levels
from memfit.formula.account import Account
from memfit.formula.fold import Meter
from memfit.formula.program import Program, Segment
from memfit.formula.run import MicroStep
from memfit.formula.timeline import optimizer_step
from memfit.formula.unroll import Pass, Tape


@dataclass(slots=True)
class Player(Tape):
    """A tape that is played while it is written."""

    allocator: Allocator = field(default_factory=Allocator)
    blocks: dict[int, Block | None] = field(default_factory=dict)

    def alloc(self, size: int) -> int:
        """Allocate at once."""
        if size <= 0:
            return 0
        self.count += 1
        self.blocks[self.count] = self.allocator.malloc(size)
        return self.count

    def free(self, index: int) -> None:
        """Free at once."""
        if index:
            self.allocator.free(self.blocks.pop(index))


def levels_over(
    account: Account, lengths: Sequence[int], *, capacity: int | None = None, torch: Torch = LATEST_TORCH,
    empty_every: int = 0,
) -> Levels:  # fmt: skip
    """The highest levels of a run over micro-batches of these sequence lengths, in this order; device = reserved.

    capacity: bytes the driver can hand out; when they are used up the cache is given back, as on a card. empty_every:
    steps between two calls of empty_cache by the loop. Raises OutOfMemory where the card would.
    """
    allocator = Allocator(capacity, parse_alloc_conf(account.recipe.alloc_conf, torch), torch)
    player = Player(allocator=allocator)
    _load(player, account)
    passes = [thinned(account.micro(accumulating=later)) for later in (False, True)]
    dims, every = account.meter.dims, 1 if account.released else account.recipe.accumulation
    gradients: list[int] = []
    batch: list[int] = []
    for number, length in enumerate(lengths):
        fresh = [player.alloc(8 * dims.batch * length) for _ in range(3)]
        for old in batch:
            player.free(old)
        batch = fresh
        one = Pass(player, Meter(replace(dims, sequence=length)), passes[number % every > 0])
        one.run(account.workspace if number == 0 else 0)
        gradients += one.gradients
        if (number + 1) % every == 0:
            _step(player, account, first=number < every)
            for index in gradients:
                player.free(index)
            gradients = []
            if empty_every and (number + 1) // every % empty_every == 0:
                allocator.empty_cache()
    return Levels(allocator.requested_peak, allocator.allocated_peak, allocator.reserved_peak, allocator.reserved_peak)


WHOLE_BLOCKS = 3  # at each end of the model whose working tensors are replayed; all others would find the same cache


def thinned(micro: MicroStep) -> MicroStep:
    """The same pass, where blocks in the middle only make what they keep and free what they kept before."""
    thin: dict[int, Program] = {}
    last = len(micro.blocks) - WHOLE_BLOCKS
    blocks = [
        replace(p, program=thin.setdefault(id(p.program), _thin(p.program))) if WHOLE_BLOCKS <= p.index < last else p
        for p in micro.blocks
    ]
    return MicroStep(micro.embedding, tuple(blocks), micro.head)


def _thin(program: Program) -> Program:
    def kept(whole: Segment) -> Segment:
        brief = {e for e in whole.events if e > 0} & {-e for e in whole.events if e < 0}
        return Segment.of([e for e in whole.events if abs(e) not in brief], program.sizes, program.roles)

    forward, leave, out, backward = map(kept, (program.forward, program.leave, program.exit, program.backward))
    return replace(program, forward=forward, leave=leave, exit=out, backward=backward)


def _load(player: Player, account: Account) -> None:
    for item in account.static.stored:
        passing = player.alloc(item.passing)
        for size in item.stays:
            player.alloc(size)
        player.free(passing)
    if account.recipe.method == "qlora" and account.trainer.kbit_prepare:
        player.allocator.empty_cache()


def _step(player: Player, account: Account, *, first: bool) -> None:
    if first:
        for group in account.static.state_tensors:
            for size in group:
                player.alloc(size)
    optimizer_step(player, account.static.step_groups)
