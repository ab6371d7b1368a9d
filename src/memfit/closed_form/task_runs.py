"""How the trainer of each task runs the model, where that is not one forward and backward of the language model's loss.

Sources: TRL 1.16 (DPOTrainer._compute_loss, KTOTrainer._compute_loss, RewardTrainer.compute_loss), transformers 5.23.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.nouns.architecture import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRun:
    """One row: the batch, the head, and the passes beside forward and backward."""

    rows: int = 1  # texts of one sample, which lie in one batch
    head: str = ""  # a row of layers.head.LOSSES; "": that of the trainer for --loss
    labelled: float = 1.0  # share of the tokens that are learned
    indices: int = 3  # tensors of token ids, labels and masks in a batch
    # a pass without gradients while the graph of the forward is alive: the model without its adapters, or, where all
    # weights are trained, a second model
    reference: bool = False
    dropout: bool = True  # False: the trainer switches the model's dropout off


LANGUAGE = TaskRun()
TASK_RUNS: dict[str, TaskRun] = {
    "classification": TaskRun(head="classes"),
    "reward": TaskRun(rows=2, head="classes", dropout=False, indices=2),
    "dpo": TaskRun(rows=2, head="fused", labelled=0.5, reference=True, dropout=False),
    "kto": TaskRun(head="fused", labelled=0.5, reference=True, dropout=False, indices=6),
}  # fmt: skip


def run_of(architecture: Architecture) -> TaskRun:
    """Return how a model's task is run."""
    return TASK_RUNS.get(architecture.trained_for, LANGUAGE)
