"""What a shell completes: the values of flags that have a list, the models of the catalogue, and paths."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from memfit.cli.flags import Flag

Words = Callable[[], Iterable[tuple[str, str]]]  # value and what it is


def _models() -> Iterable[tuple[str, str]]:
    from memfit.models.hub import list_models

    for entry in list_models():
        yield entry.stem, entry.id
        yield entry.id, ""


def _cards() -> Iterable[tuple[str, str]]:
    from memfit.catalogue.cards import list_gpus

    yield "local", "this machine's card"
    yield from ((gpu.short, gpu.name) for gpu in list_gpus())


def _tasks() -> Iterable[tuple[str, str]]:
    from memfit.tables.tasks import TASKS

    return ((row.key, row.title) for row in TASKS.values())


def _optimizers() -> Iterable[tuple[str, str]]:
    from memfit.tables.optimizers import OPTIMIZERS

    return ((row.key, row.title) for row in OPTIMIZERS.values())


def _adapters() -> Iterable[tuple[str, str]]:
    from memfit.tables.adapters import ADAPTERS

    return ((row.key, row.title) for row in ADAPTERS.values())


_LISTS: dict[str, Words] = {
    "model": _models, "gpu": _cards, "task": _tasks, "optimizer": _optimizers, "adapter": _adapters,
}  # fmt: skip


_PATHS = {"FILE": "file", "PATH": "file", "LOG": "file", "RECIPE": "file", "DIR": "dir"}


def completes(name: str, row: Flag | None = None) -> Callable[[Any, Any, str], list[Any]]:
    """Return the function by which click completes a flag, or an argument where `row` is None.

    What has no value of that beginning is completed as a path, where it may be one: click's scripts ask the shell for
    none by themselves.
    """
    words = _LISTS.get(name)
    if words is None and row is not None and "|" in row.metavar and row.metavar.islower():
        choices = [(choice.partition("[")[0], "") for choice in row.metavar.split("|")]
        words = lambda: choices  # noqa: E731
    path = "file" if row is None else next((kind for part, kind in _PATHS.items() if part in row.metavar), "")

    def complete(context: Any, parameter: Any, typed: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        count, times, rest = typed.partition("x")
        several = f"{count}x" if times and count.isdigit() and name == "gpu" else ""  # 8xh100
        begun = (rest if several else typed).lower()
        found = [
            CompletionItem(f"{several}{value}", help=text)
            for value, text in (words() if words else ())
            if value.lower().startswith(begun)
        ]
        return found or ([CompletionItem(typed, type=path)] if path else [])

    return complete
