"""The page's view Learn: what it teaches, with the figures of the question's run."""

from __future__ import annotations

import json
from contextlib import suppress

from memfit.cli.page_question import Found, Tell, by_formula, exact, judged, model_of, read_question
from memfit.errors import BadInput, MemfitError, Unsupported

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
            footprint, judgement = judged(there, chosen)
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
