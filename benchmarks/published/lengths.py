"""Token lengths of the datasets that published runs were trained on, drawn from what is known of them."""

from __future__ import annotations

import random
from dataclasses import dataclass

ORDERS = 4  # possible runs simulated per row; reserved bytes differ from one order of the same samples to another
LONGEST_RUN = 800  # micro-batches simulated of each: what is reserved hardly grows after that


@dataclass(frozen=True, slots=True)
class Dataset:
    """What a source prints about its samples, in tokens."""

    samples: int
    mean: float
    deviation: float
    shortest: int
    longest: int


DATASETS: dict[str, Dataset] = {
    # ms-swift docs, LLM/Benchmark.md: "3234.4±2547.5, min=91, max=19548" by Qwen's tokenizer
    "cls-fudan-news-zh": Dataset(4959, 3234.4, 2547.5, 91, 19548),
}


def drawn(data: Dataset, samples: int, limit: int, batch: int) -> tuple[tuple[int, ...], ...]:
    """Several orders of micro-batches of the first `samples` samples, those beyond `limit` tokens dropped.

    Lengths are gamma-distributed, which mean and deviation determine; it also gives the printed maximum. A batch is as
    long as its longest sample.
    """
    shape, scale = (data.mean / data.deviation) ** 2, data.deviation**2 / data.mean
    orders = []
    for seed in range(ORDERS):
        source = random.Random(seed)
        lengths = (int(source.gammavariate(shape, scale)) for _ in range(samples))
        kept = [n for n in lengths if data.shortest <= n <= limit][: LONGEST_RUN * batch]
        orders.append(tuple(max(kept[i : i + batch]) for i in range(0, len(kept), batch)))
    return tuple(orders)
