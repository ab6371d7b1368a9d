"""What the page answers: a question in the words of the flags becomes HTML, a command and Python, by the same code."""

from __future__ import annotations

import base64
import io
import json
import shlex
import sys
import tempfile
import traceback
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from memfit.cli.flags import AUTO, BATCH, CARD, HOST, TASK, Flag, as_flags, typed
from memfit.errors import BadInput, MemfitError, Unsupported
from memfit.report.document_html import words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memfit.cli.request import Request
    from memfit.nouns.footprint import Footprint
    from memfit.nouns.gpu import Gpu
    from memfit.nouns.job import Recipe
    from memfit.nouns.plan import Judgement, Plan
    from memfit.nouns.task import Task

    Tell = Callable[[str, float], None]
    Found = dict[str, Any]

ASKED: dict[str, Flag] = {row.flag.removeprefix("--"): row for row in (*CARD, *HOST, *TASK, BATCH, *AUTO)}
SWITCH = {"1": True, "true": True, "on": True, "0": False, "false": False}
LARGEST_CONFIG = 1 << 18  # bytes of a dropped config.json
LONGEST = 1 << 20  # tokens, where a model does not say


def answered(kind: str, question: dict[str, str], tell: Tell) -> Found:
    """Answer a question of the page. Never raises: an error is an answer with `error` and `hint`."""
    try:
        return _KINDS[kind](question, tell)
    except MemfitError as error:
        return {"error": error.message, "hint": error.hint or ""}
    except Exception:
        traceback.print_exc(file=sys.stderr)
        return {"error": "this is a bug in memfit; its traceback is in the terminal", "hint": ""}


# ---- reading a question --------------------------------------------------------------------------------------------


def flags_of(question: Mapping[str, str]) -> dict[str, Any]:
    """Return the flags of `memfit plan` that a question gives. Raises BadInput."""
    from memfit.cli import plan
    from memfit.cli.flags import TAKEN

    flags: dict[str, Any] = {row.parameter: () if row.many else row.default for row in TAKEN[plan.run][0]}
    for name, text in question.items():
        if name in ("model", "config", "config-name", "changed", "file"):
            continue
        if name not in ASKED:
            raise BadInput(f"the page asks nothing called {name}", hint=f"it asks {', '.join(ASKED)}")
        flags[ASKED[name].parameter] = _value(name, ASKED[name], text)
    return flags


def _value(name: str, row: Flag, text: str) -> Any:
    if row.kind is bool:
        if text not in SWITCH:
            raise BadInput(f"--{name} is on or off, not {text!r}", hint=f"{name}=1")
        return SWITCH[text]
    try:
        return row.kind(text)
    except BadInput as error:
        raise BadInput(f"--{name}: {error.message}", hint=error.hint) from None
    except ValueError:
        raise BadInput(f"--{name} takes a number, not {text!r}", hint=f"for example {name}=8") from None


@contextmanager
def _model(question: Mapping[str, str]) -> Iterator[str]:
    """Yield the name of the model, or the path of the config.json that came with the question."""
    name = question.get("model", "")
    if packed := question.get("config"):
        with tempfile.TemporaryDirectory(prefix="memfit-") as folder:
            path = Path(folder) / _plain(question.get("config-name", "")) / "config.json"
            path.parent.mkdir()
            path.write_bytes(_unpacked(packed))
            yield str(path.parent)
        return
    if not name:
        raise BadInput("no model given", hint="type a name, or drop a config.json")
    if name.startswith(("/", ".", "~")) or "\\" in name or ".." in name or Path(name).exists():
        raise BadInput(f"the page reads no files of this machine: {name}", hint="drop the model's config.json on it")
    yield name


def _plain(name: str) -> str:
    """Return a name of a folder: letters, digits, dots and dashes."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name).strip(".-")
    return kept[:80] or "dropped-model"


def _unpacked(packed: str) -> bytes:
    """Return a config.json that came deflated and in base64. Raises BadInput for what is none, or too large."""
    problem = BadInput("the dropped file is no config.json", hint="drop the config.json of a model on the Hub")
    try:
        reader = zlib.decompressobj()
        text = reader.decompress(base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)), LARGEST_CONFIG)
        if reader.unconsumed_tail:
            raise BadInput(f"the dropped file is larger than {LARGEST_CONFIG >> 10} KiB", hint="config.json is smaller")
        if not isinstance(json.loads(text), dict):
            raise problem
    except (ValueError, RecursionError, zlib.error):
        raise problem from None
    return text


# ---- plans ---------------------------------------------------------------------------------------------------------


def _read(question: dict[str, str], name: str) -> tuple[dict[str, Any], Request, Task]:
    from memfit.cli import task_flags
    from memfit.cli.request import read_request

    flags = task_flags.with_task(flags_of(question))
    request = read_request(name, {**flags, "gpu": usual_card()} if _no_card(flags) else flags)
    row = task_flags.asked(flags, request.architecture, None)
    task_flags.shape_of(flags, row)
    return flags, request, row


@cache
def usual_card() -> str:
    """Return the card of a question that names none: this machine's, else a common one, as the page asks at once."""
    from memfit.catalogue.cards import local_gpu

    with suppress(MemfitError):
        local_gpu()
        return "local"
    return "rtx-4090"


def _no_card(flags: Mapping[str, Any]) -> bool:
    return not flags["gpu"] and not flags["gpu_memory"]


def _plan(question: dict[str, str], tell: Tell) -> Found:
    """Return the plan by formula, or say that it needs a trace."""
    from memfit.cli import plan_of_task, task_flags

    with _model(question) as name:
        flags, request, row = _read(question, name)
        if task_flags.needs_trace(row, request.architecture, request.recipe, flags["method"]):
            task_flags.check_flags(flags, row, request.architecture, request.recipe)
            return {"trace": True, "title": f"{row.title} of {request.architecture.name}"}
        plan = _by_formula(flags, request) if row.language else plan_of_task.plan(request, row, name, flags, tell)
        return _shown(plan, flags, request, question)


def _trace(question: dict[str, str], tell: Tell) -> Found:
    """Return the plan by traces."""
    from memfit.cli import plan_of_task, task_flags

    with _model(question) as name:
        flags, request, row = _read(question, name)
        task_flags.check_flags(flags, row, request.architecture, request.recipe)
        plan = plan_of_task.plan(request, row, name, flags, tell)
        return _shown(plan, flags, request, question)


def _by_formula(flags: dict[str, Any], request: Request) -> Plan:
    from memfit.cli.plan import planning
    from memfit.cli.request import judged_plan

    return judged_plan(request, planning(request, flags, None, None)())


def _shown(plan: Plan, flags: dict[str, Any], request: Request, question: Mapping[str, str]) -> Found:
    """Return the answer of a plan: its HTML, the sliders, and how to ask the same elsewhere."""
    from memfit.cli.html_answer import explained_of
    from memfit.report.answer_html import answer_html, facts_html, ladder_html

    html = answer_html(plan, explained_of(plan), ladder=False)
    if request.notes:
        html += facts_html([("note:", line) for line in request.notes])
    return {
        "html": html, "ladder": ladder_html(plan, lambda recipe: json.dumps(pins(recipe, plan))),
        "verdict": plan.judgement.verdict, "source": plan.footprint.source,
        "title": f"{plan.job.architecture.name} on {plan.job.gpu.name}", "recipe": said(plan.recipe),
        "batch": plan.job.effective_batch, "sliders": sliders(plan, request), **ways(plan, flags, request, question),
    }  # fmt: skip


def said(recipe: Recipe) -> dict[str, str]:
    """Return a recipe's fields as the page asks for them; defaults are left out."""
    typed_words, found = as_flags(recipe), {}
    for i, word in enumerate(typed_words):
        if word.startswith("--"):
            following = typed_words[i + 1 : i + 2]
            value = following[0] if following and not following[0].startswith("--") else ""
            off = word.startswith("--no-") and not value
            found[word[5:] if off else word[2:]] = value or ("0" if off else "1")
    return found


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
        ("micro-batch", "micro-batch", _doubling(1, 64), recipe.micro_batch)
    ]
    if row.of_tokens:
        rows.append(
            ("sequence-length", "sequence length", _doubling(128, min(longest, LONGEST)), recipe.sequence_length)
        )
    if recipe.method != "full":
        rows.append(("lora-rank", "adapter rank", _doubling(4, 256), recipe.lora_rank))
    if row.sample == "pictures":
        rows.append(("images", "images a text", (0, 1, 2, 4, 8), job.shape.images))
    rows.append(("num-gpus", "GPUs", _doubling(1, max(64, job.num_gpus)), job.num_gpus))
    at_once = plan.footprint.source == "formula"
    return [
        {"name": name, "label": label, "values": sorted({*values, now}), "now": now, "quick": at_once}
        for name, label, values, now in rows
    ]


def _doubling(first: int, last: int) -> list[int]:
    found = [first]
    while found[-1] * 2 <= last:
        found.append(found[-1] * 2)
    return found if found[-1] == last else [*found, last]


def ways(plan: Plan, flags: dict[str, Any], request: Request, question: Mapping[str, str]) -> Found:
    """Return the commands and the Python that say the same, and whether files can be written."""
    from memfit.cli.plan import next_commands
    from memfit.cli.task_flags import apart
    from memfit.tables.tasks import TASKS

    row = TASKS[plan.job.task]
    model = question.get("model") or "path/to/config.json"
    asked = (
        typed(flags, ASKED.values()) if not _no_card(flags) else ["--gpu", usual_card(), *typed(flags, ASKED.values())]
    )
    command = shlex.join(["memfit", "plan", model, *asked])
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


# ---- one recipe ----------------------------------------------------------------------------------------------------


def _exact(question: dict[str, str], name: str) -> tuple[dict[str, Any], Request, Recipe]:
    """Return the recipe that a question names whole; a changed micro-batch keeps the effective batch."""
    from memfit.cli.request import check_task, exact_recipe
    from memfit.cli.task_flags import as_run, needs_trace, shape_of
    from memfit.models import families, hub
    from memfit.tables import combinations

    flags, request, row = _read({k: v for k, v in question.items() if k != "effective-batch"}, name)
    if row.language:
        check_task(request.architecture)
    if needs_trace(row, request.architecture, request.recipe):
        raise Unsupported(f"no formula counts {row.title}", hint="ask for the plan, which a trace answers")
    recipe = exact_recipe(request, None if flags["method"] == "auto" else flags["method"])
    if not row.language:
        shape = shape_of(flags, row)
        model = families.trained_for(hub.resolve_config(name), request.architecture.name, row, shape)
        request, recipe = replace(request, architecture=model), as_run(recipe, row, shape)
    batch = int(question.get("effective-batch") or 0)
    if batch and "changed" in question:
        recipe = recipe.but(accumulation=max(batch // (recipe.micro_batch * recipe.replicas), 1))
    return flags, request, combinations.check(recipe, request.architecture, request.gpu)


def _estimate(question: dict[str, str], tell: Tell) -> Found:
    """Return verdict and bar of one recipe, as `memfit estimate` judges it."""
    from memfit.report.answer_html import recipe_html, shares_html

    with _model(question) as name:
        _, request, recipe = _exact(question, name)
        footprint, judgement = _judged(request, recipe)
        html = recipe_html(recipe, footprint, judgement) + shares_html(footprint, judgement, request.gpu)
        named = question.get("model", "path/to/config.json")
        command = shlex.join([*_again(named, request), *as_flags(recipe)])
        return {"html": html, "verdict": judgement.verdict, "recipe": said(recipe), "command": command}


def _judged(request: Request, recipe: Recipe) -> tuple[Footprint, Judgement]:
    """Return the footprint of one recipe and its judgement."""
    from memfit.closed_form.judged_run import judged_run

    return judged_run(
        request.architecture, recipe, request.gpu, reserve=request.reserve, host_memory=request.host_memory,
        workers=request.workers,
    )  # fmt: skip


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


def _timeline(question: dict[str, str], tell: Tell) -> Found:
    """Return the timeline of one recipe's run, computed by formula."""
    from memfit.cli.html_answer import timeline_of

    with _model(question) as name:
        _, request, recipe = _exact(question, name)
        usable = request.gpu.usable_bytes(request.reserve)
        return {"html": timeline_of(request.architecture, recipe, request.gpu, usable)}


LENGTHS, BATCHES = (512, 1 << 17), (1, 32)  # first and last of the map's axes


def _sweep(question: dict[str, str], tell: Tell) -> Found:
    """Return the map of one recipe over length and micro-batch; the effective batch stays as it is."""
    from memfit.nouns.sweep import Axis
    from memfit.planner.sweep import sweep
    from memfit.report.heat_map import heat_map_svg
    from memfit.report.words import DOT, recipe_facts

    with _model(question) as name:
        _, request, base = _exact(question, name)
        first, last = LENGTHS
        last = min(last, request.architecture.max_positions or last)
        axes = (Axis("sequence_length", tuple(_doubling(min(first, last), last))),
                Axis("micro_batch", tuple(_doubling(*BATCHES))))  # fmt: skip

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


def _compare(question: dict[str, str], tell: Tell) -> Found:
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

    with _model(question) as name:
        _, request, recipe = _exact(question, name)
        return _Side(request, recipe, estimate(request.architecture, recipe, request.gpu, reserve=request.reserve))


def _explain(question: dict[str, str], tell: Tell) -> Found:
    """Explain a dropped log, snapshot or tape, or a pasted text. `file` is a path that the page made itself."""
    from memfit.cli import explain
    from memfit.cli.flags import TAKEN

    flags: dict[str, Any] = {row.parameter: () if row.many else row.default for row in TAKEN[explain.run][0]}
    if "file" not in question:
        raise BadInput("nothing was given to explain", hint="drop a log, a snapshot or a tape, or paste the error")
    tell("reading", 0.1)
    with _model(question) if question.get("model") else nullcontext() as model:
        found = explain.explained(question["file"], {**flags, "model": model, "gpu": question.get("gpu")})
    tell("drawing", 0.7)
    return {"html": explain.history_html(question["file"], found)}


# ---- learn ----------------------------------------------------------------------------------------------------------

_TAUGHT = "smollm2-135m"  # the model of Learn where none is named, or no formula counts the one that is
_CARDS = ("rtx-3080", "rtx-3090", "rtx-4090", "a100-40gb", "a100-80gb", "h100")  # beside the reader's


def _learn(question: dict[str, str], tell: Tell) -> Found:
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

    with _model(question) as name:
        flags, request, row = _read(question, name)
        if task_flags.apart(row, request.architecture, request.recipe, flags["method"]):
            raise Unsupported(f"these sums are of language models, not of {row.title} of {request.architecture.name}")
        if recipe:
            _, there, chosen = _exact({**_recipe_words(recipe), **question}, name)
            footprint, judgement = _judged(there, chosen)
        else:
            plan = _by_formula(flags, request)
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


# ---- files ---------------------------------------------------------------------------------------------------------


def _made(question: dict[str, str], tell: Tell) -> dict[str, str]:
    """Return the files that --out writes, by name."""
    from memfit.cli import plan_of_task, task_flags
    from memfit.cli.plan import key_of
    from memfit.errors import Refused
    from memfit.frameworks.targets import exported

    if "config" in question:
        raise BadInput("a dropped config.json has no weights to train", hint="name a model of the Hub, or a folder")
    with _model(question) as name:
        flags, request, row = _read(question, name)
        if task_flags.apart(row, request.architecture, request.recipe, flags["method"]):
            plan = plan_of_task.plan(request, row, name, {**flags, "out": "run"}, tell)
            key = plan_of_task.target_of(row, plan.recipe, flags).key
        else:
            plan = _by_formula({**flags, "out": "run"}, request)
            key = key_of(None, request, plan.recipe.trainer)
        if plan.judgement.verdict == "misfit":
            raise Refused("nothing fits, so there are no files to run", hint="take a larger card or a smaller model")
        return exported(plan, key).files


def _files(question: dict[str, str], tell: Tell) -> Found:
    """Return the files of a plan as a zip in base64."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in _made(question, tell).items():
            archive.writestr(zipfile.ZipInfo(f"memfit-run/{name}"), text)  # the same files give the same bytes
    return {"zip": base64.b64encode(packed.getvalue()).decode()}


def _save(given: dict[str, str], tell: Tell) -> Found:
    """Write the files of a plan into the folder that the user typed; nothing is overwritten."""
    from memfit.frameworks.targets import write

    folder = given.pop("folder", "").strip()
    if not folder:
        raise BadInput("no folder given", hint="type one, for example run")
    path = Path(folder).expanduser()
    return {"written": [str(p) for p in write(_made(given, tell), path)]}


def _warm(question: dict[str, str], tell: Tell) -> Found:
    """Import what answers, so that the first question does not wait."""
    _KINDS["plan"]({"model": "llama-2-7b", "gpu": "h100"}, tell)
    return {}


_KINDS: dict[str, Callable[[dict[str, str], Tell], Found]] = {
    "plan": _plan, "trace": _trace, "estimate": _estimate, "timeline": _timeline, "sweep": _sweep, "compare": _compare,
    "explain": _explain, "learn": _learn,
    "files": _files, "save": _save,
    "warm": _warm,
}  # fmt: skip
