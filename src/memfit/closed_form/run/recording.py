"""The run a recipe makes as a Tape: the unrolled events with the name, role and moment of every tensor."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.closed_form.numerics import adapted, adapter_weights
from memfit.closed_form.run.account import Account
from memfit.closed_form.run.estimate import replayable, tape_of
from memfit.closed_form.run.micro_step import MicroStep, Step
from memfit.closed_form.static import arrival, in_groups
from memfit.errors import Unsupported
from memfit.nouns.alloc_settings import LATEST_TORCH
from memfit.nouns.architecture import Architecture
from memfit.nouns.tape import Alloc, EmptyCache, Event, Free, Mark, Role, Tape

Name = tuple[Role, str]
BATCH: Name = ("temporaries", "batch of token ids")
WARMUP: Name = ("temporaries", "cache warmed for the weights")
WORKSPACE: Name = ("workspace", "cuBLAS workspace")


def recorded(account: Account) -> Tape:
    """Load, first step and later step of a run on one card. Raises Unsupported where a run is not unrolled."""
    recipe = account.recipe
    if not replayable(recipe):
        raise Unsupported(
            "no tape is written of DeepSpeed's runs and those of several cards: only their sums are known",
            hint="leave out --shard, --offload and --num-gpus, and take --precision bf16 or bf16-mixed",
        )
    names = _names(account)
    events: list[Event] = []
    born = 0
    for phase, ops in tape_of(account):
        events.append(Mark(phase, "weights" if phase == "load" else "start"))
        for op in ops:
            if op < 0:
                events.append(Free(-op))
                continue
            while isinstance(named := next(names), str):
                events.append(Mark(phase, named))
            born += 1
            events.append(Alloc(born, op, *named))
        if phase == "load" and recipe.method == "qlora" and account.trainer.kbit_prepare:
            events.append(EmptyCache())  # peft: prepare_model_for_kbit_training clears the cache
    about = {"torch": ".".join(map(str, LATEST_TORCH)), "model": account.architecture.name}
    if recipe.alloc_conf:
        about["alloc_conf"] = recipe.alloc_conf
    return Tape(tuple(events), "formula", about)


def _names(account: Account) -> Iterator[Name | str]:
    """What `timeline` allocates, in its order: (role, label) of each tensor, and the name of an instant before its first."""
    static, recipe = account.static, account.recipe
    passes = 1 if account.released else recipe.accumulation
    yield from _load(account)
    for number in range(2):
        for micro in range(min(passes, 2)):
            yield f"forward{', later micro-batch' if micro else ''}"
            yield from (BATCH, BATCH, BATCH)
            fresh = account.workspace > 0 and number == 0 and micro == 0
            yield from _pass(account, account.micro(accumulating=bool(micro)), fresh)
        yield "optimizer step"
        if number == 0:
            trained = _trained(account)
            if recipe.method == "full":
                named = list(zip(account.architecture.weights, trained, strict=True))
                trained = [name for _, name in in_groups(named, account.trainer.decayed_first)]
            first = len(static.state_tensors) - len(trained)
            for at, group in enumerate(static.state_tensors):
                owner = trained[at - first] if at >= first else "optimizer tables"
                yield from (("optimizer_states", f"{owner} state {n + 1}") for n, size in enumerate(group) if size > 0)
        for group in static.step_groups:
            yield from (("temporaries", "optimizer step buffer") for size in group if size > 0)


def _load(account: Account) -> Iterator[Name]:
    if account.warmup:
        yield WARMUP
    names = _weights(account.architecture)
    weights = [names[at] for at in arrival(account.architecture, account.recipe.method)]
    trained = _trained(account)
    copies = [f"{name} (master)" for name in trained]
    owners = (
        weights
        + ["buffer"] * len(account.architecture.buffers)
        + ([] if account.recipe.method == "full" else trained)
        + copies
    )
    for owner, item in zip(owners, account.static.stored, strict=False):
        if item.passing > 0:
            yield "temporaries", f"{owner} on its way"
        yield from (("parameters", owner) for size in item.stays if size > 0)
    yield from (
        ("parameters", owner) for owner, item in zip(owners, account.static.stored, strict=False) if item.widened
    )


def _pass(account: Account, micro: MicroStep, workspace: bool) -> Iterator[Name | str]:
    due = workspace
    for step in micro.forward:
        if step.instant == "loss":
            yield "loss"
        yield from _segment(account, step, workspace=due)
        due = due and step.segment.product < 0
    for step in micro.exits:
        yield from _segment(account, step)
    due = workspace
    for step in micro.backward:
        yield step.instant
        yield from _segment(account, step, workspace=due)
        due = due and step.segment.product < 0


def _segment(account: Account, step: Step, *, workspace: bool = False) -> Iterator[Name]:
    program, title = step.part.program, step.part.title
    for event in step.segment.marked if workspace else step.segment.events:
        if event == 0:
            yield WORKSPACE
        if event > 0 and account.meter.bytes(program.sizes.get(event, {})) > 0:
            yield program.roles[event], f"{title}, {program.labels[event]}"


def _weights(architecture: Architecture) -> list[str]:
    """Names of the stored weights, in their order."""
    blocks = [(f"block {n}, ", layer.weights) for n, layer in enumerate(architecture.layers, 1)]
    parts = [
        ("", architecture.embedding),
        *blocks,
        ("", (*architecture.final, *architecture.head, *architecture.tower)),
    ]
    return [prefix + weight.name for prefix, weights in parts for weight in weights]


def _trained(account: Account) -> list[str]:
    """Names of the weights a run trains, in the order they are stored."""
    r, a = account.recipe, account.architecture
    if r.method == "full":
        return _weights(a)
    targets = adapted(a, r.lora_targets)
    blocks = [(f"block {n}, ", layer.weights) for n, layer in enumerate(a.layers, 1)]
    parts = [("", a.embedding), *blocks, ("", a.head)]
    return [prefix + w.name for prefix, weights in parts for w in adapter_weights(weights, targets, r.lora_rank)]
