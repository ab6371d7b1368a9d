"""Token lengths of the datasets that published runs were trained on, drawn from what is known of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

ORDERS = (
    24  # possible runs simulated per row, whole: reserved bytes differ from one order of the same samples to another
)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Samples of one kind: their share of all, and mean and deviation of their lengths in tokens."""

    share: float
    mean: float
    deviation: float


@dataclass(frozen=True, slots=True)
class Dataset:
    """What is known of the lengths of a dataset's samples, in tokens."""

    samples: int
    shortest: int
    longest: int
    clusters: tuple[Cluster, ...]

    def draw(self, source: random.Random) -> int:
        """The length of one sample; gamma-distributed in its cluster, which mean and deviation determine."""
        while True:
            kind = source.choices(self.clusters, [c.share for c in self.clusters])[0]
            length = int(source.gammavariate((kind.mean / kind.deviation) ** 2, kind.deviation**2 / kind.mean))
            if self.shortest <= length <= self.longest:
                return length


DATASETS: dict[str, Dataset] = {
    # ms-swift docs, LLM/Benchmark.md: "3234.4±2547.5, min=91, max=19548" by Qwen's tokenizer. One cluster would need
    # mean lengths below 512, 1024, 2048, 4096 tokens of 327, 613, 1135, 1963; the published samples per second ask for
    # ratios of 1.4, 1.7, 2.2 between them. A quarter of short notices beside long articles gives both.
    "cls-fudan-news-zh": Dataset(4959, 91, 19548, (Cluster(0.25, 450, 250), Cluster(0.75, 4160, 2250))),
}


@cache
def drawn(data: Dataset, samples: int, limit: int, batch: int) -> tuple[tuple[int, ...], ...]:
    """Several orders of micro-batches of the first `samples` samples, those beyond `limit` tokens dropped.

    A batch is as long as its longest sample.
    """
    orders = []
    for seed in range(ORDERS):
        source = random.Random(seed)
        kept = [n for n in (data.draw(source) for _ in range(samples)) if n <= limit]
        orders.append(tuple(max(kept[i : i + batch]) for i in range(0, len(kept), batch)))
    return tuple(orders)
