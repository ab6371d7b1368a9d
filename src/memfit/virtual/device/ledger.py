"""The ledger of a virtual card passes every allocation and free to the exact allocator and records it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from memfit.allocator import Allocator, Block, OutOfMemory
from memfit.allocator.compact import EMPTY_CACHE, NOBODY, to_events, use
from memfit.nouns.tape import Alloc, Event, Free, Mark, Oom, Phase, RecordStream, Role, Tape

BASE = 0x7F00_0000_0000  # data_ptr() of a tensor at the allocator's address 0
ENGINE = "_engine_run_backward"  # the function of torch/autograd/graph.py on the stack of a backward pass
APART = 1 << 46  # bytes between the addresses of two devices

# what DDP, and transformers before it loads, allocate by size, whatever the module
BROADCAST, BUCKET, BUCKET_SIZES = "broadcast", "gradient bucket", "sizes of the gradient buckets"
WARM_UP = "warm-up of the allocator"
GATHERING, REDUCING, GATHERED = "all-gather buffer", "reduce-scatter buffer", "gathered parameters"
UNNAMED = "empty"  # an output made before the operator that fills it is known


@dataclass(slots=True)
class Ledger:
    """Everything a card's allocator did: `ops` and `streams` are those of `memfit.allocator.compact`.

    A process may use further devices like it. Each has an allocator; `ops` are those of all.

    Allocations are numbered from 0. labels, places: what made each allocation, and where. marks: (position in `ops`,
    phase, instant). number_at: address of a tensor's storage -> number of the live allocation there.
    """

    allocator: Allocator  # of the current device
    allocators: dict[int, Allocator] = field(default_factory=dict)  # of each device, the first one's first
    devices: dict[int, int] = field(default_factory=dict)  # number -> device, where it is not the first
    ops: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    place: Callable[[], str] = str  # where in the traced code an allocation happens
    layers: Callable[[], int] = lambda: 1  # returns how many modules like that one keep what they make for one backward
    stack: Callable[[], list[dict[str, object]]] | None = None  # returns the stack, while a script records history
    stacks: dict[int, list[dict[str, object]]] = field(default_factory=dict)  # number -> the recorded stack
    noted: Callable[[int], None] | None = None  # is called with the number of each request, where its line is recorded
    read: Callable[[list[int]], None] | None = None  # is called with the numbers of what each operator reads, likewise
    streams: dict[int, int] = field(default_factory=dict)
    marks: list[tuple[int, Phase, str]] = field(default_factory=list)
    number_at: dict[int, int] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)  # bytes of each block, negative in the large pool; 0: no block
    blocks: list[Block | None] = field(default_factory=list)
    stream: int = 0
    private: int = 0  # the private pool of a CUDA graph that is captured, as the number of a stream
    refused: set[int] = field(default_factory=set)  # numbers of the requests that could not be served

    @property
    def stream_in_use(self) -> int:
        """Return the number under which blocks are made: of the current stream, or of a capture's private pool."""
        return self.private or self.stream

    def use(self, device: int, fresh: Callable[[], Allocator]) -> None:
        """Make a device the current one; `fresh` returns an allocator for one that nothing was asked of yet."""
        if not self.blocks:  # what was named before the first allocation holds nothing
            self.allocators = {device: self.allocator}
            return
        if not self.allocators:
            self.allocators = {0: self.allocator}
        if device not in self.allocators:
            self.allocators[device] = fresh()
        self.allocator = self.allocators[device]

    def of(self, device: int) -> Allocator:
        """Return the allocator of a device; that of the only one, however it is named."""
        return self.allocators.get(device, self.allocator) if len(self.allocators) > 1 else self.allocator

    def owner(self, number: int) -> Allocator:
        """Return the allocator that served an allocation."""
        return self.allocators[self.device_of(number)] if self.devices else self.first

    @property
    def first(self) -> Allocator:
        """Return the allocator of the first device."""
        return next(iter(self.allocators.values()), self.allocator)

    def device_of(self, number: int) -> int:
        """Return the device of an allocation."""
        return self.devices.get(number, next(iter(self.allocators), 0))

    def part(self, tape: Tape, device: int) -> Tape:
        """Return what a tape of this ledger says of one device."""
        refused = iter(sorted(self.refused))

        def lies_there(event: Event) -> bool:
            if isinstance(event, Oom):
                return self.device_of(next(refused)) == device
            return not isinstance(event, Alloc | Free | RecordStream) or self.device_of(event.id) == device

        about = tape.about | {"device": str(device)}
        return replace(tape, events=tuple(filter(lies_there, tape.events)), about=about)

    def alloc(self, size: int, label: str) -> int:
        """Allocate `size` bytes on the current stream; return the number. Raises OutOfMemory where the card would."""
        number = self._request(size, label)
        try:
            block = self.blocks[number] = self.allocator.malloc(size, self.stream_in_use)
        except OutOfMemory:
            self._refuse(number)
            raise
        if block is not None:
            self.number_at[self.address(number)] = number
            self.sizes[number] = block.size if block.pool.small else -block.size
        return number

    def refuse(self, size: int, label: str) -> None:
        """Record a request that could not be served and did not come from PyTorch."""
        self._refuse(self._request(size, label))

    def _request(self, size: int, label: str) -> int:
        """Record a request and return its number; a failed one too, as a replay makes it again."""
        number = len(self.blocks)
        self.ops.append(size)
        self.labels.append(label)
        self.places.append(self.place())
        if self.stack:
            self.stacks[number] = self.stack()
        if self.noted:
            self.noted(number)
        self.blocks.append(None)
        self.sizes.append(0)
        if len(self.allocators) > 1 and self.allocator is not self.first:
            self.devices[number] = next(d for d, one in self.allocators.items() if one is self.allocator)
        if self.stream_in_use:
            self.streams[number] = self.stream_in_use
        return number

    def _refuse(self, number: int) -> None:
        self.ops.append(~number)
        self.refused.add(number)

    def free(self, number: int) -> None:
        """Free an allocation by its number."""
        block = self.blocks[number]
        self.ops.append(~number)
        if block is not None:
            self.number_at.pop(self.address(number), None)
            self.owner(number).free(block)
            self.blocks[number] = None

    def empty_cache(self) -> None:
        """Do and record torch.cuda.empty_cache()."""
        self.ops.append(EMPTY_CACHE)
        for allocator in self.allocators.values() or [self.allocator]:
            allocator.empty_cache()

    def record_stream(self, address: int, stream: int) -> None:
        """Record that the allocation at an address is used on `stream` too."""
        number = self.number_at.get(address)
        if number is not None and stream != self.streams.get(number, 0):
            self.ops.append(use(number, stream))
            self.streams[NOBODY] = 0
            self.owner(number).record_stream(self.blocks[number], stream)

    def address(self, number: int) -> int:
        """Return the address of a live allocation; 0 for one of no bytes."""
        block = self.blocks[number]
        if block is None:
            return 0
        return BASE + block.addr + (APART * (1 + self.devices[number]) if number in self.devices else 0)

    def size_at(self, address: int) -> int:
        """Return the requested bytes of the live allocation at an address; 0 if there is none."""
        number = self.number_at.get(address)
        block = None if number is None else self.blocks[number]
        return 0 if block is None else block.requested

    def describe(self, address: int, label: str) -> None:
        """Label the allocation at an address by its purpose, in place of the operator that made it."""
        number = self.number_at.get(address)
        if number is not None:
            self.labels[number] = label

    def rename(self, address: int, label: str) -> None:
        """Label an UNNAMED allocation at an address by the operator that turned out to fill it."""
        number = self.number_at.get(address)
        if number is not None and self.labels[number] == UNNAMED:
            self.labels[number] = label

    def events(self, named: Callable[[int], tuple[Role, str]]) -> Iterator[Event]:
        """Yield the events of a Tape; `named` gives the role and the label of an allocation by its number."""

        def allocation(number: int, size: int) -> Alloc | Oom:
            if number in self.refused:
                return Oom(size, label=f"{self.places[number]}: {self.labels[number]}")
            return Alloc(number, size, *named(number), self.streams.get(number, 0))

        marks = ((position, Mark(phase, instant)) for position, phase, instant in self.marks)
        return to_events(self.ops, allocation, marks)

    def mark(self, phase: Phase, instant: str) -> None:
        """Record that an instant begins now."""
        self.marks.append((len(self.ops), phase, instant))
