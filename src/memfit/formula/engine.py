"""A small autograd over sizes: tensors without data whose storages are born and die as PyTorch's would.

Lifetimes follow CPython's reference counts, exactly as in eager PyTorch: a storage dies when the last local variable,
saved tensor or gradient buffer lets go of it. Rules kept from torch/csrc/autograd/engine.cpp:
- nodes run in the reverse order of their creation; a node's saved tensors are released when it has run;
- the incoming gradient lives while its node runs;
- two gradients for one tensor are added in place when the first is owned by the buffer alone, else into a new one;
- a leaf's first gradient is kept as it is; a later one is added in place and dies (gradient accumulation).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from memfit.formula.size import Basis, Size, scaled
from memfit.tape import Role

Elements = Size  # a number of elements, as a polynomial


class Storage:
    """Bytes on the card; tells its recorder when it dies."""

    __slots__ = ("id", "rec")

    def __init__(self, rec: Recorder, id: int) -> None:
        self.rec, self.id = rec, id

    def __del__(self) -> None:
        self.rec.events.append(-self.id)


class Tensor:
    """Elements of some width in a storage (None: a parameter or constant counted elsewhere)."""

    __slots__ = ("elements", "grad_fn", "itemsize", "parameter", "requires_grad", "storage", "viewed")

    def __init__(
        self, storage: Storage | None, elements: Elements, itemsize: int, requires_grad: bool = False,
        grad_fn: Node | None = None, parameter: str | None = None,
    ) -> None:  # fmt: skip
        self.storage, self.elements, self.itemsize = storage, elements, itemsize
        self.requires_grad, self.grad_fn, self.parameter = requires_grad, grad_fn, parameter
        self.viewed = False  # a gradient that came through a reshape: the engine adds to it out of place

    def view(self, elements: Elements | None = None) -> Tensor:
        """The same storage seen with another shape (or a part of it)."""
        same = self.elements if elements is None else elements
        return Tensor(self.storage, same, self.itemsize, self.requires_grad, self.grad_fn, self.parameter)


Backward = Callable[[Tensor, list[Tensor]], Sequence[Tensor | None]]


class Node:
    """A backward function: where its gradients go and what it keeps until it runs."""

    __slots__ = ("apply", "edges", "saved")

    def __init__(self, inputs: list[Tensor | None], saved: list[Tensor], apply: Backward) -> None:
        self.apply, self.saved = apply, saved
        # an edge holds only where a gradient goes, never the forward tensor's storage
        self.edges: list[Node | str | None] = [
            None if t is None or not t.requires_grad else (t.grad_fn or t.parameter or "input") for t in inputs
        ]


class Recorder:
    """Writes events while model code runs on it. Positive id: born; negative: died."""

    def __init__(self, autocast: int = 0, grad: bool = True) -> None:
        self.events: list[int] = []
        self.sizes: dict[int, dict[Basis, int]] = {}
        self.roles: dict[int, Role] = {}
        self.labels: dict[int, str] = {}
        self.nodes: list[Node] = []
        self.scope: list[str] = []
        self.autocast, self.grad = autocast, grad  # autocast: itemsize of the compute dtype, 0 when off
        self.cache: dict[str, Tensor] = {}  # autocast's weight cache
        self.until_exit: list[Tensor] = []  # what the model's output holds until the forward returns
        self.gradients: dict[str, Tensor] = {}
        self.accumulating = False  # a gradient exists already
        self.release_gradients = False  # optimizer in backward: gradients die at once
        self.keep = True  # False inside the first forward of a checkpointed region: saved tensors are dropped
        self.saves = 0  # tensors saved so far
        # storages that a node holds as a plain attribute, or the loop's variables: they outlive the backward
        self.lingering: set[int] = set()
        self.returned = 0  # events up to here happen before the model returns, where that is not all of the forward
        self.stop_at: int | None = None  # a recomputation stops at its last saved tensor (early stop) ...
        self.silent = False  # ... after which operations still leave their nodes, but make nothing

    def new(self, elements: Elements, itemsize: int, label: str, role: Role = "temporaries") -> Tensor:
        """A fresh tensor of `elements` times `itemsize` bytes."""
        if self.silent:
            return Tensor(None, elements, itemsize)
        id = len(self.sizes) + 1
        self.sizes[id] = scaled(elements, itemsize)
        self.roles[id] = role
        self.labels[id] = ".".join([*self.scope, label])
        self.events.append(id)
        return Tensor(Storage(self, id), elements, itemsize)

    def buffer(self, size: Size, label: str) -> Tensor:
        """A kernel's own buffer, in bytes."""
        return self.new(size, 1, label, "temporaries")

    def record(self, out: Tensor, inputs: list[Tensor | None], saved: list[Tensor | None], apply: Backward) -> Tensor:
        """Attach the backward node that PyTorch would attach to `out`."""
        if not self.grad or not any(t is not None and t.requires_grad for t in inputs):
            return out
        kept = [Tensor(t.storage, t.elements, t.itemsize) for t in saved if t is not None]
        self.saves += len(kept)
        if self.keep:
            for t in kept:
                if t.storage is not None and self.roles[t.storage.id] == "temporaries":
                    self.roles[t.storage.id] = "activations"
        node = Node(inputs, kept if self.keep else [], apply)
        if self.keep:
            self.nodes.append(node)
        out.requires_grad, out.grad_fn = True, node
        if self.stop_at is not None and self.saves >= self.stop_at:
            self.silent = True
        return out

    def before_saving(self, *saved: Tensor | None) -> None:
        """Inputs are saved before the kernel runs: a recomputation that needs no more stops here, without the output."""
        count = sum(t is not None for t in saved)
        if self.grad and count and self.stop_at is not None and self.saves + count >= self.stop_at:
            self.silent = True

    def exit_autocast(self) -> None:
        """The forward returns: autocast's weight cache is emptied and a key/value cache goes."""
        self.cache.clear()
        self.until_exit.clear()

    def backward(self, root: Tensor, gradient: Tensor, until: int = 0) -> Tensor | None:
        """Run the nodes created since `until` from `root`; returns the gradient of the tensor named "input"."""
        buffers: dict[Node | str, Tensor] = {}
        if root.grad_fn is not None:
            buffers[root.grad_fn] = gradient
        del gradient, root
        while len(self.nodes) > until:
            node = self.nodes.pop()
            incoming = buffers.pop(node, None)
            if incoming is None:
                node.saved = []
                continue
            edges, results = node.edges, list(node.apply(incoming, node.saved))
            del incoming
            node.saved = []
            for edge in edges:
                result = results.pop(0)
                if edge is None or result is None:
                    continue
                self._deliver(buffers, edge, result)
                del result
        return buffers.pop("input", None)

    def _deliver(self, buffers: dict[Node | str, Tensor], edge: Node | str, result: Tensor) -> None:
        if isinstance(edge, str) and edge != "input":
            self._accumulate(edge, result)
            return
        old = buffers.pop(edge, None)
        if old is None:
            buffers[edge] = result
            return
        storage = old.storage
        alone = storage is None or sys.getrefcount(storage) <= 3  # `old`, the local name and the call's argument
        if alone and not old.viewed and sys.getrefcount(old) <= 2:
            buffers[edge] = old  # added in place
        else:
            buffers[edge] = self.new(old.elements, old.itemsize, "gradient sum")

    def _accumulate(self, parameter: str, gradient: Tensor) -> None:
        if self.release_gradients or (self.accumulating and parameter not in self.gradients):
            return
        if parameter in self.gradients or gradient.storage is None:
            return
        self.roles[gradient.storage.id] = "gradients"
        self.labels[gradient.storage.id] = f"{parameter} gradient"
        self.gradients[parameter] = gradient
