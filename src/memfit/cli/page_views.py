"""The page's views beside the answer: the step as a timeline, the map, a comparison, and a failure explained."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from memfit.cli.page_question import Found, Tell, doubling, exact, model_of
from memfit.errors import BadInput
from memfit.report.document_html import words

if TYPE_CHECKING:
    from memfit.cli.request import Request
    from memfit.nouns.footprint import Footprint
    from memfit.nouns.gpu import Gpu
    from memfit.nouns.job import Recipe


def timeline(question: dict[str, str], tell: Tell) -> Found:
    """Return the timeline of one recipe's run, computed by formula."""
    from memfit.cli.html_answer import timeline_of

    with model_of(question) as name:
        _, request, recipe = exact(question, name)
        usable = request.gpu.usable_bytes(request.reserve)
        return {"html": timeline_of(request.architecture, recipe, request.gpu, usable)}


LENGTHS, BATCHES = (512, 1 << 17), (1, 32)  # first and last of the map's axes


def map_of(question: dict[str, str], tell: Tell) -> Found:
    """Return the map of one recipe over length and micro-batch; the effective batch stays as it is."""
    from memfit.nouns.sweep import Axis
    from memfit.planner.sweep import sweep
    from memfit.report.heat_map import heat_map_svg
    from memfit.report.words import DOT, recipe_facts

    with model_of(question) as name:
        _, request, base = exact(question, name)
        first, last = LENGTHS
        last = min(last, request.architecture.max_positions or last)
        axes = (Axis("sequence_length", tuple(doubling(min(first, last), last))),
                Axis("micro_batch", tuple(doubling(*BATCHES))))  # fmt: skip

        def made(values: Mapping[str, Any]) -> tuple[Recipe, Gpu]:
            accumulation = max(base.effective_batch // (base.replicas * values["micro_batch"]), 1)
            return base.but(**values, accumulation=accumulation), request.gpu

        found = sweep(
            request.architecture, base, request.gpu, axes, reserve=request.reserve, made=made,
            host_memory=request.host_memory, workers=request.workers,
        )  # fmt: skip
        fixed = words(DOT.join(recipe_facts(base)))
        batch = f"Every cell has an effective batch of {base.effective_batch:,}, or its micro-batch where that is more."
        said = f"<p class='dim'>{fixed}</p><p class='dim'>{batch} A click asks for a cell's recipe.</p>"
        return {"html": f"{said}<div class='wide'>{heat_map_svg(found)}</div>"}


def compared(question: dict[str, str], tell: Tell) -> Found:
    """Return one recipe against another that was kept, or a measured run (`file`) against the recipe."""
    from memfit.documents import footprint_file
    from memfit.footprints.compare import compare
    from memfit.report.comparison_html import comparison_html
    from memfit.report.words import changes, short_recipe

    kept, file = question.pop("against", ""), question.pop("file", "")
    here = _side(question)
    if file:
        if Path(file).suffix == ".toml":  # it may name a model's folder on this machine
            raise BadInput("a recipe.toml is no measured run", hint="give a memfit-watch.jsonl, a tape or a snapshot")
        measured = footprint_file.read(Path(file), here.request.gpu.short)
        found = compare(here.footprint, measured)
        total = here.request.gpu.total_bytes
        sides, totals = (here.footprint, measured), (total, total)
        return {
            "html": comparison_html(
                f"predicted: {short_recipe(here.recipe)}", Path(file).name, sides, found, cards=totals
            )
        }
    if not kept:
        raise BadInput("nothing was kept to compare with", hint="keep an answer first, then change the question")
    there = _side(dict(parse_qsl(kept)))
    differ = list(changes(there.recipe, here.recipe))
    models, cards = ([f(side) for side in (there, here)] for f in (_Side.model, _Side.card))
    differ += [names[1] for names in (models, cards) if names[0] != names[1]]

    def named(side: _Side) -> str:
        model = [side.model()] if models[0] != models[1] else []
        card = [f"on {side.card()}"] if cards[0] != cards[1] else []
        return " ".join([*model, *card, short_recipe(side.recipe)])

    found = compare(there.footprint, here.footprint)
    sides, totals = (there.footprint, here.footprint), (there.request.gpu.total_bytes, here.request.gpu.total_bytes)
    html = comparison_html(f"kept: {named(there)}", f"now: {named(here)}", sides, found, differ, totals, settings=True)
    return {"html": html}


@dataclass(frozen=True)
class _Side:
    """One side of a comparison."""

    request: Request
    recipe: Recipe
    footprint: Footprint

    def model(self) -> str:
        """Return the model's name."""
        return self.request.architecture.name

    def card(self) -> str:
        """Return the card's name, with the number of cards."""
        from memfit.report.words import card_title

        return card_title(self.request.gpu, self.recipe.num_gpus)


def _side(question: dict[str, str]) -> _Side:
    from memfit.closed_form.run.estimate import estimate

    with model_of(question) as name:
        _, request, recipe = exact(question, name)
        return _Side(request, recipe, estimate(request.architecture, recipe, request.gpu, reserve=request.reserve))


def explained(question: dict[str, str], tell: Tell) -> Found:
    """Explain a dropped log, snapshot or tape, or a pasted text. `file` is a path that the page made itself."""
    from memfit.cli import explain
    from memfit.cli.flags import TAKEN

    flags: dict[str, Any] = {row.parameter: () if row.many else row.default for row in TAKEN[explain.run][0]}
    if "file" not in question:
        raise BadInput("nothing was given to explain", hint="drop a log, a snapshot or a tape, or paste the error")
    tell("reading", 0.1)
    with model_of(question) if question.get("model") else nullcontext() as model:
        found = explain.explained(question["file"], {**flags, "model": model, "gpu": question.get("gpu")})
    tell("drawing", 0.7)
    return {"html": explain.history_html(question["file"], found)}
