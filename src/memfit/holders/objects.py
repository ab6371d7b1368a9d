"""List what a program's objects hold: attributes with names of their own, and contents of containers and objects."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
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

from memfit.holders.names import Name, Roots, file_of, of_the_user, own

MOST_ITEMS = 100_000  # objects of one container that are inspected
DEEP = 8  # levels of containers and objects inside a container
FAR = 3  # levels of attributes of attributes that count as names
UNNAMED = Name("a model being made")
CONTAINERS = (list, tuple, dict, set, deque)
OWNERS = (torch.nn.Module, torch.optim.Optimizer, BaseException)  # measured on their own
LEAVES = (
    Tensor, *OWNERS, type, ModuleType, BuiltinFunctionType, CodeType, FrameType, str, bytes, int, float, complex,
    type(None), torch.device, torch.dtype, torch.Generator,
)  # fmt: skip
CALLS = (FunctionType, MethodType, partial, _lru_cache_wrapper)  # keep closures, defaults, arguments or results
_PLAIN = (*CONTAINERS, *LEAVES, *CALLS)


def names(roots: Roots) -> Iterator[tuple[Name, Any]]:
    """Yield the user's names and values, then attributes of the user's objects and classes, nearest first."""
    seen: set[int] = set()
    todo: deque[tuple[Name, Any, int]] = deque()
    for name, value in roots.named():
        if own(name.places[0][0]):
            todo.append((name, value, 0))
        elif isinstance(value, torch.nn.Module) and id(value) not in seen and not unmade(value):
            seen.add(id(value))  # its constructor is still running: no name of the user's is bound to it yet
            yield UNNAMED, value
    while todo:
        name, value, far = todo.popleft()
        if id(value) in seen or unmade(value):
            continue
        seen.add(id(value))
        yield name, value
        if far < FAR:
            todo += ((name.attribute(path, kind), item, far + 1) for path, item, kind in _attributes(value))


def _attributes(value: Any) -> Iterator[tuple[str, Any, type]]:
    """Yield (path, value, class of the owner) of the attributes that have a name of their own.

    A library's object has such names only for models, optimizers and errors.
    """
    if isinstance(value, torch.nn.Module):
        for path, module in value.named_modules():
            for name, item in list(vars(module).items()):
                if not name.startswith("_") and isinstance(item, (*CONTAINERS, Tensor)):
                    yield f"{path}.{name}".lstrip("."), item, type(module)
    elif isinstance(value, type):
        if file_of(value):
            yield from ((name, item, value) for name, item in list(vars(value).items()) if not name.startswith("__"))
    elif not isinstance(value, _PLAIN):
        users = of_the_user(type(value))
        yield from ((n, item, type(value)) for n, item in _fields(value) if users or isinstance(item, OWNERS))


def _fields(value: Any) -> list[tuple[str, Any]]:
    """Return the attributes in an object's slots and its dictionary."""
    slots = [name for kind in type(value).__mro__ for name in _slots(kind) if name not in ("__dict__", "__weakref__")]
    try:
        found = [(name, getattr(value, name)) for name in slots if hasattr(value, name)]
        return found + list(getattr(value, "__dict__", {}).items())
    except Exception:  # a proxy that finds nothing behind it now
        return []


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def parts(value: Any, apart: frozenset[int] = frozenset()) -> Iterator[Any]:
    """Yield what a container or an object holds, through the containers and objects in it.

    An object whose id is in `apart` has a name of its own and is measured under that.
    """
    todo, seen = deque([(value, 0)]), {id(value)}
    for _ in range(MOST_ITEMS):
        if not todo:
            return
        part, depth = todo.popleft()
        yield part
        if depth < DEEP:
            inside = (item for item in _inside(part) if id(item) not in seen and not unmade(item))
            fresh = [item for item in inside if id(item) not in apart or isinstance(item, _PLAIN)]
            seen.update(map(id, fresh))
            todo += ((item, depth + 1) for item in fresh)


def unmade(value: Any) -> bool:
    """Return whether a model or an optimizer lacks its attributes, as while it is being copied or unpickled."""
    if isinstance(value, torch.nn.Module):
        return not vars(value).keys() >= {"_modules", "_parameters", "_buffers"}
    return isinstance(value, torch.optim.Optimizer) and not vars(value).keys() >= {"state", "param_groups"}


def _inside(value: Any) -> list[Any]:
    if isinstance(value, CONTAINERS):
        return list(islice(value.values() if isinstance(value, dict) else value, MOST_ITEMS))
    if isinstance(value, GeneratorType):
        return list(value.gi_frame.f_locals.values()) if value.gi_frame is not None else []
    if isinstance(value, CALLS):
        return _closed_over(value)
    return [] if isinstance(value, LEAVES) else [item for _, item in _fields(value)]


def _closed_over(value: Any) -> list[Any]:
    """Return what a callable keeps: arguments, its object, cached results, or a user function's cells and defaults."""
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
    except ValueError:  # the variable is not bound yet
        return False
    return True


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among the parts of a value."""
    return (part for part in parts(value) if isinstance(part, Tensor))
