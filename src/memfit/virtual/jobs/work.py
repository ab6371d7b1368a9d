"""Count what a sample of a task costs to compute, by a forward pass without memory."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from memfit.nouns.job import Job
from memfit.planner.cost import KERNELS_PER_BLOCK
from memfit.planner.traced import Work
from memfit.tables.tasks import TASKS
from memfit.virtual.jobs.models import class_of, config_of, no_init_weights, sample
from memfit.virtual.jobs.recipe import Setup
from memfit.virtual.jobs.tasks import check

KERNELS = KERNELS_PER_BLOCK // 7  # of one product with the elementwise kernels around it; a decoder block has seven
TEXTS = {
    "pair": 2,
    "choice": 2,
    "prompt": 1,
    "anchor": 2,
}  # texts of one sample


def work_of(config: dict[str, Any], job: Job) -> Work:
    """Return the work of one sample of a job; where the pass cannot run on meta tensors, two operations a weight."""
    row = TASKS[job.task]
    setup = Setup(config=config, task="" if job.task == "sft" else job.task, shape=job.shape,
                  sequence=job.sequence_length)  # fmt: skip
    if setup.task:
        check(row, str(config.get("model_type")))
    made = config_of(setup)
    with torch.device("meta"), no_init_weights():
        model = class_of(made, setup.task).from_config(made)
    passes = TEXTS.get(row.sample, 1) * (2 if row.beside or job.shape.reference else 1)
    modules = sum(1 for m in model.modules() if any(p.dim() > 1 for p in m.parameters(recurse=False)))
    weights = sum(p.numel() for p in model.parameters())
    flops = 2.0 * weights * job.sequence_length
    if row.sample not in TEXTS:
        with suppress(Exception), torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(**{name: value[None].to("meta") for name, value in sample(setup).items()})
            flops = float(counter.get_total_flops())
    sampled = job.shape.completion if row.sample == "prompt" else 0
    return Work(flops * passes, KERNELS * modules * passes, weights, weights, sampled)
