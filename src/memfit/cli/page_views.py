"""The page's views beside the answer: the step as a timeline, the map, a comparison, a failure explained, and Learn."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import parse_qsl

from memfit.cli.page_question import (
    ASKED,
    Found,
    Tell,
    by_formula,
    doubling,
    exact,
    flags_of,
    model_of,
    read_question,
)
from memfit.errors import BadInput, MemfitError, Unsupported
from memfit.report.document_html import words

if TYPE_CHECKING:
    from memfit.cli.request import Request
    from memfit.nouns.footprint import Footprint
    from memfit.nouns.gpu import Gpu
    from memfit.nouns.job import Recipe
    from memfit.nouns.tape import Tape


def timeline(question: dict[str, str], tell: Tell) -> Found:
    """Return the timeline of one recipe's run, computed by formula."""
    from memfit.cli.html_answer import timeline_of

    with model_of(question) as name:
        _, request, recipe = exact(question, name)
        usable = request.gpu.usable_bytes(request.reserve)
        return {"html": timeline_of(request.architecture, recipe, request.gpu, usable)}


MOST_FILES = 32  # tapes of ranks, or histories to explain, at the same time
LENGTHS, BATCHES = (512, 1 << 17), (1, 32)  # first and last of the map's axes
GPUS = 64  # the most of a map over them


def watched(question: dict[str, str], tell: Tell) -> Found:
    """Return a watched run over the prediction of the question's recipe, or over the one that it was started with."""
    from memfit.cli.logs import read_watched
    from memfit.report.watched_html import watched_html

    path = Path(question.pop("file"))
    if not path.exists() or not path.stat().st_size:
        return {"html": f"<h1>{words(path.name)}</h1><p class='dim'>The run has not begun: the log is empty.</p>"}
    run = read_watched(path)
    predicted, note = None, ""
    if question.get("model") or question.get("config"):
        try:
            predicted = _side(question, tell).footprint
        except MemfitError as error:
            note = f"<p class='dim'>Not compared with the model on the left: {words(error.message)}</p>"
    return {"html": watched_html(run, predicted) + note}


def map_of(question: dict[str, str], tell: Tell) -> Found:
    """Return the map of one recipe over length and micro-batch; the effective batch stays as it is.

    Where other sizes decide how long a sample is, it goes over the micro-batch alone; with `over` num-gpus it goes over
    GPUs and sharding.
    """
    from memfit.nouns.job import Shard
    from memfit.nouns.sweep import Axis
    from memfit.planner.sweep import sweep
    from memfit.report.heat_map import heat_map_svg
    from memfit.report.words import DOT, recipe_facts
    from memfit.tables.tasks import TASKS

    over = question.pop("over", "")
    if over not in ("", "num-gpus"):
        raise BadInput(f"the page draws no map over {over}", hint="over=num-gpus, or leave it out")
    with model_of(question) as name:
        _, request, base = exact(question, name)
        first, last = LENGTHS
        last = min(last, request.architecture.max_positions or last)
        lengths = Axis("sequence_length", tuple(doubling(min(first, last), last)))
        batches = Axis("micro_batch", tuple(doubling(*BATCHES)))
        axes = (lengths, batches) if TASKS[request.architecture.trained_for].of_tokens else (batches,)
        if over:
            counts = Axis("num_gpus", tuple(doubling(1, max(GPUS, base.num_gpus))))
            axes = (counts, Axis("shard", get_args(Shard)))

        def made(values: Mapping[str, Any]) -> tuple[Recipe, Gpu]:
            recipe = base.but(**values)
            accumulation = max(base.effective_batch // (recipe.replicas * recipe.micro_batch), 1)
            return recipe.but(accumulation=accumulation), request.gpu

        found = sweep(request.architecture, base, request.gpu, axes, made, **request.room)
        fixed = words(DOT.join(recipe_facts(base)))
        batch = f"Every cell has an effective batch of {base.effective_batch:,}, or its micro-batch where that is more."
        said = f"<p class='dim'>{fixed}</p><p class='dim'>{batch} A click sets the values of a cell.</p>"
        return {"html": f"{said}<div class='wide'>{heat_map_svg(found)}</div>"}


def cards(question: dict[str, str], tell: Tell) -> Found:
    """Return the question's recipe on every card with a price, cheapest first, and on the smallest that holds it."""
    from memfit.catalogue.cards import list_gpus
    from memfit.nouns.sweep import CARDS_AXIS, Axis
    from memfit.planner.sweep import sweep
    from memfit.report.cards_html import priced_cards_html

    with model_of(question) as name:
        _, request, base = exact(question, name)
    own = request.gpu
    known = {gpu.short: gpu for gpu in list_gpus() if gpu.vendor == own.vendor}
    priced = sorted((g for g in known.values() if g.price_per_hour), key=lambda g: (g.price_per_hour, g.sold_bytes))
    need = request.judged_run(base)[1].need
    larger = sorted(known.values(), key=lambda g: (g.usable_bytes(request.reserve), g.price_per_hour is None))
    enough = (g for g in larger if g.usable_bytes(request.reserve) >= need)
    smallest = next((g for g in enough if _holds(request, base, g)), None)
    asked = {gpu.short: gpu for gpu in (*priced, own, *((smallest,) if smallest else ()))}

    def made(values: Mapping[str, Any]) -> tuple[Recipe, Gpu]:
        return base, asked[values[CARDS_AXIS]]

    found = sweep(request.architecture, base, own, (Axis(CARDS_AXIS, tuple(asked)),), made, **request.room)
    rows = list(zip(asked.values(), found.cells, strict=True))
    said = f"The smallest card that holds this recipe: {smallest.name}." if smallest else "No card holds this recipe."
    return {"html": f"<h2>The same recipe on other cards</h2><p class='dim'>{words(said)}</p>{priced_cards_html(rows)}"}


def _holds(request: Request, recipe: Recipe, gpu: Gpu) -> bool:
    with suppress(MemfitError):  # a card may lack what the recipe uses
        return replace(request, gpu=gpu).judged_run(recipe)[1].verdict == "fits"
    return False


def compared(question: dict[str, str], tell: Tell) -> Found:
    """Return one recipe against another that was kept, or a measured run (`file`) against the recipe."""
    from memfit.documents import footprint_file
    from memfit.footprints.compare import compare
    from memfit.report.comparison_html import comparison_html
    from memfit.report.words import changes, short_recipe

    kept, file = question.pop("against", ""), question.pop("file", "")
    here = _side(question, tell)
    if file:
        if Path(file).suffix == ".toml":  # it may name a model's folder on this machine
            raise BadInput("a recipe.toml is no measured run", hint="give a memfit-watch.jsonl, a tape or a snapshot")
        measured = footprint_file.read(Path(file), here.request.gpu.short)
        found = compare(here.footprint, measured)
        total = here.request.gpu.total_bytes
        sides, totals = (here.footprint, measured), (total, total)
        called = ("predicted", "measured")
        names = short_recipe(here.recipe), Path(file).name
        return {"html": comparison_html(*names, sides, found, cards=totals, called=called)}
    if not kept:
        raise BadInput("nothing was kept to compare with", hint="keep an answer first, then change the question")
    there = _side(dict(parse_qsl(kept)), tell)
    differ = list(changes(there.recipe, here.recipe))
    models, cards = ([f(side) for side in (there, here)] for f in (_Side.model, _Side.card))
    differ += [names[1] for names in (models, cards) if names[0] != names[1]]

    def named(side: _Side) -> str:
        model = [side.model()] if models[0] != models[1] else []
        card = [f"on {side.card()}"] if cards[0] != cards[1] else []
        return " ".join([*model, *card, short_recipe(side.recipe)])

    found = compare(there.footprint, here.footprint)
    sides, totals = (there.footprint, here.footprint), (there.request.gpu.total_bytes, here.request.gpu.total_bytes)
    html = comparison_html(
        named(there), named(here), sides, found, differ, totals, settings=True, called=("kept", "now")
    )
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


def _side(question: dict[str, str], tell: Tell) -> _Side:
    """Return a side by formula, or of the plan by traces that the cache still has."""
    from memfit.cli import plan_of_task, task_flags
    from memfit.closed_form.run.estimate import estimate

    with model_of(question) as name:
        flags, request, row = read_question(question, name)
        if task_flags.needs_trace(row, request.architecture, request.recipe, flags["method"]):
            plan = plan_of_task.plan(request, row, name, flags, tell)
            return _Side(request, plan.recipe, plan.footprint)
        _, request, recipe = exact(question, name)
        return _Side(request, recipe, estimate(request.architecture, recipe, request.gpu, reserve=request.reserve))


def explained(question: dict[str, str], tell: Tell) -> Found:
    """Explain dropped logs, snapshots or tapes, or a pasted text; several histories stand side by side."""
    from memfit.cli import explain
    from memfit.cli.flags import TAKEN
    from memfit.documents import footprint_file

    flags: dict[str, Any] = {row.parameter: () if row.many else row.default for row in TAKEN[explain.run][0]}
    if "file" not in question:
        raise BadInput("nothing was given to explain", hint="drop a log, a snapshot or a tape, or paste the error")
    files, made = _files(question), []
    sides: list[Footprint] = []
    with _model(question) as model:
        if model:  # what the reader said of the run; the planner's own choices are not what failed
            said = [n for n in question if n in ASKED and ASKED[n].parameter in flags and question[n] != "auto"]
            read = flags_of({name: question[name] for name in said})
            flags |= {ASKED[name].parameter: read[ASKED[name].parameter] for name in said} | {"model": model}
        for number, file in enumerate(files):
            tell(f"reading {Path(file).name}", (0.1 + number) / len(files))
            found = explain.explained(file, flags, drawn=True)
            tell(f"drawing {Path(file).name}", (0.7 + number) / len(files))
            made.append(explain.history_html(file, found))
            if len(files) == 2:
                with suppress(MemfitError):  # of a log there is none
                    sides.append(footprint_file.of_tape(found.tape) if found.tape else footprint_file.read(Path(file)))
    if len(made) == 1:
        return {"html": made[0]}
    pair = f"<div class='pair'>{''.join(f'<div>{html}</div>' for html in made)}</div>"
    return {"html": _difference(files, sides) + pair}


def _files(question: Mapping[str, str]) -> list[str]:
    """Return the paths of the dropped files; the page made them, and their names hold no line break."""
    files = question["file"].split("\n")
    if len(files) > MOST_FILES:
        raise BadInput(f"{len(files)} files are too many to draw", hint=f"drop {MOST_FILES} at most")
    return files


def _model(question: Mapping[str, str]) -> AbstractContextManager[str | None]:
    return model_of(question) if question.get("model") or question.get("config") else nullcontext()


def _difference(files: Sequence[str], sides: Sequence[Footprint]) -> str:
    """Return what differs between the peaks of two histories; "" where they are not two."""
    from memfit.footprints.compare import compare
    from memfit.report.comparison_html import comparison_html

    if len(sides) != 2:
        return ""
    names, (left, right) = [Path(file).name for file in files], sides
    return comparison_html(names[0], names[1], (left, right), compare(left, right), settings=True)


def lanes(question: dict[str, str], tell: Tell) -> Found:
    """Return the timelines of dropped tapes on one scale, as of the ranks of a job; of a single one, its timeline."""
    from memfit.allocator.replay import made_with, replay
    from memfit.catalogue.cards import parse_gpu
    from memfit.documents.snapshot import read
    from memfit.footprints.rank_peaks import peak_of_rank, worst_first
    from memfit.report.rank_lanes_html import rank_lanes
    from memfit.report.timeline_html import plot_html

    usable = parse_gpu(question["gpu"])[0].usable_bytes() if question.get("gpu") else None
    files, peaks = _files(question), []
    tapes: dict[int, Tape] = {}
    for number, file in enumerate(files):
        tell(f"reading {Path(file).name}", number / len(files))
        tape = read(Path(file))
        torch, settings = made_with(tape)
        timeline = replay(tape.events, settings=settings, torch=torch, start=tape.start)
        if not timeline.by_phase():
            raise BadInput(f"{Path(file).name} has no timeline: nothing was recorded over time", hint="drop a tape")
        found = re.search(r"rank-(\d+)", Path(file).name)
        rank = int(found[1]) if found and int(found[1]) not in tapes else max(tapes, default=-1) + 1
        tapes[rank] = tape
        peaks.append(peak_of_rank(rank, (rank,), Path(file).name, tape, timeline, usable or 0, (), 0, False))
    ordered = worst_first(peaks)
    worst = tapes[ordered[0].rank]
    torch, settings = made_with(worst)
    html = f"<h1>{words(ordered[0].what)}</h1>{plot_html(worst, settings, torch, usable, go_on=True)}"
    if len(ordered) > 1:
        html += rank_lanes([(peak, tapes[peak.rank]) for peak in ordered], settings, torch, usable)
    return {"html": html}


# ---- Learn ----------------------------------------------------------------------------------------------------------

_TAUGHT = "smollm2-135m"  # the model of Learn where none is named, or no formula counts the one that is
_CARDS = ("rtx-3080", "rtx-3090", "rtx-4090", "a100-40gb", "a100-80gb", "h100")  # beside the reader's


def learn(question: dict[str, str], tell: Tell) -> Found:
    """Return what the page teaches, with the figures of the question's run. `recipe` is the answer's, as JSON."""
    recipe = question.pop("recipe", "")
    small = {"model": _TAUGHT, **({"gpu": question["gpu"]} if "gpu" in question else {})}
    tries = [
        (question, recipe, ""), ({k: v for k, v in question.items() if k != "task"}, "", "its supervised fine-tuning"),
        (small, "", "a small model"), ({"model": _TAUGHT}, "", "a small model"),
    ]  # fmt: skip
    problem = "" if {"model", "config"} & {*question} else "No model is named yet"
    for asked, of, whose in tries[2 if problem else 0 :]:
        try:
            return {"html": _lesson(asked, of, f"{problem}: the figures are of {whose}." if whose else "")}
        except MemfitError as error:
            problem = problem or error.message[:1].upper() + error.message[1:]
    raise AssertionError("the small model has a formula on the usual card")


def _lesson(question: dict[str, str], recipe: str, note: str) -> str:
    """Return the HTML of Learn for a run that a formula counts. Raises MemfitError."""
    from memfit.catalogue.cards import find_gpu
    from memfit.cli import glossary, task_flags
    from memfit.cli.request import job_of
    from memfit.cli.web_files import lesson_texts
    from memfit.planner.lesson import lesson_of
    from memfit.report.learn_html import learn_html

    with model_of(question) as name:
        flags, request, row = read_question(question, name)
        if task_flags.apart(row, request.architecture, request.recipe, flags["method"]):
            raise Unsupported(f"these sums are of language models, not of {row.title} of {request.architecture.name}")
        if recipe:
            _, there, chosen = exact({**_recipe_words(recipe), **question}, name)
            footprint, judgement = there.judged_run(chosen)
        else:
            plan = by_formula(flags, request)
            chosen, footprint, judgement = plan.recipe, plan.footprint, plan.judgement
    job, base = job_of(request, flags)
    cards = {gpu.short: gpu for gpu in (*map(find_gpu, _CARDS), request.gpu)}
    ordered = sorted(cards.values(), key=lambda gpu: (gpu.sold_bytes, gpu.bandwidth))
    return learn_html(
        lesson_of(job, base, chosen, footprint, judgement, ordered), lesson_texts(), glossary.load(), note
    )


def _recipe_words(text: str) -> dict[str, str]:
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, dict) and all(isinstance(value, str) for value in found.values()):
            return found
    raise BadInput("the recipe is not JSON of texts", hint="leave it out")
