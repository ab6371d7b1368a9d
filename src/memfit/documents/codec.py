"""Nouns to JSON and back: versioned documents whose shape is defined once, here, and checked when they are read.

Every size is a whole number of bytes, every time a number of seconds. A document names its kind and version in
`schema`; the version is raised when a key changes its meaning or is removed, not when one is added. docs/json.md
explains the keys, docs/schema.json is the JSON Schema made from these classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from memfit.allocator.capacity import Capacity, Slack
from memfit.allocator.replay import Timeline
from memfit.closed_form.why import Kept, Reason, Why
from memfit.documents import filled
from memfit.documents.check_doc import CheckDoc, DiffDoc
from memfit.documents.explain_doc import ExplainDoc
from memfit.documents.listings import DoctorDoc, ModelsDoc
from memfit.documents.sweep_doc import CellDoc, SweepDoc
from memfit.documents.watch_doc import CompareDoc, WatchedDoc
from memfit.errors import BadInput
from memfit.footprints.rank_peaks import RankPeak
from memfit.nouns.architecture import Architecture
from memfit.nouns.footprint import Footprint, Levels, OnCard, PhasePeak, Source
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import AS_USUAL, Job, Recipe, Samples, Training, check_training, check_values
from memfit.nouns.plan import (
    AllCards,
    Alternative,
    Duration,
    HostJudgement,
    Judgement,
    NotUnderstood,
    Plan,
    Refusal,
    Rung,
    Verdict,
)
from memfit.nouns.sample import Leak
from memfit.nouns.tape import Phase, Role, Tape
from memfit.nouns.task import PLAIN, Shape
from memfit.planner.good_for import GpuRow, Largest

T = TypeVar("T")
Bytes = Annotated[int, Meta(description="bytes")]


class GpuDoc(Struct, frozen=True, kw_only=True):
    """The card: its name and the bytes it has for tensors. `count` cards share the work."""

    name: str
    usable_bytes: Bytes
    short: str
    count: int
    total_bytes: Bytes
    context_bytes: Bytes


class Body(Struct, frozen=True, kw_only=True):
    """A recipe's footprint judged on a card: the part that an estimate, a plan and every rung of a ladder share."""

    recipe: Recipe
    source: Source
    peak: Levels
    peak_phase: Phase
    peak_instant: str
    by_role: dict[Role, int]
    phases: tuple[PhasePeak, ...]
    fits: Annotated[bool, Meta(description="the verdict is 'fits'; 'tight' is not")]
    verdict: Verdict
    usable: Bytes
    need: Annotated[int, Meta(description="bytes of the reserved peak, NCCL included, to compare with `usable`")]
    band: Annotated[
        int, Meta(description="bytes by which the prediction may be off; a fit by `on_card` runs on so many less")
    ]
    headroom: Annotated[int, Meta(description="usable - need, in bytes; negative: over")]
    not_understood: tuple[NotUnderstood, ...] = ()  # settings for which the verdict is not_judged
    host: Annotated[HostJudgement | None, Meta(description="the second verdict: host RAM of one node")] = None
    assumptions: tuple[str, ...]
    unknowns: tuple[str, ...]
    on_card: OnCard | None = None  # a replay at the card's own capacity


B = TypeVar("B", bound=Body)


class RungDoc(Body, frozen=True, kw_only=True):
    """One step of the ladder. `saved`: bytes less than the rung before; `step_time`: relative to the first rung."""

    key: str
    title: str
    saved: int
    step_time: float
    caveat: str
    why: str
    flags: dict[str, str]


class EstimateDoc(Body, frozen=True, kw_only=True):
    """`memfit estimate --json`."""

    schema: Literal["memfit.estimate/1"] = "memfit.estimate/1"
    model: str
    parameters: int
    gpu: GpuDoc
    why: tuple[Reason, ...] = ()  # with --why: the terms of each reason add up to it, the reasons to peak.device
    kept: tuple[Kept, ...] = ()  # with --why: the tensors the forward pass keeps for the backward pass
    working: tuple[Kept, ...] = ()  # with --why: the other tensors at the worst instant
    tensors: dict[Phase, tuple[Kept, ...]] = {}  # with --why: the tensors of modules at the worst instant of each phase


class TraceDoc(Body, frozen=True, kw_only=True):
    """`memfit trace --json`. `smallest` and `smallest_other` as in `memfit replay --json`."""

    schema: Literal["memfit.trace/1"] = "memfit.trace/1"
    model: str
    parameters: int
    gpu: GpuDoc
    retries: int
    smallest: Bytes
    smallest_other: Bytes
    slack: Slack


class AskedDoc(Struct, frozen=True, kw_only=True):
    """The job as the user asked for it. `wanted` holds the recipe fields that were named; the planner keeps them."""

    num_gpus: int
    sequence_length: int
    effective_batch: int
    method: Literal["auto", "full", "lora", "qlora"]
    trainer: str
    task: Annotated[str, Meta(description="what is trained: a value of --task")] = "sft"
    shape: Annotated[Shape, Meta(description="the size of one sample, apart from sequence_length")] = PLAIN
    wanted: dict[str, Any]
    reserve: Bytes
    host_memory: Annotated[int, Meta(description="bytes of host RAM of one node; 0: not given")] = 0
    workers: Annotated[int, Meta(description="DataLoader processes for each card")] = 0
    longest_sample: int | None
    truncated: Annotated[
        float | None, Meta(description="share of the samples that are longer than sequence_length")
    ] = None
    samples: Samples | None = None
    dataset: str
    training: Training = AS_USUAL


class ChosenDoc(Struct, frozen=True, kw_only=True):
    """The answer in short: its rung ("" when there is none) and the recipe."""

    rung: str
    title: str
    recipe: Recipe


class AllCardsDoc(Body, frozen=True, kw_only=True):
    """The best recipe on all cards of a job. `shorter`: a sequence length, and `larger`: a card, with which it fits."""

    seconds_per_step: float
    shorter: int
    larger: str


class PlanDoc(Body, frozen=True, kw_only=True):
    """`memfit plan --json`: the chosen recipe's footprint, and how it was found."""

    schema: Literal["memfit.plan/1"] = "memfit.plan/1"
    model: str
    parameters: int
    gpu: GpuDoc
    job: AskedDoc
    chosen: ChosenDoc
    ladder: tuple[RungDoc, ...]
    refused: tuple[Refusal, ...]
    alternatives: tuple[Alternative, ...]
    largest: dict[str, int]
    seconds_per_step: float
    step_time: Annotated[float, Meta(description="of the chosen recipe, relative to the first rung")] = 1.0
    notes: tuple[str, ...]
    duration: Duration | None = None  # of the training on the user's data
    prices_read: Annotated[str, Meta(description="the day of the prices")] = ""
    all_cards: AllCardsDoc | None = None  # where the chosen recipe uses fewer cards than the job has


class GpuRowDoc(Struct, frozen=True, kw_only=True):
    """One card of the catalogue and, by method, the largest model of the catalogue it trains."""

    gpu: Gpu
    usable_bytes: Bytes
    good_for: dict[str, Largest]


class GpusDoc(Struct, frozen=True, kw_only=True):
    """`memfit gpus --json`. `setting`: the batch, length and precision for which "good for" was computed."""

    schema: Literal["memfit.gpus/1"] = "memfit.gpus/1"
    setting: str
    prices_read: Annotated[str, Meta(description="the day of the prices")] = ""
    gpus: tuple[GpuRowDoc, ...]


class TechniquesDoc(Struct, frozen=True, kw_only=True):
    """`memfit techniques --json`."""

    schema: Literal["memfit.techniques/1"] = "memfit.techniques/1"
    model: str
    gpu: GpuDoc
    job: AskedDoc
    verdict: Verdict | None = None  # of the recipe that memfit plan chooses
    need: Annotated[int, Meta(description="bytes of that recipe's reserved peak, NCCL included")] = 0
    recipe: Recipe | None = None
    techniques: tuple[RungDoc, ...]
    left_out: tuple[str, ...] = ()  # techniques this kind of card cannot run, with the reason


class SpanDoc(Struct, frozen=True, kw_only=True):
    """One phase of a replayed tape: its peaks in bytes, and the instant that made the reserved one."""

    phase: Phase
    instant: str
    levels: Levels


class OomDoc(Struct, frozen=True, kw_only=True):
    """Where a replayed tape runs out of memory, in PyTorch's words. `event` counts from 0; sizes in bytes."""

    phase: Phase
    instant: str
    event: int
    requested: int
    tried: int
    device_free: int
    message: str


class RankDoc(Struct, frozen=True, kw_only=True):
    """One traced rank of a job: its peak in bytes, and the ranks of the job that do the same."""

    rank: int
    members: Annotated[tuple[int, ...], Meta(description="ranks that are taken to do the same, this one included")]
    position: Annotated[str, Meta(description="its place in the process groups of the job")]
    phase: Phase
    instant: str
    levels: Levels
    roles: Annotated[dict[Role, int], Meta(description="bytes by role, alive when the highest reserved level was made")]
    nccl: Annotated[int, Meta(description="bytes counted for NCCL's communicators, beside PyTorch's")]
    communicators: Annotated[tuple[tuple[str, int, int], ...], Meta(description="name, ranks and collectives of each")]
    headroom: int
    died: bool


class RoutingDoc(Struct, frozen=True, kw_only=True):
    """What a run needs on its card by how a router spreads its tokens over experts. Sizes are bytes."""

    share: Annotated[float, Meta(description="how many times the even share of tokens the experts of a rank got")]
    even: Annotated[int, Meta(description="what it needs where they get the even share")]
    uneven: Annotated[
        int | None, Meta(description="with `share`, by which the run is judged; null: it ran out of memory")
    ]


class ReplayDoc(Struct, frozen=True, kw_only=True):
    """`memfit replay --json`. `gpu`, `verdict`, `fits`, `usable` and `band` are null where no card was named."""

    schema: Literal["memfit.replay/1"] = "memfit.replay/1"
    source: Source
    about: dict[str, str]
    events: int
    gpu: Gpu | None
    torch: str
    alloc_conf: str
    peak: Levels
    phases: tuple[SpanDoc, ...]
    retries: int
    oom: OomDoc | None
    verdict: Verdict | None
    fits: bool | None
    usable: int | None
    band: int | None
    died: Annotated[
        bool, Meta(description="the run ended out of memory, so what it would have needed afterwards is unknown")
    ]
    smallest: Annotated[
        int, Meta(description="bytes of the smallest capacity it runs on (a lower bound if it died); 0: none")
    ]
    smallest_other: Annotated[int, Meta(description="the same with expandable segments switched the other way")]
    slack: Slack
    ending: Annotated[
        Literal["enough", "finished", "oom"] | None,
        Meta(description="how a traced script ended: stopped after enough steps, finished, or out of memory"),
    ] = None
    steps: Annotated[int | None, Meta(description="optimizer steps that a traced script took")] = None
    notes: Annotated[tuple[str, ...], Meta(description="assumptions of a traced script")] = ()
    leaks: Annotated[
        tuple[Leak, ...], Meta(description="what keeps growing from step to step of a traced script, and who keeps it")
    ] = ()
    not_understood: tuple[NotUnderstood, ...] = ()  # arguments of a launcher for which the verdict is not_judged
    ranks: Annotated[
        tuple[RankDoc, ...], Meta(description="the traced ranks of a job on several cards, the worst first")
    ] = ()
    routing: Annotated[RoutingDoc | None, Meta(description="null where nothing is routed, or --answer says how")] = None
    reproduced: Annotated[
        str | None, Meta(description="'' when the model took and returned every segment as recorded; null: no record")
    ]


DOCUMENTS: dict[str, type[Struct]] = {
    "memfit.estimate/1": EstimateDoc,
    "memfit.trace/1": TraceDoc,
    "memfit.plan/1": PlanDoc,
    "memfit.techniques/1": TechniquesDoc,
    "memfit.sweep/1": SweepDoc,
    "memfit.gpus/1": GpusDoc,
    "memfit.replay/1": ReplayDoc,
    "memfit.explain/1": ExplainDoc,
    "memfit.compare/1": CompareDoc,
    "memfit.watched/1": WatchedDoc,
    "memfit.check/1": CheckDoc,
    "memfit.diff/1": DiffDoc,
    "memfit.models/1": ModelsDoc,
    "memfit.doctor/1": DoctorDoc,
}
HEAD = ("schema", "model", "parameters", "gpu")  # keys that come first


# ---- nouns -> documents --------------------------------------------------------------------------------------------


def estimate_doc(
    architecture: Architecture, recipe: Recipe, gpu: Gpu, footprint: Footprint, judgement: Judgement,
    why: Why | None = None, tensors: Mapping[Phase, tuple[Kept, ...]] = MappingProxyType({}),
) -> EstimateDoc:  # fmt: skip
    """Make the document of one footprint on one card, with its reasons where `why` is given, and tensors by phase."""
    reasons = {"why": why.reasons, "kept": why.kept, "working": why.working} if why else {}
    card = gpu_doc(gpu, judgement.usable, recipe.num_gpus)
    about = {"model": architecture.name, "parameters": architecture.parameters, "gpu": card}
    return _judged(EstimateDoc, recipe, footprint, judgement, tensors=dict(tensors), **about, **reasons)


def trace_doc(architecture: Architecture, recipe: Recipe, gpu: Gpu, footprint: Footprint, answer: Capacity) -> TraceDoc:
    """Make the document of a traced recipe on one card."""
    judgement = answer.judgement
    assert judgement is not None
    return _judged(
        TraceDoc, recipe, footprint, judgement, answer, model=architecture.name, parameters=architecture.parameters,
        gpu=gpu_doc(gpu, judgement.usable, recipe.num_gpus), retries=answer.timeline.retries,
        smallest_other=answer.other,
    )  # fmt: skip


def plan_doc(plan: Plan) -> PlanDoc:
    """Make the document of a plan."""
    job = plan.job
    stands_on = plan.ladder[-1] if plan.ladder else None
    chosen = ChosenDoc(
        rung=stands_on.key if stands_on else "", title=stands_on.title if stands_on else "", recipe=plan.recipe
    )
    return _judged(
        PlanDoc, plan.recipe, plan.footprint, plan.judgement, plan, model=job.architecture.name,
        parameters=job.architecture.parameters, gpu=gpu_doc(job.gpu, plan.judgement.usable, plan.recipe.num_gpus),
        job=asked_doc(job), chosen=chosen, ladder=tuple(map(rung_doc, plan.ladder)), refused=plan.refused,
        all_cards=_of_noun(AllCardsDoc, plan.all_cards) if plan.all_cards else None,
    )  # fmt: skip


def techniques_doc(plan: Plan, rungs: tuple[Rung, ...], left_out: tuple[str, ...] = ()) -> TechniquesDoc:
    """Make the document of every technique for one run, and of what the plan chooses."""
    job = plan.job
    return filled(
        TechniquesDoc, plan.judgement, plan, model=job.architecture.name, job=asked_doc(job),
        gpu=gpu_doc(job.gpu, plan.judgement.usable, job.num_gpus), techniques=tuple(map(rung_doc, rungs)),
        left_out=left_out,
    )  # fmt: skip


def rung_doc(rung: Rung) -> RungDoc:
    """Make the document of one rung, with its whole footprint."""
    return _of_noun(RungDoc, rung)


def gpus_doc(rows: tuple[GpuRow, ...], setting: str, prices_read: str) -> GpusDoc:
    """Make the document of the catalogue of cards."""
    made = (GpuRowDoc(gpu=r.gpu, usable_bytes=r.gpu.usable_bytes(), good_for=dict(r.good_for)) for r in rows)
    return GpusDoc(setting=setting, prices_read=prices_read, gpus=tuple(made))


def replay_doc(
    tape: Tape, found: Capacity, gpu: Gpu | None, torch: str, alloc_conf: str, **of_script: Any
) -> ReplayDoc:
    """Make the document of a tape on a card, or on one without a limit; `of_script`: ending, steps and notes."""
    judgement, timeline = found.judgement, found.timeline
    phases = (
        SpanDoc(phase=phase, instant=timeline.peak_of(phase)[0].instant, levels=levels)
        for phase, levels in timeline.by_phase().items()
    )
    unjudged = {} if judgement else dict.fromkeys(("verdict", "usable", "band"))
    return filled(
        ReplayDoc, judgement, timeline, found, tape, events=len(tape.events), gpu=gpu, torch=torch,
        alloc_conf=alloc_conf, phases=tuple(phases), oom=_oom(timeline),
        fits=judgement.verdict == "fits" if judgement else None, smallest_other=found.other, **unjudged, **of_script,
    )  # fmt: skip


def rank_doc(peak: RankPeak) -> RankDoc:
    """Describe one traced rank."""
    return filled(RankDoc, peak, position=peak.what)


def _oom(timeline: Timeline) -> OomDoc | None:
    oom, span = timeline.oom, timeline.oom_span
    return filled(OomDoc, oom, span, event=timeline.oom_at or 0) if oom and span else None


def gpu_doc(gpu: Gpu, usable: int, count: int) -> GpuDoc:
    """Describe a card of which `usable` bytes are left for tensors."""
    return filled(GpuDoc, gpu, usable_bytes=usable, count=count)


def asked_doc(job: Job) -> AskedDoc:
    """Describe a job without its model and card, which the document names elsewhere."""
    return filled(AskedDoc, job, wanted=dict(job.wanted))


def _judged(
    shape: type[B], recipe: Recipe, footprint: Footprint, judgement: Judgement, *sources: object, **own: Any
) -> B:
    """Make a document of a recipe's footprint, judged on a card."""
    worst = footprint.peak
    return filled(
        shape, judgement, footprint, *sources, recipe=recipe, peak=worst.levels, peak_phase=worst.phase,
        peak_instant=worst.instant, by_role=worst.by_role, fits=judgement.verdict == "fits", **own,
    )  # fmt: skip


def _of_noun(shape: type[B], noun: Rung | AllCards) -> B:
    return _judged(shape, noun.recipe, noun.footprint, noun.judgement, noun)


# ---- documents -> text and back ------------------------------------------------------------------------------------


def plain(document: Struct) -> dict[str, Any]:
    """Return a document as dicts, lists, strings and numbers, `schema` first."""
    found: dict[str, Any] = msgspec.to_builtins(document)
    return {**{k: found[k] for k in HEAD if k in found}, **found}


def dumps(value: Any) -> str:
    """Return the indented JSON of a document, or of plain data."""
    data = plain(value) if isinstance(value, Struct) else value
    return msgspec.json.format(msgspec.json.encode(data), indent=2).decode()


def loads(text: str | bytes) -> Any:
    """Read a document of any known schema. Raises BadInput for broken JSON, an unknown schema or a wrong shape."""
    try:
        data = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise BadInput(f"not valid JSON: {error}", hint="give a file written by memfit --json") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if not isinstance(schema, str) or schema not in DOCUMENTS:
        known = ", ".join(DOCUMENTS)
        raise BadInput("the file is not a memfit document of a known schema", hint=f"this memfit reads {known}")
    return convert(data, DOCUMENTS[schema])


def convert(data: Any, shape: type[T]) -> T:
    """Convert plain data to `shape`, strictly typed; recipes are checked as on the command line."""
    try:
        found = msgspec.convert(data, shape, strict=True)
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        raise BadInput(f"the document is wrong: {error}", hint="docs/json.md explains every key") from None
    for recipe in _recipes(found):
        check_values(recipe)
    if isinstance(found, PlanDoc | TechniquesDoc):
        check_training(found.job.training)
    return found


def _recipes(found: Any) -> list[Recipe]:
    if isinstance(found, Recipe):
        return [found]
    all_cards = getattr(found, "all_cards", None)
    own = [
        body.recipe
        for body in (found, all_cards, *getattr(found, "cells", ()))
        if isinstance(body, Body | CellDoc | SweepDoc)
    ]
    return own + [rung.recipe for rung in getattr(found, "ladder", ()) or getattr(found, "techniques", ())]


def footprint_of(body: Body) -> Footprint:
    """Return the footprint of an estimate, plan or rung."""
    return filled(Footprint, body, refused=0)  # those of a footprint are bytes, those of a plan recipes


def schema_text() -> str:
    """Return docs/schema.json: the JSON Schema (2020-12) of all documents, whose `schema` keys select their shapes."""
    shapes, parts = msgspec.json.schema_components(DOCUMENTS.values(), ref_template="#/$defs/{name}")
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "memfit documents",
        "oneOf": list(shapes),
        "$defs": dict(sorted(parts.items())),
    }
    return msgspec.json.format(msgspec.json.encode(schema), indent=2).decode() + "\n"
