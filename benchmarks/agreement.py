"""Hold the planner's answers against each other over a grid of jobs.

usage: python benchmarks/agreement.py [--jobs N] [--seed N] [--explicit-every N] [--processes N]

Every job of the grid (models x cards x counts x methods, from the catalogue) is planned, and six properties are
checked on it:

  cards     one more card of the kind, and a card of the kind with more memory, fit whatever fits
  explicit  where an explicit method, sharding, checkpointing, loss or offload fits, so does the choice of all
  others    every recommended card fits when it is asked for, with the peak that was shown
  estimate  `memfit estimate` of the chosen recipe, and of every rung, gives the peak and the verdict of the plan
  largest   the largest micro-batch and sequence that are shown fit by estimate
  ladder    every rung can be run, the savings add up, the last rung is the answer, and none undoes another

Prints each pair of answers that disagree, and exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

from memfit import Job, Recipe, catalogue, estimate, find_gpu, make_plan
from memfit.catalogue.cards import list_gpus
from memfit.closed_form.host_memory import with_host
from memfit.errors import MemfitError
from memfit.models.families import architecture
from memfit.nouns.architecture import Architecture
from memfit.nouns.gpu import Gpu
from memfit.nouns.plan import Plan, judge
from memfit.planner.rungs import backwards
from memfit.planner.search import SAME_SPEED
from memfit.tables.combinations import refusal

COUNTS = (1, 2, 4, 8)
METHODS = ("auto", "full", "lora", "qlora")
LENGTHS = (512, 2048, 8192)
HOST_MEMORY = (0, 0, 0, 64 << 30, 256 << 30)  # bytes of a node; 0: not given
# what a user may set, each value one explicit choice; `auto` may choose any of them
EXPLICIT: tuple[tuple[str, Any], ...] = (
    ("method", "full"), ("method", "lora"), ("method", "qlora"), ("shard", "none"), ("shard", "gradients"),
    ("shard", "parameters"), ("checkpointing", "none"), ("checkpointing", "full"), ("checkpointing", "offload"),
    ("loss", "full"), ("loss", "fused"), ("offload", "none"), ("offload", "optimizer"), ("offload", "parameters"),
    ("micro_batch", 1), ("micro_batch", 2), ("precision", "bf16"), ("optimizer", "adamw-8bit"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Two answers about one job that cannot both be right."""

    check: str
    job: Job
    told: str

    def __str__(self) -> str:
        j = self.job
        wanted = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in j.wanted)
        wanted += f" --host-memory {j.host_memory}" if j.host_memory else ""
        return (
            f"{self.check}: {j.architecture.name} --gpu {j.num_gpus}x{j.gpu.short} --method {j.method} "
            f"--sequence-length {j.sequence_length} {wanted}: {self.told}"
        )


def models() -> list[Architecture]:
    """Return every causal language model of the catalogue whose account is modelled."""
    found = []
    for entry in catalogue.entries():
        try:
            model = architecture(catalogue.config(entry), entry.id)
        except MemfitError:
            continue
        if model.task == "causal-lm" and not model.trainable_memory:
            found.append(model)
    return found


def grid(number: int, seed: int) -> list[Job]:
    """Return `number` jobs, drawn so that every model, card, count, method and length comes up."""
    every, draw = list(product(COUNTS, METHODS, LENGTHS)), random.Random(seed)
    known, cards = models(), [g for g in list_gpus() if g.vendor in ("NVIDIA", "AMD", "Apple")]
    jobs: list[Job] = []
    while len(jobs) < number:
        model, gpu = draw.choice(known), draw.choice(cards)
        for count, method, length in draw.sample(every, 4):
            if (gpu.unified and count > 1) or (model.max_positions and length > model.max_positions):
                continue
            host = 0 if gpu.unified else draw.choice(HOST_MEMORY)
            jobs.append(replace(job_of(model, gpu, count, method, length), host_memory=host))
    return jobs[:number]


def job_of(model: Architecture, gpu: Gpu, count: int = 1, method: Any = "auto", length: int = 2048) -> Job:
    """Return a job as the flags of `memfit plan` make it."""
    return Job(architecture=model, gpu=gpu, num_gpus=count, method=method, sequence_length=length)


def checked(job: Job, every: bool) -> Iterator[Disagreement]:
    """Yield the disagreements about one job; `every`: plan each explicit choice too, which takes a second."""
    plan = made(job)
    if plan is None:
        return
    yield from _of_plan(plan)
    yield from _of_estimate(plan)
    if plan.judgement.verdict == "fits":
        yield from _of_more_hardware(plan)
    elif every:
        yield from _of_explicit_choices(plan)
    yield from _of_others(plan)


def made(job: Job, **words: Any) -> Plan | None:
    """Return the plan of a job; None where it is impossible."""
    try:
        return make_plan(job, **words)
    except MemfitError:
        return None


def _of_plan(plan: Plan) -> Iterator[Disagreement]:
    rungs = plan.ladder
    if not rungs or rungs[-1].recipe != plan.recipe:
        yield Disagreement("ladder", plan.job, "its last rung is not the recipe of the answer")
    elif rungs[-1].judgement != plan.judgement:
        yield Disagreement("ladder", plan.job, "its last rung has another judgement than the answer")
    for rung in rungs:
        if refusal(rung.recipe, plan.job.architecture, plan.job.gpu) is not None:
            yield Disagreement("ladder", plan.job, f"{rung.title} cannot be run")
    for before, after in pairwise(rungs):
        if after.saved != before.judgement.need - after.judgement.need:
            yield Disagreement("ladder", plan.job, f"{after.title} does not save what it says")
        spares = after.saved > 0 or after.judgement.host_over < before.judgement.host_over
        if not spares and after.step_time > before.step_time / SAME_SPEED and len(rungs) > 2:
            yield Disagreement("ladder", plan.job, f"{after.title} saves nothing and is not faster")
        if backwards(before.recipe, after.recipe):
            yield Disagreement("ladder", plan.job, f"{after.title} undoes an earlier rung")


def _of_estimate(plan: Plan) -> Iterator[Disagreement]:
    job = plan.job
    for recipe, told in [(plan.recipe, plan.judgement), *((rung.recipe, rung.judgement) for rung in plan.ladder[:-1])]:
        again = judge(estimate(job.architecture, recipe, job.gpu, reserve=job.reserve), job.gpu, job.reserve)
        again = with_host(again, job.architecture, recipe, job.gpu, given=job.host_memory, workers=job.workers)
        if again != told:
            what = f"plan {told.verdict} at {told.need / 2**30:.1f}, estimate {again.verdict} {again.need / 2**30:.1f}"
            yield Disagreement("estimate", job, what)
    for name, value in plan.largest.items():
        recipe = plan.recipe.but(**{name: value})
        found = judge(estimate(job.architecture, recipe, job.gpu, reserve=job.reserve), job.gpu, job.reserve)
        if plan.judgement.verdict == "fits" and found.verdict != "fits":
            yield Disagreement("largest", job, f"{name} {value} is {found.verdict}, {found.need / 2**30:.1f} GiB")


def _of_more_hardware(plan: Plan) -> Iterator[Disagreement]:
    job = plan.job
    larger = replace(job.gpu, total_bytes=int(job.gpu.total_bytes * 1.25), sold_bytes=int(job.gpu.sold_bytes * 1.25))
    more = [replace(job, gpu=larger)]
    if job.gpu.platform != "mps":
        more.append(replace(job, num_gpus=job.num_gpus + 1))
    for other in more:
        found = made(other)
        if found is None or found.judgement.verdict != "fits":
            what = f"{other.num_gpus} cards of {other.gpu.total_bytes / 2**30:.0f} GiB"
            yield Disagreement("cards", job, f"{shown(plan)}, on {what} {shown(found) if found else 'impossible'}")


def _of_explicit_choices(plan: Plan) -> Iterator[Disagreement]:
    job = plan.job
    for name, value in EXPLICIT:
        if name == "method" and job.method != "auto":
            continue
        method = value if name == "method" else job.method
        found = made(replace(job, method=method, wanted=((name, value),)))
        if found is not None and found.judgement.verdict == "fits":
            yield Disagreement("explicit", job, f"{shown(plan)}, with {name} {value} {shown(found)}")


def _of_others(plan: Plan) -> Iterator[Disagreement]:
    if plan.judgement.verdict != "misfit":
        return
    offered = make_plan(plan.job, cards=list_gpus())
    for option in offered.alternatives:
        asked = made(replace(plan.job, gpu=find_gpu(option.gpu), num_gpus=option.num_gpus))
        if asked is None or (asked.recipe, asked.judgement) != (option.recipe, option.judgement):
            told = f"offers {option.num_gpus} x {option.gpu} at {option.judgement.need / 2**30:.1f}"
            yield Disagreement("others", plan.job, f"{told}, asked directly {shown(asked) if asked else 'impossible'}")


def shown(plan: Plan) -> str:
    """Return a plan's answer in a few words."""
    r: Recipe = plan.recipe
    return f"{plan.judgement.verdict} at {plan.judgement.need / 2**30:.1f} GiB ({r.method} on {r.num_gpus})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--explicit-every", type=int, default=4, help="plan explicit choices for one job in so many")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    jobs, began = grid(options.jobs, options.seed), time.perf_counter()
    found: Counter[str] = Counter()
    every = [number % options.explicit_every == 0 for number in range(len(jobs))]
    with ProcessPoolExecutor(options.processes) as pool:
        for number, disagreements in enumerate(pool.map(_listed, jobs, every, chunksize=10), 1):
            for check, told in disagreements:
                found[check] += 1
                print(told, flush=True)
            if number % 100 == 0:
                print(f"{number} of {len(jobs)}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    told = ", ".join(f"{check} {count}" for check, count in found.items()) or "no two answers disagree"
    print(f"{len(jobs)} jobs: {told}")
    return 1 if found else 0


def _listed(job: Job, every: bool) -> list[tuple[str, str]]:
    """Return what disagrees about one job, as a process can hand it over."""
    return [(found.check, str(found)) for found in checked(job, every)]


if __name__ == "__main__":
    sys.exit(main())
