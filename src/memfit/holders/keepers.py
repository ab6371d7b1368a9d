"""Name who keeps tensors that stay: the variable, the container or the graph, and the line that stores into it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from memfit.holders.bounds import Window, capacity, count, room
from memfit.holders.live_tensors import graph, graph_size, live_tensors, saved_by, storages
from memfit.holders.names import CACHE_OF, Name, Roots
from memfit.holders.objects import tensors as tensors_of
from memfit.holders.referrers import WIDEST, holders_of
from memfit.holders.source import is_carried, keeping_line
from memfit.nouns.sample import LeakHolder

MOST_HOLDERS = 5
NOBODY = ("", "")
NAMELESS = "tensors that no Python name leads to"
CYCLES = "reference cycles, freed only when Python's garbage collector runs"

Graphs = dict[tuple[str, str], tuple[Name, int]]


def alive(references: Iterable[weakref.ref[Tensor]]) -> list[Tensor]:
    """Return the tensors that still exist."""
    return [t for t in (ref() for ref in references) if t is not None]


def without(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that share no memory with `others`: a view of a weight is nothing new."""
    old = storages(others).keys()
    return [t for t in tensors if not storages([t]).keys() & old]


def named(
    kept: Sequence[Tensor], roots: Roots, steps: int, graphs: Sequence[LeakHolder] = (),
    windows: list[Window] | None = None,
) -> tuple[LeakHolder, ...]:  # fmt: skip
    """Group leaking tensors by the name that keeps them; those without a name belong to the graphs that grow.

    Containers with a bound, for which the card has room, are left out, and go into `windows`.
    """
    picked = list(kept)[:: max(-(-len(kept) // WIDEST), 1)]  # a sample: holders_of takes at most WIDEST
    found = holders_of(picked, roots)
    groups: dict[tuple[str, str], list[Tensor]] = {}
    for number, t in enumerate(picked):
        name = found.get(number)
        groups.setdefault(_key(name) if name else NOBODY, []).append(t)
    count = len(kept) / max(len(picked), 1) / steps  # tensors per step for each picked one
    share = sum(storages(kept).values()) / max(sum(storages(picked).values()), 1) / steps
    first = {_key(name): name for name in found.values()}
    nameless = groups.pop(NOBODY, [])
    holders, windows = [], [] if windows is None else windows
    for key, tensors in groups.items():
        nodes, saved = _behind(tensors, nameless)
        taken = set(map(id, saved))
        nameless = [t for t in nameless if id(t) not in taken]
        many, size = _amount([*tensors, *saved], count, share)
        where = keeping_line(first[key], roots.running)
        if (window := _window(first[key], where[0], _amount(tensors, count, share)[0], size)) is not None:
            windows.append(window)
        elif saved:
            holders.append(LeakHolder("graph", key[0], *where, max(round(nodes * count), 1), size))
        else:
            holders.append(LeakHolder(_kind(first[key]), key[0], *where, many, size))
    many, size = _amount(nameless, count, share)
    if nameless and not graphs:
        graphs = _saving(nameless, roots, steps)
        if graphs and graphs[0].name in {window.name for window in windows}:
            nameless, graphs = [], ()
    if graphs:
        holders += [replace(graphs[0], bytes=size), *graphs[1:]]
    elif nameless:
        holders.append(LeakHolder("unknown", NAMELESS, "", "", many, size))
    return tuple(sorted(holders, key=lambda h: -h.bytes)[:MOST_HOLDERS])


def _window(name: Name, place: str, many: int, size: int) -> Window | None:
    """Return the container behind a name if it has a bound that the card has room for. many: its own tensors per step;
    size: bytes that it keeps per step, those of graphs too.
    """
    bounded, left = room(name)
    if not bounded or left is None:
        return Window(name.path, place, size, None) if bounded else None
    box = next((box for box in name.boxes if capacity(box) is not None), max(name.boxes, key=count))
    inside = sum(1 for _ in tensors_of(box)) / max(count(box), 1)  # tensors of one item
    item = int(size / max(many / max(inside, 1), 1))
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
    return Window(name.path, place, item, left) if free is None or left * item <= free else None


def _behind(tensors: Sequence[Tensor], nameless: Sequence[Tensor]) -> tuple[int, list[Tensor]]:
    """Return how many nodes the graphs behind these tensors have, and which of the nameless tensors they saved."""
    nodes = list(graph(tensors)) if nameless else []
    saved = storages(t for node in nodes for t in saved_by(node)).keys()
    return len(nodes), [t for t in nameless if storages([t]).keys() & saved]


def _saving(nameless: Sequence[Tensor], roots: Roots, steps: int) -> Sequence[LeakHolder]:
    """Return the name, such as an optimizer's state, whose graph saved the most of these tensors, if any has one."""
    ids = storages(nameless).keys()
    ends = without([t for t in live_tensors() if t.grad_fn is not None], nameless)[-WIDEST:]  # the newest
    found = holders_of(ends, roots)
    nodes = {
        number: sum(1 for node in graph([ends[number]]) if storages(saved_by(node)).keys() & ids) for number in found
    }
    best = max(nodes, key=lambda number: nodes[number], default=None)
    if best is None or not nodes[best]:
        return ()
    # no line of the program stores a state by its name: the line that made the optimizer is shown
    optimizer = replace(found[best], path=found[best].path.partition(".state[")[0])
    where = keeping_line(optimizer, roots.running)
    return (LeakHolder("graph", found[best].path, *where, max(nodes[best] // steps, 1), 0),)


def enlarged(
    tensors: Sequence[Tensor], roots: Roots, gain: int, windows: list[Window] | None = None
) -> tuple[LeakHolder, ...]:
    """Return the names of tensors that each step makes anew and larger, of what lives on from step to step.

    A variable that no line makes from what it held before is this step's own: a longer batch, and what came of it.
    """
    found = holders_of(tensors, roots)
    lasting = [n for n, name in found.items() if _kind(name) == "container" or "." in name.path or is_carried(name)]
    holders = named([tensors[n] for n in lasting], roots, 1, windows=windows)
    total = sum(holder.bytes for holder in holders)
    return tuple(replace(holder, bytes=gain * holder.bytes // total) for holder in holders if total)


def _key(name: Name) -> tuple[str, str]:
    """Return the path and the file of a name, which distinguish it from others."""
    return name.path, name.places[0][0]


def _kind(name: Name) -> Literal["container", "variable"]:
    return "container" if "[" in name.path or name.path.startswith(CACHE_OF) else "variable"


def _amount(tensors: Sequence[Tensor], count: float, share: float) -> tuple[int, int]:
    """Return (tensors, bytes) per step that a group of picked tensors stands for."""
    return max(round(len(tensors) * count), 1), int(sum(storages(tensors).values()) * share)


def graphs_of(roots: Roots) -> Graphs:
    """Return the variables bound to a tensor with a graph behind it, and how many nodes that has."""
    return {
        _key(name): (name, graph_size(value))
        for name, value in roots.variables()
        if isinstance(value, Tensor) and value.grad_fn is not None
    }


def grown(before: Graphs, after: Graphs, steps: int) -> list[LeakHolder]:
    """Return the variables whose graph has grown by a node or more per step, largest first.

    Whatever a step computes from such a variable has that graph behind it too, so those that the program adds to or
    hands on to the next step go alone where there are any.
    """
    gains = [(found, nodes - before[key][1]) for key, (found, nodes) in after.items() if key in before]
    grew = [(found, gained) for found, gained in gains if gained >= steps]
    chosen = [(found, gained) for found, gained in grew if is_carried(found)] or grew
    holders = [LeakHolder("graph", found.path, *keeping_line(found), gained // steps, 0) for found, gained in chosen]
    return sorted(holders, key=lambda holder: -holder.count)
