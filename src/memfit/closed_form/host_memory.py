"""The host RAM a run needs on one node, line by line, and its verdict: what CPUs hold while the GPUs train.

Weights that are loaded in the dtype of their file are pages of that file: all processes of a node share them, and the
system takes them back when memory runs out, so they are not counted. Only copies are: weights loaded in another dtype,
experts that are stacked, whatever is offloaded, and state dicts on their way to the disk. Sources: transformers 5.23,
accelerate 1.15, safetensors 0.8, PyTorch 2.13, bitsandbytes 0.50 and DeepSpeed 0.19, as they are installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from memfit.closed_form.numerics import Numerics, numerics
from memfit.closed_form.parallel.share import part
from memfit.closed_form.static import Static, in_groups, static_of, trained_weights
from memfit.nouns.architecture import Architecture
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Recipe
from memfit.nouns.plan import HostJudgement, HostLine, HostNeed, HostPhase, HostVerdict, Judgement, beside
from memfit.nouns.zero_settings import ZeroSettings, parse_zero_conf
from memfit.tables.loading import loading_of
from memfit.tables.optimizers import PAGED_FROM, optimizer
from memfit.tables.precisions import Backend, backend
from memfit.tables.quantization import QUANTIZATIONS
from memfit.tables.trainers import Trainer, trainer
from memfit.units import GIB, MIB, human

CARDS_PER_NODE = 8  # cards of one machine where nothing else is said, as HGX and DGX machines have
# Anonymous and file bytes of a process that has imported torch 2.13+cu130, transformers 5.23, TRL, PEFT and datasets.
# Measured; range 0.5 to 0.9 GiB.
IMPORTED = 834 * MIB
# Bytes that the CUDA driver (0.1 to 1.7 GiB on an RTX 3090: pytorch#113326), cuBLAS, NCCL and the data loader take in a
# process. Assumed: 0.5 to 3 GiB.
DRIVER = 3 * GIB
PROCESS = IMPORTED + DRIVER
# The same on Apple, which has no NCCL, and whose buffers are in the card's context_bytes. Assumed: 0.2 to 1 GiB.
METAL = GIB // 2
# Bytes of a process of the DataLoader: the pages it inherits from the training process are copied as it touches them,
# because reading a Python object writes its reference count (pytorch#13246). Measured: 480 MiB can be inherited, 10 to
# 28 MiB of them were copied in the first 300 batches.
WORKER = 480 * MIB
FILE_WIDTH = 2  # bytes per element of a checkpoint on the Hub: bf16 or fp16
FILE = 50 * 10**9  # max_shard_size of save_pretrained, transformers 5.23: bytes of one file
STATE = 4  # bytes per element of DeepSpeedCPUAdam's states, master weights and gradients

Groups = tuple[tuple[int, ...], ...]  # elements of each trained weight, by group of the optimizer
TRANSFORMERS, ZERO, ZERO_3 = "transformers core_model_loading.py", "DeepSpeed stage_1_and_2.py", "DeepSpeed stage3.py"


def pinned(size: int) -> int:
    """Return the bytes of a pinned allocation: the next power of two, which PyTorch's pinned cache never gives back.

    Source: PyTorch 2.13 ATen/core/CachingHostAllocator.h, unless pinned_max_round_threshold_mb is set.
    """
    return 1 << (size - 1).bit_length() if size > 0 else 0


@dataclass(frozen=True, slots=True)
class _Run:
    """What the lines are computed from. `local`: processes of the node, which are the first of `world`."""

    architecture: Architecture
    recipe: Recipe
    kind: Backend
    trainer: Trainer
    widths: Numerics
    static: Static
    gpu: Gpu
    workers: int
    local: int

    @property
    def world(self) -> int:
        return self.recipe.num_gpus

    @property
    def sizes(self) -> ZeroSettings:
        return parse_zero_conf(self.recipe.zero_conf, self.architecture.width)

    @property
    def stage_3(self) -> bool:
        return self.kind == "deepspeed" and "parameters" in (self.recipe.shard, self.recipe.offload)

    @property
    def weights(self) -> int:
        """Return the bytes of all weights as they are stored, adapters and scales included."""
        return self.static.base + self.static.scales + self.static.adapter + self.static.saved


def needed(
    architecture: Architecture, recipe: Recipe, gpu: Gpu, *, workers: int = 0, per_node: int = CARDS_PER_NODE
) -> HostNeed:
    """Return the host RAM of the first node, in the phase of the run that needs most of it.

    `workers`: processes of the DataLoader for each card; `per_node`: cards of one machine.
    """
    profile = trainer(recipe.trainer)
    widths = numerics(recipe, profile)
    static = static_of(architecture, recipe, widths, optimizer(recipe.optimizer), profile)
    local = min(recipe.num_gpus, per_node)
    run = _Run(architecture, recipe, backend(recipe), profile, widths, static, gpu, workers, local)
    always = [line for line in _processes(run) if line.bytes]
    lasting = [line for line in (*_offloaded(run), *_kept(run), *_paged(run)) if line.bytes]
    phases: dict[HostPhase, list[HostLine]] = {
        "train": [*always, *lasting],
        "load": [*always, *(line for line in _loaded(run) if line.bytes)],
        "save": [*always, *lasting, _SAVED[run.kind](run)],
    }
    worst = max(phases, key=lambda phase: sum(line.bytes for line in phases[phase]))
    return HostNeed(worst, tuple(phases[worst]))


def with_host(
    judgement: Judgement, architecture: Architecture, recipe: Recipe, gpu: Gpu, *, given: int = 0, workers: int = 0
) -> Judgement:
    """Return the judgement of a recipe on a card with that of `given` bytes of host RAM; the worse verdict counts."""
    need = needed(architecture, recipe, gpu, workers=workers)
    return beside(judgement, judge_host(need, gpu, given, judgement.need + gpu.context_bytes))


def judge_host(need: HostNeed, gpu: Gpu, given: int, device: int) -> HostJudgement:
    """Compare a need with the host RAM that is given (0: none). `device`: bytes the run takes on the card.

    With unified memory both are taken from one pool, which is known from the card.
    """
    lines, total, given = need.lines, need.bytes, given or gpu.pool_bytes
    if gpu.pool_bytes:
        shown = HostLine("the GPU's share", device, human(device), "the footprint: reserved, context and libraries")
        lines, total = (shown, *lines), total + device
    verdict: HostVerdict = "not given" if not given else "fits" if total <= given else "misfit"
    return HostJudgement(verdict, total, given, need.phase, lines, shared=bool(gpu.pool_bytes))


def _each(run: _Run, label: str, size: int, formula: str, source: str) -> HostLine:
    """Return a line of `size` bytes in every process of the node."""
    return HostLine(label, run.local * size, f"{run.local} x {formula}" if run.local > 1 else formula, source)


# ---- always


def _processes(run: _Run) -> Iterator[HostLine]:
    launcher = run.kind != "plain"
    each = IMPORTED + METAL if run.gpu.platform == "mps" else PROCESS
    formula = f"{run.local} x {human(each)}" + (f" + {human(IMPORTED)} of the launcher" if launcher else "")
    size = run.local * each + launcher * IMPORTED
    yield HostLine("processes", size, formula, "imported libraries measured; driver assumed, 0.5 to 3 GiB")
    yield _each(
        run, "DataLoader workers", run.workers * WORKER, f"{run.workers} x {human(WORKER)}", "measured; pytorch#13246"
    )


# ---- while weights are loaded


def _loaded(run: _Run) -> Iterator[HostLine]:
    """Yield the copies made while weights are loaded, in each process that reads them to the host."""
    if run.kind == "deepspeed" and run.recipe.offload == "parameters":
        yield from _shards(run)
    if run.recipe.offloaded_by_fsdp:
        yield from _pinned_shards(run)
    if run.recipe.method == "qlora" and loading_of(run.recipe) == "host":
        yield from _quantised(run)
        return
    if _straight_to_card(run) or run.stage_3:  # ZeRO-3: rank 0 reads pages of the file, weight by weight
        return
    s, width = run.static, run.widths.weight
    if width > FILE_WIDTH:
        yield _each(run, "weights as loaded", s.base, f"{s.parameters:,} x {width} B", f"{TRANSFORMERS} (.to(dtype))")
    else:
        stacked = _stacked(run.architecture)
        yield _each(run, "stacked experts", stacked * width, f"{stacked:,} x {width} B", TRANSFORMERS)
    yield _each(run, "adapters", s.adapter + s.saved, human(s.adapter + s.saved), "peft")


QUANTISING = 16  # bytes per element while bitsandbytes 0.50 quantises a weight on the CPU: three fp32 copies, one int32


def _quantised(run: _Run) -> Iterator[HostLine]:
    """Yield the 4-bit weights that every process makes on the host, and the copies of the one being made."""
    s = run.static
    whole = s.base + s.scales
    yield _each(run, "weights quantised on the host", whole, human(whole), "transformers quantizer_bnb_4bit.py")
    linears = (w.numel for layer in run.architecture.kinds for w in layer.weights if w.kind == "linear")
    largest = max(linears, default=0)
    formula = f"{QUANTISING} B x {largest:,}"
    passing = 0 if run.recipe.offloaded_by_fsdp else QUANTISING * largest  # shards come later, and take more
    yield _each(run, "weight being quantised", passing, formula, "bitsandbytes backends/default/ops.py")


def _straight_to_card(run: _Run) -> bool:
    """Return whether weights are read onto the card: bitsandbytes always does, TRL and axolotl on one card."""
    return run.recipe.method == "qlora" or (run.kind == "plain" and run.trainer.name in ("trl", "axolotl"))


@lru_cache(maxsize=64)
def _stacked(a: Architecture) -> int:
    """Return the elements of experts that are read one by one and stacked into new tensors."""
    if a.stored_stacked:
        return 0
    return sum(w.numel for layer in a.layers for w in layer.weights if w.kind == "experts")


# ---- what is offloaded


def _offloaded(run: _Run) -> Iterator[HostLine]:
    """Yield what DeepSpeed keeps on the host: master weights, gradients, states, and weights with ZeRO-3."""
    if run.recipe.offload == "none":
        return
    if run.recipe.offloaded_by_fsdp:
        yield from _offloaded_by_fsdp(run)
        return
    groups = _groups_of(run)
    shares = [part(sum(group), run.world) for group in groups]
    p = sum(shares)
    states = _each(run, "optimizer states", 2 * STATE * p, f"2 x 4 B x {p:,}", "DeepSpeed cpu_adam.py")
    if run.stage_3:
        yield from _offloaded_stage_3(run, groups, shares)
        yield states
        return
    whole = f"power of two above each of {' + '.join(f'{x:,}' for x in shares)}"
    yield _each(run, "fp32 master weights", _rounded(shares, STATE), f"4 B x {whole}", ZERO)
    yield _each(run, "fp32 gradients", _rounded(shares, STATE), f"4 B x {whole}", ZERO)
    yield _each(run, "16-bit weights on their way back", _rounded(shares, 2), f"2 B x {whole}", ZERO)
    yield states
    largest = max((n for group in groups for n in group), default=0)
    yield _each(run, "buffer of the largest gradient", pinned(2 * largest), f"pinned 2 B x {largest:,}", ZERO)
    if run.recipe.accumulation > 1:
        total = _accumulated(groups, run.world, run.local)
        formula = "2 B x every weight of a share, each pinned alone"
        yield HostLine("gradients of earlier micro-batches", total, formula, f"{ZERO} (accumulated_grads_in_cpu)")


def _offloaded_by_fsdp(run: _Run) -> Iterator[HostLine]:
    """Yield FSDP2's shards, each pinned alone, and what is trained of them: gradients, and states of the CPU's step."""
    yield from _pinned_shards(run)
    s, trained = run.static, [n for group in _groups_of(run) for n in group]
    gradients = sum(pinned(part(n, run.world) * run.widths.adapter) for n in trained)
    formula = f"{run.widths.adapter} B x {s.trained:,} / {run.world}, each pinned alone"
    yield _each(run, "gradients of the adapters", gradients, formula, "torch _fsdp_collectives.py")
    states = part(s.states, run.world)
    yield _each(run, "optimizer states", states, human(states), "torch.optim on the CPU")


def _pinned_shards(run: _Run) -> Iterator[HostLine]:
    size = _pinned_payload(run.architecture, run.recipe.quantization, run.world, run.widths.weight)
    size += sum(pinned(part(n, run.world) * run.widths.adapter) for group in _groups_of(run) for n in group)
    formula = f"{human(run.static.base)} / {run.world}, each weight pinned alone"
    yield _each(run, "shards of the weights", size, formula, "torch _fsdp_param.py (CPUOffloadPolicy)")


@lru_cache(maxsize=256)
def _pinned_payload(a: Architecture, quantised: str, world: int, width: int) -> int:
    row, linears = QUANTIZATIONS[quantised], {id(w) for layer in a.kinds for w in layer.weights if w.kind == "linear"}
    sizes = (row.payload(w.numel) if id(w) in linears else w.numel * width for w in a.weights)
    return sum(pinned(part(size, world)) for size in sizes)


def _offloaded_stage_3(run: _Run, groups: Groups, shares: list[int]) -> Iterator[HostLine]:
    p = sum(shares)
    yield _each(run, "fp32 master weights", STATE * p, f"4 B x {p:,}", ZERO_3)
    gradients = sum(
        pinned(STATE * n) for group in groups for n in _sub_groups(group, run.world, run.sizes.sub_group_size)
    )
    yield _each(
        run, "fp32 gradients", gradients, f"4 B x {p:,}, pinned by sub-groups of {run.sizes.sub_group_size:,}", ZERO_3
    )
    flat = pinned(2 * p)
    yield _each(run, "16-bit gradients", flat, f"pinned 2 B x {p:,}", f"{ZERO_3} (grad_partitions_flat_buffer)")
    if run.recipe.offload == "parameters":
        yield from _shards(run)
        yield _each(run, "16-bit weights, flat", _rounded(shares, 2), f"pinned 2 B x {p:,}", ZERO_3)


def _shards(run: _Run) -> Iterator[HostLine]:
    """Yield the shards zero.Init pins one by one; those of trained weights stay in PyTorch's pinned cache, unused."""
    width = run.widths.weight
    size = _pinned_one_by_one(run.architecture, run.world, width, run.sizes.param_persistence_threshold)
    formula = f"{width} B x {run.static.parameters:,} / {run.world}, each weight pinned alone"
    yield _each(run, "weights as read by zero.Init", size, formula, "DeepSpeed partition_parameters.py")


@lru_cache(maxsize=256)
def _pinned_one_by_one(a: Architecture, world: int, width: int, persistent: int) -> int:
    return sum(pinned(part(w.numel, world) * width) for w in a.weights if w.numel > persistent)


def _rounded(shares: list[int], width: int) -> int:
    return sum(pinned(width * n) for n in shares)


def _groups_of(run: _Run) -> Groups:
    r, t = run.recipe, run.trainer
    return _groups(run.architecture, r.method, r.lora_rank, r.lora_targets, run.widths, t.decayed_first)


@lru_cache(maxsize=256)
def _groups(
    a: Architecture, method: str, rank: int, targets: tuple[str, ...], n: Numerics, decayed_first: bool
) -> Groups:
    """Return the elements of each trained weight, by group of the optimizer: with weight decay, and without."""
    trained = in_groups(trained_weights(a, method, rank, targets, n), decayed_first)
    if not decayed_first:
        return (tuple(w.numel for w, _ in trained),)
    plain = ("norm", "bias")
    groups = (tuple(w.numel for w, _ in trained if (w.kind in plain) == last) for last in (False, True))
    return tuple(group for group in groups if group)


def _sub_groups(group: tuple[int, ...], world: int, size: int) -> Iterator[int]:
    """Yield the elements of the sub-groups that ZeRO-3 steps at once: closed by the weight that fills them."""
    if (total := sum(part(n, world) for n in group)) <= size:
        yield total
        return
    filled = 0
    for n in group:
        filled += part(n, world)
        if filled >= size:
            yield filled
            filled = 0
    yield filled


def _accumulated(groups: Groups, world: int, local: int) -> int:
    """Return the bytes of the gradients kept between micro-batches: whole, by each rank with a part of the weight."""
    total = 0
    for group in groups:
        share = part(sum(group), world)
        for end, n in zip(accumulate(group), group, strict=True):
            ranks = min(-(-end // share), local) - min((end - n) // share, local)
            total += ranks * pinned(2 * n)
    return total


# ---- checkpoints of activations, and paged states


def _kept(run: _Run) -> Iterator[HostLine]:
    """Yield the inputs of all blocks that activation offloading keeps in pinned memory (torch's save_on_cpu)."""
    r = run.recipe
    if r.checkpointing != "offload" or run.gpu.unified:
        return
    width = run.widths.autocast or run.widths.residual if run.kind == "fsdp" else run.widths.residual
    size, blocks = r.tokens * run.architecture.width * width, len(run.architecture.layers)
    formula = f"{blocks} blocks x pinned {width} B x {r.tokens:,} x {run.architecture.width:,}"
    yield _each(run, "inputs of the blocks", blocks * pinned(size), formula, "transformers modeling_utils.py")


def _paged(run: _Run) -> Iterator[HostLine]:
    """Yield the states that bitsandbytes pages out: the card's verdict leaves them out, so the host must have room."""
    row = optimizer(run.recipe.optimizer)
    if not row.paged:
        return
    paged = sum(n for group in _groups_of(run) for n in group if n >= PAGED_FROM)
    size = int(row.moments * paged * (row.width or 0))
    yield _each(
        run, "paged optimizer states", size, f"{row.moments} x {row.width} B x {paged:,}", "bitsandbytes optimizer.py"
    )


# ---- while a checkpoint is written


def _saved_alone(run: _Run) -> HostLine:
    """Return the weights of one file: safetensors copies them to the host before it writes."""
    weights = run.static.base if run.recipe.method == "full" else run.static.adapter + run.static.saved
    size = min(weights, max(FILE, run.static.largest * run.widths.weight))
    formula = f"{human(weights)} in files of at most 50 GB"
    return HostLine("weights of a file on rank 0", size, formula, "safetensors torch.py (_to_ndarray)")


def _saved_fsdp(run: _Run) -> HostLine:
    """Return the full state dict that rank 0 gathers: of the model, or of the optimizer if that is larger."""
    states = run.static.states
    if states > run.weights:
        source = "accelerate fsdp_utils.py (save_fsdp_optimizer)"
        return HostLine("full state dict of the optimizer on rank 0", states, human(states), source)
    source = "accelerate accelerator.py (get_state_dict)"
    return HostLine("full state dict on rank 0", run.weights, human(run.weights), source)


def _saved_deepspeed(run: _Run) -> HostLine:
    """Return ZeRO-3's gathered weights on rank 0, without frozen ones; else the clone that every process makes."""
    if run.stage_3:
        size = run.static.base if run.recipe.method == "full" else run.static.adapter
        return HostLine("consolidated weights on rank 0", size, human(size), "DeepSpeed engine.py")
    source = "accelerate accelerator.py (get_state_dict)"
    return _each(run, "clone of the state dict", run.weights, human(run.weights), source)


_SAVED: dict[Backend, Callable[[_Run], HostLine]] = {
    "plain": _saved_alone, "ddp": _saved_alone, "fsdp": _saved_fsdp, "deepspeed": _saved_deepspeed,
}  # fmt: skip
