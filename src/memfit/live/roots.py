"""Who keeps tensors alive in a program that ran out of memory: its variables, by name, bytes and line.

Looked at are the locals of the frames the error came through, the globals of the user's own modules, the attributes of
objects among them, closures of hooks, and the frames of an error that was being handled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from memfit.explain.evidence import LIBRARY, Root
from memfit.live.recorder import OURS
from memfit.watcher.source import line_of

MOST_ITEMS = 20_000  # objects looked at in one container
MOST_NODES = 200_000  # nodes of one autograd graph
DEEP = 4  # containers inside containers
UNNAMED = "a model being made"
SMALL = 4096  # bytes a variable must keep to be named
CONTAINERS = (list, tuple, dict, set, deque)


def roots_of(error: BaseException) -> tuple[Root, ...]:
    """The variables that keep most, each storage counted for what it belongs to first: a model, its optimizer."""
    found = _Finder()
    frames = list(_frames(error.__traceback__))
    named = list(_variables(frames))
    for _, _, value in named:
        found.claim(value)
    made = [root for where, name, value in named if (root := found.root(where, name, value))]
    made += [root for root in found.hooks() if root]
    earlier = error.__context__
    while earlier is not None:
        if not type(earlier).__module__.startswith("memfit"):
            made += filter(None, [found.exception(frames, type(earlier).__name__, earlier)])
        earlier = earlier.__context__
    best: dict[tuple[str, str], Root] = {}
    for root in made:
        key = (root.what, root.name)
        if key not in best or best[key].bytes < root.bytes:
            best[key] = root
    return tuple(sorted(best.values(), key=lambda root: -root.bytes))


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _line(code: CodeType, name: str) -> str:
    return line_of(code.co_filename, name, code.co_firstlineno, code.co_name)


def _own(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return not path.startswith((OURS, "<")) and not any(part in path for part in LIBRARY)


def _variables(frames: Iterable[FrameType]) -> Iterator[tuple[FrameType, str, Any]]:
    """(frame, name, value): locals and globals of the user's frames, and what their objects hold."""
    seen: set[int] = set()
    for frame in filter(_own, frames):
        scopes = [frame.f_locals] if frame.f_locals is frame.f_globals else [frame.f_locals, frame.f_globals]
        for name, value in [pair for scope in scopes for pair in list(scope.items())]:
            if name.startswith("__") or id(value) in seen or isinstance(value, type):
                continue
            seen.add(id(value))
            yield frame, name, value
            if not isinstance(value, (*CONTAINERS, Tensor, torch.optim.Optimizer)):
                yield from ((frame, key, held) for key, held in _attributes(value) if id(held) not in seen)
    for frame in frames:  # a model that is only just being made has no name of the user's yet
        for value in frame.f_locals.values():
            if isinstance(value, torch.nn.Module) and id(value) not in seen and not _own(frame):
                seen.add(id(value))
                yield frame, UNNAMED, value


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """The containers and tensors an object of the user's own classes has."""
    try:
        held = vars(value)
    except TypeError:
        return []
    skipped = ("_parameters", "_buffers", "_modules")
    return [
        (k, v) for k, v in held.items() if k not in skipped and "hook" not in k and isinstance(v, (*CONTAINERS, Tensor))
    ]


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
                self.owned |= {_storage(t), *([_storage(t.grad)] if t.grad is not None else [])}
        elif isinstance(value, torch.optim.Optimizer):
            for state in value.state.values():
                self.owned |= {_storage(t) for t in state.values() if isinstance(t, Tensor)}

    def root(self, frame: FrameType, name: str, value: Any) -> Root | None:
        """What a variable keeps; None where that is little."""
        line = _line(frame.f_code, name) if _own(frame) else ""
        if isinstance(value, torch.nn.Module):
            return self._model(name, value, line)
        if isinstance(value, BaseException):
            return self.exception([frame], name, value, line)
        if isinstance(value, Tensor):
            sizes, passes = self._graph([value])
            total = sum(sizes.values())
            return Root(name, line, "graph", total, passes) if passes > 1 and total >= SMALL else None
        if not isinstance(value, CONTAINERS):
            return None
        held = list(_tensors(value))
        sizes = {_storage(t): t.untyped_storage().nbytes() for t in held if t.is_cuda and _storage(t) not in self.owned}
        graph, _ = self._graph(held)
        total = sum((sizes | graph).values())
        if total < SMALL or not sizes:
            return None
        return Root(
            name, line, "graph" if sum(graph.values()) > sum(sizes.values()) else "collection", total, len(sizes)
        )

    def _model(self, name: str, module: torch.nn.Module, line: str) -> Root | None:
        if id(module) in self.inside:
            return None
        sizes = {_storage(p): (p.untyped_storage().nbytes(), p.dtype) for p in module.parameters() if p.is_cuda}
        total = sum(size for size, _ in sizes.values())
        wide = sum(size for size, dtype in sizes.values() if dtype == torch.float32)
        return Root(name, line, "model", total, len(sizes), wide) if total >= SMALL else None

    def exception(self, frames: list[FrameType], name: str, error: BaseException, line: str = "") -> Root | None:
        """An error that is being handled, or was kept: its traceback keeps the frames, they keep their tensors."""
        held = [v for f in _frames(error.__traceback__) if f not in frames for v in f.f_locals.values()]
        found = [t for value in held for t in _tensors(value)]
        graph, _ = self._graph(found)
        sizes = {
            _storage(t): t.untyped_storage().nbytes() for t in found if t.is_cuda and _storage(t) not in self.owned
        }
        total = sum((sizes | graph).values())
        if not line and error.__traceback__ is not None:
            caught = error.__traceback__.tb_frame  # where it was caught, and is still being handled
            line = f"{caught.f_code.co_filename.rsplit('/', 1)[-1]}:{caught.f_lineno}"
        return Root(name, line, "exception", total, len(sizes)) if total >= SMALL else None

    def hooks(self) -> Iterator[Root | None]:
        """What the hooks of modules keep in their closures."""
        for module in self.modules:
            for part in module.modules():
                for hook in (
                    *part._forward_hooks.values(),
                    *part._forward_pre_hooks.values(),
                    *part._backward_hooks.values(),
                ):
                    yield from self._closure(hook)

    def _closure(self, hook: Any) -> Iterator[Root | None]:
        code = getattr(hook, "__code__", None)
        if code is None:
            return
        for name, cell in zip(code.co_freevars, hook.__closure__ or (), strict=False):
            value = cell.cell_contents
            if isinstance(value, CONTAINERS):
                held = [t for t in _tensors(value) if t.is_cuda and _storage(t) not in self.owned]
                sizes = {_storage(t): t.untyped_storage().nbytes() for t in held}
                line = _line(code, name)
                yield Root(name, line, "hook", sum(sizes.values()), len(sizes)) if sizes else None

    def _graph(self, held: Iterable[Tensor]) -> tuple[dict[int, int], int]:
        """(bytes of each storage that the tensors' autograd graphs saved, how often a leaf is reached: the passes)."""
        sizes: dict[int, int] = {}
        reached: dict[int, int] = {}
        nodes = [t.grad_fn for t in held if t.grad_fn is not None]
        seen = {id(node): node for node in nodes}
        while nodes and len(seen) < MOST_NODES:
            node = nodes.pop()
            for t in _saved(node):
                if t.is_cuda and _storage(t) not in self.owned:
                    sizes[_storage(t)] = t.untyped_storage().nbytes()
            for after, _ in node.next_functions:
                if after is None:
                    continue
                if hasattr(after, "variable"):
                    reached[id(after)] = reached.get(id(after), 0) + 1
                if id(after) not in seen:
                    seen[id(after)] = after
                    nodes.append(after)
        return sizes, max(reached.values(), default=0)


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


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Tensors in containers of containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, CONTAINERS) and depth < DEEP and len(value) <= MOST_ITEMS:
        for part in list(value.values()) if isinstance(value, dict) else list(value):
            yield from _tensors(part, depth + 1)


def _storage(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)
