"""The model card a finished run leaves beside its model: the recipe, what was measured, and what happened on the way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from memfit.export.text import summary, title
from memfit.run.folder import Run, write_text
from memfit.run.nouns import Outcome
from memfit.units import human


def write_card(run: Run, outcome: Outcome) -> Path:
    """Write README.md into the model's folder; returns its path."""
    path = run.output / "README.md"
    write_text(path, card(run, outcome))
    return path


def card(run: Run, outcome: Outcome) -> str:
    """The card as Markdown with the front matter the Hub reads."""
    plan = run.plan
    recipe, base = plan.recipe, plan.job.architecture.name
    front = ["---", "library_name: " + ("transformers" if recipe.method == "full" else "peft")]
    front += [f"base_model: {base}"] if not Path(base).is_absolute() else []
    front += ["tags: [memfit]", "---", ""]
    body = [
        f"# {Path(base).name}, {title(recipe)}", "",
        f"Fine-tuned by `memfit train` on {Path(plan.job.dataset).name}: {outcome.step:,} optimizer steps of "
        f"{recipe.effective_batch} sequences, {outcome.samples:,} samples.", "",
        *_table(("", "value"), _facts(run, outcome)), "", "## Memory", "", f"Planned: {summary(plan)}.", "",
        *(_table(("stage", "most bytes of tensors"), [(k, human(v)) for k, v in outcome.peaks.items()]) or ["Not measured on a CPU."]),
        "", *_falls(run), "## Recipe", "", "```toml", (run.path / "recipe.toml").read_text().rstrip(), "```", "",
    ]  # fmt: skip
    return "\n".join([*front, *body])


def _facts(run: Run, outcome: Outcome) -> list[tuple[str, str]]:
    found = []
    if outcome.loss is not None:
        found.append(("training loss, first and last logged", f"{outcome.first_loss:.4f}, {outcome.loss:.4f}"))
    if outcome.eval_loss is not None:
        found.append(("evaluation loss", f"{outcome.eval_loss:.4f}"))
    if outcome.reserved:
        found.append(("most reserved by the allocator", human(outcome.reserved)))
    found.append(("peak resident memory of the process", human(outcome.host)))
    return found + [(name, version) for name, version in outcome.versions.items()]


def _falls(run: Run) -> list[str]:
    if not run.falls:
        return []
    rows = [(str(f.resumed_at), f.shortage.stage, ", ".join(f.changed)) for f in run.falls]
    lost = (
        ["The optimizer's states started again where the optimizer changed.", ""]
        if any(f.moments_lost for f in run.falls)
        else []
    )
    head = ["## Falls", "", "Memory ran out and the run went on with less:", ""]
    return [*head, *_table(("resumed from step", "while", "changed"), rows), "", *lost]


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    return [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows)]
