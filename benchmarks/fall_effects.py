"""Measure what a fall does to losses, logged windows and random numbers: `python benchmarks/fall_effects.py`.

Short runs of a model of two layers on the CPU, with and without one out-of-memory in the forward of a step, which
halves the micro-batch; prints the rows of a table of docs/train.md.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

STEPS, FALL = 60, 25  # FALL: the step that is whole when memory runs out
Logs = dict[int, float]


def logs(run: Any, name: str) -> Logs:
    """Return step -> logged value."""
    import runs

    return {log["step"]: log[name] for log in runs.history(run) if name in log}


def apart(ours: Logs, theirs: Logs, beyond: int = 0) -> float:
    """Return the largest relative difference of the steps after `beyond` that both logged."""
    return max(abs(ours[s] / theirs[s] - 1) for s in ours.keys() & theirs.keys() if s > beyond)


class Pair:
    """A run without a fall and one with, of the same recipe; `every`: steps between logged losses."""

    def __init__(self, place: Path, made: tuple[Path, Path], recipe: Any, every: float) -> None:
        import runs
        from memfit.train import attempt
        from memfit.train.supervise import supervise

        told: dict[str, Any] = {"max_steps": STEPS, "save_steps": 10, "eval_data": str(made[1])}
        self.plain, self.fell = (runs.make_run(place / name, made, recipe, **told) for name in ("plain", "fell"))
        with mock.patch.object(attempt, "LOGGED", every):
            supervise(self.plain, attempt.attempt, runs.silent)
            supervise(self.fell, runs.failing("forward and backward", FALL), runs.silent)
        assert len(self.fell.falls) == 1 and self.fell.outcome and self.fell.outcome.status == "done"
        self.changed = ", ".join(self.fell.falls[0].changed)
        self.weights = self._weights("model" if recipe.method == "full" else "adapter_model")

    def _weights(self, name: str) -> float:
        import runs

        ours, theirs = (runs.weights(run, f"{name}.safetensors") for run in (self.fell, self.plain))
        return max(float((ours[k] - theirs[k]).abs().max() / theirs[k].abs().max()) for k in ours)

    def row(self, what: str) -> str:
        """Return a row: training losses, evaluation losses and weights against the run without a fall."""
        train, evaluated = (apart(logs(self.fell, n), logs(self.plain, n), FALL) for n in ("loss", "eval_loss"))
        return f"| {what}; {self.changed} | {train:.1e} | {evaluated:.1e} | {self.weights:.1e} |"


def evaluations(run: Any) -> list[tuple[int, float]]:
    """Return the evaluation loss of one model by the samples of a batch."""
    from memfit.train import attempt

    found = []
    for batch in (8, 4, 2, 1):
        trainer = attempt.load(run, replace(run.settings, eval_batch=batch))
        trainer._load_from_checkpoint(str(run.last_good().path))
        found.append((trainer.args.per_device_eval_batch_size, trainer.evaluate()["eval_loss"]))
    return found


def main() -> int:
    """Measure, and print."""
    import torch

    import runs
    from memfit.virtual.tracing import quiet

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, quiet():
        place = Path(name)
        made = runs.assets(place / "assets")
        base = runs.RECIPE.but(micro_batch=8)
        dropout = base.but(method="lora", lora_rank=4, lora_dropout=0.1)
        recipes = {  # the first rung is checkpointing; a recipe that has it falls to a smaller micro-batch
            "full fine-tuning": base, "LoRA, dropout 0.1": dropout,
            "full fine-tuning, checkpointed": base.but(checkpointing="full"),
            "LoRA, checkpointed": dropout.but(checkpointing="full", lora_dropout=0.0),
            "LoRA, dropout 0.1, checkpointed": dropout.but(checkpointing="full"),
        }  # fmt: skip
        pairs = {what: Pair(place / what, made, recipe, 1) for what, recipe in recipes.items()}
        windows = Pair(place / "d", made, base, 3)
        losses = evaluations(windows.plain)
        rows = [pair.row(what) for what, pair in pairs.items()]
        near = {
            "windows, no fall": logs(windows.plain, "loss"), "windows, a fall": logs(windows.fell, "loss"),
            "single steps, no fall": logs(pairs["full fine-tuning"].plain, "loss"),
        }  # fmt: skip
    print("| one fall | training loss | evaluation loss | weights |\n|---|---:|---:|---:|", *rows, sep="\n")
    print(f"\nlogged losses around step {FALL}, of every step and of windows of three steps:")
    for what, found in near.items():
        print(f"  {what}:", {step: round(loss, 4) for step, loss in found.items() if abs(step - FALL) < 6})
    print("\nevaluation of the same weights:", {batch: round(loss, 4) for batch, loss in losses})
    return 0


if __name__ == "__main__":
    sys.exit(main())
