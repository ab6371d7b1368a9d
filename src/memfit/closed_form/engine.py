"""A miniature autograd over sizes: tensors without data, whose storages are allocated and freed as in PyTorch.

Lifetimes follow CPython's reference counts, exactly as in eager PyTorch: a storage is freed when the last local
variable, saved tensor or gradient buffer drops it. Rules taken from torch/csrc/autograd/engine.cpp:
- nodes run in the reverse order of their creation; a node's saved tensors are released when it has run;
- the incoming gradient lives while its node runs;
- two gradients for one tensor are added in place when the first is owned by the buffer alone, else into a new one;
- a leaf's first gradient is kept as it is; a later one is added to it in place and freed (gradient accumulation).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from memfit.closed_form.size import Basis, Size, Units, scaled, tokens_of_the_text
from memfit.nouns.tape import Role

Elements = Size  # a number of elements, as a polynomial


class Storage:
    """Bytes on the card. Deleting the object records the free."""

    __slots__ = ("id", "rec")

    def __init__(self, rec: GraphRecorder, id: int) -> None:
        self.rec, self.id = rec, id

    def __del__(self) -> None:
        self.rec.events.append(-self.id)


class Tensor:
    """Elements of `itemsize` bytes in a storage; None for a parameter or constant that is counted elsewhere."""

    __slots__ = (
        "elements", "expanded", "grad_fn", "heads_first", "itemsize", "parameter", "requires_grad", "slot", "storage",
        "viewed",
    )  # fmt: skip

    def __init__(
        self, storage: Storage | None, elements: Elements, itemsize: int, requires_grad: bool = False,
        grad_fn: Node | None = None, parameter: str | None = None, slot: int = 0, heads_first: bool = False,
    ) -> None:  # fmt: skip
        self.storage, self.elements, self.itemsize = storage, elements, itemsize
        self.requires_grad, self.grad_fn, self.parameter, self.slot = requires_grad, grad_fn, parameter, slot
        self.heads_first = heads_first  # memory layout [B, N, S, H]; else [B, S, N, H], as a linear layer writes it
        self.expanded = False  # an expand() of one head
        self.viewed = False  # a gradient that came through a view: the engine adds to it out of place

    def view(self, elements: Elements | None = None) -> Tensor:
        """Return the same storage seen with another shape (or a part of it)."""
        return Tensor(
            self.storage, self.elements if elements is None else elements, self.itemsize, self.requires_grad,
            self.grad_fn, self.parameter, self.slot, self.heads_first,
        )  # fmt: skip

    def blueprint(self) -> Tensor:
        """Return the same shape, dtype and layout without storage, which a backward function may keep."""
        return Tensor(None, self.elements, self.itemsize, heads_first=self.heads_first)

    def detach(self) -> Tensor:
        """Return the same storage outside the graph."""
        return Tensor(self.storage, self.elements, self.itemsize, heads_first=self.heads_first)


# gradient of the output (of every output, for a node with several) -> gradient of every input
Backward = Callable[[Any], Sequence[Tensor | None]]


class Node:
    """A backward function, the tensors it saves until it runs, and the nodes its gradients go to."""

    __slots__ = ("apply", "edges", "outputs", "saved", "units", "unpacks")

    def __init__(
        self, inputs: Sequence[Tensor | None], saved: list[Tensor], apply: Backward, units: tuple[Units, Units],
        outputs: int = 1,
    ) -> None:  # fmt: skip
        self.apply, self.saved, self.units, self.outputs = apply, saved, units, outputs
        self.unpacks = bool(saved)  # unpacking saved tensors starts the recomputation of a checkpointed block
        # (next node, parameter or "input", output number); an edge does not keep the forward tensor alive
        self.edges: list[tuple[Node | str, int] | None] = [
            None if t is None or not t.requires_grad else (t.grad_fn or t.parameter or "input", t.slot) for t in inputs
        ]


Buffers = dict[Node, list[Tensor | None]]


class GraphRecorder:
    """Records a program's events while model code runs on it.

    An event is the id of a storage that is allocated, the negative id of one that is freed, or 0 for a product of
    cuBLAS. Sizes are polynomials (`sizes`), so the events serve every batch size; `run.unroll` replays them.
    """

    def __init__(self, autocast: int = 0, grad: bool = True, *, half: bool = False) -> None:
        self.events: list[int] = []
        self.sizes: dict[int, dict[Basis, int]] = {}
        self.roles: dict[int, Role] = {}
        self.labels: dict[int, str] = {}
        self.nodes: list[Node] = []
        self.forgotten: list[Node] = []  # nodes of the first forward of a checkpointed region
        self.scopes = [""]  # prefixes of labels, the innermost last
        self.autocast, self.grad = autocast, grad  # autocast: itemsize of the compute dtype, 0 when off
        self.half = half  # 16-bit numbers are fp16
        # what the bases of elements count, and those of a kernel's scratch memory; a node's backward keeps both
        self.units: Units = tokens_of_the_text
        self.scratch: Units = tokens_of_the_text
        self.cache: dict[str, Tensor] = {}  # autocast's weight cache
        self.until_exit: list[Tensor] = []  # tensors that the model's output holds until the forward returns
        self.gradients: dict[str, Tensor] = {}
        self.kept: Tensor | None = None  # sharded gradients, which outlive the program
        # gradients of tensors that other programs made, by their name in Tensor.parameter: the block's input and others
        self.inputs: dict[str, list[Tensor | None]] = {"input": [None]}
        self.decodes = False  # the tokens are those of the target; see Dims.decoder
        self.shared: dict[str, Tensor] = {}  # tensors that all blocks of a stack use
        self.sums: dict[str, Tensor] = {}  # their gradients, as far as the blocks behind this one have added to them
        self.seeds: dict[Node, str] = {}  # node -> name of the shared tensor it made
        self.accumulating = False  # a gradient exists already
        self.awaited = ""  # parameter whose first gradient is kept until a second one arrives
        self.waiting: dict[str, Tensor] = {}  # gradients of parameters from another program, to which these are added
        self.release_gradients = False  # optimizer in backward: gradients are freed at once
        self.keep = True  # False inside the first forward of a checkpointed region: saved tensors are dropped
        self.recomputed = False  # saved tensors come from a recomputation and are freed when their function returns
        self.running: Node | None = None
        self.saves = 0  # number of tensors saved so far
        # storages held by a plain attribute of a node or a variable of the training loop: they outlive the backward
        self.lingering: set[int] = set()
        self.returned = 0  # number of events before the model returns; 0: the whole forward
        self.attributes: list[Tensor] = []  # tensors held by attributes of nodes, which checkpointing does not free
        self.stop_at: int | None = None  # number of saved tensors at which a recomputation stops (early stop)
        self.silent = False  # after that stop: operations record their nodes, but allocate nothing

    def enter(self, name: str) -> None:
        """Label tensors allocated from here to `leave` as part of `name`."""
        self.scopes.append(f"{self.scopes[-1]}{name}.")

    def leave(self) -> None:
        """End the innermost `enter`."""
        self.scopes.pop()

    def new(
        self, elements: Elements, itemsize: int, label: str, role: Role = "temporaries", heads_first: bool = False
    ) -> Tensor:
        """Return a fresh tensor of `elements` times `itemsize` bytes."""
        return self._allocated(elements, itemsize, label, role, self.units, heads_first=heads_first)

    def within_a_call(self, elements: Elements, itemsize: int, label: str) -> Tensor:
        """Return scratch memory of one call of a kernel, of which there may be several for all tokens."""
        return self._allocated(elements, itemsize, label, "temporaries", self.scratch)

    def _allocated(
        self, elements: Elements, itemsize: int, label: str, role: Role, units: Units, *, heads_first: bool = False
    ) -> Tensor:
        if self.silent:
            return Tensor(None, elements, itemsize, heads_first=heads_first)
        id = len(self.sizes) + 1
        self.sizes[id] = scaled(units(elements), itemsize)
        self.roles[id] = role
        self.labels[id] = self.scopes[-1] + label
        self.events.append(id)
        return Tensor(Storage(self, id), elements, itemsize, heads_first=heads_first)

    def product(self, elements: Elements, itemsize: int, label: str, heads_first: bool = False) -> Tensor:
        """Return a fresh tensor that cuBLAS writes."""
        out = self.new(elements, itemsize, label, heads_first=heads_first)
        self.multiplies()
        return out

    def multiplies(self) -> None:
        """Record a product of cuBLAS; the first one of a thread allocates its workspace."""
        if not self.silent:
            self.events.append(0)

    def like(self, x: Tensor, label: str, itemsize: int = 0) -> Tensor:
        """Return a fresh tensor with the shape and layout of `x`, and its dtype unless `itemsize` is given."""
        return self.new(x.elements, itemsize or x.itemsize, label, heads_first=x.heads_first)

    def buffer(self, size: Size, label: str) -> Tensor:
        """Return a kernel's own buffer of `size` bytes."""
        return self.new(size, 1, label)

    def record(
        self, out: Tensor, inputs: Sequence[Tensor | None], saved: Sequence[Tensor | None], apply: Backward
    ) -> Tensor:
        """Attach the backward node that PyTorch would attach to `out`."""
        self.record_all([out], inputs, saved, apply)
        return out

    def record_all(
        self, outs: list[Tensor], inputs: Sequence[Tensor | None], saved: Sequence[Tensor | None], apply: Backward
    ) -> None:
        """Attach a node to several outputs; `apply` gets a list when there is more than one."""
        if not self.grad or not any(t is not None and t.requires_grad for t in inputs):
            return
        kept = [t.detach() for t in reversed(saved) if t is not None]  # a list drops its last member first
        self.saves += len(kept)
        if self.keep:
            for t in kept:
                if t.storage is not None and self.roles[t.storage.id] == "temporaries":
                    self.roles[t.storage.id] = "activations"
        node = Node(inputs, kept, apply, (self.units, self.scratch), len(outs))
        if not self.keep:
            node.saved = []
        (self.nodes if self.keep else self.forgotten).append(node)
        for slot, out in enumerate(outs):
            out.requires_grad, out.grad_fn, out.slot = True, node, slot
        if self.stop_at is not None and self.saves >= self.stop_at:
            self.silent = True

    def hold(self, x: Tensor) -> None:
        """Keep `x` as a plain attribute of the node that is recorded next, until the graph is freed."""
        if x.storage is not None:
            self.roles[x.storage.id] = "activations"
            self.attributes.append(x.detach())

    def before_saving(self, *saved: Tensor | None) -> None:
        """Stop a recomputation whose last saved tensors are these inputs, which are saved before the kernel runs."""
        count = sum(t is not None for t in saved)
        if self.grad and count and self.stop_at is not None and self.saves + count >= self.stop_at:
            self.silent = True

    def taken(self) -> list[int]:
        """Return the events so far, and start a new list."""
        events, self.events = self.events, []
        return events

    def exit_autocast(self) -> None:
        """End the forward: empty autocast's weight cache and free a key/value cache."""
        self.cache.clear()
        self.until_exit.clear()

    def backward(self, root: Tensor, gradient: list[Tensor]) -> Tensor | None:
        """Run all nodes from `root`, whose gradient is popped off `gradient`; return the gradient of "input"."""
        buffers = self._seeded()
        if root.grad_fn is not None:
            buffers[root.grad_fn] = [gradient.pop()]
        del root
        self._run(self.nodes, buffers)
        received, self.inputs["input"] = self.inputs["input"], [None]
        return received[0]

    def run_ahead(self, root: Tensor, gradient: list[Tensor]) -> tuple[int, dict[int, list[Tensor | None]]]:
        """Run the nodes behind a checkpointed region's last saved tensor, before the region is computed again.

        Return how many of the region's nodes are left, and the gradients that have arrived for some of them.
        """
        buffers: Buffers = {}
        if root.grad_fn is not None:
            buffers[root.grad_fn] = [gradient.pop()]
        del root
        self._run(self.forgotten, buffers, ahead=True)
        waiting = {i: buffers.pop(node) for i, node in enumerate(self.forgotten) if node in buffers}
        left, self.forgotten = len(self.forgotten), []
        return left, waiting

    def resume(self, left: int, waiting: dict[int, list[Tensor | None]]) -> Tensor | None:
        """Run the rest of the backward, through the nodes of the recomputation."""
        del self.nodes[left:]
        buffers = self._seeded() | {self.nodes[i]: waiting.pop(i) for i in list(waiting)}
        self._run(self.nodes, buffers)
        received, self.inputs["input"] = self.inputs["input"], [None]
        return received[0]

    def _seeded(self) -> Buffers:
        """Return the gradients that other programs have computed for tensors of this one."""
        for name in self.sums.keys() & self.inputs.keys():
            self.inputs[name] = [self.sums.pop(name)]
        alive = set(self.nodes)
        return {node: [self.sums.pop(name)] for node, name in self.seeds.items() if node in alive and name in self.sums}

    def _run(self, nodes: list[Node], buffers: Buffers, *, ahead: bool = False) -> None:
        """Run nodes from last to first; with `ahead` stop before the first that unpacks a saved tensor."""
        units, scratch = self.units, self.scratch
        while nodes and not (ahead and nodes[-1] in buffers and nodes[-1].unpacks):
            node = nodes.pop()
            incoming = buffers.pop(node, None)
            if incoming is None:
                node.saved = []
                continue
            edges, self.running, (self.units, self.scratch) = node.edges, node, node.units
            results = list(node.apply(incoming[0] if node.outputs == 1 else incoming))
            del incoming
            node.saved, self.running = [], None
            for edge in edges:
                result = results.pop(0)
                if edge is not None and result is not None:
                    self._deliver(buffers, edge, result)
                del result
        self.units, self.scratch = units, scratch

    def returned_from_function(self) -> None:
        """Release saved tensors when a function has computed its gradients and only reshapes or casts them."""
        if self.recomputed and self.running is not None:
            self.running.saved = []

    def _deliver(self, buffers: Buffers, edge: tuple[Node | str, int], result: Tensor) -> None:
        node, slot = edge
        if isinstance(node, str) and node not in self.inputs:
            self._accumulate(node, result)
            return
        held = self.inputs[node] if isinstance(node, str) else buffers.setdefault(node, [None] * node.outputs)
        old, held[slot] = held[slot], None
        if old is None:
            held[slot] = result
        elif not old.viewed and _references(old) <= _ALONE:
            held[slot] = old  # added in place
        else:
            held[slot] = self.like(old, "gradient sum")

    def _accumulate(self, parameter: str, gradient: Tensor) -> None:
        if (other := self.waiting.pop(parameter, None)) is not None:  # the engine adds the two before it hands them on
            gradient = self.like(other, "gradient sum") if gradient.viewed else other
            del other
        added = self.accumulating and parameter != self.awaited
        if self.release_gradients or added or parameter in self.gradients or gradient.storage is None:
            return
        self.roles[gradient.storage.id] = "gradients"
        self.labels[gradient.storage.id] = f"{parameter} gradient"
        self.gradients[parameter] = gradient


def _references(t: Tensor) -> int:
    """Return the number of references to a tensor and to its storage, which views share."""
    return sys.getrefcount(t) + (0 if t.storage is None else sys.getrefcount(t.storage))


def _references_to_local() -> int:
    """Return `_references` of a tensor that one local variable holds; Python versions count differently."""
    t = Tensor(Storage(GraphRecorder(), 0), {}, 1)
    return _references(t)


_ALONE = _references_to_local()
