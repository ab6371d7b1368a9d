"""Estimate the seconds of an optimizer step by a roofline: in each part the slowest of compute, memory, PCIe and links.

The model is meant for relative times (docs/techniques.md states how accurate they are). Absolute times depend on the
shares assumed below.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from memfit.closed_form.run.account import Account
from memfit.closed_form.static import Static
from memfit.closed_form.task_runs import run_of, second_model
from memfit.data.lengths import Lengths, packed, padding_waste
from memfit.nouns.architecture import Architecture
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Duration, Plan
from memfit.tables.matmul_rates import fp32_share, half_share
from memfit.tables.optimizers import optimizer
from memfit.tables.precisions import BYTES, meaning
from memfit.tables.trainers import checkpointing_of

# Share of the rate of large matrix products (tables/matmul_rates.py) that a whole step reaches, with elementwise
# kernels and launches between products; range 0.4 to 0.7
TRAINING_SHARE = 0.6
# Real seconds per step against the roofline's: 0.83 to 1.15 in 12 published runs on A100 (fms-acceleration,
# Mistral-7B), 1.2 to 2.2 in 10 of 4B to 14B models on an H100 (benchmarks/measured), whose products are faster, unlike
# its elementwise kernels and launches; 1B models, which wait for launches, up to 3.2.
RANGE = (0.8, 2.2)
BANDWIDTH_SHARE = 0.8  # share of the data-sheet bandwidth that streaming kernels reach
UNKNOWN_FLOPS, UNKNOWN_BANDWIDTH, UNKNOWN_PCIE = 50e12, 500e9, 13e9
KERNELS_PER_BLOCK = 60  # launches of one block's forward (recorded: 45 to 75); a backward has twice as many
LAUNCH_SECONDS = 6e-6  # CPU time of one launch in eager PyTorch; range 4e-6 to 10e-6
EAGER_PASSES = 14  # times a score matrix crosses device memory in eager attention, forward and backward
# bytes per second of host memory that AdamW on the CPUs reaches, all processes together; range 20e9 to 200e9
HOST_BANDWIDTH = 80e9
PAGED_MISS = 0.0  # paged states stay on the card until memory is short
EXPOSED = 0.3  # share of communication that compute does not hide; range 0.1 to 0.6


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step, by part."""

    forward: float
    backward: float
    recompute: float
    optimizer: float
    transfer: float  # PCIe and links
    sampling: float = 0.0  # of answers, one token after another

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.recompute + self.optimizer + self.transfer + self.sampling


def step_time(a: Architecture, r: Recipe, gpu: Gpu, s: Static) -> StepTime:
    """Return the seconds of one optimizer step: `accumulation` micro-steps and the update."""
    run = run_of(a)
    r = r.but(micro_batch=r.micro_batch * run.rows * run.columns)
    flops = (gpu.half_flops or UNKNOWN_FLOPS) * half_share(gpu) * TRAINING_SHARE
    width = BYTES[meaning(r).computed]
    if width == 4:
        flops *= fp32_share(gpu)
    bandwidth = (gpu.bandwidth or UNKNOWN_BANDWIDTH) * BANDWIDTH_SHARE
    active = active_parameters(a, _written(a, r))
    weights = s.parameters * width
    if r.method == "qlora":  # each use reads the payload, writes the 16-bit weight and reads it again
        weights = s.base + s.scales + 2 * s.quantised * 2
    compute = (2.0 * active * r.tokens_each + _tower(a) * r.micro_batch) / flops
    traffic = weights / bandwidth
    # bitsandbytes dequantises in a kernel of its own, before the product; elsewhere reading weights hides behind it
    products = compute + traffic if r.method == "qlora" else max(compute, traffic)
    attention = _attention(a, r, flops, bandwidth)
    logits = _logits(a, r, bandwidth, run.head or r.loss)
    launches = KERNELS_PER_BLOCK * LAUNCH_SECONDS * len(a.layers)  # the lower bound for small batches
    forward = max(products + attention + logits / 3, launches) * (2 if second_model(a) else 1)
    backward = max((2 if r.method == "full" else 1.05) * products + 2.5 * attention + logits * 2 / 3, 2 * launches)
    # selective checkpointing keeps the output of attention
    again = products if checkpointing_of(r) == "selective" else products + attention
    recompute = 0.0 if r.checkpointing == "none" else max(again, launches)
    kept = 2.0 * a.width * len(a.layers) * r.tokens_each
    offloaded = 2 * kept / _pcie(gpu) if r.checkpointing == "offload" else 0.0
    return StepTime(
        forward * r.accumulation, backward * r.accumulation, recompute * r.accumulation,
        _update(r, s, gpu, bandwidth), offloaded * r.accumulation + _transfer(r, s, gpu),
        a.shape.completion * max(traffic, launches) if run.sampled else 0.0,
    )  # fmt: skip


@lru_cache(maxsize=64)
def active_parameters(a: Architecture, written: float = 1.0) -> int:
    """Return the parameters that each token is multiplied with: all but the embedding and unused experts.

    written: tokens of a decoder for each token of its encoder.
    """
    total = int(written * (sum(w.numel for w in (*a.final, *a.head)) or a.vocabulary * a.width))
    for number, layer in enumerate(a.layers):
        decodes = 0 < a.encoder_layers <= number
        for w in layer.weights:
            share = (
                layer.mlp.experts_per_token / layer.mlp.experts if w.kind == "experts" and layer.mlp.experts else 1.0
            )
            total += int(w.numel * share * (written if decodes else 1.0))
    return total


@lru_cache(maxsize=64)
def _tower(a: Architecture) -> float:
    """Return the operations of a forward pass of a tower on the images of a sample."""
    t = a.vision
    if t is None or a.task == "vision":  # whose blocks are the model's
        return 0.0
    rows = (t.windows if layer.attention.window else (t.rows,) for layer in t.layers)
    scores = sum(row.count * row.length**2 for each in rows for row in each)
    return 2.0 * sum(layer.parameters for layer in t.layers) * t.rows.tokens + 4.0 * t.width * scores


def _written(a: Architecture, r: Recipe) -> float:
    """Return the tokens that a decoder writes for each that its encoder reads; 1 without an encoder."""
    return a.shape.target / r.sequence_length if a.encoder_layers else 1.0


def _attention(a: Architecture, r: Recipe, flops: float, bandwidth: float) -> float:
    seconds = 0.0
    for number, layer in enumerate(a.layers):
        at, length = layer.attention, r.sequence_length
        share = _written(a, r) if 0 < a.encoder_layers <= number else 1.0
        reach = min(length * share, at.window or length) + length * (layer.cross is not None)
        scores = r.tokens_each * share * reach * at.heads
        seconds += 2.0 * scores * (at.head_dim + at.value_dim) / flops / (2 if at.causal else 1)
        if r.attention == "eager":
            seconds += EAGER_PASSES / 3 * 2.0 * scores / bandwidth
    return seconds


def _logits(a: Architecture, r: Recipe, bandwidth: float, loss: str) -> float:
    """Return the seconds of the loss: full logits cross memory in fp32 several times, fused ones stay in cache."""
    passes = {"full": 34, "odds": 34, "chunked": 30, "fused": 6, "classes": 0, "ranking": 0}[loss]
    return passes * a.vocabulary * r.tokens_each * _written(a, r) / bandwidth


def _update(r: Recipe, s: Static, gpu: Gpu, bandwidth: float) -> float:
    """Return the seconds to read and write weights, gradients and states once, on the host when offloaded."""
    row = optimizer(r.optimizer)
    share = r.num_gpus if r.shard != "none" else 1
    traffic = (3 * s.gradients + 2 * s.states + 2 * s.master) / share
    if r.offload != "none":
        return traffic * r.num_gpus / HOST_BANDWIDTH
    paged = 2 * row.moments * 4 * s.trained / share / _pcie(gpu) * PAGED_MISS if row.paged else 0.0
    return traffic * (1 + row.flops) / bandwidth + paged


def _pcie(gpu: Gpu) -> float:
    return gpu.pcie_bandwidth or UNKNOWN_PCIE


def _transfer(r: Recipe, s: Static, gpu: Gpu) -> float:
    """Return the seconds of PCIe (offload) and link traffic (gradients, gathered weights) not hidden by compute."""
    seconds = 0.0
    cards = r.num_gpus if r.shard != "none" else 1  # each card fetches its share, and the links bring the others'
    if r.offload != "none":
        seconds += 2 * s.gradients / cards / _pcie(gpu)
    if r.offload == "parameters":
        seconds += 2 * r.accumulation * s.base / cards / _pcie(gpu)
    if r.num_gpus > 1:
        link = gpu.link_bandwidth or _pcie(gpu)
        share = (r.num_gpus - 1) / r.num_gpus
        seconds += EXPOSED * 2 * share * s.gradients / link
        if r.shard == "parameters":
            seconds += EXPOSED * 2 * r.accumulation * share * s.base / link
    return seconds


# ---- a whole training on the user's data


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
