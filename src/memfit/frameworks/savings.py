"""What each choice of a recipe saves in this run: the peak without it, everything else kept, minus the peak with it."""

from __future__ import annotations

from collections.abc import Callable

from memfit.closed_form.run.account import Account
from memfit.closed_form.run.estimate import closed_form
from memfit.errors import MemfitError
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Plan
from memfit.tables import combinations
from memfit.tables.optimizers import optimizer
from memfit.units import MIB, human

Change = Callable[[Recipe], Recipe]

# recipe field -> (the recipe without that choice, what it is held against)
_WITHOUT: dict[str, tuple[Change, str]] = {
    "method": (lambda r: r.but(method="full", quantization="none"), "training every weight"),
    "quantization": (lambda r: r.but(method="lora", quantization="none"), "a 16-bit base"),
    "precision": (lambda r: r.but(precision="fp32"), "fp32"),
    "checkpointing": (lambda r: r.but(checkpointing="none"), "keeping all activations"),
    "optimizer": (lambda r: r.but(optimizer="adamw"), optimizer("adamw").title),
    "loss": (lambda r: r.but(loss="full"), "whole logits"),
    "attention": (lambda r: r.but(attention="eager"), "eager attention"),
    "micro_batch": (lambda r: r.but(micro_batch=r.micro_batch * r.accumulation, accumulation=1), "the whole batch at once"),
    "offload": (lambda r: r.but(offload="none"), "no offloading"),
    "shard": (lambda r: r.but(shard="none"), "no sharding"),
}  # fmt: skip


def savings(plan: Plan) -> dict[str, str]:
    """Recipe field -> "saves 13.4 GiB against keeping all activations", for every choice that saves at least 1 MiB.

    Tensor bytes at the worst instant of training. A choice whose opposite is impossible has nothing to be held against.
    """
    chosen = _peak(plan, plan.recipe)
    found = {}
    for field, (change, against) in _WITHOUT.items():
        without = change(plan.recipe)
        if chosen is None or without == plan.recipe or _impossible(plan, without):
            continue
        peak = _peak(plan, without)
        if peak is not None and peak - chosen >= MIB:
            found[field] = f"saves {human(peak - chosen)} against {against}"
    return found


def _impossible(plan: Plan, recipe: Recipe) -> bool:
    return combinations.refusal(recipe, plan.job.architecture, plan.job.gpu) is not None


def _peak(plan: Plan, recipe: Recipe) -> int | None:
    """Bytes of tensors; None for a model whose training memory is not modelled."""
    try:
        return closed_form(Account(plan.job.architecture, recipe, plan.job.gpu)).requested
    except MemfitError:
        return None
