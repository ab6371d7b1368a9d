"""Choose the shallow depths at which a job is traced, trace it there, and unroll the tape of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from memfit.nouns.alloc_settings import torch_version
from memfit.nouns.gpu import Gpu
from memfit.nouns.tape import Alloc, Event, Tape
from memfit.tables.pipelines import pipeline
from memfit.virtual.device.ledger import WARM_UP
from memfit.virtual.jobs.diffusion import made
from memfit.virtual.jobs.models import class_of, config_of, largest_warm_up, no_init_weights
from memfit.virtual.jobs.recipe import Setup
from memfit.virtual.repeated_blocks.unroll import NotPeriodic, in_order_of_birth, unroll

Traced = tuple[Tape, dict[str, int]]  # and how often each unknown value was read
PERIODS = range(1, 9)  # in layers: attention full or sliding, every k-th block a mixture of experts
# The largest share of the layers that the shallow models may have together. Above it (Gemma 3: 36 of 62), tracing the
# whole model takes less time.
WORTH = 1 / 2
_DEPTH = "num_hidden_layers"
_DENOISERS = ("num_single_dit_layers", "n_layers", "num_layers")  # the same of diffusers' transformers
_POSITIONS = ("idx", "index", "layer_id")  # endings of attributes that only number the layer
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
    """Return the depths to trace; None where too few blocks repeat, or allocations depend on more than blocks."""
    # DeepSpeed's partitions and DDP's buckets end within blocks; Inductor plans the buffers of all blocks at once;
    # groups of blocks under one checkpoint are no list of the model's.
    if setup.deepspeed or setup.compile or setup.interval > 1 or (setup.world_size > 1 and setup.shard == "none"):
        return None
    with suppress(Exception):  # a shortened config may be invalid; the trace of the whole model reports its own errors
        return _depths(setup)
    return None


def unrolled(plan: Depths, once: Callable[[Setup], Traced], gpu: Gpu) -> Traced | None:
    """Trace a job at three depths and unroll the deeper two, which must also reproduce the tape of the shallowest.

    Return None where they do not, or where a trace fails; then the whole model must be traced.
    """
    try:
        least, shallow, deep = (once(setup) for setup in plan.setups)
    except Exception:  # the trace of the whole model reports its own errors
        return None
    # torch 2.12 alone breaks ties among free blocks by the order of deaths, so there that order is left as it is
    arranged = tuple[Event, ...] if torch_version(torch.__version__) == (2, 12) else in_order_of_birth
    one, two, three = (replace(run[0], events=arranged(run[0].events)) for run in (least, shallow, deep))
    try:
        tape_of = unroll(two, three, plan.layers[1:], plan.blocks)
        if arranged(tape_of(plan.layers[0]).events) != one.events:
            return None
        whole = tape_of(plan.whole)
        periods = (plan.whole - plan.layers[1]) // (plan.layers[1] - plan.layers[0])
        reads = {name: _line([run[1].get(name, 0) for run in (least, shallow, deep)], periods) for name in deep[1]}
    except NotPeriodic:
        return None
    most = largest_warm_up(gpu)
    capped = (
        replace(e, size=min(e.size, most)) if isinstance(e, Alloc) and e.label == WARM_UP else e for e in whole.events
    )
    return replace(whole, events=arranged(capped)), reads


def _line(counts: list[int], periods: int) -> int:
    """Extrapolate a count to `periods` above the second of three depths. Raises NotPeriodic where it is not linear."""
    least, shallow, deep = counts
    if deep - shallow != shallow - least:
        raise NotPeriodic("a value is read more often than once per block")
    return shallow + (deep - shallow) * periods


# --- what a model is made of ---


@dataclass(frozen=True, slots=True)
class _Anatomy:
    """A model without memory: a description of each block, and the elements of the weights outside of blocks."""

    blocks: tuple[tuple[Any, ...], ...]
    outside: dict[str, int]
    path: str  # of the list of blocks
    lists: tuple[str, ...]  # names of the config's lists with one entry a block


def _depths(setup: Setup) -> Depths | None:
    whole = _anatomy(setup)
    found = _repeated(whole.blocks)
    if not found:
        return None
    start, layers = found
    count = len(whole.blocks)
    setups = [_shortened(setup, start, count - n) for n in layers]
    cuts = [_anatomy(s, whole) for s in setups]
    for n, cut in zip(layers, cuts, strict=True):
        if cut.blocks != whole.blocks[:start] + whole.blocks[start + count - n :]:
            return None
    period = layers[1] - layers[0]
    for name, elements in whole.outside.items():
        one, two, three = (cut.outside[name] for cut in cuts)
        if not two - one == three - two == (elements - three) * period / (count - layers[2]):
            return None
    return Depths(tuple(setups), layers, count, whole.path.rpartition(".")[2])  # type: ignore[arg-type]


def _repeated(blocks: tuple[tuple[Any, ...], ...]) -> tuple[int, tuple[int, int, int]] | None:
    """Return where blocks begin to repeat, and the three depths that show it with the fewest layers together.

    The least depth has one period of the repeated blocks, or two blocks where all are alike: a single one would be
    first and last at once.
    """
    found = []
    for period in PERIODS:
        start = same = run = 0  # the longest run of blocks equal to the one a period later
        for i, (block, later) in enumerate(zip(blocks, blocks[period:], strict=False)):
            run = run + 1 if block == later else 0
            if run > same:
                start, same = i + 1 - run, run
        rest = len(blocks) - (same + period) // period * period
        least = rest + (2 if period == 1 else period)
        layers = (least, least + period, least + 2 * period)
        if same >= period and layers[2] < len(blocks) and sum(layers) <= WORTH * len(blocks):
            found.append((sum(layers), start, layers))
    return min(found)[1:] if found else None


def _anatomy(setup: Setup, like: _Anatomy | None = None) -> _Anatomy:
    """Describe the model that a job will train, or a shallower one `like` it.

    Raises ValueError where it has no list of blocks, or several.
    """
    entries, depth, made = _built(setup)
    count = entries[depth]
    with torch.device("meta"), no_init_weights():
        model = made()
    found = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count}
    ((path, blocks),) = found.items() if like is None else [(like.path, found[like.path])]
    lists = like.lists if like else tuple(k for k, v in entries.items() if isinstance(v, list) and len(v) == count)
    described = tuple((*(repr(entries[k][i]) for k in lists), *_block(block)) for i, block in enumerate(blocks))
    weights = (*model.named_parameters(), *model.named_buffers())
    outside = {name: t.numel() for name, t in weights if not name.startswith(f"{path}.")}
    return _Anatomy(described, outside, path, lists)


def _built(setup: Setup) -> tuple[dict[str, Any], str, Callable[[], Any]]:
    """Return the config that numbers the blocks, its key for them, and what builds the model."""
    if (part := _denoiser(setup.config)) is not None:
        given = setup.config[part]
        return given, next(key for key in _DENOISERS if key in given), partial(made, given)
    config = config_of(setup)
    entries = config.get_text_config().to_dict() | {_DEPTH: config.get_text_config().num_hidden_layers}
    return entries, _DEPTH, partial(class_of(config, setup.task).from_config, config)


def _denoiser(config: dict[str, Any]) -> str | None:
    """Return the key of a pipeline's denoiser, None for a model of transformers."""
    return pipeline(config).denoiser if config.get("model_type") == "diffusers" else None


def _block(block: nn.Module) -> Iterator[Any]:
    """Describe a block by its modules, their settings and their weights, but not by its position."""
    for name, module in block.named_modules():
        settings = {k: v for k, v in vars(module).items() if isinstance(v, _PLAIN) and not k.endswith(_POSITIONS)}
        held = (*module._parameters.items(), *module._buffers.items())
        yield name, type(module), tuple(settings.items()), [(k, t.shape, t.dtype) for k, t in held if t is not None]


def _shortened(setup: Setup, start: int, gone: int) -> Setup:
    """Return the same job on a model without `gone` blocks from `start` on."""
    entries, depth, _ = _built(setup)
    count, part = entries[depth], _denoiser(setup.config)
    names = {depth} if part else {_DEPTH, type(config_of(setup).get_text_config()).attribute_map.get(_DEPTH, _DEPTH)}

    def cut(given: dict[str, Any]) -> dict[str, Any]:
        lists = {k: v[:start] + v[start + gone :] for k, v in given.items() if isinstance(v, list) and len(v) == count}
        return given | lists | dict.fromkeys(names & given.keys() or {_DEPTH}, count - gone)

    nested = part or ("text_config" if setup.config.get("text_config") else "")
    return replace(setup, config=setup.config | {nested: cut(setup.config[nested])} if nested else cut(setup.config))
