"""Play a whole run on an allocator or onto a tape: weights loaded one by one, then optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, repeat
from typing import Any

from memfit.allocator.heap import EMPTY_CACHE, Heap
from memfit.closed_form.numerics import adapted, adapter_weights, seen
from memfit.closed_form.parallel.sharding import broadcast
from memfit.closed_form.run.account import GENERATION, Account
from memfit.closed_form.run.unroll import WORKSPACE, Gauge, Pass, TapeWriter, free_all, named
from memfit.closed_form.static import Static, Stored, arrival, in_groups
from memfit.errors import Unsupported
from memfit.nouns.alloc_settings import LATEST_TORCH
from memfit.nouns.job import Recipe
from memfit.nouns.tape import STEPS, Phase, Tape


def replayable(recipe: Recipe) -> bool:
    """Return whether every tensor of the run is known; for several cards and DeepSpeed only sums are."""
    return recipe.shard == "none" and recipe.num_gpus == 1 and not recipe.zero


def on_one_stream(recipe: Recipe) -> bool:
    """Return whether everything is on the default stream: a run on one card, or one of DDP's."""
    return recipe.shard == "none" and not recipe.zero


def clears_cache(account: Account) -> bool:
    """Return whether the cache is emptied after loading: Trainer.train begins with accelerate's free_memory."""
    return on_one_stream(account.recipe) and account.trainer.loop != "torch"


def played(account: Account, heap: Heap, gauge: Gauge | None = None) -> Iterator[Phase]:
    """Play load and STEPS optimizer steps on `heap`; yield each phase at its end."""
    static, recipe, malloc = account.static, account.recipe, named(heap)
    writer = heap if isinstance(heap, TapeWriter) else None
    heap.free(malloc(account.warmup, "temporaries", "cache warmed for the weights"))
    workspace = account.workspace * static.multiplies
    if writer:
        load(static.stored, heap, _owners(account), workspace=workspace, clears=account.prepared)
    else:
        heap.play_ops(_loading(static, workspace, account.prepared), [])
    yield "load"
    buckets: list[Any] = []
    if recipe.num_gpus > 1:  # DDP's reducer is built when the weights have been sent
        sent = None
        for size in broadcast(static):
            last, sent = sent, malloc(size, "temporaries", "weights as they are sent")
            heap.free(last)
        heap.free(sent)
        buckets = [malloc(size, "temporaries", "bucket of gradients") for size in account.buckets]
        yield "load"
    batch, inputs, kept = list[Any](), list[Any](), list[Any]()
    for number in range(STEPS):
        phase: Phase = "step" if number else "first_step"
        old: list[Any] = []  # NCCL's watchdog may hold the first buckets until gradients are reduced again
        if buckets and number == 1:  # made anew in the order in which gradients came
            old, buckets = buckets, [malloc(size, "temporaries", "bucket of gradients") for size in account.buckets]
        gradients: list[Any] = []
        micro_batches = (False, True) if recipe.accumulation > 1 and not account.released else (False,)
        if account.generation:
            if writer:
                writer.instant("generation")
            account.generation.play(heap, 0 if number or static.multiplies else account.workspace)
            if gauge:
                gauge.later = False
                gauge.after(GENERATION)
        for later in micro_batches:
            if writer:
                writer.instant(f"forward{', later micro-batch' if later else ''}")
            fresh = [malloc(size, "temporaries", "batch of token ids") for size in account.batch]
            if not later:  # all of a step are fetched at once
                every = [malloc(account.inputs, "temporaries", "inputs of a batch") for _ in range(recipe.accumulation)]
                free_all(heap, inputs)
                inputs = every
            free_all(heap, batch)
            batch = fresh
            if gauge:
                gauge.later = later
            one = Pass(heap, account.meter, account.micro(accumulating=later), gauge=gauge)
            one.multiplied = bool(account.generation) or static.multiplies
            one.keeps_graph, one.kept = account.trainer.keeps_loss, kept
            one.until_reduced = old if later == micro_batches[-1] else []
            one.run(account.workspace if phase == "first_step" and not later else 0)
            gradients += one.gradients
            kept = one.kept if one.keeps_graph else []
        if writer:
            writer.instant("optimizer step")
        if phase == "first_step" and writer:
            for group, owner in zip(static.state_tensors, _state_owners(account), strict=True):
                for place, size in enumerate(group, 1):
                    malloc(size, "optimizer_states", f"{owner} state {place}")
        elif phase == "first_step":
            heap.play_ops([*chain.from_iterable(static.state_tensors)], [])
        optimizer_step(static.step_groups, heap)
        if gauge:
            gauge.after(None)
        free_all(heap, gradients)
        yield phase


class _OpsWriter(Heap):
    """A heap that records its calls in the compact form of a tape."""

    def __init__(self) -> None:
        self.ops: list[int] = []
        self._count = 0

    def malloc(self, size: int) -> int:
        """Record an allocation and return its number, from 1; nothing happens for 0 bytes (number 0)."""
        if size <= 0:
            return 0
        self.ops.append(size)
        self._count += 1
        return self._count

    def free(self, block: int | None) -> None:
        """Record that an allocation is freed; 0 is none."""
        if block:
            self.ops.append(-block)

    def empty_cache(self) -> None:
        """Record a call of empty_cache()."""
        self.ops.append(EMPTY_CACHE)


@lru_cache(maxsize=64)
def _loading(static: Static, workspace: int, clears: bool) -> list[int]:
    """Return how weights are loaded, in the compact form of a tape: the same at every batch size and length."""
    writer = _OpsWriter()
    load(static.stored, writer, workspace=workspace, clears=clears)
    return writer.ops


def load(
    stored: Sequence[Stored], heap: Heap, owners: Sequence[str] = (), *, workspace: int = 0, clears: bool = False
) -> None:
    """Load weights one by one, each with what its conversion needs; replace some by wider copies; add what is `added`.

    The cache is cleared before more is added if `clears` is set. cuBLAS allocates `workspace` bytes when it makes the
    first of DoRA's magnitudes. Adapters that the trainer narrows are all wide before it does.
    """
    malloc = named(heap)
    narrow: list[tuple[int, Any, int, str]] = []
    adapters: list[tuple[Any, Stored, str]] = []
    every = list(zip(stored, chain(owners, repeat("")), strict=False))

    def made(item: Stored, owner: str) -> Any:
        passing = [malloc(size, "temporaries", f"{owner} on its way") for size in item.passing]
        blocks = [malloc(size, "parameters", owner) for size in item.stays]
        free_all(heap, passing)
        return blocks[0]

    for item, owner in every:
        if not item.added:
            block = made(item, owner)
            if item.widened:
                narrow.append((item.place, block, item.widened, owner))
    for _, block, size, owner in sorted(narrow, key=lambda copied: copied[0]):
        malloc(size, "parameters", owner)
        heap.free(block)
    if clears:
        heap.empty_cache()
    for item, owner in every:
        if item.added:
            if item.passing:
                malloc(workspace, "workspace", WORKSPACE)
                workspace = 0
            block = made(item, owner)
            if item.made:
                adapters.append((block, item, owner))
    for wide in (True, False):
        for at, (block, item, owner) in enumerate(adapters):
            adapters[at] = malloc(item.made if wide else item.stays[0], "parameters", owner), item, owner
            heap.free(block)


def optimizer_step(groups: Sequence[tuple[int, ...]], heap: Heap) -> None:
    """Play the temporaries of one optimizer step: the last of each group exists until the next group does."""
    malloc = named(heap)
    last = None
    for group in groups:
        *done, kept = [malloc(size, "temporaries", "optimizer step buffer") for size in group]
        free_all(heap, [last, *done])
        last = kept
    heap.free(last)


# ---- the tape ------------------------------------------------------------------------------------------------------


def recorded(account: Account) -> Tape:
    """Return the tape of a run on one card, saving and evaluation included, every tensor with its role and name.

    Raises Unsupported unless the run is `replayable`.
    """
    recipe, writer = account.recipe, TapeWriter()
    if not replayable(recipe):
        raise Unsupported(
            "no tape is written of DeepSpeed's runs and those of several cards: only their sums are known",
            hint="leave out --shard, --offload and --num-gpus, and take --precision bf16 or bf16-mixed",
        )
    writer.begin("load", "weights")
    for phase in played(account, writer):
        if phase == "load" and clears_cache(account):
            writer.empty_cache()
        if phase != "step":
            writer.begin("first_step" if phase == "load" else "step", "start")
    role, label, size = account.copied
    writer.begin("save", "saving a checkpoint")
    writer.free(writer.malloc(size, role, label))
    writer.begin("eval", "start")
    if account.generation:
        writer.instant("generation")
        account.generation.play(writer)
    else:
        writer.instant("forward")
        Pass(writer, account.meter, account.micro(train=False)).run(0)
    about = {"torch": ".".join(map(str, LATEST_TORCH)), "model": account.architecture.title}
    if recipe.alloc_conf:
        about["alloc_conf"] = recipe.alloc_conf
    return Tape(tuple(writer.events), "formula", about)


def _owners(account: Account) -> list[str]:
    """Return the names of the stored tensors, in the order they are loaded."""
    a, method = account.architecture, account.recipe.method
    names, trained = [name for name, _ in a.named], _trained(account)
    owners = [names[at] for at in arrival(a, method)] + ["buffer"] * len(a.buffers)
    return owners + ([] if method == "full" else trained) + [f"{name} (master)" for name in trained]


def _state_owners(account: Account) -> list[str]:
    """Return the names of the weights that optimizer states belong to, in the order the states are made."""
    trained, states = _trained(account), len(account.static.state_tensors)
    if account.recipe.method == "full":
        pairs = [(w, name) for name, w in account.architecture.named if not w.fixed]
        trained = [name for _, name in in_groups(pairs, account.trainer.decayed_first)]
    return (["optimizer tables"] * (states - len(trained)) + trained)[-states:] if states else []


def _trained(account: Account) -> list[str]:
    """Return the names of the weights a run trains, in the order they are stored."""
    r, a = account.recipe, account.architecture
    if r.method == "full":
        return [name for name, w in a.named if not w.fixed]
    targets = adapted(a, r.lora_targets)
    blocks = [(f"{module}.", layer.weights) for module, layer in zip(a.layer_names, a.layers, strict=True)]
    parts = [("", a.embedding), *blocks, ("", a.head), *(("", part) for part in seen(a))]
    magnitudes = account.numerics.magnitude > 0
    adapters = ((prefix, adapter_weights(weights, targets, r.lora_rank, magnitudes)) for prefix, weights in parts)
    return [prefix + w.name for prefix, weights in adapters for w in weights]
