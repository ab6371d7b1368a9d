"""Search from a program's names down to what each retains when memory ran out, by name, bytes and line.

The search covers the locals of the frames that the error came through, the globals of the user's modules, the
attributes of objects and classes among them, the closures of hooks, and the frames of other errors: those being
handled, those that a variable keeps, and the last one that a console showed.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import _lru_cache_wrapper
from inspect import unwrap
from math import prod
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from memfit.explain.evidence import OTHER_MODEL, SAVED, Root
from memfit.holders.live_tensors import graph, saved_by, storages
from memfit.holders.names import Name, Roots, of_the_user, own, short_line, variable
from memfit.holders.objects import CONTAINERS, LEAVES, MOST_ITEMS, names, parts, tensors
from memfit.holders.source import line_of

SMALL = 4096  # bytes a variable must keep to be reported
NEAR = 2  # levels of submodules in which a second model is looked for
FEW = 3  # weights whose shapes suffice to recognise a model
MOSTLY = 0.8  # share of a collection's elements from which it counts as copies of weights
MOST_CLASSES = 3  # classes that are listed of a collection's objects
LAST_ERROR = ("last_exc", "last_value")  # attributes of `sys` with the error that a console or notebook showed last


def roots_of(error: BaseException) -> tuple[Root, ...]:
    """Return what the program's variables keep, largest first; tensors of a model or optimizer count for that alone."""
    frames = frames_of(error)
    named = list(names(Roots(lambda: frames)))
    retained = _Retained(frames, frozenset(id(value) for _, value in named))
    for _, value in named:
        retained.claim(value)
    roots = [root for name, value in named for root in retained.roots(name, value)]
    roots += [*retained.hooks(), *retained.handled(error), *retained.shown(error)]
    best: dict[tuple[str, str], Root] = {}
    for root in roots:
        key = (root.what, root.name)
        if key not in best or best[key].bytes < root.bytes:
            best[key] = root
    return tuple(sorted(best.values(), key=lambda root: -root.bytes))


def frames_of(error: BaseException) -> list[FrameType]:
    """Return the frames that an error came through, outermost first."""
    return [frame for frame, _ in walk_tb(error.__traceback__)]


class _Retained:
    """Measures what variables keep. Tensors of models and optimizers count for those alone.

    `named`: ids of all objects that have a name.
    """

    def __init__(self, frames: list[FrameType], named: frozenset[int]) -> None:
        self.frames, self.named = frames, named
        self.owned: set[int] = set()  # storages of parameters, gradients and states
        self.states: dict[int, int] = {}  # id of a parameter -> bytes of its states
        self.resting: set[int] = set()  # ids of parameters of an optimizer that are all frozen now: a GAN's other net
        self.modules: list[torch.nn.Module] = []
        self.inside: set[int] = set()  # ids of modules within another

    def claim(self, value: Any) -> None:
        """Note which storages belong to a model or an optimizer; to be called for all names before measuring any."""
        if isinstance(value, torch.nn.Module) and id(value) not in self.inside and value not in self.modules:
            self.modules.append(value)
            self.inside |= {id(m) for m in value.modules() if m is not value}
            for t in (*value.parameters(), *value.buffers()):
                self.owned |= storages([t, *([t.grad] if t.grad is not None else [])]).keys()
        elif isinstance(value, torch.optim.Optimizer):
            self.owned |= storages(tensors(dict(value.state))).keys()
            self._stepped(value)
        elif isinstance(value, dict | list | tuple) and len(value) <= MOST_ITEMS:
            for part in value.values() if isinstance(value, dict) else value:
                if isinstance(part, torch.optim.Optimizer):
                    self._stepped(part)

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the bytes of an optimizer's states, and whether all of its parameters are frozen now."""
        self.states |= {id(p): sum(storages(tensors(state)).values()) for p, state in optimizer.state.items()}
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(p.requires_grad for p in weights):
            self.resting |= {id(p) for p in weights}

    def held(self, found: Iterable[Tensor]) -> dict[int, int]:
        """Return storage -> bytes of the tensors on the card that belong to no model and no optimizer."""
        return {key: size for key, size in storages(t for t in found if t.is_cuda).items() if key not in self.owned}

    def roots(self, name: Name, value: Any) -> list[Root]:
        """Return what a variable keeps; nothing if it keeps less than SMALL."""
        if isinstance(value, torch.nn.Module):
            return self._models(name, value)
        if isinstance(value, BaseException):
            found = self.exceptions(name.text, [value], line_of(name))
        elif isinstance(value, Tensor):
            found = self._state(name, value)
        elif isinstance(value, CONTAINERS) or not (isinstance(value, LEAVES) or of_the_user(type(value))):
            found = self._container(name, value)
            if found is not None and isinstance(value, _lru_cache_wrapper):  # no line stores into a function's cache
                code = unwrap(value).__code__
                found = replace(found, line=short_line(code.co_filename, code.co_firstlineno))
        else:
            return []
        return [found] if found is not None else []

    def _state(self, name: Name, value: Tensor) -> Root | None:
        saved, passes = self._graph([value])
        total = sum(saved.values())
        if passes < 2 or total < SMALL:
            return None
        return Root(name.text, line_of(name), "graph" if value.numel() == 1 else "state", total, passes)

    def _container(self, name: Name, value: Any) -> Root | None:
        """Measure a container or an object of a library by the kind of its content that has the most bytes."""
        held = list(parts(value, self.named))
        errors = [part for part in held if isinstance(part, BaseException)]
        kept = [
            self.exceptions(name.text, errors, line_of(name)) if errors else None,
            self._several(name, held),
            self._collection(name, value, held),
        ]
        return max((root for root in kept if root is not None), key=lambda root: root.bytes, default=None)

    def _collection(self, name: Name, value: Any, held: list[Any]) -> Root | None:
        found = [part for part in held if isinstance(part, Tensor)]
        sizes, (saved, _) = self.held(found), self._graph(found)
        total = sum((sizes | saved).values())
        if total < SMALL or not sizes:
            return None
        what = "graph" if sum(saved.values()) > sum(sizes.values()) else "collection"
        copies = self._copies(found) if what == "collection" else 0
        line, kinds = line_of(self._most_of(name, value)), _classes(held)
        return Root(name.text, line, what, total, len(sizes), copies=copies, of=kinds)  # type: ignore[arg-type]

    def _most_of(self, name: Name, value: Any) -> Name:
        """Return the name of the item that has more than half of a dictionary's bytes, where there is one."""
        if not isinstance(value, dict) or len(value) > MOST_ITEMS:
            return name
        sizes = {key: sum(storages(tensors(part)).values()) for key, part in value.items() if isinstance(key, str)}
        key = max(sizes, key=sizes.__getitem__, default="")
        return name.item(key) if "'" not in key and 2 * sizes.get(key, 0) > sum(sizes.values()) else name

    def _copies(self, found: list[Tensor]) -> int:
        """Return how many copies of a model's weights these tensors are; 0 where too many of them are something else.

        A head of another shape, as in a checkpoint that is fine-tuned, is allowed for.
        """
        fresh = self.held(found)
        mine = [t for t in found if t.is_cuda and t.untyped_storage()._cdata in fresh]
        shapes, total = Counter(tuple(t.shape) for t in mine), sum(t.numel() for t in mine)
        for module in self.modules:
            for trained in (False, True):
                weights = [p for p in module.parameters() if p.requires_grad or not trained]
                wanted = Counter(tuple(p.shape) for p in weights)
                times = round(total / max(sum(p.numel() for p in weights), 1))
                shared = {shape: min(shapes[shape], times * count) for shape, count in wanted.items() if shapes[shape]}
                matched = sum(prod(shape) * count for shape, count in shared.items())
                if len(shared) >= min(FEW, len(wanted)) and len(weights) >= FEW and matched >= MOSTLY * total > 0:
                    return times
        return 0

    def _models(self, name: Name, module: torch.nn.Module) -> list[Root]:
        """Measure a model, and separately the frozen models within it: a teacher, a reference, an average."""
        if id(module) in self.inside:
            return []
        near = [(path, part) for path, part in module.named_modules() if path and path.count(".") < NEAR]
        others = [(path, part) for path, part in near if OTHER_MODEL.search(path.rsplit(".", 1)[-1])]
        frozen = [(path, part) for path, part in others if not self._trained(part)]
        outer = [(path, part) for path, part in frozen if not any(path.startswith(f"{other}.") for other, _ in frozen)]
        apart = {id(p) for _, part in outer for p in part.parameters()}
        made = [self._model(name, module, apart)]
        made += [self._model(name.attribute(path, type(module)), part, set()) for path, part in outer]
        made.append(self._saved_modules(name, module))
        return [root for root in made if root is not None]

    def _model(self, name: Name, module: torch.nn.Module, apart: set[int]) -> Root | None:
        mine = [p for p in module.parameters() if id(p) not in apart]
        weights = [p for p in mine if p.is_cuda]
        sizes = storages(weights)
        total = sum(sizes.values())
        waiting = sum(p.numel() * p.element_size() for p in mine if p.device.type in ("cpu", "meta"))
        wide, double = (
            sum(storages(p for p in weights if p.dtype == dtype).values()) for dtype in (torch.float32, torch.float64)
        )
        trained = sum(storages(p for p in self._trained(module) if id(p) not in apart).values())
        if total < SMALL:
            return None
        return Root(name.text, line_of(name), "model", total, len(sizes), wide, double, trained, waiting)

    def _saved_modules(self, name: Name, module: torch.nn.Module) -> Root | None:
        """Measure the modules that PEFT trains in full beside its adapters, with gradients and states."""
        weights = [p for path, p in module.named_parameters() if SAVED in path and p.requires_grad and p.is_cuda]
        sizes = storages(t for p in weights for t in (p, p.grad) if t is not None)
        total = sum(sizes.values()) + sum(self.states.get(id(p), 0) for p in weights)
        return Root(SAVED, line_of(name), "part", total, len(weights)) if total >= SMALL else None

    def _several(self, name: Name, held: list[Any]) -> Root | None:
        """Measure the models and optimizers that a container leads to and that have no name of their own."""
        modules = [part for part in held if isinstance(part, torch.nn.Module)]
        found = [t for module in modules for p in module.parameters() for t in (p, p.grad) if t is not None]
        found += [t for part in held if isinstance(part, torch.optim.Optimizer) for t in tensors(dict(part.state))]
        sizes = self.held(found)
        total = sum(sizes.values())
        return Root(name.text, line_of(name), "models", total, len(sizes)) if total >= SMALL else None

    def exceptions(self, name: str, errors: list[BaseException], line: str = "") -> Root | None:
        """Measure errors that are being handled or were kept: their tracebacks keep frames, and these keep tensors."""
        frames = {id(frame): frame for error in errors for frame in frames_of(error)}
        mine = {id(frame) for frame in self.frames}
        values = [value for key, f in frames.items() if key not in mine for value in f.f_locals.values()]
        found = [t for value in values for t in (*tensors(value), *_of_models(value))]
        sizes = self.held(found)
        total = sum((sizes | self._graph(found)[0]).values())
        if not line and frames:  # the line that caught the error and is still handling it
            own_first = (frame for frame in frames.values() if own(frame.f_code.co_filename))
            first = next(own_first, next(iter(frames.values())))
            line = short_line(first.f_code.co_filename, first.f_lineno)
        return Root(name, line, "exception", total, len(sizes)) if total >= SMALL else None

    def handled(self, error: BaseException) -> Iterator[Root]:
        """Measure the errors that were being handled when this one was raised."""
        earlier = error.__context__
        while earlier is not None:
            ours = type(earlier).__module__.startswith("memfit")
            if not ours and (root := self.exceptions(type(earlier).__name__, [earlier])) is not None:
                yield root
            earlier = earlier.__context__

    def shown(self, error: BaseException) -> Iterator[Root]:
        """Measure the error that a console showed last: `sys` keeps it until the next one."""
        files = dict.fromkeys(f.f_code.co_filename for f in self.frames if own(f.f_code.co_filename))
        places = tuple((file, 0, "") for file in files)
        for name in LAST_ERROR:
            last = getattr(sys, name, None)
            if isinstance(last, BaseException) and last is not error:
                root = self.exceptions(f"sys.{name}", [last], line_of(Name(f"sys.{name}", places)))
                if root is not None:
                    yield root
                    return

    def hooks(self) -> Iterator[Root]:
        """Measure what hooks of modules keep in their closures; hooks of one line count together, each tensor once."""
        kept: dict[tuple[str, str], dict[int, int]] = {}
        for name, line, sizes in self._hooks():
            kept.setdefault((name, line), {}).update(sizes)
        for (name, line), sizes in kept.items():
            yield Root(name, line, "hook", sum(sizes.values()), len(sizes))

    def _hooks(self) -> Iterator[tuple[str, str, dict[int, int]]]:
        for part in (part for module in self.modules for part in module.modules()):
            kinds = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks)
            for hook in (hook for kind in kinds for hook in kind.values()):
                yield from self._closure(hook)

    def _closure(self, hook: Any) -> Iterator[tuple[str, str, dict[int, int]]]:
        code = getattr(hook, "__code__", None)
        if code is None:
            return
        for name, cell in zip(code.co_freevars, hook.__closure__ or (), strict=False):
            sizes = self.held(tensors(cell.cell_contents)) if isinstance(cell.cell_contents, CONTAINERS) else {}
            if sizes:
                yield name, line_of(variable(name, code)), sizes

    def _trained(self, module: torch.nn.Module) -> list[Tensor]:
        """Return the trained weights: they have or will get a gradient, have states, or are frozen only for now."""
        return [
            p
            for part in module.modules()
            for p in part.parameters(recurse=False)
            if p.is_cuda
            and (
                (p.requires_grad and (part.training or p.grad is not None))
                or id(p) in self.resting
                or self.states.get(id(p), 0)
            )
        ]

    def _graph(self, found: Iterable[Tensor]) -> tuple[dict[int, int], int]:
        """Return (bytes of each storage that the tensors' autograd graphs saved, how many passes they span).

        A leaf is reached once for each pass.
        """
        nodes = list(graph(found))
        leaves = Counter(id(after) for node in nodes for after, _ in node.next_functions if hasattr(after, "variable"))
        return self.held(t for node in nodes for t in saved_by(node)), max(leaves.values(), default=0)


def _of_models(value: Any) -> Iterator[Tensor]:
    """Yield weights, gradients and states of the models and optimizers that a variable leads to."""
    for part in parts(value):
        if isinstance(part, torch.nn.Module):
            yield from (t for p in part.parameters() for t in (p, p.grad) if t is not None)
        elif isinstance(part, torch.optim.Optimizer):
            yield from tensors(dict(part.state))


def _classes(held: list[Any]) -> str:
    """List the classes of the library objects in a container, commonest first."""
    counts = Counter(type(part) for part in held if not isinstance(part, (*CONTAINERS, *LEAVES)))
    return ", ".join(kind.__name__ for kind, _ in counts.most_common(MOST_CLASSES) if not of_the_user(kind))
