"""What the view Learn teaches about one run: rules of thumb beside memfit's own account, techniques, and cards."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from memfit.closed_form.rule_of_thumb import attention_scores, checkpointed_activations, static_lines
from memfit.closed_form.run.account import Account
from memfit.closed_form.run.estimate import estimate
from memfit.closed_form.why import Why, explain
from memfit.errors import MemfitError
from memfit.nouns.architecture import Architecture
from memfit.nouns.footprint import Footprint
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Job, Precision, Recipe
from memfit.nouns.plan import Alternative, Judgement, Rung
from memfit.nouns.tape import Role
from memfit.planner.hardware import on_each
from memfit.planner.ladder import techniques
from memfit.tables.optimizers import OPTIMIZERS
from memfit.tables.quantization import QUANTIZATIONS

HALF, SINGLE = 2, 4  # bytes of a 16-bit and of a 32-bit number


@dataclass(frozen=True, slots=True)
class RoleSum:
    """One line of the mental calculator, in bytes: the rule of thumb, and what memfit counts."""

    role: Role
    rule: int
    words: str  # the multiplication
    whole: int  # all that the run keeps on the card
    at_peak: int  # what of it exists at the worst instant


@dataclass(frozen=True, slots=True)
class WidthRow:
    """Bytes per weight of one way to store or train all weights, by part, and together in bytes."""

    name: str
    parts: tuple[tuple[str, float], ...]
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """Everything that the view shows of one run. Sizes are bytes."""

    job: Job
    recipe: Recipe
    footprint: Footprint
    judgement: Judgement
    sums: tuple[RoleSum, ...]
    precisions: tuple[WidthRow, ...]
    optimizers: tuple[WidthRow, ...]
    stored: tuple[WidthRow, ...]
    read: tuple[WidthRow, ...]  # the figures of articles
    trained: int  # weights that get a gradient
    kept: int  # by one forward pass for its backward pass
    kept_without: int  # the same without checkpointing
    kept_with: int  # the same with full checkpointing
    rule: int  # what checkpointing keeps by the rule of thumb
    scores: int  # of one layer of eager attention; 0: the model has none
    logits: int  # in 16 bits, of one micro-batch; 0: the model has none
    standing: int  # weights and optimizer states
    expandable: int  # the reserved peak with expandable segments; 0: the card has none
    grows: Role  # the role that a doubled micro-batch makes grow most
    rungs: tuple[Rung, ...]
    cards: tuple[tuple[Gpu, Alternative | None], ...]

    @property
    def architecture(self) -> Architecture:
        """Return the model."""
        return self.job.architecture


def lesson_of(
    job: Job, base: Recipe, recipe: Recipe, footprint: Footprint, judgement: Judgement, cards: Iterable[Gpu]
) -> Lesson:
    """Return the lesson of a run. base: the recipe that the techniques start from; footprint: of `recipe`.

    Raises MemfitError where no technique is possible.
    """
    a, account = job.architecture, Account(job.architecture, recipe, job.gpu)
    resident: dict[Role, int] = {}
    for role, _, size in account.resident(states=True, gradients=True):
        resident[role] = resident.get(role, 0) + size
    trained = account.static.trained
    kept = _kept(a, recipe, job.gpu)
    rule = checkpointed_activations(a, recipe.micro_batch, recipe.sequence_length)
    logits = a.vocabulary * recipe.tokens_each * HALF
    return Lesson(
        job=job, recipe=recipe, footprint=footprint, judgement=judgement, trained=trained,
        sums=_sums(a, recipe, footprint, resident | {"activations": kept}, trained, rule, logits),
        precisions=_precisions(a.parameters), optimizers=_optimizers(a), stored=_stored(a), read=_read(),
        kept=kept, kept_without=_kept(a, recipe.but(checkpointing="none"), job.gpu),
        kept_with=_kept(a, recipe.but(checkpointing="full"), job.gpu), rule=rule, scores=_scores(a, recipe),
        logits=logits, standing=resident.get("parameters", 0) + resident.get("optimizer_states", 0),
        expandable=_expandable(a, recipe, job.gpu), grows=_grows(a, recipe, job.gpu),
        rungs=techniques(job, base), cards=on_each(job, base, cards),
    )  # fmt: skip


def _kept(a: Architecture, recipe: Recipe, gpu: Gpu) -> int:
    """Return the bytes that one forward pass keeps for its backward pass."""
    explained = _explained(a, recipe, gpu)
    return sum(k.total for k in explained.kept) if explained else 0


def _explained(a: Architecture, recipe: Recipe, gpu: Gpu) -> Why | None:
    with suppress(MemfitError, StopIteration):  # a peak that no single instant explains
        return explain(Account(a, recipe, gpu), estimate(a, recipe, gpu, replay=False).peak)
    return None


def _scores(a: Architecture, recipe: Recipe) -> int:
    with suppress(MemfitError, StopIteration, IndexError):  # a first layer without attention
        return attention_scores(a, recipe.micro_batch, recipe.sequence_length)
    return 0


def _expandable(a: Architecture, recipe: Recipe, gpu: Gpu) -> int:
    with suppress(MemfitError):
        return estimate(a, recipe.but(alloc_conf="expandable_segments:True"), gpu).peak.levels.reserved
    return 0


def _grows(a: Architecture, recipe: Recipe, gpu: Gpu) -> Role:
    """Return the role whose bytes at the peak grow most with a doubled micro-batch."""
    once, twice = (
        estimate(a, recipe.but(micro_batch=recipe.micro_batch * times), gpu, replay=False).peak.by_role
        for times in (1, 2)
    )
    tensors: tuple[Role, ...] = ("parameters", "gradients", "optimizer_states", "activations", "temporaries")
    return max(tensors, key=lambda role: twice.get(role, 0) - once.get(role, 0))


# ---- the mental calculator -----------------------------------------------------------------------------------------


def _sums(
    a: Architecture, recipe: Recipe, footprint: Footprint, whole: dict[Role, int], trained: int, rule: int, logits: int
) -> tuple[RoleSum, ...]:
    """Return a line for each role."""
    adapters = 0 if recipe.method == "full" else trained
    rules: dict[Role, list[tuple[str, int]]] = {}
    for line in static_lines(a.parameters, recipe, adapters):
        rules.setdefault(line.role, []).append((line.formula, line.bytes))
    batch = f"{recipe.micro_batch:,} x {recipe.sequence_length:,} tokens"
    rules["activations"] = [(f"{batch} x {a.width:,} x {len(a.layers)} blocks x {HALF} B", rule)]
    if recipe.loss == "full" and logits:
        text = f"{batch} x {a.vocabulary:,} x ({HALF} + {SINGLE}) B of logits"
        rules["temporaries"] = [(text, logits * (HALF + SINGLE) // HALF)]
    peak = footprint.peak.by_role
    return tuple(
        RoleSum(
            role, sum(size for _, size in rules.get(role, ())), " + ".join(text for text, _ in rules.get(role, ())),
            whole.get(role, peak.get(role, 0)), peak.get(role, 0),
        )
        for role in ("parameters", "gradients", "optimizer_states", "activations", "temporaries", "workspace",
                     "fragmentation", "context")
    )  # fmt: skip


_PARTS = {
    "base weights": "weights", "gradients": "gradients", "fp32 master weights": "master copy",
    "optimizer states": "states", "block scales": "scales", "scales of the states": "scales",
    "adapter weights": "adapters",
}  # fmt: skip


def _row(name: str, parameters: int, recipe: Recipe, adapters: int = 0) -> WidthRow:
    """Return the bytes of `parameters` weights under a recipe, by the rule of thumb."""
    lines = static_lines(parameters, recipe, adapters, HALF)
    parts = tuple((_PARTS[line.label], line.bytes / parameters) for line in lines)
    return WidthRow(name, parts, sum(line.bytes for line in lines))


def _precisions(parameters: int) -> tuple[WidthRow, ...]:
    """Return what AdamW costs in each precision."""
    names: tuple[Precision, ...] = ("bf16", "bf16-master", "bf16-mixed", "fp16-mixed", "fp32")
    return tuple(_row(name, parameters, Recipe(precision=name)) for name in names)


_SHOWN = ("adamw", "adamw-32bit", "adamw-8bit", "paged-adamw-8bit", "adafactor", "lion", "sgd-momentum", "sgd")


def _optimizers(a: Architecture) -> tuple[WidthRow, ...]:
    """Return the states of all weights in 16 bits under each optimizer."""
    rows = []
    for key in _SHOWN:
        row = OPTIMIZERS[key]
        size = sum(sum(row.state_tensors(w, HALF)) for w in a.weights)
        rows.append(WidthRow(row.title, (("states", size / a.parameters),), size))
    return tuple(rows)


def _stored(a: Architecture) -> tuple[WidthRow, ...]:
    """Return the model's weights in each width; 4 and 8 bits are for the matrices of its blocks alone."""
    n = a.parameters
    rows = [WidthRow(name, (("weights", float(width)),), n * width) for name, width in (("fp32", 4), ("bf16, fp16", 2))]
    matrices = [w for layer in a.layers for w in layer.weights if w.kind == "linear"]
    wide = HALF * (n - sum(w.numel for w in matrices))
    for key in ("int8", "nf4", "nf4-double"):
        quantised = sum(QUANTIZATIONS[key].bytes(w.numel, w.shape[0]) for w in matrices)
        parts = (("weights", QUANTIZATIONS[key].bits / 8),)
        rows.append(WidthRow(key, parts, quantised + wide))
    return tuple(rows)


def _read() -> tuple[WidthRow, ...]:
    """Return the figures that articles quote, by the recipe that they mean."""
    bf16, master = Recipe(precision="bf16"), Recipe(precision="bf16-master")
    lora, qlora = Recipe(method="lora"), Recipe(method="qlora", quantization="nf4")
    return (
        _row("1 B, weights in bf16, AdamW states in fp32", 10**9, bf16.but(optimizer="adamw-32bit")),
        _row("4 B, everything in bf16", 4 * 10**9, bf16),
        _row("4 B, LoRA with 20 M adapter weights", 4 * 10**9, lora, 20 * 10**6),
        _row("7 B, bf16 with fp32 master weights", 7 * 10**9, master),
        _row("7 B, the same with an 8-bit optimizer", 7 * 10**9, master.but(optimizer="adamw-8bit")),
        _row("7 B, everything in fp32", 7 * 10**9, Recipe(precision="fp32")),
        _row("7 B, QLoRA with 20 M adapter weights", 7 * 10**9, qlora, 20 * 10**6),
    )
