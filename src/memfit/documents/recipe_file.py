"""recipe.toml, the file that `memfit plan --out` writes: the chosen recipe with its model, card and data."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec
import tomli_w

from memfit.closed_form.task_runs import by_formula
from memfit.errors import BadInput, UnknownName, Unsupported, suggested
from memfit.models import families, hub
from memfit.nouns.architecture import Architecture
from memfit.nouns.job import (
    AS_USUAL,
    JOB_RANGES,
    SHAPE_RANGES,
    Recipe,
    Training,
    check_numbers,
    check_training,
    check_values,
)
from memfit.nouns.job import RecipeFile as RecipeFile
from memfit.nouns.task import PLAIN, Shape
from memfit.reading.settings_text import of_toml
from memfit.tables.tasks import task

T = TypeVar("T")
SCHEMA = 1  # raised when a key changes its meaning, not for a new key with a default
SIZE_LIMIT = 1 << 20  # bytes of the largest file that is read; a real recipe.toml has under a thousand
_JOB = tuple(f.name for f in fields(RecipeFile) if f.name not in ("recipe", "shape", "training"))
_USUAL = {"training": AS_USUAL, "shape": PLAIN}  # tables of which only what differs is written


def dumps(file: RecipeFile) -> str:
    """Return the file as TOML text, from which `loads` makes the same RecipeFile."""
    job = {name: getattr(file, name) for name in _JOB}
    recipe = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(file.recipe).items()}
    known = {name: value for name, value in job.items() if name == "model" or value not in ("", 0, (), "sft")}
    tables = {"job": known, "recipe": recipe}
    for name, usual in _USUAL.items():
        values = asdict(getattr(file, name))
        changed = {key: value for key, value in values.items() if value != getattr(usual, key)}
        tables |= {name: changed} if changed else {}
    return tomli_w.dumps({"schema": SCHEMA, **tables})


def loads(text: str) -> RecipeFile:
    """Parse TOML text. Raises BadInput for broken text, unknown keys, wrong types and values out of range."""
    try:
        data = of_toml(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise BadInput(f"not valid TOML: {error}", hint="write a new one with: memfit plan MODEL --out DIR") from None
    return from_dict(data)


def from_dict(data: Mapping[str, Any]) -> RecipeFile:
    """Make a RecipeFile of a parsed recipe.toml, with the same refusals as `loads`."""
    schema = data.get("schema")
    if type(schema) is not int:
        raise BadInput("the recipe has no `schema` number", hint=f"add the line: schema = {SCHEMA}")
    if schema != SCHEMA:
        raise Unsupported(
            f"the recipe has schema {schema}, this memfit reads {SCHEMA}", hint="pip install --upgrade memfit"
        )
    _refuse_unknown("table", data, ("schema", "job", "recipe", *_USUAL))
    job, recipe, training, shape = (_table(data, name) for name in ("job", "recipe", *_USUAL))
    _refuse_unknown("key", recipe, [f.name for f in fields(Recipe)])
    _refuse_unknown("key", job, _JOB)
    _refuse_unknown("key", shape, [f.name for f in fields(Shape)])
    _refuse_unknown("key", training, [f.name for f in fields(Training)])
    if "recipe" not in data or "model" not in job:
        raise BadInput(
            "a recipe needs the key `model` under [job] and a [recipe] table", hint='model = "Qwen/Qwen2.5-7B"'
        )
    if training.get("save_steps") == 0:
        raise BadInput(
            "save_steps = 0 under [training] in recipe.toml: nothing saved, or as usual?",
            hint='save_strategy = "no" saves nothing; without the key every 500 steps (memfit train: 0.1 of all)',
        )
    converted = check_values(_typed(recipe, Recipe, "recipe"))
    trained = check_training(_typed(training, Training, "training"))
    sized = _typed(shape, Shape, "shape")
    file = _typed({**job, "recipe": converted, "shape": sized, "training": trained}, RecipeFile, "job")
    check_numbers(file, JOB_RANGES)
    check_numbers(sized, SHAPE_RANGES)
    return file


def architecture_of(file: RecipeFile) -> Architecture:
    """Return the model as the task of a recipe.toml trains it. Raises Unsupported where no formula counts that."""
    row = task(file.task)
    if row.language:
        return hub.resolve_model(file.model)
    found = families.trained_for(hub.resolve_config(file.model), file.model, row, file.shape)
    if not by_formula(row, found, file.recipe):
        problem = f"no formula counts {row.title} of {file.model} with this recipe"
        hint = "memfit trace --from recipe.toml judges it, and its --save-tape is a prediction"
        raise Unsupported(problem, hint=hint)
    return found


def in_folder(path: Path) -> Path:
    """Return the recipe.toml of a folder that a plan was written to; another path as it is."""
    inside = path / "recipe.toml"
    return inside if inside.is_file() else path


def read(path: Path) -> RecipeFile:
    """Read a recipe.toml of at most SIZE_LIMIT bytes."""
    text = read_text(path)
    try:
        return loads(text)
    except BadInput as error:
        raise in_file(error, path) from None


def in_file(error: BadInput, path: Path) -> BadInput:
    """Put the file's name in front of the error's message."""
    error.message = f"{path}: {error.message}"
    error.args = (error.message,)
    return error


def read_text(path: Path) -> str:
    """Read a small UTF-8 file. Raises BadInput when it is missing, not a file, too large or not text."""
    try:
        if not path.is_file():
            raise BadInput(
                f"{path} is not a file" if path.exists() else f"there is no file {path}", hint="check the path"
            )
        with path.open("rb") as stream:
            raw = stream.read(SIZE_LIMIT + 1)
        if len(raw) > SIZE_LIMIT:
            raise BadInput(f"{path} is larger than {SIZE_LIMIT} bytes", hint="a configuration file is a few kilobytes")
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not a text file", hint="it must be UTF-8") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read {path}: {error}", hint="check the path and its permissions") from None


def _table(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = data.get(name, {})
    if not isinstance(table, dict):
        raise BadInput(f"`{name}` must be a table", hint=f"start it with a line: [{name}]")
    return table


def _refuse_unknown(what: str, found: Mapping[str, Any], known: list[str] | tuple[str, ...]) -> None:
    for name in found:
        if name not in known:
            hint = "" if suggested(name, known, "") else f"known: {', '.join(known)}"
            raise UnknownName(f"{what} in recipe.toml", name, known, hint=hint)


def _typed(values: dict[str, Any], shape: type[T], table: str) -> T:
    """Convert plain values to a dataclass, strictly; msgspec's errors name the place: '... - at `$.micro_batch`'."""
    try:
        return msgspec.convert(values, shape, strict=True)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`")
        choices = get_args(get_type_hints(shape).get(name))
        words = [c for c in choices if isinstance(c, str)]
        hint = f"choose one of {', '.join(words)}" if words else "TOML: numbers bare, text in quotes, lists in []"
        raise BadInput(f"{table}.{name} in recipe.toml: {problem}", hint=hint) from None
