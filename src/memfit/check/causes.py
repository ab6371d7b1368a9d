"""Find which change of a file makes a job need more, where no changed line allocates it: by running each alone.

A configuration is changed key by key, another file by the lines that git names. The only change is the cause. Of
several, each is made alone in the old version, and the job is judged again: what then comes is what that change adds.
"""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w
import yaml

from memfit.check.difference import TELLING, cause
from memfit.check.git import Hunk, worktree
from memfit.check.judges import Case, Judged
from memfit.nouns.check import CausePlace, CheckJob, JobAnswer, JobDifference

MOST_TRACED, MOST_COUNTED = 8, 64  # changes that are tried one by one, where each is a trace or a formula
LISTED = 3
LEAST = 0.1  # of what was added: a change that adds less is not listed
Judge = Callable[[Sequence[Case]], list[Judged]]


@dataclass(frozen=True, slots=True)
class Change:
    """One change that can be made alone: `apply` makes it in a tree of the old version."""

    file: str
    line: int
    apply: Callable[[Path], None]
    job: CheckJob | None = None  # the job as changed, where its own definition is the change
    key: bool = False


def causes_of(
    found: JobDifference, base: Case, head: Case, hunks: Sequence[Hunk], commit: str, judge: Judge, formula: bool
) -> tuple[CausePlace, ...]:
    """Return the places that make a difference, the one that adds most first; () where none does alone.

    hunks: changes of files that the job reads.
    """
    changes = list(_changes(base, head, hunks))
    if not changes:
        return ()
    if len(changes) == 1:
        one = changes[0]
        return (cause(one.file, one.line, found.added, "key" if one.key else "only", head.root),)
    if len(changes) > (MOST_COUNTED if formula else MOST_TRACED):
        return ()
    with ExitStack() as stack:
        cases = []
        for one in changes:
            tree = stack.enter_context(worktree(head.root, commit))
            one.apply(tree)
            cases.append(replace(base, root=tree, job=one.job or base.job))
        answers = judge(cases)
    total = found.added or max((role.added for role in found.roles), key=abs)
    added = [(_added(found, judged.answer), change) for judged, change in zip(answers, changes, strict=True)]
    wanted = sorted((row for row in added if row[0] * total > 0), key=lambda row: -abs(row[0]))
    if not wanted or abs(wanted[0][0]) < TELLING * abs(total) / len(changes):
        return ()
    return tuple(
        cause(change.file, change.line, size, "key" if change.key else "alone", head.root)
        for size, change in wanted[:LISTED]
        if abs(size) >= LEAST * abs(total)
    )


def _added(found: JobDifference, answer: object) -> int:
    if not isinstance(answer, JobAnswer):
        return 0
    return next((p.levels.reserved - found.base for p in answer.phases if p.phase == found.phase), 0)


def _changes(base: Case, head: Case, hunks: Sequence[Hunk]) -> Iterator[Change]:
    if _said(base.job) != _said(head.job):
        yield Change(_file_of(head), head.job.line, lambda tree: None, head.job)
    config = str(Path(head.inside, head.job.folder, head.job.config)) if head.job.config else ""
    for hunk in hunks:
        if hunk.file == config:
            continue
        if _matters(base.root, hunk):
            yield Change(hunk.file, hunk.line, lambda tree, hunk=hunk: _apply(tree, hunk))  # type: ignore[misc]
    if config and any(hunk.file == config for hunk in hunks):
        yield from _keys(base.root / config, head.root / config, config)


def _said(job: CheckJob) -> CheckJob:
    return replace(job, line=0, budgets=(), phases=())


def _file_of(case: Case) -> str:
    from memfit.documents.check_file import OWN, find

    path = find(case.root / case.inside)
    return str(Path(case.inside, path.name if path else OWN))


def _matters(root: Path, hunk: Hunk) -> bool:
    """Return whether a change is more than comments and line breaks."""
    if not hunk.file.endswith(".py") or not hunk.base_file:
        return True
    try:
        text = (root / hunk.base_file).read_text()
        return ast.dump(ast.parse(text)) != ast.dump(ast.parse(_with(text, hunk)))
    except (OSError, SyntaxError, ValueError):
        return True  # it needs another change beside it


def _apply(tree: Path, hunk: Hunk) -> None:
    path = tree / (hunk.base_file or hunk.file)
    text = path.read_text() if path.is_file() else ""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        path.unlink()
    path.write_text(_with(text, hunk))


def _with(text: str, hunk: Hunk) -> str:
    lines = text.splitlines()
    start = hunk.base_start - 1 if hunk.base_count else hunk.base_start
    lines[start : start + hunk.base_count] = hunk.added
    return "\n".join(lines) + "\n"


# --- configurations ---


def _keys(old: Path, new: Path, name: str) -> Iterator[Change]:
    """Yield the keys of a configuration that changed."""
    before, after = (_flat(_read(path)) for path in (old, new))
    lines = key_lines(new)
    for key in dict.fromkeys((*after, *before)):
        if before.get(key) != after.get(key):
            line = lines.get(key) or next((lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in lines), 1)
            value = after.get(key)
            yield Change(name, line, _setter(name, key, value, key in after), key=True)


def _setter(name: str, key: tuple[str, ...], value: Any, present: bool) -> Callable[[Path], None]:
    def apply(tree: Path) -> None:
        path = tree / name
        data = _read(path)
        inner = data
        for part in key[:-1]:
            inner = inner.setdefault(part, {})
        if present:
            inner[key[-1]] = value
        else:
            inner.pop(key[-1], None)
        path.write_text(_WRITE.get(path.suffix, yaml.safe_dump)(data))

    return apply


_WRITE: dict[str, Callable[[Any], str]] = {".toml": tomli_w.dumps, ".json": json.dumps}


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        data = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _flat(data: dict[str, Any], before: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for key, value in data.items():
        place = (*before, str(key))
        found |= _flat(value, place) if isinstance(value, dict) and value else {place: value}
    return found


def key_lines(path: Path) -> dict[tuple[str, ...], int]:
    """Return the line of each key of a YAML or JSON file, and of a TOML file's by its text."""
    try:
        text = path.read_text()
        if path.suffix != ".toml":
            return dict(_marks(yaml.compose(text), ()))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("["):
            table = tuple(part.strip("\"' ") for part in stripped.strip("[]").split("."))
        elif "=" in stripped and not stripped.startswith("#"):
            found.setdefault((*table, stripped.partition("=")[0].strip("\"' ")), number)
    return found


def _marks(node: Any, before: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            place = (*before, str(key.value))
            yield place, key.start_mark.line + 1
            yield from _marks(value, place)
