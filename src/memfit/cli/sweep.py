"""memfit sweep: the map of headroom over one or two axes of a recipe."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

from memfit.catalogue.cards import count_in_name, parse_gpu
from memfit.cli import terminal
from memfit.cli.flags import (
    CARD,
    COMMON,
    FROM,
    HOST,
    IGNORE,
    MODEL,
    RECIPE,
    TASK,
    Flag,
    as_flags,
    meant_flag,
    recipe_values,
    takes,
    typed,
)
from memfit.cli.forked import forked_map
from memfit.cli.one_recipe import counted, without_images
from memfit.cli.request import (
    LORA_ONLY,
    Request,
    check_names,
    check_targets,
    exact_recipe,
    machine_words,
    model_name,
    plan_of,
    read_request,
)
from memfit.cli.task_flags import asked, with_task
from memfit.cli.terminal import EXIT_OF
from memfit.documents.sweep_doc import sweep_csv, sweep_doc
from memfit.errors import BadInput, UnknownName
from memfit.nouns.architecture import Architecture
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Recipe, check_values
from memfit.nouns.plan import Verdict
from memfit.nouns.sweep import Axis, Cell, Sweep, Value
from memfit.planner.sweep import MOST_AXES, MOST_CELLS, Values, sweep
from memfit.report.heat_map import heat_map_svg, heat_map_view
from memfit.tables.tasks import TASKS

EXAMPLES = (
    "memfit sweep qwen3-8b --gpu l4 --method qlora --over sequence-length=1k..32k",
    "memfit sweep qwen3-8b --gpu l4 --over num-gpus=1..8 --over micro-batch=1..8",
    "memfit sweep qwen3-8b --over gpu=rtx-4090,l40s,h100 --over method=lora,qlora",
)
OVER = Flag(
    "over", str, "An axis of the map: a list, or a range that doubles (1k..128k) or takes equal steps (1..9:2). Give "
    "one or two: the first makes the columns, the second the rows. An axis is named like its flag, or gpu.",
    "NAME=VALUES", many=True,
)  # fmt: skip
CSV = Flag("csv", bool, "Print a line for each combination; sizes are whole bytes.", default=False)
SVG = Flag("svg", str, "Write the map as a picture into this file.", "FILE")
FORCE = Flag("force", bool, "Overwrite the file of --svg.", default=False)
EXAMPLE = "--over sequence-length=1k..128k --over micro-batch=1..64"
AXES = {row.name: row for row in (*RECIPE, CARD[0])}
# the best verdict among the cells is the exit code
BEST: tuple[Verdict, ...] = ("fits", "not_judged", "tight", "misfit")


@takes(*CARD, *HOST, OVER, FROM, IGNORE, CSV, SVG, FORCE, *TASK, *RECIPE, *COMMON, argument=MODEL)
def run(model: str | None = None, **flags: Any) -> int:
    """Map the headroom over one or two fields of a recipe.

    Each cell says what memfit estimate says of the same recipe. The exit code is 0 if any combination fits, else that
    of the best one.
    """
    if flags["json"] and flags["csv"]:
        raise BadInput("--json and --csv both write to the output", hint="give one of them")
    terminal.check_files(flags, "svg")
    flags, axes = with_task(flags), tuple(_axis(text) for text in flags["over"])
    _check_axes(axes, flags)
    request, found = _swept(model, flags, axes)
    if all(cell.refused for cell in found.cells):
        first = found.cells[0]
        raise BadInput(f"no combination is possible: {first.refused}", hint=first.hint)
    terminal.notes(request.notes)
    _show(request, found, flags)
    terminal.write_file(flags, "svg", lambda: heat_map_svg(found, alone=True).encode())
    verdicts = {cell.verdict for cell in found.cells}
    return EXIT_OF[next(verdict for verdict in BEST if verdict in verdicts)]


def _swept(model: str | None, flags: dict[str, Any], axes: tuple[Axis, ...]) -> tuple[Request, Sweep]:
    """Return the request without its axes, and the sweep. Every cell's recipe is read as that of memfit estimate is."""

    models: dict[str, Architecture] = {}  # as published, and as the task trains it

    def read(values: Values) -> tuple[Request, Recipe]:
        request = read_request(model, {**flags, **values}, models.get("published"))
        plain = models.setdefault("published", request.architecture)
        row = asked(without_images(flags, plain), plain, request.adopted)
        request = counted(request, row, model_name(model, request), flags, models.get("trained"))
        models.setdefault("trained", request.architecture)
        return request, exact_recipe(request, flags["method"])

    def made(values: Values) -> tuple[Recipe, Gpu]:
        request, recipe = read(values)
        return recipe, request.gpu

    request, base = _first_read(read, axes)
    known = request.architecture
    _check_effect(axes, base, known)
    for axis in axes:
        if axis.name == "lora_targets":
            check_targets(base.but(lora_targets=axis.values), known)
    with terminal.progress() as tell:
        found = sweep(
            known, base, request.gpu, axes, made, **request.room, not_understood=request.not_understood,
            progress=lambda share: tell("estimating", share), each=forked_map,
        )  # fmt: skip
    return request, found


def _first_read(read: Callable[[Values], tuple[Request, Recipe]], axes: tuple[Axis, ...]) -> tuple[Request, Recipe]:
    """Return the request without the axes. Of an axis of cards it is that of the first card for which there is one."""
    cards: list[Values] = [{axis.name: card} for axis in axes if axis.name == "gpu" for card in axis.values]
    for card in cards[:-1]:
        with suppress(BadInput):
            return read(card)
    return read(cards[-1] if cards else {})


def _show(request: Request, found: Sweep, flags: dict[str, Any]) -> None:
    if flags["json"]:
        terminal.show_json(sweep_doc(found))
        return
    if flags["csv"]:
        sys.stdout.write(sweep_csv(found))
        return

    terminal.show(heat_map_view(found, _next(request, found, flags)))


def _next(request: Request, found: Sweep, flags: dict[str, Any]) -> list[str]:
    """Return the command that shows the largest combination that fits; where none does, the one that finds what would.

    A verdict that was withheld has neither.
    """
    fitting = [(cell, found.values(number)) for number, cell in enumerate(found.cells) if cell.verdict == "fits"]
    if any(cell.verdict == "not_judged" for cell in found.cells):
        return []
    if not fitting:
        return [shlex.join([*plan_of(request), *machine_words(request, flags), *typed(flags, TASK)])]
    cell, values = max(fitting, key=_largest)
    card = ["--gpu", str(values["gpu"])] if "gpu" in values else request.gpu_words
    machine = machine_words(request, flags)
    words = [request.architecture.name, *card, *machine, *typed(flags, TASK), *as_flags(cell.recipe)]
    return [shlex.join(["memfit", "estimate", *words])]


def _largest(found: tuple[Cell, Mapping[str, Value]]) -> tuple[int, int, int]:
    """Return the sort key of combinations that fit: the most tokens, the longest, the fullest card."""
    cell = found[0]
    assert cell.judgement is not None
    return cell.recipe.tokens, cell.recipe.sequence_length, cell.judgement.need


# ---- the axes, as they are typed -----------------------------------------------------------------------------------


def _axis(text: str) -> Axis:
    """Parse 'sequence-length=1k..128k' into an axis."""
    name, equals, listed = text.partition("=")
    key = name.strip().lstrip("-").replace("-", "_").lower()
    row = AXES.get(key)
    if row is None:
        raise _unknown(name.strip(), key)
    if not equals or not listed.strip():
        raise BadInput(f"--over {text} has no values", hint=_example(row))
    values = dict.fromkeys(value for part in listed.split(",") for value in _values(row, part.strip()))
    return Axis(row.name, tuple(values))


def _unknown(name: str, key: str) -> BadInput:
    """Return the error of an axis that is no flag of a recipe; another tool's name of one is recognised."""
    known = [axis.replace("_", "-") for axis in AXES]
    meant = meant_flag(f"--{key}").partition(" ")[0].removeprefix("--")
    if meant in known:
        return BadInput(f"unknown axis '{name}'", hint=_example(AXES[meant.replace("-", "_")]))
    return UnknownName("axis", name, known, hint=f"an axis is a flag of the recipe: {EXAMPLE}")


def _example(row: Flag) -> str:
    """Return an axis of a flag that works when it is typed."""
    name = row.flag.removeprefix("--")
    choices = row.metavar.replace("|", ",")
    if row.kind is int:
        return f"--over {name}=1,2" if row.name == "fsdp_version" else f"--over {name}=1..8"
    if row.kind is float:
        return f"--over {name}=0,0.05"
    if row.kind is bool:
        return f"--over {name}=no,yes"
    known = {
        "sequence_length": "1k..128k", "gpu": "rtx-4090,h100", "optimizer": "adamw,adamw-8bit",
        "adapter": "lora,rslora", "trainer": "trl,transformers", "lora_targets": "attention,all-linear",
        "alloc_conf": "expandable_segments:True,expandable_segments:False", "zero_conf": "sub_group_size:0",
    }  # fmt: skip
    return f"--over {name}={known.get(row.name, choices)}"


RANGE = re.compile(r"(?P<first>[^.:]+(?:\.\d+)?[km]?)\.\.(?P<last>[^:]+?)(?::(?P<step>.+))?", re.IGNORECASE)
SWITCH = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}


def _values(row: Flag, text: str) -> Iterator[Value]:
    """Yield the values of one part of a list: a single one, or those of a range."""
    if ".." not in text:
        yield _value(row, text)
        return
    counted = row.kind is int or row.name == "sequence_length"
    if not counted:
        raise BadInput(f"--over {row.flag.removeprefix('--')}: {text} is no range, as the values have no order",
                       hint=f"list them: {_example(row)}")  # fmt: skip
    found = RANGE.fullmatch(text)
    if found is None:
        raise BadInput(f"'{text}' is no range", hint=f"{_example(row)}, or 1..9:2 for equal steps")
    first, last = _number(row, found["first"]), _number(row, found["last"])
    step = _number(row, found["step"]) if found["step"] else 0
    if first > last:
        right = f"--over {row.flag.removeprefix('--')}={found['last']}..{found['first']}"
        raise BadInput(f"'{text}' ends before it begins", hint=right)
    values = tuple(islice(_ranged(first, last, step), MOST_CELLS + 1))
    if len(values) > MOST_CELLS:
        raise BadInput(f"'{text}' has more values than the {MOST_CELLS} cells of a sweep", hint=_example(row))
    yield from values


def _ranged(first: int, last: int, step: int) -> Iterator[int]:
    """Yield numbers from `first` to `last`: doubling, up to `last` itself, or in equal steps, which may miss it."""
    value = first
    while value < last:
        yield value
        value = value + step if step else 2 * value
    if value == last or not step:
        yield last


def _number(row: Flag, text: str) -> int:
    """Parse an end or the step of a range: a whole number from 1."""
    value = _value(row, text)
    if not isinstance(value, int) or value < 1:
        raise BadInput(f"{row.flag}: a range holds whole numbers from 1, not '{text}'", hint=_example(row))
    return value


def _value(row: Flag, text: str) -> Value:
    """Parse one value as its flag does, and refuse what no recipe can have."""
    if row.name == "gpu":
        return _card(text)
    if row.kind is bool:
        if text.lower() not in SWITCH:
            raise BadInput(f"--over {row.name}: '{text}' is neither yes nor no", hint=_example(row))
        return SWITCH[text.lower()]
    try:
        value: Value = row.kind(text)
    except ValueError:
        number = "a whole number" if row.kind is int else "a number"
        raise BadInput(f"{row.flag}: '{text}' is not {number}", hint=_example(row)) from None

    check_names(check_values(Recipe().but(**recipe_values({row.name: value}))))
    return value


def _card(text: str) -> str:
    if text == "local":
        raise BadInput("--over gpu=local: an axis of cards takes their names", hint="memfit gpus lists them")
    parse_gpu(text)
    return text


def _check_axes(axes: tuple[Axis, ...], flags: Mapping[str, Any]) -> None:
    """Refuse too few or too many axes, and flags that set what an axis sets."""
    names = [axis.name for axis in axes]
    if not names:
        raise BadInput("no axis given", hint=EXAMPLE)
    if len(names) > MOST_AXES:
        raise BadInput(f"{len(names)} axes given, at most {MOST_AXES} make a map", hint=EXAMPLE)
    if len(set(names)) < len(names):
        raise BadInput(f"--over {names[0].replace('_', '-')} is given twice", hint="join their values with commas")
    for name in [*names, *(["gpu_memory"] if "gpu" in names else [])]:
        if flags.get(name) is not None:
            flag, axis = name.replace("_", "-"), "gpu" if name == "gpu_memory" else name.replace("_", "-")
            raise BadInput(f"both --{flag} and --over {axis} are given", hint=f"leave --{flag} out")
    cards = [str(value) for axis in axes if axis.name == "gpu" for value in axis.values] or [flags.get("gpu") or ""]
    counted = next((card for card in cards if _counted(card)), "")
    if "num_gpus" in names and counted:
        raise BadInput(f"both {counted} and --over num-gpus give a number of cards", hint="name the card alone: h100")


def _counted(name: str) -> bool:
    return count_in_name(name) is not None


def _check_effect(axes: tuple[Axis, ...], base: Recipe, model: Architecture) -> None:
    """Refuse an axis of adapters where there are none, and one of lengths that do not decide the samples' sizes."""
    names = [axis.name for axis in axes]
    row = TASKS[model.trained_for]
    if "sequence_length" in names and not row.of_tokens:
        decided = "--prompt-length and --completion-length decide" if row.sample == "prompt" else "its samples decide"
        problem = f"--over sequence-length has no effect on {row.title}: {decided} the length"
        raise BadInput(problem, hint="--over micro-batch=1..64")
    useless = [name for name in names if name in LORA_ONLY and name != "adapter"]
    if useless and base.method == "full" and not {"method", "adapter"} & set(names):
        flag = useless[0].replace("_", "-")
        raise BadInput(f"--over {flag} has no effect: full fine-tuning has no adapters", hint="add --method lora")
