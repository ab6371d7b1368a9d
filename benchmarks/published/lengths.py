"""Token lengths of the datasets that published runs were trained on, drawn from what is known of them."""

from __future__ import annotations

import random
from dataclasses import dataclass

ORDERS, BATCHES = 2, 100  # runs simulated per row, and micro-batches in each: reserved bytes hardly grow after that


@dataclass(frozen=True, slots=True)
class Dataset:
    """What a source prints about its samples, in tokens."""

    mean: float
    deviation: float
    shortest: int
    longest: int


DATASETS: dict[str, Dataset] = {
    # ms-swift docs, LLM/Benchmark.md: "3234.4±2547.5, min=91, max=19548" by Qwen's tokenizer
    "cls-fudan-news-zh": Dataset(3234.4, 2547.5, 91, 19548),
}


def drawn(data: Dataset, limit: int, batch: int) -> tuple[tuple[int, ...], ...]:
    """Several orders of micro-batches: gamma-distributed samples up to `limit`, each batch as long as its longest.

    Mean and deviation fix the gamma distribution; it also gives the printed maximum of the 4959 samples.
    """
    shape, scale = (data.mean / data.deviation) ** 2, data.deviation**2 / data.mean
    orders = []
    for seed in range(ORDERS):
        source = random.Random(seed)
        samples: list[int] = []
        while len(samples) < BATCHES * batch:
            length = int(source.gammavariate(shape, scale))
            if data.shortest <= length <= limit:
                samples.append(length)
        orders.append(tuple(max(samples[i : i + batch]) for i in range(0, len(samples), batch)))
    return tuple(orders)
