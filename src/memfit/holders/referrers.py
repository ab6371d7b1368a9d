"""Search from tensors up to the names that keep them, by Python's referrers: one walk over the heap per level."""

from __future__ import annotations

import functools
import gc
import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

from memfit.holders.bounds import capacity, is_box
from memfit.holders.names import CACHE_OF, ITEM, Name, Roots, file_of, key_text, own, variable

DEEPEST = 12  # links from a tensor up to a name, as for a list in the object of a hook of a nested layer
HOOKS = re.compile(r"\._\w*hooks")  # a module's dictionaries of hooks, into which no line stores by name
CELL = "[cell "  # begins the step from a function's closure to one of its variables
WIDEST = 48  # objects per level: the walk compares everything on the heap with each of them


class Link:
    """One object on the way up. `path` leads from it down to the tensors, whose numbers are `origins`.

    boxes: the containers on that way, the innermost first.
    """

    __slots__ = ("boxes", "node", "origins", "path")

    def __init__(self, node: Any, path: tuple[str, ...], origins: set[int], boxes: tuple[Any, ...] = ()) -> None:
        self.node, self.path, self.origins, self.boxes = node, path, origins, boxes

    @property
    def bounded(self) -> bool:
        """Whether a container on the way holds so many items at most."""
        return any(capacity(box) is not None for box in self.boxes)


def holders_of(things: Sequence[Any], roots: Roots) -> dict[int, Name]:
    """Return number -> the name that keeps a thing alive, by the shortest path, for those that have one."""
    level = [Link(thing, (), {number}) for number, thing in enumerate(things[:WIDEST])]
    found: dict[int, Name] = {}
    attributes: dict[int, Name] = {}  # attributes of the user's classes, for objects that no name leads to
    seen = {id(link.node): set(link.origins) for link in level}
    for _ in range(DEEPEST):
        open_links = [link for link in level if not _resolved(link, roots, found)][:WIDEST]
        for link in open_links:
            if (name := _attribute(link)) is not None:
                attributes.update(dict.fromkeys(link.origins - attributes.keys(), replace(name, boxes=link.boxes)))
        if not open_links:
            break
        below = {id(link.node): link for link in open_links}
        level = list(_above(below, seen, things))
    # the innermost class on the path is likelier to store there than the code that owns the root
    inside = {n: (*attributes[n].places, *name.places) for n, name in found.items() if n in attributes}
    return attributes | found | {number: replace(found[number], places=places) for number, places in inside.items()}


def _resolved(link: Link, roots: Roots, found: dict[int, Name]) -> bool:
    """Name the things that this object leads to if it has a name; return whether all of them are named now.

    A name that leads to a thing through no bounded container replaces one that does: the thing stays by the former.
    """
    name = _named(link, roots)
    unbounded = {n for n, known in found.items() if all(capacity(box) is None for box in known.boxes)}
    if name is not None:
        fresh = link.origins - (found.keys() if link.bounded else unbounded)
        found |= dict.fromkeys(fresh, replace(name, boxes=link.boxes))
    if link.bounded:
        return link.origins <= found.keys()
    return link.origins <= (unbounded | link.origins if name is not None else unbounded)


def _named(link: Link, roots: Roots) -> Name | None:
    node, steps = link.node, [step for step in link.path if step]
    path = _short("".join(steps))
    if isinstance(node, functools._lru_cache_wrapper):
        function = inspect.unwrap(node)
        return variable(f"{CACHE_OF}{function.__qualname__}()", function.__code__)
    if isinstance(node, FunctionType) and steps and steps[0].startswith(CELL):
        code, number = node.__code__, int(steps[0][len(CELL) : -1])
        if own(code.co_filename):  # the variable of a closure, whoever keeps the function
            return variable(code.co_freevars[number] + _short("".join(steps[1:])), code)
    known = roots.names.get(id(node))
    if known is not None and not HOOKS.search(path):
        return known.attribute(path[1:], type(node)) if path[:1] == "." else replace(known, path=known.path + path)
    if isinstance(node, ModuleType) and not HOOKS.search(path):  # of a library
        return Name(f"{node.__name__}{path}", ((getattr(node, "__file__", None) or "", 0, ""),))
    return None


def _attribute(link: Link) -> Name | None:
    """Return the attribute of an object of one of the program's classes, as `Class.attribute`."""
    kind, path = type(link.node), _short("".join(link.path))
    file = file_of(kind) if path.startswith(".") else ""
    return Name(f"{kind.__name__}{path}", ((file, 0, kind.__name__),)) if file else None


def _short(path: str) -> str:
    """Cut a path after its first item without a key, and write parameters as attributes of their module."""
    head, item, _ = path.partition("[...]")
    return re.sub(r"\._(?:parameters|modules|buffers)\['(\w+)'\]", r".\1", head) + item


def _above(below: dict[int, Link], seen: dict[int, set[int]], things: Sequence[Any]) -> Iterable[Link]:
    """Yield what refers to these objects, each with the path down to the tensors.

    An object is visited again for tensors that reach it later than others: an optimizer's states are keyed by
    parameters, which lead to the optimizer in fewer links than the states do.
    """
    nodes = [link.node for link in below.values()]
    for above in gc.get_referrers(*nodes):
        if above is nodes or above is things or isinstance(above, FrameType | Link):
            continue
        known = seen.setdefault(id(above), set())
        children = [below[id(child)] for child in gc.get_referents(above) if id(child) in below]
        children = [child for child in children if not child.origins <= known]
        if children:
            origins = set().union(*(child.origins for child in children)) - known
            known |= origins
            boxes = children[0].boxes
            if isinstance(nodes_above := children[0].node, dict) and _is_namespace(above, nodes_above):
                boxes = boxes[:-1]
            yield Link(above, _way(above, children[0]), origins, (*boxes, above) if is_box(above) else boxes)


def _way(above: Any, child: Link) -> tuple[str, ...]:
    """Return the path from `above` down to the tensors."""
    node, path = child.node, child.path
    if isinstance(node, dict) and _is_namespace(above, node):  # an item of __dict__ is an attribute
        name = path[0][2:-2] if path and path[0].startswith("['") else ""
        return (f".{name}", *path[1:]) if name else path
    if isinstance(above, dict):
        return (next((key_text(key) for key, value in list(above.items()) if value is node), ""), *path)
    if isinstance(above, tuple) and isinstance(node, CellType):
        return (f"{CELL}{next(n for n, cell in enumerate(above) if cell is node)}]", *path)
    if isinstance(above, list | tuple | set | frozenset) or type(above).__name__ == "deque":
        return (ITEM, *path)
    attributes = getattr(above, "__dict__", None)
    if isinstance(attributes, dict):
        return (next((f".{name}" for name, value in list(attributes.items()) if value is node), ""), *path)
    return path


def _is_namespace(above: Any, node: Any) -> bool:
    """Return whether `node` is the __dict__ of `above`."""
    if isinstance(above, type):
        return all(vars(above).get(key) is value for key, value in list(node.items())[:3])
    return getattr(above, "__dict__", None) is node
