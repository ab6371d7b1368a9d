"""What the page answers: a question becomes HTML, a command and Python, by the code of the commands."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shlex
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.cli import page_views
from memfit.cli.flags import DATA, as_flags, typed
from memfit.cli.page_question import (
    ASKED,
    Found,
    Tell,
    UnreadError,
    as_asked,
    by_formula,
    doubling,
    exact,
    model_of,
    no_card,
    read_data,
    read_question,
    said,
    usual_card,
)
from memfit.errors import BadInput, MemfitError, Refused
from memfit.report.words import visible

if TYPE_CHECKING:
    from memfit.cli.request import Request
    from memfit.nouns.job import Recipe
    from memfit.nouns.plan import Plan

LONGEST = 1 << 20  # tokens, where a model does not say
# the folder that a dropped file lies in (page.drops, page_question.model_of), which is nothing that its owner knows
_TEMPORARY = "|".join(map(re.escape, (tempfile.gettempdir(), os.path.realpath(tempfile.gettempdir()))))
_DROPPED = re.compile(rf"(?:{_TEMPORARY})/memfit-(?:page-[^/]+/)?[^/]+/")


def answered(kind: str, question: dict[str, str], tell: Tell) -> Found:
    """Answer a question of the page. Never raises: an error is an answer with `error` and `hint`."""
    try:
        found = _KINDS[kind](question, tell)
    except MemfitError as error:
        found = {"error": visible(error.message), "hint": visible(error.hint or "")}
        if isinstance(error, UnreadError):
            found["unread"] = True
    except Exception:
        traceback.print_exc(file=sys.stderr)
        return {"error": "this is a bug in memfit; its traceback is in the terminal", "hint": ""}
    return {name: _named(value) for name, value in found.items()}


def _named(value: Any) -> Any:
    """Return a value with the names of dropped files in place of their paths."""
    if isinstance(value, list):
        return [_named(one) for one in value]
    return _DROPPED.sub("", value) if isinstance(value, str) else value


def _plan(question: dict[str, str], tell: Tell) -> Found:
    """Return the plan by formula, or say that it needs a trace."""
    from memfit.cli import plan_of_task, task_flags

    with model_of(question) as name:
        flags, request, row = read_question(question, name)
        if task_flags.needs_trace(row, request.architecture, request.recipe, flags["method"]):
            task_flags.check_flags(flags, row, request.architecture, request.recipe)
            return {"trace": True, "title": f"{row.title} of {request.architecture.name}"}
        plan = by_formula(flags, request) if row.language else plan_of_task.plan(request, row, name, flags, tell)
        return _shown(plan, flags, request, question)


def _trace(question: dict[str, str], tell: Tell) -> Found:
    """Return the plan by traces, and the timeline of the chosen recipe's."""
    from memfit.cli import plan_of_task, task_flags
    from memfit.cli.html_answer import timeline_of_plan

    with model_of(question) as name:
        flags, request, row = read_question(question, name)
        task_flags.check_flags(flags, row, request.architecture, request.recipe)
        plan = plan_of_task.plan(request, row, name, flags, tell)
        return {**_shown(plan, flags, request, question), "timeline": timeline_of_plan(plan)}


def _shown(plan: Plan, flags: dict[str, Any], request: Request, question: Mapping[str, str]) -> Found:
    """Return the answer of a plan: its HTML, the sliders, and how to ask the same elsewhere."""
    from memfit.cli.html_answer import explained_of
    from memfit.cli.task_flags import as_typed
    from memfit.report.answer_html import answer_html, ladder_html
    from memfit.tables.tasks import TASKS

    noted = replace(plan, notes=(*plan.notes, *request.notes))
    recipe = said(plan.recipe)
    if request.dataset:  # which says how large a sample is
        recipe |= as_asked(as_typed(TASKS[plan.job.task], plan.job.shape, request.architecture))
    return {
        "html": answer_html(noted, explained_of(plan), ladder=False),
        "ladder": ladder_html(plan, lambda recipe: json.dumps(pins(recipe, plan))),
        "verdict": plan.judgement.verdict, "source": plan.footprint.source,
        "title": f"{plan.job.architecture.name} on {plan.job.gpu.name}", "recipe": recipe,
        "batch": plan.job.effective_batch, "sliders": sliders(plan, request), **ways(plan, flags, request, question),
    }  # fmt: skip


# what a click on a rung sets, beside the values that the user has set
_PINNED = ("method", "precision", "quantization", "optimizer", "micro_batch", "checkpointing", "attention", "loss",
           "offload", "shard", "lora_rank", "padding")  # fmt: skip


def pins(recipe: Recipe, plan: Plan) -> dict[str, str]:
    """Return the fields that ask for a rung's recipe: those in which it may differ from the plan's."""
    here, there = said(recipe), said(plan.recipe)
    text = {name.replace("_", "-"): str(getattr(recipe, name)) for name in _PINNED}
    if recipe.method == "full":
        del text["lora-rank"]
    return {
        name: here.get(name, value) for name, value in text.items() if name in here or here.get(name) != there.get(name)
    }


def sliders(plan: Plan, request: Request) -> list[dict[str, Any]]:
    """Return what can be moved: name, values in order, the current one, and whether the formulas answer at once."""
    from memfit.tables.tasks import TASKS

    recipe, job, row = plan.recipe, plan.job, TASKS[plan.job.task]
    longest = request.architecture.max_positions or LONGEST
    rows: list[tuple[str, str, Iterable[int], int]] = [
        ("micro-batch", "micro-batch", doubling(1, 64), recipe.micro_batch)
    ]
    if row.of_tokens:
        rows.append(
            ("sequence-length", "sequence length", doubling(128, min(longest, LONGEST)), recipe.sequence_length)
        )
    if recipe.method != "full":
        rows.append(("lora-rank", "adapter rank", doubling(4, 256), recipe.lora_rank))
    if row.sample == "pictures":
        rows.append(("images", "images a text", (0, 1, 2, 4, 8), job.shape.images))
    rows.append(("num-gpus", "GPUs", doubling(1, max(64, job.num_gpus)), job.num_gpus))
    whole = [
        ("prompt-length", "prompt, tokens", job.shape.prompt),
        ("completion-length", "answer, tokens", job.shape.completion),
    ]
    if row.sample == "prompt":
        rows[1:1] = [(name, label, doubling(64, min(longest, LONGEST) // 2), now) for name, label, now in whole]
    at_once = {name for name, *_ in rows if plan.footprint.source == "formula"} - {name for name, *_ in whole}
    return [
        {"name": name, "label": label, "values": sorted({*values, now}), "now": now, "quick": name in at_once}
        for name, label, values, now in rows
    ]


def ways(plan: Plan, flags: dict[str, Any], request: Request, question: Mapping[str, str]) -> Found:
    """Return the commands and the Python that say the same, and whether files can be written."""
    from memfit.cli.plan import next_commands
    from memfit.cli.task_flags import apart
    from memfit.tables.tasks import TASKS

    row = TASKS[plan.job.task]
    model = question.get("model") or "path/to/config.json"
    card = ["--gpu", usual_card()] if no_card(flags) else []
    command = shlex.join(["memfit", "plan", model, *card, *typed(flags, (*ASKED.values(), *DATA))])
    own = apart(row, request.architecture, request.recipe, flags["method"])
    following = [] if own or "config" in question else next_commands(plan, request, flags)
    scripted = own or row.key == "sft"
    expressed = plan.recipe.context_parallel == 1 and "config" not in question
    can = plan.judgement.verdict in ("fits", "tight") and scripted and expressed
    return {"command": command, "next": following, "python": "" if own else _python(plan, model), "files": can}


def _python(plan: Plan, model: str) -> str:
    """Return the lines of Python that estimate the plan's recipe."""
    recipe = plan.recipe
    given = [f"{f.name}={getattr(recipe, f.name)!r}" for f in fields(recipe) if getattr(recipe, f.name) != f.default]
    return (
        "import memfit\n\n"
        f"recipe = memfit.Recipe({', '.join(given)})\n"
        f"card = memfit.find_gpu({plan.job.gpu.short!r})\n"
        f"footprint = memfit.estimate(memfit.resolve_model({model!r}), recipe, card)\n"
        "print(memfit.judge(footprint, card))"
    )


def _estimate(question: dict[str, str], tell: Tell) -> Found:
    """Return verdict and bar of one recipe, as `memfit estimate` judges it."""
    from memfit.report.answer_html import recipe_html, shares_html

    with model_of(question) as name:
        _, request, recipe = exact(question, name)
        footprint, judgement = request.judged_run(recipe)
        html = recipe_html(recipe, footprint, judgement) + shares_html(footprint, judgement, request.gpu)
        named = question.get("model", "path/to/config.json")
        command = shlex.join([*_again(named, request), *as_flags(recipe)])
        return {"html": html, "verdict": judgement.verdict, "recipe": said(recipe), "command": command}


def _again(named: str, request: Request) -> list[str]:
    """Return the beginning of the command that answers for one recipe: memfit estimate knows no other tasks."""
    from memfit.cli.task_flags import as_typed
    from memfit.tables.tasks import TASKS

    model = request.architecture
    row = TASKS[model.trained_for]
    if row.language:
        return ["memfit", "estimate", named, *request.gpu_words]
    said = as_typed(row, model.shape, model)
    return ["memfit", "trace", named, *request.gpu_words, *([] if "--task" in said else ["--task", row.key]), *said]


def _warm(question: dict[str, str], tell: Tell) -> Found:
    """Import what answers, so that the first question does not wait."""
    _KINDS["plan"]({"model": "llama-2-7b", "gpu": "h100"}, tell)
    return {}


def _ahead(question: dict[str, str], tell: Tell) -> Found:
    """Import what explains a dropped snapshot, and read it while it is sent."""
    import memfit.cli.explain
    import memfit.report.timeline_html  # noqa: F401
    from memfit.documents.snapshot import MAX_FILE, ahead

    size = int(question["size"])
    with suppress(MemfitError, OSError):  # the question about it will say the same
        if size <= MAX_FILE:
            ahead.read(Path(question["file"]), Path(question["part"]), size)
    return {}


def _files(question: dict[str, str], tell: Tell) -> dict[str, str]:
    """Return the files that --out writes, by name."""
    from memfit.cli import plan_of_task, task_flags
    from memfit.cli.plan import key_of
    from memfit.frameworks.targets import exported

    if "config" in question:
        raise BadInput("a dropped config.json has no weights to train", hint="name a model of the Hub, or a folder")
    with model_of(question) as name:
        flags, request, row = read_question(question, name)
        if task_flags.apart(row, request.architecture, request.recipe, flags["method"]):
            plan = plan_of_task.plan(request, row, name, {**flags, "out": "run"}, tell)
            key = plan_of_task.target_of(row, plan.recipe, flags).key
        else:
            plan = by_formula({**flags, "out": "run"}, request)
            key = key_of(None, request, plan.recipe.trainer)
        if plan.judgement.verdict == "misfit":
            raise Refused("nothing fits, so there are no files to run", hint="take a larger card or a smaller model")
        return {path: _named(text) for path, text in exported(plan, key).files.items()}


def _packed(question: dict[str, str], tell: Tell) -> Found:
    """Return the files of a plan as a zip in base64."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in _files(question, tell).items():
            archive.writestr(zipfile.ZipInfo(f"memfit-run/{name}"), text)  # the same files give the same bytes
    return {"zip": base64.b64encode(buffer.getvalue()).decode()}


def _save(given: dict[str, str], tell: Tell) -> Found:
    """Write the files of a plan into the folder that the user typed; nothing is overwritten."""
    from memfit.frameworks.targets import write

    folder = given.pop("folder", "").strip()
    if not folder:
        raise BadInput("no folder given", hint="type one, for example run")
    path = Path(folder).expanduser()
    return {"written": [str(p) for p in write(_files(given, tell), path)]}


_KINDS: dict[str, Callable[[dict[str, str], Tell], Found]] = {
    "plan": _plan, "trace": _trace, "estimate": _estimate,
    "timeline": page_views.timeline, "sweep": page_views.map_of, "cards": page_views.cards,
    "compare": page_views.compared, "watched": page_views.watched, "lanes": page_views.lanes,
    "explain": page_views.explained, "learn": page_views.learn,
    "files": _packed, "save": _save,
    "warm": _warm, "ahead": _ahead, "data": read_data,
}  # fmt: skip
