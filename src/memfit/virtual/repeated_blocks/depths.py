"""Deep models at the price of shallow ones: the depths at which a job is traced, and the tape of the whole unrolled from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.initialization import no_init_weights

from memfit.nouns.alloc_settings import torch_version
from memfit.nouns.tape import Tape
from memfit.virtual.device.rows import Row
from memfit.virtual.jobs.models import class_of, config_of
from memfit.virtual.jobs.setup import Setup
from memfit.virtual.repeated_blocks.folded import fold, rows_of, unfold
from memfit.virtual.repeated_blocks.unrolled import NotPeriodic, Order, in_order_of_birth, unroll

Traced = tuple[Tape, dict[str, int], list[Row]]  # and what had to be answered, and what DDP laid out by size
Block = tuple[Any, ...]

PERIODS = range(1, 9)  # of layers: attention full or sliding, every k-th block a mixture
WORTH = (
    1 / 2
)  # of the layers: where the shallow models have more of them together (Gemma 3: 36 of 62), the whole one takes less time
_DEPTH = "num_hidden_layers"
_POSITIONS = ("idx", "index", "layer_id")  # how attributes end that only say which layer this is
_PLAIN = (int, float, str, tuple, torch.dtype, type(None))


@dataclass(frozen=True, slots=True)
class Depths:
    """One job on three shallow models, each a period of blocks deeper than the one before, and on the whole."""

    setups: tuple[Setup, Setup, Setup]
    layers: tuple[int, int, int]
    whole: int
    blocks: str  # name of the list of blocks

    def __str__(self) -> str:
        *first, last = self.layers
        return f"{', '.join(map(str, first))} and {last} of {self.whole} layers traced, the rest unrolled"


def depths(setup: Setup) -> Depths | None:
    """None where blocks do not repeat, or too few do, or more than blocks decides what is allocated."""
    # partitions and buckets end within blocks; Inductor plans the buffers of all blocks at once
    if setup.deepspeed or setup.compile:
        return None
    with suppress(Exception):  # whatever a config that is cut short leads to, the whole one says what is wrong with it
        return _depths(setup)
    return None


def unrolled(plan: Depths, once: Callable[[Setup], Traced]) -> tuple[Tape, dict[str, int]] | None:
    """The job's trace from those at three depths: two make the tape, which then must be the third's at its depth."""
    try:
        runs = [once(setup) for setup in plan.setups]
    except Exception:  # the whole one says what is wrong
        return None
    # ties among free blocks follow the order of deaths
    arranged: Order = tuple if torch_version(torch.__version__) == (2, 12) else in_order_of_birth
    try:
        rows = rows_of([run[2] for run in runs], plan.layers, plan.whole)
        shallow, deep = (fold(run[0], run[2]) for run in runs[1:])
        found = unroll(shallow, deep, plan.layers[1:], plan.blocks, arranged)
        if unfold(found.tape(plan.layers[0]), runs[0][2], arranged).events != arranged(runs[0][0].events):
            return None
        periods = (plan.whole - plan.layers[1]) // (plan.layers[1] - plan.layers[0])
        asked = {name: _line([run[1].get(name, 0) for run in runs], periods) for name in runs[-1][1]}
        return unfold(found.tape(plan.whole), rows, arranged), asked
    except NotPeriodic:
        return None


def _line(counts: list[int], periods: int) -> int:
    """A count so many periods above the second of three depths."""
    least, shallow, deep = counts
    if deep - shallow != shallow - least:
        raise NotPeriodic("something is asked more often than once per block")
    return shallow + (deep - shallow) * periods


# --- what a model is made of ---


@dataclass(frozen=True, slots=True)
class _Anatomy:
    """A model without memory: what tells its blocks apart, one by one, and the elements of the weights besides."""

    blocks: tuple[Block, ...]
    others: dict[str, int]
    name: str
    lists: tuple[str, ...]  # what the config says of every block, by name


def _depths(setup: Setup) -> Depths | None:
    whole = _anatomy(setup)
    found = _repeated(whole.blocks)
    if not found:
        return None
    start, layers = found
    count = len(whole.blocks)
    setups = [_shortened(setup, start, count - n) for n in layers]
    made = [_anatomy(s, whole.lists) for s in setups]
    for n, cut in zip(layers, made, strict=True):
        if cut.blocks != whole.blocks[:start] + whole.blocks[start + count - n :] or cut.name != whole.name:
            return None
    period = layers[1] - layers[0]
    for name, elements in whole.others.items():
        one, two, three = (cut.others[name] for cut in made)
        if not two - one == three - two == (elements - three) * period / (count - layers[2]):
            return None
    return Depths(tuple(setups), layers, count, whole.name)  # type: ignore[arg-type]


def _repeated(blocks: tuple[Block, ...]) -> tuple[int, tuple[int, int, int]] | None:
    """Where blocks begin to repeat, and the depths that show it: with one, two and three periods of them.

    Two blocks where all are alike: one alone would be the first and the last at once.
    """
    found = []
    for period in PERIODS:
        start, same = _longest([a == b for a, b in zip(blocks, blocks[period:], strict=False)])
        rest = len(blocks) - (same + period) // period * period
        least = rest + (2 if period == 1 else period)
        layers = (least, least + period, least + 2 * period)
        if same >= period and layers[2] < len(blocks) and sum(layers) <= WORTH * len(blocks):
            found.append((sum(layers), start, layers))
    return min(found)[1:] if found else None


def _longest(same: list[bool]) -> tuple[int, int]:
    """The longest row of truths: where it begins, and its length."""
    best = (0, 0)
    begin = 0
    for i, true in enumerate([*same, False]):
        if true:
            continue
        if i - begin > best[1]:
            best = begin, i - begin
        begin = i + 1
    return best


def _anatomy(setup: Setup, lists: tuple[str, ...] | None = None) -> _Anatomy:
    """Of the model that a job will train. Raises ValueError where it has no list of blocks, or several."""
    config = config_of(setup)
    text = config.get_text_config()
    with torch.device("meta"), no_init_weights():
        model = class_of(config).from_config(config)
    count, said = text.num_hidden_layers, text.to_dict()
    ((path, blocks),) = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if lists is None:
        lists = tuple(k for k, v in said.items() if isinstance(v, list) and len(v) == count)
    looks = tuple((*(repr(said[k][i]) for k in lists), *_block(block)) for i, block in enumerate(blocks))
    weights = (*model.named_parameters(), *model.named_buffers())
    others = {name: t.numel() for name, t in weights if not name.startswith(f"{path}.")}
    return _Anatomy(looks, others, path.rpartition(".")[2], lists)


def _block(block: nn.Module) -> Iterator[Any]:
    """What tells a block from others: modules, what they were told, weights; not where it lies."""
    for name, module in block.named_modules():
        told = {k: v for k, v in vars(module).items() if isinstance(v, _PLAIN) and not k.endswith(_POSITIONS)}
        held = [
            (k, t.shape, t.dtype) for d in (module._parameters, module._buffers) for k, t in d.items() if t is not None
        ]
        yield name, type(module), tuple(told.items()), tuple(held)


def _shortened(setup: Setup, start: int, gone: int) -> Setup:
    """The same job on a model without `gone` blocks from `start` on."""
    config = config_of(setup).get_text_config()
    names = {_DEPTH, type(config).attribute_map.get(_DEPTH, _DEPTH)}
    count = config.num_hidden_layers

    def cut(given: dict[str, Any]) -> dict[str, Any]:
        lists = {k: v[:start] + v[start + gone :] for k, v in given.items() if isinstance(v, list) and len(v) == count}
        return given | lists | dict.fromkeys(names & given.keys() or {_DEPTH}, count - gone)

    nested = setup.config.get("text_config")
    return replace(setup, config={**setup.config, "text_config": cut(nested)} if nested else cut(setup.config))
