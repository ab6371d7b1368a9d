"""The file of a repository's jobs: memfit.toml, or [tool.memfit] of pyproject.toml."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from memfit.documents.recipe_file import read_text
from memfit.errors import BadInput, UnknownName, suggested
from memfit.nouns.check import CheckJob, parse_budget
from memfit.nouns.tape import PHASES, Phase
from memfit.reading import settings_text

OWN, PROJECT = "memfit.toml", "pyproject.toml"
EXAMPLE = """[jobs.sft] with command = "python train.py" and gpu = "rtx-4090\""""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class _Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """The keys of a job; those with a default may stand at the top of the file, for all jobs."""

    command: str | list[str] = ""
    config: str = ""
    model: str = ""
    gpu: str = ""
    folder: str = ""
    budget: str | list[str] = ""
    phases: list[Phase] = []
    host_memory: str = ""
    workers: int | None = None
    reserve: str = ""
    alloc_conf: str | None = None
    steps: int | None = None
    answer: list[str] = []
    ignore: list[str] = []
    env: dict[str, str] = {}


KEYS = tuple(f.encode_name for f in msgspec.structs.fields(_Keys))
OF_ALL = ("gpu", "reserve", "alloc-conf", "steps", "env", "budget", "phases", "host-memory")


@dataclass(frozen=True, slots=True)
class CheckFile:
    """The jobs of a repository. path: the file they stand in."""

    path: Path
    jobs: tuple[CheckJob, ...]

    def named(self, names: tuple[str, ...]) -> tuple[CheckJob, ...]:
        """Return the jobs of these names, all for none. Raises UnknownName."""
        known = {job.name: job for job in self.jobs}
        for name in names:
            if name not in known:
                raise UnknownName("job", name, known, hint=f"jobs in {self.path.name}: {', '.join(known)}")
        return tuple(known[name] for name in dict.fromkeys(names)) if names else self.jobs


def find(folder: Path) -> Path | None:
    """Return the file of jobs in a folder: memfit.toml, else a pyproject.toml that has [tool.memfit]."""
    if (folder / OWN).is_file():
        return folder / OWN
    project = folder / PROJECT
    if project.is_file() and re.search(r"^\s*\[+tool\.memfit\b", read_text(project), re.MULTILINE):
        return project
    return None


def read(path: Path) -> CheckFile:
    """Read the jobs of a file. Raises BadInput that names the file and what is wrong in it."""
    text = read_text(path)
    try:
        data: Any = settings_text.of_toml(text)
    except (RecursionError, ValueError) as error:
        raise BadInput(f"{path.name} is not valid TOML: {error}", hint=EXAMPLE) from None
    if path.name == PROJECT:
        data = data.get("tool", {}).get("memfit", {}) if isinstance(data.get("tool"), dict) else {}
    if not isinstance(data, dict):
        raise BadInput(f"[tool.memfit] in {path.name} is no table", hint=f"for example {EXAMPLE}")
    for key in data:
        if key not in ("jobs", *OF_ALL):
            known = ("jobs", *OF_ALL)
            hint = "" if suggested(key, known, "") else f"known: {', '.join(known)}"
            raise UnknownName(f"key in {path.name}", key, known, hint=hint)
    jobs = data.get("jobs", {})
    if not isinstance(jobs, dict) or not jobs:
        raise BadInput(f"{path.name} names no job", hint=f"for example {EXAMPLE}")
    shared = {key: value for key, value in data.items() if key != "jobs"}
    return CheckFile(path, tuple(_job(path, text, name, shared, values) for name, values in jobs.items()))


def _job(path: Path, text: str, name: str, shared: Mapping[str, Any], values: Any) -> CheckJob:
    where = f"job '{name}' in {path.name}"
    if not _NAME.fullmatch(name):
        raise BadInput(f"{where}: no name for a job", hint="letters, digits, '.', '_' and '-'")
    if not isinstance(values, dict):
        raise BadInput(f"{where} is no table", hint=f"for example {EXAMPLE}")
    for key in values:
        if key not in KEYS:
            hint = "" if suggested(key, KEYS, "") else f"known: {', '.join(KEYS)}"
            raise UnknownName(f"key of {where}", key, KEYS, hint=hint)
    if "command" in values:
        shared = {key: value for key, value in shared.items() if key != "host-memory"}
    try:
        keys = msgspec.convert({**shared, **values}, _Keys, strict=True)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$.")
        hint = f"choose of {', '.join(PHASES)}" if place.startswith("phases") else "text in quotes, lists in []"
        raise BadInput(f"{where}: {place.rstrip('`')}: {problem}", hint=hint) from None
    if bool(keys.command) == bool(keys.config):
        raise BadInput(
            f"{where} needs either a command or a config",
            hint='command = "python train.py", or config = "axolotl.yaml"',
        )
    if not keys.gpu:
        raise BadInput(f"{where} names no card", hint='gpu = "rtx-4090", or "8xh100"')
    if keys.command and (keys.host_memory or keys.workers is not None):
        raise BadInput(f"{where}: host-memory and workers are for a config", hint="a script's host RAM is not judged")
    try:
        budgets = [keys.budget] if isinstance(keys.budget, str) else keys.budget
        limits = tuple(parse_budget(line) for line in budgets if line)
        command = tuple(shlex.split(keys.command) if isinstance(keys.command, str) else keys.command)
    except BadInput as error:
        raise BadInput(f"{where}: {error.message}", hint=error.hint) from None
    except ValueError as error:
        raise BadInput(f"{where}: command: {error}", hint="close the quotes, or write a list of words") from None
    return CheckJob(
        name, keys.gpu, command, keys.config, keys.model, keys.folder, limits, tuple(keys.phases), keys.host_memory,
        keys.workers, keys.reserve, keys.alloc_conf, keys.steps, tuple(keys.answer), tuple(keys.ignore), keys.env,
        _line(text, name),
    )  # fmt: skip


def _line(text: str, name: str) -> int:
    """Return the number of the line that begins a job; 1 where it is written in another way."""
    header = re.compile(rf"""^\s*\[\s*(tool\.memfit\.)?jobs\.["']?{re.escape(name)}["']?\s*\]""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if header.match(line)), 1)


def dumps(jobs: Mapping[str, Mapping[str, str]], gpu: str) -> str:
    """Return the text of a first file."""
    return tomli_w.dumps({"gpu": gpu, "jobs": {name: dict(keys) for name, keys in jobs.items()}})
