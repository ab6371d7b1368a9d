"""Read a question of the page: words like those of the flags become flags, a request and one whole recipe."""

from __future__ import annotations

import base64
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.json import decode, encode

from memfit.cli.flags import AUTO, BATCH, CARD, HOST, TASK, Flag, as_flags
from memfit.errors import BadInput, MemfitError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memfit.cli.request import Request
    from memfit.nouns.job import Recipe
    from memfit.nouns.plan import Plan
    from memfit.nouns.task import Task

Tell = Callable[[str, float], None]  # what is being done, and the share of it that is done
Found = dict[str, Any]

ASKED: dict[str, Flag] = {row.flag.removeprefix("--"): row for row in (*CARD, *HOST, *TASK, BATCH, *AUTO)}
SWITCH = {"1": True, "true": True, "on": True, "0": False, "false": False}
LARGEST_CONFIG = 1 << 18  # bytes of a dropped config.json


def flags_of(question: Mapping[str, str]) -> dict[str, Any]:
    """Return the flags of `memfit plan` that a question gives. Raises BadInput."""
    from memfit.cli import plan
    from memfit.cli.flags import TAKEN

    flags: dict[str, Any] = {row.parameter: () if row.many else row.default for row in TAKEN[plan.run][0]}
    for name, text in question.items():
        if name in ("model", "config", "config-name", "changed", "file", "data", "data-name"):
            continue
        if name not in ASKED:
            raise BadInput(f"the page asks nothing called {name}", hint=f"it asks {', '.join(ASKED)}")
        flags[ASKED[name].parameter] = _value(name, ASKED[name], text)
    return {**flags, "data": question.get("data")}  # the path of a dropped file, which page.app puts for its key


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
def model_of(question: Mapping[str, str]) -> Iterator[str]:
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


def read_question(question: dict[str, str], name: str) -> tuple[dict[str, Any], Request, Task]:
    """Return the flags, the request and the task of a question, with its data."""
    flags, request, row = _read(question, name)
    return flags, _with_data(request, flags, row) if flags["data"] else request, row


def _read(question: dict[str, str], name: str) -> tuple[dict[str, Any], Request, Task]:
    from memfit.cli import task_flags
    from memfit.cli.request import read_request

    flags = task_flags.with_task(flags_of(question))
    request = read_request(name, {**flags, "gpu": usual_card()} if no_card(flags) else flags)
    row = task_flags.asked(flags, request.architecture, None)
    task_flags.shape_of(flags, row)
    return flags, request, row


# ---- dropped data ---------------------------------------------------------------------------------------------------


class UnreadError(BadInput):
    """Dropped data whose samples have not been counted yet, which takes longer than a question may."""


def _with_data(request: Request, flags: Mapping[str, Any], row: Task) -> Request:
    """Return the request with the samples of dropped data. Raises UnreadError until `read_data` has counted them."""
    from memfit.cli.request_data import with_dataset
    from memfit.data.dataset import Dataset

    sample, path = _sample(flags, request, row), Path(flags["data"])
    try:
        dataset = decode(_counts(path, sample).read_bytes(), type=Dataset)
    except FileNotFoundError:
        raise UnreadError(f"{path} has not been read yet", hint="ask for the plan first, which reads it") from None
    return with_dataset(request, dataset, sample)


def _sample(flags: Mapping[str, Any], request: Request, row: Task) -> Task:
    """Return the task whose samples `memfit plan` reads."""
    from memfit.cli.task_flags import apart
    from memfit.tables.tasks import TASKS

    return row if apart(row, request.architecture, request.recipe, flags["method"]) else TASKS["sft"]


def _counts(path: Path, row: Task) -> Path:
    """Return where the counts of dropped data lie; no dropped file has a name with a dot before it."""
    return path.with_name(f".{row.key}.counts")


def read_data(question: dict[str, str], tell: Tell) -> Found:
    """Count the tokens of the dropped data as samples of the task, and keep the counts beside it."""
    from memfit.cli.request_data import kind_for
    from memfit.data.dataset import read_dataset
    from memfit.report.words import visible

    path = Path(question["data"])
    with model_of(question) as name:
        row = _sample(*_read(question, name))
    dataset = read_dataset(
        path, kind=kind_for(row), alone=True,
        progress=lambda done, size: tell(f"reading {path.name}", done / max(size, 1)),
    )  # fmt: skip
    kept = replace(dataset, layouts=(), examples=(), reasons=(), notes=tuple(map(visible, dataset.notes)))
    target = _counts(path, row)
    part = target.with_name(f"{target.name}-{os.getpid()}")
    part.write_bytes(encode(kept))
    part.rename(target)  # at once, as others may ask
    return {}


@cache
def usual_card() -> str:
    """Return the card of a question that names none: this machine's, else a common one, as the page asks at once."""
    from memfit.catalogue.cards import local_gpu

    with suppress(MemfitError):
        local_gpu()
        return "local"
    return "rtx-4090"


def no_card(flags: Mapping[str, Any]) -> bool:
    return not flags["gpu"] and not flags["gpu_memory"]


def said(recipe: Recipe) -> dict[str, str]:
    """Return a recipe's fields as the page asks for them; defaults are left out."""
    return as_asked(as_flags(recipe))


def as_asked(typed_words: Sequence[str]) -> dict[str, str]:
    """Return flags as the page asks for them: ["--micro-batch", "4", "--no-compile"] as micro-batch 4 and compile 0."""
    found = {}
    for i, word in enumerate(typed_words):
        if word.startswith("--"):
            following = typed_words[i + 1 : i + 2]
            value = following[0] if following and not following[0].startswith("--") else ""
            off = word.startswith("--no-") and not value
            found[word[5:] if off else word[2:]] = value or ("0" if off else "1")
    return found


def exact(question: dict[str, str], name: str) -> tuple[dict[str, Any], Request, Recipe]:
    """Return the recipe that a question names whole; a changed micro-batch keeps the effective batch."""
    from memfit.cli.one_recipe import counted
    from memfit.cli.request import exact_recipe
    from memfit.tables import combinations

    flags, request, row = read_question({k: v for k, v in question.items() if k != "effective-batch"}, name)
    request = counted(request, row, name, flags)
    recipe = exact_recipe(request, None if flags["method"] == "auto" else flags["method"])
    batch = int(question.get("effective-batch") or 0)
    if batch and "changed" in question:
        recipe = recipe.but(accumulation=max(batch // (recipe.micro_batch * recipe.replicas), 1))
    return flags, request, combinations.check(recipe, request.architecture, request.gpu)


def by_formula(flags: dict[str, Any], request: Request) -> Plan:
    from memfit.cli.plan import planning
    from memfit.cli.request import judged_plan

    return judged_plan(request, planning(request, flags, None, None)())


def doubling(first: int, last: int) -> list[int]:
    found = [first]
    while found[-1] * 2 <= last:
        found.append(found[-1] * 2)
    return found if found[-1] == last else [*found, last]
