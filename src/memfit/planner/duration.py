"""How long a plan's training takes on the user's data: its optimizer steps at the mean length of their batches."""

from __future__ import annotations

from math import ceil

from memfit.closed_form.run.account import Account
from memfit.data.lengths import Lengths, packed, padding_waste
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Duration, Plan
from memfit.planner.cost import RANGE, step_time


def duration(plan: Plan, lengths: Lengths) -> Duration | None:
    """Return the duration of a plan on samples of these lengths; None where the speed of the card is not known.

    Memory is planned for the longest batch, time for the mean one. An epoch is as many optimizer steps as its sequences
    fill, the last one included.
    """
    job, r = plan.job, plan.recipe
    if not job.gpu.half_flops:
        return None
    sequences, mean = _sequences(r, lengths)
    per_epoch = ceil(sequences / r.effective_batch)
    steps = job.training.max_steps if job.training.max_steps > 0 else max(ceil(job.training.epochs * per_epoch), 1)
    usual = r.but(sequence_length=max(round(mean), 1))
    static = Account(job.architecture, usual, job.gpu).static
    seconds = steps * step_time(job.architecture, usual, job.gpu, static).total
    hourly = job.gpu.price_per_hour
    low, high = RANGE
    return Duration(
        sequences, mean, steps, steps / per_epoch, seconds, (low * seconds, high * seconds),
        None if hourly is None else hourly * r.num_gpus * seconds / 3600,
    )  # fmt: skip


def _sequences(r: Recipe, lengths: Lengths) -> tuple[int, float]:
    """Return the sequences of one epoch and the mean tokens of one, with padding or in packed rows."""
    if r.padding == "packing":
        rows = packed(lengths, r.sequence_length)
        return rows, lengths.cut(r.sequence_length).tokens / max(rows, 1)
    return lengths.count, padding_waste(lengths, r.micro_batch, r.sequence_length).computed / lengths.count
