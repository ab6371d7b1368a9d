"""Who keeps tensors alive in a program that ran out of memory: its variables, by name, bytes and line.

Looked at are the locals of the frames the error came through, the globals of the user's own modules, the attributes of
objects among them, closures of hooks, and the frames of an error that was being handled.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from memfit.explain.evidence import Root
from memfit.watcher.census import graph, storages
from memfit.watcher.roots import Found, Roots, own
from memfit.watcher.source import line_of

MOST_ITEMS = 20_000  # objects looked at in one container
DEEP = 4  # containers inside containers
UNNAMED = "a model being made"
SMALL = 4096  # bytes a variable must keep to be named
CONTAINERS = (list, tuple, dict, set, deque)


def roots_of(error: BaseException) -> tuple[Root, ...]:
    """The variables that keep most, each storage counted for what it belongs to first: a model, its optimizer."""
    frames = _frames(error)
    found = _Finder()
    named = list(_variables(Roots(lambda: frames)))
    for _, value in named:
        found.claim(value)
    made = [found.root(name, value, frames) for name, value in named]
    made += found.hooks()
    earlier = error.__context__
    while earlier is not None:
        if not type(earlier).__module__.startswith("memfit"):
            made.append(found.exception(type(earlier).__name__, earlier, frames))
        earlier = earlier.__context__
    best: dict[tuple[str, str], Root] = {}
    for root in filter(None, made):
        key = (root.what, root.name)
        if key not in best or best[key].bytes < root.bytes:
            best[key] = root
    return tuple(sorted(best.values(), key=lambda root: -root.bytes))


def _frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in walk_tb(error.__traceback__)]


def _variables(roots: Roots) -> Iterator[tuple[Found, Any]]:
    """Names of the user's with what they are bound to, and the containers and tensors that objects among them have."""
    seen: set[int] = set()
    for found, value in roots.variables():
        below = "." in found.path or "[" in found.path
        if id(value) in seen or (below and not ("." in found.path and isinstance(value, (*CONTAINERS, Tensor)))):
            continue
        if own(found.file):
            seen.add(id(value))
            yield found, value
        elif isinstance(value, torch.nn.Module):  # only just being made: it has no name of the user's yet
            seen.add(id(value))
            yield Found(UNNAMED, "", 0, ""), value


class _Finder:
    """Measures variables; what belongs to models and optimizers is theirs alone."""

    def __init__(self) -> None:
        self.owned: set[int] = set()  # storages of parameters, gradients and states
        self.modules: list[torch.nn.Module] = []
        self.inside: set[int] = set()  # ids of modules within another

    def claim(self, value: Any) -> None:
        """Models and optimizers first."""
        if isinstance(value, torch.nn.Module) and id(value) not in self.inside and value not in self.modules:
            self.modules.append(value)
            self.inside |= {id(m) for m in value.modules() if m is not value}
            for t in (*value.parameters(), *value.buffers()):
                self.owned |= storages([t, *([t.grad] if t.grad is not None else [])]).keys()
        elif isinstance(value, torch.optim.Optimizer):
            self.owned |= storages(_tensors(dict(value.state))).keys()

    def held(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        """Storage -> bytes of tensors on the card that belong to no model and no optimizer."""
        return {key: size for key, size in storages(t for t in tensors if t.is_cuda).items() if key not in self.owned}

    def root(self, found: Found, value: Any, frames: list[FrameType]) -> Root | None:
        """What a variable keeps; None where that is little."""
        name, line = found.path.rsplit(".", 1)[-1], line_of(found)
        if isinstance(value, torch.nn.Module):
            return self._model(name, value, line)
        if isinstance(value, BaseException):
            return self.exception(name, value, frames, line)
        if isinstance(value, Tensor):
            saved, passes = self._graph([value])
            total = sum(saved.values())
            one = value.numel() == 1
            return (
                Root(name, line, "graph" if one else "state", total, passes) if passes > 1 and total >= SMALL else None
            )
        if not isinstance(value, CONTAINERS):
            return None
        errors = [part for part in _parts(value) if isinstance(part, BaseException)]
        kept = [self.exception(name, error, frames, line) for error in errors]
        kept += [self._several(name, value, line), self._collection(name, value, line_of(self._most_of(found, value)))]
        return max((root for root in kept if root is not None), key=lambda root: root.bytes, default=None)

    def _most_of(self, found: Found, value: Any) -> Found:
        """The path to the key under which most of a dictionary lies, where one has more than half."""
        if not isinstance(value, dict) or len(value) > MOST_ITEMS:
            return found
        sizes = {key: sum(storages(_tensors(part)).values()) for key, part in value.items() if isinstance(key, str)}
        key = max(sizes, key=sizes.__getitem__, default="")
        most = "'" not in key and 2 * sizes.get(key, 0) > sum(sizes.values())
        return replace(found, path=f"{found.path}['{key}']") if most else found

    def _collection(self, name: str, value: Any, line: str) -> Root | None:
        tensors = list(_tensors(value))
        sizes, (saved, _) = self.held(tensors), self._graph(tensors)
        total = sum((sizes | saved).values())
        if total < SMALL or not sizes:
            return None
        what = "graph" if sum(saved.values()) > sum(sizes.values()) else "collection"
        return Root(name, line, what, total, len(sizes))  # type: ignore[arg-type]

    def _model(self, name: str, module: torch.nn.Module, line: str) -> Root | None:
        if id(module) in self.inside:
            return None
        weights = [p for p in module.parameters() if p.is_cuda]
        sizes = storages(weights)
        total = sum(sizes.values())
        wide, double = (
            sum(storages(p for p in weights if p.dtype == dtype).values()) for dtype in (torch.float32, torch.float64)
        )
        return Root(name, line, "model", total, len(sizes), wide, double) if total >= SMALL else None

    def _several(self, name: str, value: Any, line: str) -> Root | None:
        """A container of models, optimizers or schedulers: what those keep that nobody else has a name for."""
        scheduler = torch.optim.lr_scheduler.LRScheduler
        found = [part.optimizer if isinstance(part, scheduler) else part for part in _parts(value)]
        modules = [part for part in found if isinstance(part, torch.nn.Module)]
        tensors = [t for module in modules for p in module.parameters() for t in (p, p.grad) if t is not None]
        tensors += [t for part in found if isinstance(part, torch.optim.Optimizer) for t in _tensors(dict(part.state))]
        sizes = self.held(tensors)
        total = sum(sizes.values())
        return Root(name, line, "models", total, len(sizes)) if total >= SMALL else None

    def exception(self, name: str, error: BaseException, frames: list[FrameType], line: str = "") -> Root | None:
        """An error that is being handled, or was kept: its traceback keeps the frames, they keep their tensors."""
        theirs = _frames(error)
        found = [t for f in theirs if f not in frames for value in f.f_locals.values() for t in _tensors(value)]
        sizes = self.held(found)
        total = sum((sizes | self._graph(found)[0]).values())
        if not line and theirs:  # where it was caught, and is still being handled
            line = f"{theirs[0].f_code.co_filename.rsplit('/', 1)[-1]}:{theirs[0].f_lineno}"
        return Root(name, line, "exception", total, len(sizes)) if total >= SMALL else None

    def hooks(self) -> Iterator[Root]:
        """What the hooks of modules keep in their closures."""
        for part in (part for module in self.modules for part in module.modules()):
            kinds = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks)
            for hook in (hook for kind in kinds for hook in kind.values()):
                yield from self._closure(hook)

    def _closure(self, hook: Any) -> Iterator[Root]:
        code = getattr(hook, "__code__", None)
        if code is None:
            return
        for name, cell in zip(code.co_freevars, hook.__closure__ or (), strict=False):
            sizes = self.held(_tensors(cell.cell_contents)) if isinstance(cell.cell_contents, CONTAINERS) else {}
            if sizes:
                line = line_of(Found(name, code.co_filename, code.co_firstlineno, code.co_name))
                yield Root(name, line, "hook", sum(sizes.values()), len(sizes))

    def _graph(self, tensors: Iterable[Tensor]) -> tuple[dict[int, int], int]:
        """(bytes of each storage that the tensors' autograd graphs saved, how often a leaf is reached: the passes)."""
        nodes = list(graph(tensors))
        leaves = Counter(id(after) for node in nodes for after, _ in node.next_functions if hasattr(after, "variable"))
        return self.held(t for node in nodes for t in _saved(node)), max(leaves.values(), default=0)


def _saved(node: Any) -> Iterator[Tensor]:
    """The tensors a node keeps for its backward; none once that is done."""
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                value = getattr(node, name)
            except (RuntimeError, AttributeError):  # released, or of a kind Python cannot see
                continue
            parts = value if isinstance(value, tuple | list) else (value,)
            yield from (part for part in parts if isinstance(part, Tensor))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Tensors in containers of containers."""
    return (part for part in _parts(value) if isinstance(part, Tensor))


def _parts(value: Any, depth: int = 0) -> Iterator[Any]:
    """What containers of containers hold."""
    if not isinstance(value, CONTAINERS):
        yield value
    elif depth < DEEP and len(value) <= MOST_ITEMS:
        for part in list(value.values()) if isinstance(value, dict) else list(value):
            yield from _parts(part, depth + 1)
