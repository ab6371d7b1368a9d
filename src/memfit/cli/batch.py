"""How many sequences an optimizer step takes: what flags and files say about micro-batch, accumulation and GPUs, solved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memfit.errors import BadInput
from memfit.nouns.job import Recipe

if TYPE_CHECKING:
    from memfit.frameworks.reading import Adopted

DEFAULT_BATCH = 16
LARGEST_BATCH = 1 << 24
SHARES = {"micro_batch", "accumulation", "num_gpus"}  # their product is the effective batch


def file_batch(recipe: Recipe, adopted: Adopted, wanted: set[str], notes: list[str]) -> Recipe:
    """The recipe of a `--from` file with the batch its framework would run: of a total and two factors the third follows."""
    told = (set(adopted.stated) | wanted) & SHARES
    total = adopted.effective_batch
    if adopted.format == "recipe" or wanted & (SHARES - {"num_gpus"}):
        return recipe
    if total:
        return _solved(recipe, total, told, notes, adopted.format)
    if not told & {"micro_batch", "accumulation"}:
        accumulation = max(DEFAULT_BATCH // recipe.num_gpus, 1)
        notes.append(f"{adopted.format}: no batch is named: micro-batch 1 x {accumulation} taken")
        return recipe.but(accumulation=accumulation)
    return recipe


def _solved(recipe: Recipe, total: int, told: set[str], notes: list[str], where: str) -> Recipe:
    """micro_batch x accumulation x num_gpus = total, as DeepSpeed solves and checks it."""
    missing = next((name for name in ("accumulation", "micro_batch", "num_gpus") if name not in told), None)
    if missing == "accumulation" and "micro_batch" not in told:
        missing, recipe = "micro_batch", recipe.but(accumulation=1)
    if missing is None:
        if recipe.effective_batch == total:
            return recipe
    else:
        rest = recipe.but(**{missing: 1}).effective_batch
        if total % rest == 0 and total >= rest:
            if missing == "num_gpus" and total != rest:
                notes.append(f"{where}: {total // rest} GPUs, from a batch of {total} in shares of {rest}")
            return recipe.but(**{missing: total // rest})
    each = f"micro-batch {recipe.micro_batch} x accumulation {recipe.accumulation} x {recipe.num_gpus} GPUs"
    raise BadInput(f"{where}: a batch of {total} is not {each}", hint="say how many GPUs it is for: --gpu 8xh100")


def effective_batch(
    recipe: Recipe, adopted: Adopted | None, wanted: Mapping[str, Any], asked_for: int | None
) -> tuple[int, Recipe]:
    """(sequences per step over all GPUs, the recipe to start from): as asked, as the flags or the file multiply, or 16."""
    if asked_for is not None and not 1 <= asked_for <= LARGEST_BATCH:
        raise BadInput(f"--effective-batch must be from 1 to {LARGEST_BATCH}, not {asked_for}", hint="16 is usual")
    if "micro_batch" in wanted and "accumulation" in wanted:
        if asked_for not in (None, recipe.effective_batch):
            raise BadInput(
                f"--micro-batch x --accumulation x GPUs is {recipe.effective_batch}, not --effective-batch {asked_for}",
                hint="leave one of the three out",
            )
        return recipe.effective_batch, recipe
    least: int = wanted.get("micro_batch", 1) * wanted.get("accumulation", 1) * recipe.num_gpus
    if asked_for is not None and asked_for % least:
        hint = f"for example {least * 2}"
        raise BadInput(f"--effective-batch {asked_for} is no multiple of {least} sequences", hint=hint)
    if adopted is None:
        return asked_for or max(DEFAULT_BATCH, least), recipe
    if asked_for is None:
        kept = adopted.effective_batch if adopted.format == "recipe" and not SHARES & set(wanted) else None
        return kept or recipe.effective_batch, recipe
    return asked_for, _resized(recipe, asked_for // recipe.num_gpus, wanted)


def _resized(recipe: Recipe, per_gpu: int, wanted: Mapping[str, Any]) -> Recipe:
    """The file's recipe at another batch: its micro-batch, or the largest below it that divides the batch."""
    if "accumulation" in wanted:
        return recipe.but(micro_batch=per_gpu // recipe.accumulation)
    micro = max(b for b in range(1, min(recipe.micro_batch, per_gpu) + 1) if per_gpu % b == 0)
    return recipe.but(micro_batch=micro, accumulation=per_gpu // micro)
