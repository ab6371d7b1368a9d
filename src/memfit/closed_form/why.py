"""Explain a peak: for every share the formula with its numbers, and the tensors alive at that instant.

The sums are exact: the terms of a reason add up to its bytes, and the reasons add up to what nvidia-smi shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

from memfit.closed_form.layers.program import GRADIENT, INPUT, WAITING
from memfit.closed_form.run.account import Account, Instant
from memfit.closed_form.run.micro_step import Peak, PlacedProgram, PlacedSegment
from memfit.nouns.footprint import FIRST_BUCKETS, KEPT, PAGED, SLACK, WORKING, PhasePeak
from memfit.nouns.tape import Role
from memfit.tables.quantization import QUANTIZATIONS
from memfit.units import human

WIDTHS = {1: "8 bits", 2: "16 bits", 4: "32 bits", 8: "64 bits"}


@dataclass(frozen=True, slots=True)
class Summand:
    """One summand: '6,738,415,616 x 2 x 2 B'."""

    text: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Reason:
    """One share of the peak: a sentence about it, and terms that add up to its bytes."""

    role: Role
    label: str
    bytes: int
    words: str
    terms: tuple[Summand, ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """Equal tensors alive at one instant: `count` of them, `bytes` each."""

    where: str  # "block", "embedding" or "head"
    label: str
    role: Role
    bytes: int
    count: int
    per_token: bool  # the size grows with the tokens of a micro-batch

    @property
    def total(self) -> int:
        return self.bytes * self.count


@dataclass(frozen=True, slots=True)
class Why:
    """A peak explained, and the tensors behind it."""

    peak: PhasePeak
    reasons: tuple[Reason, ...]
    kept: tuple[Kept, ...]  # activations that the forward keeps for the backward
    working: tuple[Kept, ...]  # temporaries at the worst instant
    tokens: int
    blocks: int


def explain(account: Account, peak: PhasePeak) -> Why:
    """Explain one phase's peak, as `estimate` gave it for the same recipe and card."""
    worst = _instant_of(account, peak)
    reasons = [_static(account, *line) for line in worst.static]
    reasons += _moving(account, worst) if worst.peak else []
    reasons += _around(account, peak)
    until_loss = account.micro().until_loss
    forward = alive(account, Peak(0, until_loss, len(until_loss.steps), None))
    at_worst = alive(account, worst.peak) if worst.peak else ()
    return Why(
        peak, tuple(reasons), tuple(k for k in forward if k.role == "activations"),
        tuple(k for k in at_worst if k.role == "temporaries"), account.recipe.tokens, len(account.architecture.layers),
    )  # fmt: skip


def tensors_at(account: Account, peak: PhasePeak) -> tuple[Kept, ...]:
    """Return the activations, temporaries and gradients of blocks that are alive at a phase's worst instant."""
    worst = _instant_of(account, peak)
    return alive(account, worst.peak) if worst.peak else ()


def _instant_of(account: Account, peak: PhasePeak) -> Instant:
    """Return the instant of a phase's peak: of those with its name and its bytes the first."""
    found = chain(
        (i for i in account.instants() if i.phase == peak.phase),
        account.every_instant(peak.phase) if peak.phase in ("first_step", "step") else (),
    )
    tensors = peak.tensors - _first_buckets(peak)
    return next(i for i in found if i.name == peak.instant and i.requested == tensors)


def _first_buckets(peak: PhasePeak) -> int:
    return sum(line.bytes for line in peak.lines if line.label == FIRST_BUCKETS)


# ---- what stays on the card ----------------------------------------------------------------------------------------


def _static(account: Account, role: Role, label: str, size: int) -> Reason:
    words, terms = _FORMULAS[label](account) if label in _FORMULAS else (_WORDS.get(label, ""), [])
    if (gpus := _parts(account, label)) > 1:
        total = sum(t.bytes for t in terms)
        terms = [Summand(f"({' + '.join(t.text for t in terms)}) / {gpus}", total // gpus)]
        words += f", split over {gpus} GPUs"
    rest = size - sum(t.bytes for t in terms)
    if rest:
        terms = [*terms, Summand(_REST.get(label, "rounding") if terms else human(size), rest)]
    return Reason(role, label, size, words, tuple(terms))


def _parts(account: Account, label: str) -> int:
    """Return how many GPUs share a line."""
    levels = ("none", "optimizer", "gradients", "parameters")
    sharded = label in _SHARDED_FROM and levels.index(account.recipe.shard) >= levels.index(_SHARDED_FROM[label])
    return account.recipe.num_gpus if sharded else 1


Sentence = tuple[str, list[Summand]]
_WEIGHTS = ("base weights", "quantisation scales", "fp32 copies (k-bit preparation)", "adapter weights")
_SHARDED_FROM = {  # the value of `shard` from which on a line is sharded
    **dict.fromkeys(_WEIGHTS, "parameters"),
    "gradients": "gradients", "optimizer states": "optimizer", "fp32 master weights": "optimizer",
}  # fmt: skip
_REST = {"optimizer states": "scales, tables and counters", "base weights": "rounding of packed matrices"}


def _base(account: Account) -> Sentence:
    s, n = account.static, account.numerics
    row = QUANTIZATIONS.get(account.recipe.quantization) if s.quantised else None
    if row is None:
        return f"every weight in {WIDTHS[n.weight]}", [_product(s.parameters, n.weight)]
    rest = s.parameters - s.quantised
    words = f"matrices packed to {row.bits} bits each ({row.title}), embeddings, norms and head in {WIDTHS[n.weight]}"
    packed = Summand(f"{s.quantised:,} x {row.bits} / 8 B", s.quantised * row.bits // 8)
    return words, [packed, _product(rest, n.weight)]


def _scales(account: Account) -> Sentence:
    row = QUANTIZATIONS[account.recipe.quantization]
    by_block = f"one scale of {row.scale_bytes} B per {row.block} weights"
    per = by_block if row.block else f"{row.per_row} B per output row"
    return f"what makes packed weights readable: {per}, and tables", []


def _upcast(account: Account) -> Sentence:
    s, n = account.static, account.numerics
    words = "prepare_model_for_kbit_training makes everything that is not packed fp32"
    return words, [_product(s.parameters - s.quantised, n.other - n.weight)]


def _adapter(account: Account) -> Sentence:
    r, n = account.recipe, account.numerics
    named = {"all-linear": "every linear layer", "attention": "the attention projections"}
    where = named.get(r.lora_targets[0], ", ".join(r.lora_targets))
    words = f"rank {r.lora_rank}: two thin matrices beside {where} of every block, in {WIDTHS[n.adapter]}"
    return words, [_product(account.static.trained, n.adapter)]


def _master(account: Account) -> Sentence:
    terms = [_product(account.static.trained, account.numerics.master)]
    return "an fp32 copy of every trained weight, so that small updates are not rounded away", terms


def _gradients(account: Account) -> Sentence:
    n, full = account.numerics, account.recipe.method == "full"
    width = n.weight if full else n.adapter
    words = f"one number per trained weight, as wide as the weight ({width} B)"
    return words, [_product(account.static.trained, width)]


def _states(account: Account) -> Sentence:
    row, s, n = account.optimizer, account.static, account.numerics
    if row.factored:
        return f"{row.title} keeps one number per row and per column of each matrix, in fp32", []
    if row.rank_of:
        return f"{row.title} keeps its numbers in a space of rank {row.rank_of}, and the way into it", []
    many = f"{row.moments} number{'s' if row.moments != 1 else ''} per trained weight"
    if row.width is None:
        wide = 4 if n.master else n.weight if account.recipe.method == "full" else n.adapter
        words = f"{row.title} keeps {many}, each as wide as the weight it updates ({wide} B)"
        return words, [Summand(f"{s.trained:,} x {row.moments} x {wide} B", s.trained * row.moments * wide)]
    if row.paged:
        return f"{row.title} keeps {many}; those of large tensors are paged, in a row of their own", []
    words = f"{row.title} keeps {many}, {row.width:g} B each" + (f", and a scale per {row.block}" if row.block else "")
    wide32 = _kept_wide(account)
    few = s.trained - wide32
    terms = [Summand(f"{few:,} x {row.moments} x {row.width:g} B", int(few * row.moments * row.width))]
    if wide32:
        words += "; embeddings keep 32 bits"
        terms.append(Summand(f"{wide32:,} x {row.moments} x 4 B", wide32 * row.moments * 4))
    return words, terms


def _kept_wide(account: Account) -> int:
    """Return how many embedding elements keep 32-bit states under transformers' Trainer."""
    row = account.optimizer
    wide = account.trainer.embeddings_32bit and row.package == "bitsandbytes" and row.width == 1
    if not wide or account.recipe.method != "full":
        return 0
    return sum(w.numel for w in account.architecture.weights if w.kind == "embedding")


def _batch(account: Account) -> Sentence:
    tokens = account.recipe.tokens
    return "token ids, labels and mask of one micro-batch", [Summand(f"3 x {tokens:,} x 8 B", 3 * 8 * tokens)]


def _workspaces(account: Account) -> Sentence:
    words = "scratch memory cuBLAS keeps for each thread that multiplies: forward and backward"
    return words, [Summand(f"2 x {human(account.workspace)}", 2 * account.workspace)]


_FORMULAS: dict[str, Callable[[Account], Sentence]] = {
    "base weights": _base,
    "quantisation scales": _scales,
    "fp32 copies (k-bit preparation)": _upcast,
    "adapter weights": _adapter,
    "fp32 master weights": _master,
    "gradients": _gradients,
    "optimizer states": _states,
    "batch": _batch,
    "cuBLAS workspaces": _workspaces,
}
_WORDS = {  # of lines without a formula
    "communication buckets": "where gradients are gathered to be sent to the other GPUs",
    "gathered blocks": "blocks whose sharded weights exist whole while they compute, and what reduces their gradients",
    "optimizer step buffers": "temporaries of the optimizer's step",
    "weights being converted":
        "one weight on its way from the width it is read in to that it is kept in, or adapters before they have theirs",
    "whole weight before it is sharded": "the largest weight, sent whole to every card before each keeps its part",
    "whole weights before they are sharded": "weights read from the checkpoint whole, before each rank keeps its share",
    "weights being flattened, sharded or broadcast":
        "copies of the weights while DeepSpeed flattens or shards them, or DDP sends those of rank 0 to the others",
    "gathered for the state dict": "a sharded weight made whole to be saved",
    "a weight of the checkpoint, whole": "one saved weight at a time is whole on the first GPU before it is dealt out",
    "states as loaded, beside the live ones": "optimizer states read from the checkpoint straight onto each GPU",
    "states as they are loaded": "a resumed run keeps them wider than before, and paged ones on the card",
    "adapters loaded in fp32": "PEFT widens 16-bit adapters when it loads them again",
    "adapters of the file, before the states": "adapters read from the checkpoint, beside the live ones",
    "experts one by one for the checkpoint": "gate and up projections of all experts, copied out of joint tensors",
    "inputs kept by the graph of the step before": "a loop that keeps `loss` keeps what its graph still holds",
    "delta and merged weight":
        "the adapter multiplied out and scaled, and what it takes to add it to a quantised or decomposed weight",
    "replaced weights kept by the graph of the last step":
        "a loop that keeps `loss` keeps the 4-bit weights that its graph read",
}  # fmt: skip


def _product(count: int, width: int) -> Summand:
    return Summand(f"{count:,} x {width} B", count * width)


# ---- what a micro-step allocates -----------------------------------------------------------------------------------

_MOVING: dict[Role, tuple[str, str]] = {
    "activations": (KEPT, "results of the forward pass that the backward pass needs"),
    "temporaries": (WORKING, "inputs and outputs of what runs at this instant"),
    "gradients": ("gradients", "gradients of trained weights that exist at this instant"),
}


def _moving(account: Account, worst: Instant) -> list[Reason]:
    by_role: dict[Role, list[Kept]] = {}
    rest = worst.requested - sum(size for _, _, size in worst.static)
    for kept in alive(account, worst.peak) if worst.peak else ():
        by_role.setdefault(kept.role, []).append(kept)
        rest -= kept.total
    reasons = []
    for role, group in by_role.items():
        label, words = _MOVING[role]
        places: dict[str, int] = {}
        for kept in group:
            places[kept.where] = places.get(kept.where, 0) + kept.total
        terms = tuple(Summand(f"{place}s" if place == "block" else place, size) for place, size in places.items())
        reasons.append(Reason(role, label, sum(places.values()), words, terms))
    if rest:  # a block's output and the next block's input differ in width
        terms, words = (Summand(f"{rest:,} B", rest),), "counted in the peak, of no known tensor"
        reasons.append(Reason("temporaries", "not attributed", rest, words, terms))
    return reasons


def alive(account: Account, peak: Peak) -> tuple[Kept, ...]:
    """Return the tensors that exist at a peak beside weights and states, largest group first."""
    counts: dict[tuple[str, str, Role, int, bool], int] = {}
    for part, id, role in _living(peak):
        program = part.program
        where = "block" if part.index >= 0 else part.title
        label = "block input" if role == "activations" and id == program.output else program.labels[id]
        size = program.sizes[id]
        key = (where, label, role, account.meter.bytes(size), all(str(basis).startswith("T") for basis in size))
        counts[key] = counts.get(key, 0) + 1
    found = [Kept(*key[:4], count, key[4]) for key, count in counts.items() if key[3]]
    return tuple(sorted(found, key=lambda k: (-k.total, k.label)))


def _living(peak: Peak) -> Iterator[tuple[PlacedProgram, int, Role]]:
    """Replay the completed steps and the current one, and yield every tensor that is still allocated with its role.

    A block's output is allocated in the block and freed by the next one as its INPUT; gradients flow the other way.
    """
    live: dict[PlacedProgram, dict[int, Role]] = {}
    before: dict[PlacedProgram, PlacedProgram] = {}  # the part whose output is this part's input
    last: PlacedProgram | None = None
    for step, events, backward in _played(peak):
        part, program = step.part, step.part.program
        own = live.setdefault(part, {})
        if not backward and step.segment is program.forward:
            if last is not None:
                before[part] = last
                if program.roles.get(INPUT) == "activations" and last.program.output in live[last]:
                    live[last][last.program.output] = "activations"  # the next part keeps it for its backward
            last = part
        after = next((p for p, source in before.items() if source is part), None)
        for event in events:
            if event > 0:
                own[event] = program.roles[event]
            elif own.pop(-event, None) is None:
                carried = next((name for name, id in program.takes.items() if id == -event), None)
                if carried is not None:
                    for other in live:
                        if other.index == part.index or not carried.startswith(WAITING):
                            live[other].pop(other.program.hands.get(carried, 0), None)
                    continue
                giver = after if -event == _gradient_of(part) else before.get(part)
                if giver is not None:
                    handed = giver.program.input_gradient if giver is after else giver.program.output
                    live[giver].pop(handed, None)
    for part, roles in live.items():
        for id, role in roles.items():
            yield part, id, role


def _gradient_of(part: PlacedProgram) -> int:
    """Return the id of the gradient that a part receives; the embedding's is 1, because it has no input."""
    return 1 if part.title == "embedding" else GRADIENT


def _played(peak: Peak) -> Iterator[tuple[PlacedSegment, tuple[int, ...], bool]]:
    """Yield (step, its events up to the peak, whether it is a backward) in order of time."""
    for step in peak.steps:
        yield step, step.segment.events, step.segment is step.part.program.backward
    if peak.step is not None and peak.event is not None:
        segment = peak.step.segment
        yield peak.step, segment.events[: peak.event + 1], segment is peak.step.part.program.backward


# ---- what surrounds the tensors ------------------------------------------------------------------------------------


def _around(account: Account, peak: PhasePeak) -> list[Reason]:
    levels = peak.levels
    context = account.gpu.context_bytes
    other = {line.label: line.bytes for line in peak.lines if line.role == "fragmentation" and line.label != SLACK}
    slack = levels.reserved - peak.tensors - sum(other.values())
    first = _first_buckets(peak)
    rows: list[tuple[Role, str, int, str, list[Summand]]] = [
        ("temporaries", FIRST_BUCKETS, first, "made with the model, and kept beside those of the second step while "
         "NCCL's watchdog holds them", [Summand(human(first), first)]),
        ("fragmentation", SLACK, slack,
         f"held by PyTorch's allocator beyond the tensors: reserved - requested{' - the next' * bool(other)}",
         [Summand(f"{' - '.join(f'{size:,}' for size in (levels.reserved, peak.tensors, *other.values()))} B", slack)]),
        *(("fragmentation", label, size, "held by the allocator for another instant than this one",
           [Summand(human(size), size)]) for label, size in other.items()),
        ("context", "CUDA context", context, f"the driver and loaded kernels of one process on {account.gpu.name}",
         [Summand(human(context), context)]),
        ("context", "NCCL buffers", levels.device - levels.reserved - context - peak.paged,
         "what the GPUs talk through", [Summand(human(account.share.nccl), account.share.nccl)]),
        ("context", PAGED, peak.paged, "states of large tensors in managed memory, which moves to the host when the "
         "card is full: no verdict counts it", [Summand(human(peak.paged), peak.paged)]),
    ]  # fmt: skip
    return [Reason(role, label, size, words, tuple(terms)) for role, label, size, words, terms in rows if size]
