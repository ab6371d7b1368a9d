"""From a program's names down to what they keep: attributes of its objects and classes, and what containers and objects hold."""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import _lru_cache_wrapper, partial
from itertools import islice
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor

from memfit.live.holders.source import line_of
from memfit.live.holders.variables import Found, Roots, own

MOST_ITEMS = 100_000  # things looked at in one container
DEEP = 8  # containers and objects inside containers
FAR = 3  # attributes of attributes that are names
UNNAMED = "a model being made"
CONTAINERS = (list, tuple, dict, set, deque)
OWNERS = (torch.nn.Module, torch.optim.Optimizer, BaseException)  # what they hold is theirs
LEAVES = (
    Tensor, *OWNERS, type, ModuleType, BuiltinFunctionType, CodeType, FrameType, str, bytes, int, float, complex, type(None), torch.device,
    torch.dtype, torch.Generator,
)  # fmt: skip
CALLS = (
    FunctionType,
    MethodType,
    partial,
    _lru_cache_wrapper,
)  # what is called keeps what it closes over, is given or remembers


@dataclass(frozen=True, slots=True)
class Name:
    """A name of the user's, and the places whose lines may store into it, the likeliest first."""

    places: tuple[Found, ...]

    @property
    def text(self) -> str:
        """self.buffer.items -> items."""
        return self.places[0].path.rsplit(".", 1)[-1]

    @property
    def line(self) -> str:
        """ "train.py:12"; "" where no source says."""
        return next(filter(None, map(line_of, self.places)), "")

    def attribute(self, path: str, kind: type) -> Name:
        """Of an object of the class `kind`, whose own code stores into its attributes more likely than its owner's."""
        last = self.places[-1]
        below = replace(last, path=f"{last.path}.{path}")
        file = file_of(kind)
        return Name((replace(below, file=file, first=0, function=kind.__name__), below) if file else (below,))

    def under(self, key: str) -> Name:
        """An item of a dictionary."""
        return Name(tuple(replace(place, path=f"{place.path}['{key}']") for place in self.places))


def names(roots: Roots) -> Iterator[tuple[Name, Any]]:
    """The user's names with what they are bound to, then the attributes of objects and classes of theirs, the nearest first."""
    seen: set[int] = set()
    todo: deque[tuple[Name, Any, int]] = deque()
    for found, value in roots.named():
        if own(found.file):
            todo.append((Name((found,)), value, 0))
        elif isinstance(value, torch.nn.Module) and id(value) not in seen and not unmade(value):
            seen.add(id(value))  # only just being made: it has no name of the user's yet
            yield Name((Found(UNNAMED, "", 0, ""),)), value
    while todo:
        name, value, far = todo.popleft()
        if id(value) in seen or unmade(value):
            continue
        seen.add(id(value))
        yield name, value
        if far < FAR:
            todo += ((name.attribute(path, kind), item, far + 1) for path, item, kind in _attributes(value))


def _attributes(value: Any) -> Iterator[tuple[str, Any, type]]:
    """(path, value, class that has it) of what has a name of its own within an object: of a library's, models and errors only."""
    if isinstance(value, torch.nn.Module):
        for path, module in value.named_modules():
            for name, item in list(vars(module).items()):
                if not name.startswith("_") and isinstance(item, (*CONTAINERS, Tensor)):
                    yield f"{path}.{name}".lstrip("."), item, type(module)
    elif isinstance(value, type):
        if file_of(value):
            yield from ((name, item, value) for name, item in list(vars(value).items()) if not name.startswith("__"))
    elif not isinstance(value, (*CONTAINERS, *LEAVES, *CALLS)):
        theirs = of_the_user(type(value))
        yield from ((n, item, type(value)) for n, item in _fields(value) if theirs or isinstance(item, OWNERS))


def _fields(value: Any) -> list[tuple[str, Any]]:
    """What an object has in its dictionary and its slots."""
    slots = [name for kind in type(value).__mro__ for name in _slots(kind) if name not in ("__dict__", "__weakref__")]
    try:
        found = [(name, getattr(value, name)) for name in slots if hasattr(value, name)]
        return found + list(getattr(value, "__dict__", {}).items())
    except Exception:  # a proxy that finds nothing behind it now
        return []


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def of_the_user(kind: type) -> bool:
    """Is this a class of the program's own?"""
    return kind.__module__ == "__main__" or bool(file_of(kind))


def file_of(kind: type) -> str:
    """The user's file that a class is written in: as its methods say, or its module; "" where it is a library's."""
    codes = (getattr(member, "__code__", None) for member in vars(kind).values())
    files = [code.co_filename for code in codes if code is not None]
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return next((f for f in (*files, file) if isinstance(f, str) and own(f)), "")


def parts(value: Any, apart: frozenset[int] = frozenset()) -> Iterator[Any]:
    """What a container or an object holds, through containers and objects in it. Objects whose id is in `apart` have a name of
    their own, and what they hold is left to it."""
    todo, seen = deque([(value, 0)]), {id(value)}
    for _ in range(MOST_ITEMS):
        if not todo:
            return
        part, depth = todo.popleft()
        yield part
        if depth < DEEP:
            inside = (item for item in _inside(part) if id(item) not in seen and not unmade(item))
            fresh = [item for item in inside if id(item) not in apart or _plain(item)]
            seen.update(map(id, fresh))
            todo += ((item, depth + 1) for item in fresh)


def unmade(value: Any) -> bool:
    """A model or an optimizer that has none of its attributes yet: one that is being copied or read."""
    if isinstance(value, torch.nn.Module):
        return not vars(value).keys() >= {"_modules", "_parameters", "_buffers"}
    return isinstance(value, torch.optim.Optimizer) and not vars(value).keys() >= {"state", "param_groups"}


def _plain(value: Any) -> bool:
    return isinstance(value, (*CONTAINERS, *LEAVES, *CALLS))


def _inside(value: Any) -> list[Any]:
    if isinstance(value, CONTAINERS):
        return list(islice(value.values() if isinstance(value, dict) else value, MOST_ITEMS))
    if isinstance(value, GeneratorType):
        return list(value.gi_frame.f_locals.values()) if value.gi_frame is not None else []
    if isinstance(value, CALLS):
        return _closed_over(value)
    return [] if isinstance(value, LEAVES) else [item for _, item in _fields(value)]


def _closed_over(value: Any) -> list[Any]:
    """What a function of the user's keeps: cells, defaults, given arguments, its object, results it remembers."""
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, _lru_cache_wrapper):
        return [part for part in gc.get_referents(value) if not isinstance(part, type)][:MOST_ITEMS]
    if not own(value.__code__.co_filename):
        return []
    cells = [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
    return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]


def _is_full(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # of a name that is bound later
        return False
    return True


def tensors(value: Any, apart: frozenset[int] = frozenset()) -> Iterator[Tensor]:
    """The tensors among them."""
    return (part for part in parts(value, apart) if isinstance(part, Tensor))
