"""One answer as HTML: what `plan --html` writes, and the pieces that the page shows too."""

from __future__ import annotations

from contextlib import suppress

from memfit.cli.web_files import look
from memfit.closed_form.run.account import Account
from memfit.closed_form.run.timeline import recorded
from memfit.closed_form.why import Why, explain
from memfit.errors import MemfitError, Unsupported
from memfit.footprints.compare import Comparison
from memfit.nouns.alloc_settings import LATEST_TORCH, parse_alloc_conf
from memfit.nouns.architecture import Architecture
from memfit.nouns.footprint import Footprint
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Judgement, Plan
from memfit.nouns.sample import Watched
from memfit.report.answer_html import answer_html, facts_html, phases_html, recipe_html, shares_html, tensors_html
from memfit.report.comparison_html import comparison_html
from memfit.report.document_html import document, words
from memfit.report.estimate import beliefs
from memfit.report.timeline_html import plot_html
from memfit.report.watched_html import watched_html
from memfit.report.words import card_title


def plan_page(plan: Plan) -> bytes:
    """Return the whole answer as a file of its own."""
    body = answer_html(plan, explained_of(plan))
    body += f"<h2>Timeline</h2>{timeline_of_plan(plan)}"
    return document(f"{plan.job.architecture.title} on {plan.job.gpu.name}", body, look())


def recipe_page(
    architecture: Architecture, recipe: Recipe, gpu: Gpu, footprint: Footprint, judgement: Judgement
) -> bytes:
    """Return what `memfit estimate` says as a file of its own."""
    explained = _why(architecture, recipe, gpu, footprint)
    title = f"{architecture.title} on {card_title(gpu, recipe.num_gpus)}"
    parts = (
        f"<h1>{words(title)}</h1>", recipe_html(recipe, footprint, judgement),
        shares_html(footprint, judgement, gpu, explained), tensors_html(footprint.peak, explained),
        phases_html(footprint), facts_html(beliefs(footprint, judgement)),
        f"<h2>Timeline</h2>{timeline_of(architecture, recipe, gpu, judgement.usable)}",
    )  # fmt: skip
    return document(title, "\n".join(parts), look())


def comparison_page(left: str, right: str, sides: tuple[Footprint, Footprint], found: Comparison) -> bytes:
    """Return what `memfit compare` says as a file of its own."""
    return document(f"{right} against {left}", comparison_html(left, right, sides, found), look())


def watched_page(watched: Watched) -> bytes:
    """Return what `memfit watch` says of a run as a file of its own."""
    return document(watched.header.name, watched_html(watched), look())


def explained_of(plan: Plan) -> Why | None:
    """Return the arithmetic of a plan's peak; None where a trace answered."""
    if plan.footprint.source != "formula":
        return None
    return _why(plan.job.architecture, plan.recipe, plan.job.gpu, plan.footprint)


def _why(architecture: Architecture, recipe: Recipe, gpu: Gpu, footprint: Footprint) -> Why | None:
    """Return the arithmetic of a peak; None for one that no single instant explains."""
    with suppress(MemfitError):
        return explain(Account(architecture, recipe, gpu), footprint.peak)
    return None


def timeline_of_plan(plan: Plan) -> str:
    """Return the timeline of a plan's recipe: by formula, or of the trace that answered."""
    recipe, usable = plan.recipe, plan.judgement.usable
    if plan.footprint.source == "formula":
        return timeline_of(plan.job.architecture, recipe, plan.job.gpu, usable)
    from memfit.allocator.replay import made_with
    from memfit.closed_form.parallel.sharding import nccl_bytes
    from memfit.documents import traced_answers

    tape = traced_answers.tape_of(recipe, plan.footprint)
    if tape is None:
        return "<p class='dim'>The tape of this trace is not in the cache; memfit trace --html draws it again.</p>"
    torch, settings = made_with(tape)
    return plot_html(tape, settings, torch, usable - nccl_bytes(recipe.num_gpus))


def timeline_of(architecture: Architecture, recipe: Recipe, gpu: Gpu, usable: int) -> str:
    """Return the timeline of one recipe's run, computed by formula, with a line at the card's usable bytes.

    Where only the sums of a run are known, return why there is none.
    """
    try:
        tape = recorded(Account(architecture, recipe, gpu))
    except Unsupported as error:
        trace = "memfit trace takes the words of memfit estimate, runs the trainer and draws one with --html FILE"
        return f"<p class='dim'>There is no timeline: {words(error.message)}. {trace}.</p>"
    return plot_html(tape, parse_alloc_conf(recipe.alloc_conf), LATEST_TORCH, usable)
