"""The model card of a finished run: recipe, measurements, and the times that memory ran out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from memfit.footprints.footprint_of_watch import by_phase
from memfit.frameworks.script import learning_rate
from memfit.frameworks.text import summary
from memfit.nouns.plan import Plan
from memfit.nouns.sample import METERS
from memfit.report.words import phase_title
from memfit.tables.adapters import method_title
from memfit.tables.tasks import TASKS
from memfit.train.folder import MEMORY_FILE, SAMPLES_FILE, Run
from memfit.train.outcome import Outcome
from memfit.train.run_file import write_text
from memfit.train.sample_counts import recorded
from memfit.units import human, several

TAGS = "tags: [memfit]"  # in the front matter; distinguishes this card from others


def write_card(run: Run, outcome: Outcome) -> Path:
    """Write README.md into the model's folder and return its path."""
    path = run.output / "README.md"
    write_text(path, card(run, outcome))
    return path


def has_card(run: Run) -> bool:
    """Return whether memfit, not a library, wrote README.md beside the model."""
    path = run.output / "README.md"
    return path.is_file() and TAGS in path.read_text(encoding="utf-8", errors="replace").splitlines()


def card(run: Run, outcome: Outcome, merged: bool = False) -> str:
    """Return the card as Markdown with front matter for the Hub. `merged`: the card of the merged model."""
    plan = run.plan
    recipe, base = plan.recipe, plan.job.architecture.name
    front = ["---", "library_name: " + ("transformers" if recipe.method == "full" or merged else "peft")]
    front += [f"base_model: {base}"] if not Path(base).is_absolute() else []
    front += [TAGS, "---", ""]
    body = [
        f"# {Path(base).name}, {method_title(recipe)}{', merged' * merged}", "",
        f"Fine-tuned by `memfit train` on {Path(plan.job.dataset).name}: {outcome.step:,} optimizer steps of "
        f"{recipe.effective_batch} {TASKS[plan.job.task].unit}, {_samples(run, outcome)}.", "",
        *_table(("", "value"), _facts(run, outcome)), "", "## Memory", "", *_memory(run, outcome), "",
        *_falls(run), "## Recipe", "", "```toml", _recipe(run), "```", "",
    ]  # fmt: skip
    return "\n".join([*front, *body])


def _recipe(run: Run) -> str:
    """Return recipe.toml without the folders of this machine: a card is made to be shared."""
    text, plan = (run.path / "recipe.toml").read_text().rstrip(), run.plan
    for name in (plan.job.architecture.name, plan.job.dataset, plan.job.training.eval_data):
        if name and Path(name).is_absolute():
            text = text.replace(name, Path(name).name)
    return text


def _samples(run: Run, outcome: Outcome) -> str:
    """Return the samples trained, and how many of them the record still lists where some are missing."""
    there = recorded(run.path, outcome.step)
    lost = f" ({there:,} of {outcome.samples:,} are in {SAMPLES_FILE})" if there != outcome.samples else ""
    return f"{several(outcome.samples, 'sample')}{lost}"


def _facts(run: Run, outcome: Outcome) -> list[tuple[str, str]]:
    found = _training(run.plan)
    if outcome.loss is not None:
        found.append(("training loss, first and last logged", f"{outcome.first_loss:.4f}, {outcome.loss:.4f}"))
    if outcome.eval_loss is not None:
        found.append(("evaluation loss", f"{outcome.eval_loss:.4f}"))
    if outcome.reserved:
        found.append(("most reserved by the allocator", human(outcome.reserved)))
    found.append(("peak resident memory of the process", human(outcome.host)))
    return found + [(name, version) for name, version in outcome.versions.items()]


def _training(plan: Plan) -> list[tuple[str, str]]:
    """Return the job's training options."""
    training = plan.job.training
    steps, evaluated = training.max_steps > 0, training.eval_data
    return [
        ("learning rate", learning_rate(plan)),
        ("most optimizer steps", f"{training.max_steps:,}") if steps else ("epochs", f"{training.epochs:g}"),
        *([("evaluation data", Path(evaluated).name)] if evaluated else []),
    ]


def _memory(run: Run, outcome: Outcome) -> list[str]:
    """Return predicted and measured peaks by phase on a GPU, and resident memory on a CPU."""
    planned = f"Planned: {summary(run.plan)}."
    watched, damaged = run.watched()
    if damaged:
        planned += (
            f" {several(damaged, 'line')} of {MEMORY_FILE} cannot be read, and what was measured there is missing here."
        )
    if watched is None:
        return [planned, "", "Not measured."]
    peaks, facts = by_phase(watched.samples), METERS[watched.header.meter]
    if facts.compared is None:
        table = _table(
            ("phase", "resident"), [(phase_title(phase), human(peak.device)) for phase, peak in peaks.items()]
        )
        stages = [(stage, human(size)) for stage, size in outcome.peaks.items()]
        counted = ["", *_table(("stage", "most bytes of tensors, counted"), stages)] if stages else []
        as_fp32 = " in fp32 instead of fp16-mixed" * (run.settings.cpu and run.plan.recipe.precision == "fp16-mixed")
        return [
            f"Trained on a CPU{as_fp32}, so no prediction for a card can be compared. "
            "Measured: resident memory of the process.",
            "",
            *table,
            *counted,
        ]
    measured = f"Measured: {facts.title}, in {MEMORY_FILE}."
    predicted = {p.phase: p.levels for p in run.plan.footprint.phases}
    rows = [
        (
            phase_title(phase), human(predicted[phase].reserved) if phase in predicted else "-",
            human(peak.reserved), human(peak.allocated),
        )
        for phase, peak in peaks.items()
    ]  # fmt: skip
    head = ("phase", "predicted, reserved", "measured, reserved", "measured, tensors")
    return [planned, "", measured, "", *_table(head, rows)]


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
