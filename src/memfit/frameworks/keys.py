"""Read another tool's file: `Keys` holds its settings, `Key` maps one to a recipe field, `Adopted` is the result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from memfit.documents.recipe_file import read_text
from memfit.errors import BadInput
from memfit.nouns.job import AS_USUAL, Recipe, Training, check_values
from memfit.nouns.task import PLAIN, Shape
from memfit.reading import settings_text
from memfit.tables.loading import as_read

_OFF: tuple[Any, ...] = (None, False, 0, 0.0, "", "no", "none", "None", "auto", [], {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file as it was read: what is written for the same framework starts from it."""

    path: Path
    text: str
    data: Mapping[str, Any]
    lost: tuple[str, ...] = ()  # keys that the files of another framework cannot hold
    unknown: tuple[str, ...] = ()  # keys that may change memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """The content of another tool's file as a recipe."""

    format: str  # "axolotl", "transformers" ...
    recipe: Recipe
    model: str | None = None
    data: str | None = None
    effective_batch: int | None = None  # sequences per optimizer step, if the file sets it
    task: str = "sft"  # a row of tables/tasks.py
    shape: Shape = PLAIN  # of one sample of the task
    training: Training = AS_USUAL  # its keys change no memory and are `ignored` in other files than recipe.toml
    source: Source | None = None  # None: a recipe.toml
    stated: tuple[str, ...] = ()  # the recipe fields that the file, or its tool's defaults, decide
    assumed: tuple[str, ...] = ()  # sentences on what the file leaves open and memfit assumed
    ignored: tuple[str, ...] = ()  # keys that do not change memory
    unknown: tuple[str, ...] = ()  # keys that may change it
    values: Mapping[str, str] = field(default_factory=dict)  # what the file sets these to, if that is short
    reserve: int = 0  # bytes of the card to keep free
    host_memory: int = 0  # bytes of host RAM of one node; 0: not given
    workers: int = 0  # processes of the DataLoader for each card
    half_open: bool = False  # the file does not say whether its 16-bit type is bf16 or fp16


@dataclass(slots=True)
class Sharding:
    """What a DeepSpeed or FSDP block decides; `changes` are recipe fields."""

    changes: dict[str, Any] = field(default_factory=dict)
    kind: str = ""  # "deepspeed", "fsdp" or ""
    pure: bool = False  # bf16 without an fp32 master copy
    unknown: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    batch: int | None = None  # sequences per optimizer step
    checkpointing: str = ""

    @property
    def without_precision(self) -> dict[str, Any]:
        """Return the changes except the precision, which the framework's own keys decide."""
        return {name: value for name, value in self.changes.items() if name != "precision"}


class Keys:
    """The settings of one file. Keys that are read count as understood; `rest` classifies the others."""

    def __init__(self, data: Mapping[Any, Any], where: str) -> None:
        self.data = {str(key): value for key, value in data.items()}
        self.where = where
        self.used: set[str] = set()
        self.inexpressible: list[str] = []  # understood keys whose value a recipe cannot express
        self.half_open = False  # as in Adopted

    def __contains__(self, name: str) -> bool:
        return name in self.data

    def take(self, *names: str, default: Any = None) -> Any:
        """Return the first of the names that is set (not null); all of them count as understood."""
        self.used.update(names)
        return next((self.data[n] for n in names if self.data.get(n) is not None), default)

    def number(self, *names: str, default: int) -> int:
        """Return a whole number; "auto" is the default."""
        value = self.take(*names, default=default)
        if value == "auto":
            return default
        return int(self._checked(names[0], value, int, "a whole number"))

    def real(self, name: str, default: float) -> float:
        """Return a number, whole or not."""
        return float(self._checked(name, self.take(name, default=default), int | float, "a number"))

    def flag(self, *names: str, default: bool = False) -> bool:
        """Return True for true and for words that switch on; "auto" is the default."""
        value = self.take(*names, default=default)
        if isinstance(value, str):
            return default if value == "auto" else value.lower() not in ("false", "no", "none", "0", "")
        return bool(value)

    def text(self, *names: str) -> str | None:
        """Return a word or path; None when unset."""
        value = self.take(*names)
        return None if value is None else str(self._checked(names[0], value, str, "text"))

    def table(self, name: str) -> Keys:
        """Return a nested mapping; empty when unset."""
        value = self._checked(name, self.take(name, default={}), Mapping, "a mapping")
        return Keys(value, f"{name} of {self.where}")

    def _checked(self, name: str, value: Any, kind: Any, words: str) -> Any:
        """Return the value of a key. Raises BadInput for another type; true and false are no numbers."""
        if isinstance(value, kind) and not isinstance(value, bool):
            return value
        raise BadInput(f"`{name}` in {self.where} must be {words}, not {short(value)}", hint="check the file")

    def not_expressed(self, *names: str) -> None:
        """Report keys that are set as unknown, because a recipe cannot express their values."""
        self.inexpressible += [n for n in names if n in self.data and not is_off(self.data[n])]

    def rest(self, ignored: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the other keys that do not change memory (by pattern, or because they are off), and those that may."""
        patterns = tuple(ignored)
        left = [n for n in self.data if n not in self.used]
        harmless = {n for n in left if is_off(self.data[n]) or any(fnmatchcase(n, p) for p in patterns)}
        unknown = (*self.inexpressible, *(n for n in left if n not in harmless))
        return tuple(n for n in left if n in harmless and n not in unknown), tuple(dict.fromkeys(unknown))


def is_off(value: object) -> bool:
    """Return whether a setting with this value says nothing, or switches something off."""
    return any(value is off or (type(value) is type(off) and value == off) for off in _OFF)


@dataclass(frozen=True, slots=True)
class Key:
    """A framework's setting for one recipe field. The type of `default` is the type of the setting."""

    recipe_field: str
    name: str  # the framework's
    default: bool | int | float = 0  # the framework's own
    values: Mapping[Any, Any] = field(default_factory=dict)  # the recipe's value -> the framework's, where they differ

    def read(self, keys: Keys, default: Any = None) -> Any:
        """Return the recipe's value; `default` replaces the framework's own."""
        default = self.default if default is None else default
        reader: Any = {bool: keys.flag, int: keys.number, float: keys.real}[type(default)]
        value = reader(self.name, default=default)
        return next((ours for ours, theirs in self.values.items() if theirs == value), value)

    def write(self, recipe: Recipe) -> dict[str, Any]:
        """Return the setting as the framework has it."""
        value = getattr(recipe, self.recipe_field)
        return {self.name: self.values.get(value, value)}


class KeyTable(dict[str, Key]):
    """The keys of a framework by recipe field, for reading and writing."""

    def __init__(self, *rows: Key) -> None:
        super().__init__({row.recipe_field: row for row in rows})

    def read(self, keys: Keys, *fields: str) -> dict[str, Any]:
        """Return these fields of the recipe."""
        return {name: self[name].read(keys) for name in fields}

    def write(self, recipe: Recipe, *fields: str) -> dict[str, Any]:
        """Return these fields as the framework's settings."""
        return {name: value for one in fields for name, value in self[one].write(recipe).items()}


def parse(path: Path) -> Any:
    """Return the data of a JSON, TOML or YAML file of at most 1 MiB, whose format is detected by content.

    Raises BadInput for a missing, large or broken file. Nothing in the file is executed.
    """
    return parsed(read_text(path), path)


def parsed(text: str, path: Path) -> Any:
    """Return the data of the text of the file `path`, as `parse` does."""
    return settings_text.parsed(text, str(path))


def at(data: Any, path: Sequence[str | int]) -> Any:
    """Return the value at a path of keys and places in lists; None where there is none."""
    for name in path:
        if isinstance(name, int):
            data = data[name] if isinstance(data, list) and name < len(data) else None
        else:
            data = data.get(name) if isinstance(data, Mapping) else None
    return data


def words(text: str) -> tuple[str, ...]:
    """Return the words of a text, for lists of patterns."""
    return tuple(text.split())


def short(value: object) -> str:
    """Return a value for a message: the first 60 characters of a scalar, the type of nested data."""
    return repr(value)[:60] if isinstance(value, str | bool | int | float) else f"a {type(value).__name__}"


def word(value: object) -> str:
    """Return a scalar as text, "" for nested data, which may be too large to print."""
    return str(value) if isinstance(value, str | bool | int | float) else ""


def build(where: str, changes: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a file. Raises BadInput with the file's name for values out of range.

    FSDP with offload, or with weights that stay gathered, is modelled as DeepSpeed, whose mixed precision is
    bf16-master.
    """
    try:
        recipe = as_read(check_values(Recipe(**changes)))
    except BadInput as error:
        raise BadInput(f"{where}: {error.message}", hint=error.hint) from None
    if not recipe.zero or recipe.precision != "bf16-mixed":
        return recipe
    return recipe.but(precision="bf16-master" if recipe.method == "full" else "bf16")


def adopted_from(
    format: str, keys: Keys, harmless: Iterable[str], changes: Mapping[str, Any], sharding: Sharding,
    model: str | None = None, data: str | None = None, unknown: Iterable[str] = (),
) -> Adopted:  # fmt: skip
    """Return the content of a file whose keys have been read into `changes` of a recipe.

    `unknown`: keys of its blocks that were not understood, beside those of the sharding and of the file itself.
    """
    ignored, others = keys.rest(harmless)
    return Adopted(
        format=format,
        recipe=build(keys.where, changes),
        model=model,
        data=data,
        effective_batch=sharding.batch,
        stated=tuple(changes),
        assumed=tuple(sharding.assumed),
        ignored=ignored,
        half_open=keys.half_open,
        unknown=tuple(dict.fromkeys((*sharding.unknown, *unknown, *others))),
    )


def saved_modules(value: object, where: str) -> tuple[str, ...]:
    """Return the modules to train whole beside adapters, none where the file names none."""
    return module_names(value, where) if value else ()


def module_names(value: object, where: str) -> tuple[str, ...]:
    """Return LoRA's module names from a list or a comma-separated text."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
        raise BadInput(
            f"the LoRA modules in {where} must be names, not {short(value)}", hint="for example [q_proj, v_proj]"
        )
    found = tuple(value)
    return ("all-linear",) if found in (("all-linear",), ("all",), ("all_linear",)) else found
