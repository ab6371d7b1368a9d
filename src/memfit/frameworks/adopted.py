"""The noun Adopted, and Keys, which reads a foreign file's settings and remembers what it did not understand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from memfit.errors import BadInput
from memfit.nouns.job import AS_USUAL, Recipe, Training, check_values

_OFF: tuple[Any, ...] = (None, False, 0, 0.0, "", "no", "none", "None", "auto", [], {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """What another tool's file says, in memfit's words."""

    format: str  # "axolotl", "transformers" ...
    recipe: Recipe
    model: str | None = None
    data: str | None = None
    effective_batch: int | None = None  # sequences per optimizer step, where the file says it
    training: Training = AS_USUAL  # of a recipe.toml; other files' changes no memory and is among `ignored`
    stated: tuple[str, ...] = ()  # the recipe fields the file, or its tool's defaults, decide
    assumed: tuple[str, ...] = ()  # sentences: what the file leaves open and memfit chose
    ignored: tuple[str, ...] = ()  # keys that do not matter to memory
    unknown: tuple[str, ...] = ()  # keys that might


class Keys:
    """The settings of one file. Every key that is read counts as understood; `rest` sorts the others."""

    def __init__(self, data: Mapping[Any, Any], where: str) -> None:
        self.data = {str(key): value for key, value in data.items()}
        self.where = where
        self.used: set[str] = set()
        self.odd: list[str] = []  # understood keys whose value memfit cannot express

    def __contains__(self, name: str) -> bool:
        return name in self.data

    def take(self, *names: str, default: Any = None) -> Any:
        """The first of the names that is set (not null); all of them count as understood."""
        self.used.update(names)
        return next((self.data[n] for n in names if self.data.get(n) is not None), default)

    def number(self, *names: str, default: int) -> int:
        """A whole number; "auto" is the default."""
        value = self.take(*names, default=default)
        if value == "auto":
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise BadInput(
                f"`{names[0]}` in {self.where} must be a whole number, not {short(value)}", hint="check the file"
            )
        return value

    def real(self, name: str, default: float) -> float:
        """A number, whole or not."""
        value = self.take(name, default=default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise BadInput(f"`{name}` in {self.where} must be a number, not {short(value)}", hint="check the file")
        return float(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        """True for true and for words that switch on; "auto" is the default."""
        value = self.take(*names, default=default)
        if isinstance(value, str):
            return default if value == "auto" else value.lower() not in ("false", "no", "none", "0", "")
        return bool(value)

    def text(self, *names: str) -> str | None:
        """A word or path; None when unset."""
        value = self.take(*names)
        if value is None:
            return None
        if not isinstance(value, str):
            raise BadInput(f"`{names[0]}` in {self.where} must be text, not {short(value)}", hint="check the file")
        return value

    def table(self, name: str) -> Keys:
        """A nested mapping; empty when unset."""
        value = self.take(name, default={})
        if not isinstance(value, Mapping):
            raise BadInput(f"`{name}` in {self.where} must be a mapping, not {short(value)}", hint="check the file")
        return Keys(value, f"{name} of {self.where}")

    def odds(self, *names: str) -> None:
        """List keys as not understood after all, because of their value."""
        self.odd += [n for n in names if n in self.data]

    def rest(self, ignored: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(keys that do not matter, keys that might): by pattern, or because they are off."""
        patterns = tuple(ignored)
        left = [n for n in self.data if n not in self.used]
        harmless = [n for n in left if _off(self.data[n]) or any(fnmatchcase(n, p) for p in patterns)]
        return tuple(harmless), (*self.odd, *(n for n in left if n not in harmless))


def _off(value: object) -> bool:
    return any(value is off or (type(value) is type(off) and value == off) for off in _OFF)


def short(value: object) -> str:
    """A value for a message: a scalar as it is, cut; of nested data only its kind."""
    return repr(value)[:60] if isinstance(value, str | bool | int | float) else f"a {type(value).__name__}"


def word(value: object) -> str:
    """A scalar as text, "" for anything else: nested data may be too large to print."""
    return str(value) if isinstance(value, str | bool | int | float) else ""


def build(where: str, changes: Mapping[str, Any]) -> Recipe:
    """A Recipe from what a file says; values out of range are refused with the file's name.

    FSDP's ways to offload and to keep weights gathered are accounted as DeepSpeed's, in its word for mixed precision.
    """
    try:
        recipe = check_values(Recipe(**changes))
    except BadInput as error:
        raise BadInput(f"{where}: {error.message}", hint=error.hint) from None
    if not recipe.zero or recipe.precision != "bf16-mixed":
        return recipe
    return recipe.but(precision="bf16-master" if recipe.method == "full" else "bf16")


def names_of(value: object, where: str) -> tuple[str, ...]:
    """Module names from a list or a comma-separated text."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
        raise BadInput(
            f"the LoRA modules in {where} must be names, not {short(value)}", hint="for example [q_proj, v_proj]"
        )
    found = tuple(value)
    return ("all-linear",) if found in (("all-linear",), ("all",), ("all_linear",)) else found


def beside(path: Path, name: str) -> Path:
    """Where a file named inside `path` lies: as named, or next to it."""
    named = Path(name)
    return named if named.is_absolute() else path.parent / named
