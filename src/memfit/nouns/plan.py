"""The noun Plan: verdict, chosen recipe, ladder, and refused candidates with reasons; and the rule for verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from memfit.nouns.footprint import Fit, Footprint
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Job, Recipe
from memfit.units import rough

Verdict = Literal["fits", "tight", "misfit", "not_judged"]
HostVerdict = Literal["fits", "misfit", "not given"]
HostPhase = Literal["load", "train", "save"]


@dataclass(frozen=True, slots=True)
class HostLine:
    """One named share of the host RAM of a node, with the formula it comes from."""

    label: str
    bytes: int
    formula: str
    source: str  # where the mechanism stands: a file of a library, or "measured" or "assumed" with the range


@dataclass(frozen=True, slots=True)
class HostNeed:
    """The host RAM of one node in the phase that needs most of it."""

    phase: HostPhase
    lines: tuple[HostLine, ...]

    @property
    def bytes(self) -> int:
        """Return the sum of the lines."""
        return sum(line.bytes for line in self.lines)


@dataclass(frozen=True, slots=True)
class HostJudgement:
    """The comparison of a run with the host RAM of a node: the second verdict. Sizes are bytes.

    With unified memory CPU and GPU share one pool: `given` is the pool, and `need` includes what the GPU needs.
    """

    verdict: HostVerdict
    need: int
    given: int  # 0: not given
    phase: HostPhase
    lines: tuple[HostLine, ...]
    shared: bool = False  # one pool for CPU and GPU

    @property
    def over(self) -> int:
        """Return the bytes beyond what is given; 0 where it fits or nothing is given."""
        return self.need - self.given if self.verdict == "misfit" else 0


@dataclass(frozen=True, slots=True)
class NotUnderstood:
    """A setting that can change memory and that memfit does not understand."""

    key: str  # as the file or the flag has it
    why: str  # what it changes
    adds: bool = False  # it can only add memory: what does not fit without it does not fit
    frees: bool = False  # it can only free memory: what fits without it fits
    value: str = ""  # what the file sets it to, if that is short


@dataclass(frozen=True, slots=True)
class Judgement:
    """The comparison of a footprint with a card, and of the run with the host RAM. Sizes are bytes.

    They are of what was understood.
    A run that fits the card and not the host is a misfit: `verdict` is the worse of the two.
    """

    verdict: Verdict
    usable: int  # bytes left for PyTorch's allocator: CUDA total - context - reserve
    # What the run needs on this card: its reserved peak, and NCCL's buffers where there are several GPUs. A full card
    # gives cached blocks back, so it is less than the run would take if the memory were there (`OnCard.unlimited`). If
    # the run does not fit, it is what it reserves with a band more, or, where that does not do either, without a limit.
    need: int
    band: int  # how far the prediction may be off, see docs/accuracy.md
    headroom: int  # usable - need; negative: bytes over. A full card has little, and a run that fits runs on less
    not_understood: tuple[NotUnderstood, ...] = ()  # why the verdict is not_judged
    host: HostJudgement | None = None  # None: not judged

    @property
    def on_less(self) -> bool:
        """Return whether a run fits a full card, whose headroom is below the band: it was replayed on a band less."""
        return self.verdict == "fits" and self.headroom < self.band

    @property
    def room(self) -> str:
        """Return what a run that fits leaves: '3.2 GiB headroom'; of a full card 'runs on 1.1 GiB less'."""
        return f"runs on {rough(self.band)} less" if self.on_less else f"{rough(self.headroom)} headroom"

    @property
    def host_over(self) -> int:
        """Return the bytes of host RAM that are missing; 0 where it suffices or is not known."""
        return self.host.over if self.host else 0

    @property
    def shortage(self) -> str:
        """Return what is missing: '3.2 GiB over', '113.4 GiB of host RAM over', or both; "" where nothing is."""
        pool = "shared memory" if self.host and self.host.shared else "host RAM"
        card = [f"{rough(-self.headroom)} over"] if self.headroom < 0 else []
        return ", ".join(card + ([f"{rough(self.host_over)} of {pool} over"] if self.host_over else []))


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder: the recipe so far, and what this step saves and costs in this run."""

    key: str  # row of planner/rungs.py: "checkpointing"
    title: str  # "+ activation checkpointing"
    recipe: Recipe
    footprint: Footprint
    judgement: Judgement
    saved: int  # bytes of reserved peak less than the rung before
    step_time: float  # relative to the first rung
    caveat: str = ""  # what it costs in quality
    why: str = ""  # "fits", "95.1 GiB over", "not needed"
    flags: dict[str, str] = field(default_factory=dict)  # framework -> the setting that turns it on


@dataclass(frozen=True, slots=True)
class Refusal:
    """A candidate that was not chosen, and the reason in words."""

    title: str
    recipe: Recipe
    over: int  # bytes over the card; 0 or less: it fits, but another recipe is better
    why: str


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another card (or number of them) for the same job."""

    gpu: str
    num_gpus: int
    recipe: Recipe
    judgement: Judgement
    price_per_hour: float | None  # of one card
    seconds_per_step: float  # roofline estimate of one optimizer step on that card

    @property
    def price_per_step(self) -> float | None:
        """Return USD of one optimizer step on all its cards; None where the price is not known."""
        if self.price_per_hour is None:
            return None
        return self.price_per_hour * self.num_gpus * self.seconds_per_step / 3600


@dataclass(frozen=True, slots=True)
class AllCards:
    """The best recipe on all cards of a job, where the plan uses fewer, and what would make it fit."""

    recipe: Recipe
    footprint: Footprint
    judgement: Judgement
    seconds_per_step: float  # roofline estimate of one optimizer step
    shorter: int = 0  # a shorter sequence length with which it fits; 0: it fits as it is, or with none that was tried
    larger: str = ""  # the smallest larger card on as many of which it fits; "": it fits as it is, or on none


@dataclass(frozen=True, slots=True)
class Duration:
    """How long a training on the user's data takes, by the roofline at the mean length of its batches."""

    sequences: int  # of one epoch: samples, or rows of packed samples
    mean_tokens: float  # of one sequence, padding included
    steps: int  # optimizer steps, of all epochs
    epochs: float
    seconds: float
    range: tuple[float, float]  # seconds, by the error of the roofline
    cost: float | None  # USD on all cards; None: the card has no price


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to a Job. `recipe` is the chosen one, or the closest when nothing fits."""

    job: Job
    recipe: Recipe
    footprint: Footprint
    judgement: Judgement
    ladder: tuple[Rung, ...]
    refused: tuple[Refusal, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    largest: dict[str, int] = field(default_factory=dict)  # "micro_batch", "sequence_length": what would still fit
    seconds_per_step: float = 0.0  # roofline estimate of one optimizer step
    step_time: float = 1.0  # of the chosen recipe, relative to the first rung
    notes: tuple[str, ...] = ()
    duration: Duration | None = None  # None: no data, it does not fit, or the card's speed is unknown
    prices_read: str = ""  # the day of the prices: "2026-11-21"
    all_cards: AllCards | None = None  # None: the recipe uses all cards of the job


# How far a prediction may be off. Source: docs/accuracy.md, mean error on published runs.
BAND_SHARE = 0.05
# The share of reserved memory that the allocator can free by returning cached blocks before it fails. Source: a
# recorded job that reserved 5.03 GiB ran on 4.875 GiB, not on 4.75, and with expandable segments on 4.5.
RECLAIM_SHARE = 0.10


# Releases of all cached blocks in one optimizer step with which a run still fits. Trainers offer one a step as a
# setting (transformers' torch_empty_cache_steps).
MOST_RETRIES = 1
# The share of a step's time that one release of all cached blocks costs: cudaFree waits for the device, and what was
# released is allocated again. Source: transformers 5.23, training_args.py, torch_empty_cache_steps: "about 10% slower
# performance" (huggingface/transformers#31372, one step a release). Range: "very slightly" (#28769) to this figure.
RETRY_TIME = 0.10


def judge(footprint: Footprint, gpu: Gpu, reserve: int = 0) -> Judgement:
    """Judge a footprint by its reserved peak and the card's usable bytes.

    The verdict is that of a replay at the card's capacity where one was made, else that of `verdict_of`.
    """
    levels, usable = footprint.peak.levels, gpu.usable_bytes(reserve)
    nccl = max(levels.device - levels.reserved - gpu.context_bytes - footprint.peak.paged, 0)
    need, card = levels.reserved + nccl, footprint.on_card
    if card and card.capacity == usable - nccl:
        return Judgement(card.verdict, usable, need, card.band, usable - need)
    tensors = max(p.levels.allocated for p in footprint.needed)
    return verdict_of((card.unlimited if card else levels.reserved) + nccl, tensors + nccl, usable)


def beside(judgement: Judgement, host: HostJudgement) -> Judgement:
    """Return the judgement with that of the host RAM: a misfit of either is a misfit."""
    return replace(judgement, host=host, verdict="misfit" if host.verdict == "misfit" else judgement.verdict)


def verdict_of(need: int, tensors: int, usable: int) -> Judgement:
    """Return the verdict on a peak of `need` reserved bytes, `tensors` of them allocated, without a replay.

    fits: a peak higher by BAND_SHARE would still fit.
    misfit: the tensors alone, lower by BAND_SHARE, or the reserved bytes, lower by RECLAIM_SHARE, are more than the
    card has, so that returning cached blocks cannot help.
    tight: anything between.
    """
    band = int(need * BAND_SHARE)
    verdict: Verdict = "tight"
    if need + band <= usable:
        verdict = "fits"
    elif max(tensors - int(tensors * BAND_SHARE), need - int(need * RECLAIM_SHARE)) > usable:
        verdict = "misfit"
    return Judgement(verdict, usable, need, band, usable - need)


def verdict_by_replay(capacity: int, band: int, retries_on: Callable[[int], int | None]) -> Fit:
    """Return the verdict of replays at and around a capacity.

    `retries_on` returns how often one optimizer step releases the cache on so many bytes; None where memory runs out.
    fits: it runs with a band less, and without more than MOST_RETRIES. misfit: it does not run with a band more.
    tight: anything between.
    """
    here = retries_on(capacity)
    if here is None:
        return "misfit" if retries_on(capacity + band) is None else "tight"
    return "fits" if here <= MOST_RETRIES and retries_on(capacity - band) is not None else "tight"


def withheld(judgement: Judgement, not_understood: Sequence[NotUnderstood]) -> Judgement:
    """Return the judgement without its verdict, if anything was not understood.

    A misfit stays a misfit if all of it can only add memory, and what fits still fits if all of it can only free some.
    """
    misfit, fits = judgement.verdict == "misfit", judgement.verdict == "fits"
    if all((misfit and x.adds) or (fits and x.frees) for x in not_understood):
        return judgement
    return replace(judgement, verdict="not_judged", not_understood=tuple(not_understood))


def withheld_rung(rung: Rung, not_understood: Sequence[NotUnderstood]) -> Rung:
    """Return a rung without its verdict, if anything was not understood."""
    judgement = withheld(rung.judgement, not_understood)
    return rung if judgement is rung.judgement else replace(rung, judgement=judgement, why="not judged")


def withheld_plan(plan: Plan, not_understood: Sequence[NotUnderstood]) -> Plan:
    """Return the plan without verdicts, cards and limits that rest on them, if anything was not understood."""
    if not not_understood:
        return plan
    judgement = withheld(plan.judgement, not_understood)
    ladder = tuple(withheld_rung(rung, not_understood) for rung in plan.ladder)
    return replace(plan, judgement=judgement, ladder=ladder, refused=(), alternatives=(), largest={}, all_cards=None)
