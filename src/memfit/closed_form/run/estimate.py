"""Estimate a recipe on a card by the closed form, and by default replay it on the model of the allocator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from memfit.closed_form.numerics import attention_kernel, kernel_width
from memfit.closed_form.parallel.sharding import nccl_range
from memfit.closed_form.run.account import Account, AccountLine, Instant
from memfit.closed_form.run.played_run import PlayedPhase, on_card, play, playable
from memfit.closed_form.task_runs import drops
from memfit.nouns.alloc_settings import parse_alloc_conf
from memfit.nouns.architecture import Architecture
from memfit.nouns.footprint import (
    FIRST_BUCKETS,
    KEPT,
    OPTIONAL,
    PAGED,
    SLACK,
    WORKING,
    Footprint,
    Levels,
    Line,
    PhasePeak,
)
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Recipe, check_values
from memfit.nouns.tape import Phase, Role
from memfit.nouns.zero_settings import BUCKET_OF_DEEPSPEED, parse_zero_conf
from memfit.tables.cautions import cautions
from memfit.tables.quantization import CHECKPOINTS
from memfit.tables.tasks import TASKS
from memfit.tables.trainers import Trainer
from memfit.units import human

# Bytes the caching allocator reserves above the tensors when nothing is replayed, as a share of everything but weights
# and states. By: whether there is checkpointing, whose blocks of many sizes are reused less.
# Source: the medians of 95 recorded runs on PyTorch 2.13; range 0.00 to 0.62.
SLACK_SHARE = {False: 0.10, True: 0.25}
MOST_REPLAYED = 1 << 44  # bytes; the allocator's model of a device without a limit ends at four times that
# What published runs took beyond their prediction without a known reason, and for which recipes.
# Source: TRL's benchmark of April 2026, 8 to 32 H100, nvidia-smi (docs/accuracy.md, "Several cards"); GiB
TAKEN_BEYOND: tuple[tuple[Callable[[Recipe], bool], str], ...] = (
    (lambda r: r.context_parallel > 2 and not r.zero, "rings of 4 GPUs took 1.0 to 1.3 GiB more in published runs"),
    (lambda r: r.shard == "parameters" and r.zero and r.num_gpus > 8,
     "ZeRO-3 on several nodes took 3 to 7 GiB more in published runs"),
)  # fmt: skip
ROUNDING_SHARE = 0.002  # of the tensors: 512-byte rounding and unsplit remainders; range 0.0000 to 0.0149


def estimate(
    architecture: Architecture, recipe: Recipe, gpu: Gpu, *, replay: bool = True, padded: bool | None = None,
    profile: Trainer | None = None, reserve: int = 0, at_capacity: bool = True,
) -> Footprint:  # fmt: skip
    """Return the bytes of every phase of a run on a card, of which `reserve` bytes are kept free.

    replay: play the run's allocations on the allocator model, so that reserved bytes follow from block reuse (some 10
    to 100 ms); else they follow from SLACK_SHARE. at_capacity: where it could matter, replay once or twice more on the
    bytes that the card has. Without it `judge` never says fits where it would not with it. padded: batches hold
    padding, so the attention kernel gets a mask; by default where several samples are padded to the longest. Raises
    BadInput for values that no recipe can have, and Unsupported for models whose activations are not modelled.
    """
    downloaded = str(recipe.quantization) in CHECKPOINTS  # no choice of a run
    check_values(recipe.but(quantization="none") if downloaded else recipe)
    account = Account(architecture, recipe, gpu, padded, profile)
    instants = account.instants()
    worst: dict[Phase, Instant] = {}
    for instant in instants:
        if instant.phase not in worst or instant.requested > worst[instant.phase].requested:
            worst[instant.phase] = instant
    most = max(i.requested for i in instants)
    if replay and most < MOST_REPLAYED and playable(account):
        return _replayed(account, worst, reserve if at_capacity else None)
    held = {phase: reserved_of(account, instant) for phase, instant in worst.items()}
    for instant in instants:
        if instant.idle:  # with several streams, reserved and requested bytes may peak at different instants
            held[instant.phase] = max(held[instant.phase], reserved_of(account, instant))
    cached, begin = 0, ("load",) if account.caches_loading else ("load", "first_step")
    for phase in worst:  # the cache is never given back between phases
        cached = held[phase] = max(held[phase], cached if phase not in begin else 0)
    phases = tuple(
        _phase_peak(account, instant, instant, held[phase], _allocated(instant)) for phase, instant in worst.items()
    )
    return Footprint(phases, "formula", *_notes(account, exact=False))


def closed_form(account: Account) -> Instant:
    """Return the worst instant of training alone (no load, evaluation or saving), which searches compare."""
    found = [*account.passes("step", states=True), account.optimizer_step("step")]
    return max(found, key=lambda i: i.requested + i.idle)


def reserved_of(account: Account, instant: Instant) -> int:
    """Return the reserved bytes of an instant without a replay."""
    steady = sum(size for role, _, size in instant.static if role in ("parameters", "optimizer_states", "workspace"))
    moving = max(instant.requested - steady, 0)
    return (
        instant.requested
        + _first_buckets(account, instant)
        + instant.idle
        + int(ROUNDING_SHARE * instant.requested)
        + int(SLACK_SHARE[account.recipe.checkpointing != "none"] * moving)
    )


def _first_buckets(account: Account, instant: Instant) -> int:
    """Return the bytes of DDP's first buckets, which a step may hold beside its own (`FIRST_BUCKETS`)."""
    return account.share.buckets if instant.phase == "step" and not account.recipe.zero else 0


def _replayed(account: Account, worst: Mapping[Phase, Instant], reserve: int | None) -> Footprint:
    """Return the phases by a replay: without a limit, or on a card if it runs there or with a band more."""
    # blocks that may not be split serve tensors of about their size alone, and an evaluation has others
    unsplit = parse_alloc_conf(account.recipe.alloc_conf).max_split_size is not None
    evaluates = unsplit or worst["eval"].requested > worst["step"].requested
    free = play(account, evaluates=evaluates)
    assert free is not None  # nothing limits it
    card, run = None, free
    if reserve is not None:
        tensors = max(_allocated(i, free.phases.get(phase)) for phase, i in worst.items() if phase not in OPTIONAL)
        capacity = account.gpu.usable_bytes(reserve) - account.share.nccl
        card, run = on_card(account, free, tensors, capacity, evaluates=evaluates)
    phases: list[PhasePeak] = []
    for phase, instant in worst.items():
        known = run.phases.get(phase) or (free.phases.get(phase) if phase in OPTIONAL else None)
        held = known.reserved if known else reserved_of(account, instant)
        if known is None and phase not in ("load", "first_step"):
            held = (run.phases.get("eval") or run.phases["step"]).reserved
        made = known.made_in(account, phase) if known else None
        found = _phase_peak(account, made or instant, instant, held, _allocated(instant, known))
        phases.append(replace(found, held=known.held) if known else found)
    return Footprint(tuple(phases), "formula", *_notes(account, exact=True), on_card=card)


def _allocated(instant: Instant, known: PlayedPhase | None = None) -> int:
    """Return the most allocated bytes of a phase with this worst instant, played or rounded up."""
    rounded = instant.requested + int(ROUNDING_SHARE * instant.requested)
    return max(known.allocated, instant.requested) if known and known.allocated else rounded


def _phase_peak(account: Account, made: Instant, worst: Instant, held: int, allocated: int) -> PhasePeak:
    """Return a phase: its levels, at most those of its `worst` instant, and the lines of the one that made its peak."""
    context, nccl = account.gpu.context_bytes, account.share.nccl
    held = max(held, allocated)
    paged = account.paged(made.phase)
    levels = Levels(worst.requested, allocated, held, held + context + nccl + paged)
    first = _first_buckets(account, made)
    if allocated - worst.requested < first:  # freed before the instant
        first = 0
    lines: list[AccountLine] = [
        *made.static, *_moving_lines(account, made), ("temporaries", FIRST_BUCKETS, first),
        ("fragmentation", SLACK, held - made.requested - first), ("context", "CUDA context", context),
        ("context", "NCCL buffers", nccl), ("context", PAGED, paged),
    ]  # fmt: skip
    return PhasePeak(made.phase, made.name, levels, tuple(Line(*line) for line in lines if line[2]))


def _moving_lines(account: Account, instant: Instant) -> list[AccountLine]:
    if instant.peak is None:
        return []
    titles: dict[Role, str] = {
        "activations": KEPT, "temporaries": WORKING, "gradients": "gradients",
    }  # fmt: skip
    sizes = instant.peak.by_role.items()
    return [(role, titles.get(role, role), account.meter.bytes(size)) for role, size in sizes]


def _lengths(account: Account) -> str:
    """Describe the batch that is counted: the largest that can occur."""
    if account.recipe.padding == "packing":
        return "packed rows, all of them full"
    return "padded batches" if account.padded else "every sample as long as the sequence"


def longer_row(account: Account) -> int:
    """Return the most bytes that the cache grows by when a packed row is longer than all rows before it.

    None of the blocks that the tensors of shorter rows left may be large enough. 0 where the rows of the trainer are
    all of one length, and where segments expand.
    """
    recipe = account.recipe
    if recipe.padding != "packing" or not account.trainer.packs_unpadded:
        return 0
    if parse_alloc_conf(recipe.alloc_conf).expandable_segments:
        return 0
    worst = max(account.passes("step", states=True), key=lambda instant: instant.requested)
    moving = ("activations", "temporaries")
    return sum(size for role, _, size in _moving_lines(account, worst) if role in moving)


def _kept_by_root(account: Account) -> int:
    """Return the bytes that Trainer.ends_in_root adds to the backward of a block: both ends and the head's gradient."""
    a, width = account.architecture, account.traced.weight
    head = sum(w.numel for w in (*a.final, *a.head)) * width
    return sum(w.numel for w in a.embedding) * width + head * (2 if account.recipe.method == "full" else 1)


def _of_task(account: Account) -> list[str]:
    """Return what a task assumes, and of one that samples answers what each part of a step requests at most."""
    caveat, sampled = TASKS[account.architecture.trained_for].caveat, account.sampling("step", states=True)
    found = [caveat] if caveat else []
    if sampled:
        names = [instant.name for instant in sampled]
        update = max(i.requested for i in account.passes("step", states=True) if i.name not in names)
        generation = human(max(i.requested for i in sampled))
        found.append(f"allocated in a step: generation {generation}, update {human(update)}")
    return found


def _notes(account: Account, *, exact: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the assumptions and the unknowns of an estimate."""
    r, n = account.recipe, account.numerics
    capability, width = account.gpu.compute_capability, kernel_width(r, n)
    layers, (_, dropout) = (x.attention for x in account.architecture.kinds), drops(account.architecture)
    run = {attention_kernel(layer, r, width, capability, account.padded, dropout=dropout) for layer in layers}
    kernels = ["flash"] if r.attention == "flash" else sorted(run)
    assumptions = [
        f"trainer {account.trainer.name} on PyTorch 2.13",
        f"attention kernel {', '.join(kernels)}" + (f" (cc {'.'.join(map(str, capability))})" if capability else ""),
        f"{'fp32' if n.adapter == 4 else '16-bit'} adapters" if r.method != "full" else f"{n.weight * 8}-bit gradients",
        _lengths(account),
    ]
    assumptions += _of_task(account)
    if r.zero and (r.shard in ("optimizer", "gradients") or r.offload != "none"):
        bucket = parse_zero_conf(r.zero_conf, account.architecture.width).reduce_bucket_size
        own = "" if bucket == BUCKET_OF_DEEPSPEED else f" (DeepSpeed's own default is {BUCKET_OF_DEEPSPEED:,})"
        assumptions.append(f"ZeRO buckets of {bucket:,} elements{own}")
    if account.share.gathered and r.accumulation > 1 and r.method == "full":
        kept = human(account.static.trained * account.traced.weight)
        assumptions.append(f"gradients reduced after every micro-batch (sync_each_batch; without it {kept} more)")
    unknowns = [f"context ±{100 if 'context_bytes' in account.gpu.unverified else 60} MiB on your driver"]
    if not exact:
        slack = SLACK_SHARE[r.checkpointing != "none"]
        unknowns.append(f"allocator slack taken as {slack:.0%} of what comes and goes, not replayed")
    if account.share.buckets and not r.zero:
        more = human(account.share.buckets)
        unknowns.append(f"DDP's first buckets, counted beside those of step 2, are often freed before ({more} less)")
    apart = account.share.by_block and not (account.share.flat or account.trainer.ends_in_root)
    if apart and not account.architecture.tied:
        more = human(_kept_by_root(account))
        unknowns.append(f"accelerate before 1.14 keeps embedding and head gathered ({more} more)")
    if account.share.nccl:
        unknowns.append(nccl_range(account.share.nccl))
    if grown := longer_row(account):
        unknowns.append(
            f"packed rows differ by some tokens: one longer than all before it reserves up to {human(grown)} more, "
            "which the allocator gives back where the card is full (not under expandable_segments:True)"
        )
    unknowns += [text for applies, text in TAKEN_BEYOND if applies(r)]
    return (*assumptions, *cautions(account.architecture, r, account.gpu)), tuple(unknowns)
