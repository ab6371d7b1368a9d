"""Find which change of a file makes a job need more, where no changed line allocates it: by running each alone.

A configuration is changed key by key, another file by the lines that git names. The only change is the cause. Of
several, each is made alone in the old version, and the job is judged again: what then comes is what that change adds.
Where none does alone, because they need each other, each is left out instead, and what then goes is what it adds.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
import yaml

from memfit.check.difference import TELLING, line_text
from memfit.check.git import Hunk, Moves, worktree
from memfit.check.judges import Case, Judged
from memfit.errors import BadInput
from memfit.nouns.check import CausePlace, CheckJob, Found, JobAnswer, JobDifference
from memfit.reading import settings_text

MOST_TRACED, MOST_COUNTED = 8, 24  # changes that are tried one by one, where each is a trace or a formula
LISTED = 3
LEAST = 0.1  # of what was added: a change that adds less is not listed
Judge = Callable[[Sequence[Case]], list[Judged]]


@dataclass(frozen=True, slots=True)
class Change:
    """One change that can be made by itself: `apply` makes it in a tree of the old version.

    last: its last line, of several. start: its first line there; of a file, the last change is made first. job: the job
    as changed, where its own definition is the change. removed: the text of a line that goes, where none comes.
    """

    file: str
    line: int
    apply: Callable[[Path], None]
    start: int = 0
    job: CheckJob | None = None
    key: bool = False
    removed: str = ""
    last: int = 0

    def cause(self, added: int, how: Found, root: Path) -> CausePlace:
        """Return the place of this change."""
        text = self.removed or line_text(root / self.file, self.line)
        found = "key" if self.key else how
        return CausePlace(self.file, self.line, text, added, found, bool(self.removed), self.last)


def causes_of(
    found: JobDifference, base: Case, head: Case, hunks: Sequence[Hunk], renamed: Mapping[str, str], commit: str,
    judge: Judge, formula: bool,
) -> tuple[CausePlace, ...]:  # fmt: skip
    """Return the places that make a difference, the one that adds most first; () where none was found.

    hunks: changes of files that the job reads. renamed: old names of files -> new ones.
    """
    most = MOST_COUNTED if formula else MOST_TRACED
    lines = [one for hunk in hunks for one in _lines_of(base.root, hunk)]
    changes = next((few for each in (lines, hunks) if len(few := list(_changes(base, head, each))) <= most), [])
    if len(changes) == 1:
        return (changes[0].cause(found.added or found.host_added, "only", head.root),)
    if not changes:
        return ()

    def reserved(sets: Sequence[Sequence[Change]]) -> list[int | None]:
        """Return the bytes of the worst instant with each of these sets of changes made in the old version."""
        with ExitStack() as stack:
            cases = []
            for those in sets:
                tree = stack.enter_context(worktree(head.root, commit))
                _make(tree, those, renamed if len(those) > 1 else {})
                job = next((one.job for one in those if one.job), base.job)
                cases.append(replace(base, root=tree, job=job))
            return [_reserved(found, judged.answer) for judged in judge(cases)]

    alone = [size and size - found.base for size in reserved([[one] for one in changes])]
    if causes := _telling(found, changes, alone, "alone", head.root):
        return causes
    without = [size and found.head - size for size in reserved([[o for o in changes if o is not c] for c in changes])]
    return _telling(found, changes, without, "without", head.root)


def _make(tree: Path, changes: Sequence[Change], renamed: Mapping[str, str]) -> None:
    for old, new in renamed.items():
        if (tree / old).is_file():
            (tree / new).parent.mkdir(parents=True, exist_ok=True)
            (tree / old).rename(tree / new)
    for one in sorted(changes, key=lambda one: -one.start):
        one.apply(tree)


def _telling(
    found: JobDifference, changes: Sequence[Change], added: Sequence[int | None], how: Found, root: Path
) -> tuple[CausePlace, ...]:
    """Return the changes that add at least their share of the whole, the largest first."""
    total = found.added or max((role.added for role in found.roles), key=abs)
    rows = [(size, one) for size, one in zip(added, changes, strict=True) if size and size * total > 0]
    rows.sort(key=lambda row: -abs(row[0]))
    if not rows or abs(rows[0][0]) < TELLING * abs(total) / len(changes):
        return ()
    return tuple(one.cause(size, how, root) for size, one in rows[:LISTED] if abs(size) >= LEAST * abs(total))


def _reserved(found: JobDifference, answer: object) -> int | None:
    """Return the bytes of the phase that is explained; None for a job that fails with these changes."""
    if not isinstance(answer, JobAnswer):
        return None
    return next((p.levels.reserved for p in answer.phases if p.phase == found.phase), None)


def _changes(base: Case, head: Case, hunks: Sequence[Hunk]) -> Iterator[Change]:
    if _said(base.job) != _said(head.job):
        file = _file_of(head)
        yield Change(file, _line_of(head.root / file, base.job, head.job), lambda tree: None, job=head.job)
    config = str(Path(head.inside, head.job.folder, head.job.config)) if head.job.config else ""
    for hunk in hunks:
        if hunk.file == config:
            continue
        if _matters(base.root, hunk):
            first, last = hunk.lines
            gone = "" if hunk.added else line_text(base.root / hunk.base_file, hunk.base_start)
            yield Change(
                hunk.file, first, partial(_apply, hunk), hunk.base_start, removed=gone, last=last if last > first else 0
            )
    if config and any(hunk.file == config for hunk in hunks):
        yield from _keys(base.root / config, head.root / config, config, Moves(hunks, {}))


def _said(job: CheckJob) -> CheckJob:
    return replace(job, line=0, budgets=(), phases=())


def _file_of(case: Case) -> str:
    from memfit.documents.check_file import OWN, find

    path = find(case.root / case.inside)
    return str(Path(case.inside, path.name if path else OWN))


def _line_of(path: Path, old: CheckJob, new: CheckJob) -> int:
    """Return the line of the key that changed in a job's definition; else where the job begins."""
    lines = key_lines(path)
    for one in fields(CheckJob):
        key = one.name.replace("_", "-")
        for place in (("jobs", new.name, key), ("tool", "memfit", "jobs", new.name, key), (key,)):
            if one.name != "line" and getattr(old, one.name) != getattr(new, one.name) and place in lines:
                return lines[place]
    return new.line


def _lines_of(root: Path, hunk: Hunk) -> Sequence[Hunk]:
    """Return a change of as many lines as before line by line, where Python can be read with each one alone."""
    if hunk.base_count != len(hunk.added):
        return (hunk,)
    ones = [
        replace(hunk, base_start=hunk.base_start + n, base_count=1, start=hunk.start + n, added=(text,))
        for n, text in enumerate(hunk.added)
    ]
    try:
        if hunk.file.endswith(".py"):
            text = (root / hunk.base_file).read_text()
            for one in ones:
                ast.parse(_with(text, one))
    except (OSError, SyntaxError, ValueError):
        return (hunk,)
    return ones


def _matters(root: Path, hunk: Hunk) -> bool:
    """Return whether a change is more than comments and line breaks."""
    if not hunk.file.endswith(".py") or not hunk.base_file:
        return True
    try:
        text = (root / hunk.base_file).read_text()
        return ast.dump(ast.parse(text)) != ast.dump(ast.parse(_with(text, hunk)))
    except (OSError, SyntaxError, ValueError):
        return True  # it needs another change beside it


def _apply(hunk: Hunk, tree: Path) -> None:
    path = tree / hunk.file
    if not path.is_file() and hunk.base_file:
        path = tree / hunk.base_file
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


def _keys(old: Path, new: Path, name: str, moves: Moves) -> Iterator[Change]:
    """Yield the keys of a configuration that changed."""
    before, after = (_flat(_read(path)) for path in (old, new))
    lines, gone = key_lines(new), key_lines(old)
    for key in dict.fromkeys((*after, *before)):
        if before.get(key) == after.get(key):
            continue
        line = next((lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in lines), 1)
        removed = ""
        if key not in after and key in gone:
            removed = line_text(old, gone[key])
            line = int(moves(f"{name}:{gone[key]}").rpartition(":")[2])
        yield Change(name, line, _setter(name, key, after.get(key), key in after), key=True, removed=removed)


def _setter(name: str, key: tuple[str, ...], value: Any, present: bool) -> Callable[[Path], None]:
    def apply(tree: Path) -> None:
        path = tree / name
        data = _read(path)
        inner = data
        for part in key[:-1]:
            if not isinstance(inner.get(part), dict):
                inner[part] = {}
            inner = inner[part]
        if present:
            inner[key[-1]] = value
        else:
            inner.pop(key[-1], None)
        path.write_text(_WRITE.get(path.suffix, yaml.safe_dump)(data))

    return apply


_WRITE: dict[str, Callable[[Any], str]] = {".toml": tomli_w.dumps, ".json": json.dumps}


def _read(path: Path) -> dict[str, Any]:
    try:
        data = settings_text.parsed(path.read_text(), path.name)
    except (OSError, UnicodeError, BadInput):
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
        settings_text.parsed(text, path.name)  # what unfolds to too much is not walked
        if path.suffix != ".toml":
            return dict(_marks(settings_text.node_of(text), ()))
    except (OSError, ValueError, yaml.YAMLError, RecursionError, BadInput):
        return {}
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("["):
            table = tuple(bare or quoted for bare, quoted in _PARTS.findall(stripped.strip("[]")))
        elif "=" in stripped and not stripped.startswith("#"):
            found.setdefault((*table, stripped.partition("=")[0].strip("\"' ")), number)
    return found


_PARTS = re.compile(r"""([\w-]+)|["']([^"']*)["']""")


def _marks(node: Any, before: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            place = (*before, str(key.value))
            yield place, key.start_mark.line + 1
            yield from _marks(value, place)
