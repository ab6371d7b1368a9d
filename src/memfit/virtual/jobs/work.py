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
from memfit.virtual.jobs.models import batch_of_one, class_of, config_of, no_init_weights
from memfit.virtual.jobs.recipe import Setup
from memfit.virtual.jobs.tasks import check

KERNELS = KERNELS_PER_BLOCK // 7  # of one product with the elementwise kernels around it; a decoder block has seven
TEXTS = {"pair": 2, "choice": 2, "prompt": 1, "anchor": 2}  # texts of one sample


def work_of(config: dict[str, Any], job: Job) -> Work:
    """Return the work of one sample of a job; where the pass cannot run on meta tensors, two operations a weight."""
    row = TASKS[job.task]
    setup = Setup(config=config, task="" if job.task == "sft" else job.task, shape=job.shape,
                  sequence=job.sequence_length)  # fmt: skip
    if setup.task:
        check(row, str(config.get("model_type")))
    if row.sample == "noise":
        return _of_noise(setup)
    made = config_of(setup)
    with torch.device("meta"), no_init_weights():
        model = class_of(made, setup.task).from_config(made)
    passes = TEXTS.get(row.sample, 1) * (2 if row.beside or job.shape.reference else 1)
    modules = _products(model)
    weights = sum(p.numel() for p in model.parameters())
    flops = 2.0 * weights * job.sequence_length
    if row.sample == "pictures":
        flops = _with_pictures(model, batch_of_one(setup), made) or flops
    elif row.sample not in TEXTS:
        flops = _counted(model, batch_of_one(setup)) or flops
    sampled = job.shape.completion if row.sample == "prompt" else 0
    return Work(flops * passes, KERNELS * modules * passes, weights, weights, sampled)


def _products(model: Any) -> int:
    return sum(1 for m in model.modules() if any(p.dim() > 1 for p in m.parameters(recurse=False)))


def _of_noise(setup: Setup) -> Work:
    """Return the work of a denoiser; that of the frozen parts before it is left out."""
    from memfit.virtual.jobs import diffusion

    diffusion.check(setup)
    model, forward = diffusion.forward_on_meta(setup)
    weights = sum(p.numel() for p in model.parameters())
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        try:
            forward()
            flops = float(counter.get_total_flops())
        except NotImplementedError:  # Lumina 2 reads the lengths of texts, which a meta tensor has not
            flops = 2.0 * weights * diffusion.tokens(setup)
    return Work(flops, KERNELS * _products(model), weights, weights)


def _counted(model: Any, batch: dict[str, Any]) -> float:
    """Return the operations of a forward pass; 0 where it cannot run on meta tensors."""
    with suppress(Exception), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**{name: value.to("meta") for name, value in batch.items()})
        return float(counter.get_total_flops())
    return 0.0


def _with_pictures(model: Any, batch: dict[str, Any], config: Any) -> float:
    """Return the operations of texts with images: where the towers read values, that of the text and of its patches.

    A patch takes two operations a weight of the tower; attention among patches is left out then.
    """
    whole = _counted(model, batch)
    if whole:
        return whole
    from memfit.virtual.jobs.pictures import patches

    text = _counted(model, {name: value for name, value in batch.items() if name in ("input_ids", "attention_mask")})
    tower = sum(p.numel() for name, p in model.named_parameters() if ".vis" in name)  # vision_tower, visual
    return text and text + 2.0 * tower * patches(batch, config)
