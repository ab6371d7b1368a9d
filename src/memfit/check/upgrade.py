"""Align a job's tensors in two environments by module and operator, and name the line of a library that decides.

A line decides if it allocates, or calls what allocates, and the function it stands in differs between the environments:
of the calls that led to an allocation, the innermost such one. Where all these functions are the same in both, what
differs is how long a tensor is kept, and whatever keeps it has read it: of the functions that read it by an operator of
their own, one that differs decides, and the line is the one that does. Comments and line breaks are no difference.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

from memfit.check.difference import MOST, OUTSIDE, difference, without_renamed
from memfit.check.environments import Environment
from memfit.nouns.check import CheckJob, JobAnswer, PhaseShares, Share
from memfit.nouns.footprint import Footprint, Line, PhasePeak
from memfit.nouns.tape import Role
from memfit.nouns.upgrade import LibraryPlace, TensorChange, Upgrade, VersionChange
from memfit.virtual.supported import PACKAGES

LEAST = 0.01  # of the largest change: smaller ones are not listed
_LINES = 8  # of a change that are told
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Key = tuple[Role, str]


def upgrade(job: CheckJob, envs: tuple[Environment, Environment], base: JobAnswer, head: JobAnswer) -> Upgrade:
    """Compare a job's answers in two environments."""
    found = difference(job, base, head)
    old, new = (_phase(answer, found.phase) for answer in (base, head))
    rows = _aligned(envs, old, new)
    most = max((abs(row.added) for row in rows), default=0)
    rows = [row for row in rows if abs(row.added) >= LEAST * most]
    libraries = {name for p in (old, new) for share in p.shares for name in _libraries(envs, share)}
    versions = tuple(
        VersionChange(name, before, after)
        for name in sorted(libraries | set(PACKAGES))
        if (before := envs[0].version(name)) != (after := envs[1].version(name))
    )
    return Upgrade(
        head.title, job.gpu, (envs[0].name, envs[1].name), versions, base, head, found, tuple(rows[:MOST]),
        _places(rows),
    )  # fmt: skip


def _phase(answer: JobAnswer, name: str) -> PhaseShares:
    return next((p for p in answer.phases if p.phase == name), answer.peak or answer.phases[0])


def _aligned(envs: tuple[Environment, Environment], old: PhaseShares, new: PhaseShares) -> list[TensorChange]:
    """Return the kinds of tensors that changed, the largest change first.

    Shares are of one kind if role, module and operator are the same; the lines are those that allocate the most of it.
    """
    sizes: tuple[Counter[Key], Counter[Key]] = Counter(), Counter()
    lines: tuple[dict[Key, Counter[tuple[str, ...]]], dict[Key, Counter[tuple[str, ...]]]] = {}, {}
    reads: tuple[dict[Key, dict[tuple[str, ...], None]], dict[Key, dict[tuple[str, ...], None]]] = {}, {}
    for side, phase in enumerate((old, new)):
        for share in phase.shares:
            key = share.role, share.label
            sizes[side][key] += share.bytes
            lines[side].setdefault(key, Counter())[share.lines] += share.bytes
            reads[side].setdefault(key, {}).update(dict.fromkeys(share.reads))
    rows = []
    for key in dict.fromkeys((*sizes[0], *sizes[1])):
        before, after = sizes[0][key], sizes[1][key]
        if before == after or key[0] in OUTSIDE:
            continue
        side = int(after > before)
        chains = lines[side].get(key) or lines[1 - side][key]
        less = lines[1 - side].get(key, Counter())
        # by functions, since lines move between versions: the chain of which there is most more than before
        known = Counter[tuple[str, ...]]()
        for chain, size in less.items():
            known[_names(chain)] += size
        chain = max(chains, key=lambda chain: chains[chain] - known[_names(chain)])
        shown = tuple(_shown(envs[side], line) for line in chain[:_LINES])
        decided = _decided(envs, side, chain) or _kept(envs, side, reads[side].get(key, ()))
        rows.append(TensorChange(*key, before, after, shown, decided))
    return sorted(without_renamed(rows), key=lambda row: -abs(row.added))


def _names(chain: Iterable[str]) -> tuple[str, ...]:
    """Return a chain of lines as the files and functions that they stand in."""
    found = []
    for line in chain:
        file, _, number = line.rpartition(":")
        function = _function(_source(file), int(number)) if file.startswith("/") else None
        found.append(f"{Path(file).name}:{function[0] if function else ''}")
    return tuple(found)


def _shown(env: Environment, line: str) -> str:
    file, _, number = line.rpartition(":")
    return f"{env.relative(file) or file}:{number}" if file.startswith("/") else line


def _libraries(envs: tuple[Environment, Environment], share: Share) -> Iterator[str]:
    for line in share.lines:
        for env in envs:
            if line.startswith("/") and (relative := env.relative(line.rpartition(":")[0])):
                yield env.library_of(relative)


def _decided(envs: tuple[Environment, Environment], side: int, chain: Sequence[str]) -> LibraryPlace | None:
    """Return the innermost line of a chain whose function is another one in the other environment."""
    return next(filter(None, (_differing(envs, side, line) for line in chain)), None)


def _kept(envs: tuple[Environment, Environment], side: int, chains: Iterable[Sequence[str]]) -> LibraryPlace | None:
    """Return the line that makes a function differ which reads a tensor itself, not by a function that it calls."""
    for chain in chains:
        for line in chain:
            if found := _differing(envs, side, line):
                number = _differing_line(envs, side, line, found)
                code = _source(line.rpartition(":")[0]).splitlines()[number - 1].strip()[:200]
                return replace(found, line=number, code=code, keeps=True)
            if not (envs[side].relative(line.rpartition(":")[0])).startswith("torch/"):
                break
    return None


def _differing(envs: tuple[Environment, Environment], side: int, line: str) -> LibraryPlace | None:
    """Return a line of a library whose function the other environment has differently; else None."""
    own, other = envs[side], envs[1 - side]
    file, _, text = line.rpartition(":")
    relative = own.relative(file) if file.startswith("/") else ""
    number, source = int(text or 0), _source(file)
    function = _function(source, number)
    theirs = other.find(relative) if relative else None
    if not relative or function is None or theirs == Path(file):
        return None
    if theirs is not None and function[1] in _bodies(_source(str(theirs))).get(function[0], ()):
        return None
    library = own.library_of(relative)
    versions = envs[0].version(library), envs[1].version(library)
    code = source.splitlines()[number - 1].strip()[:200] if source else ""
    return LibraryPlace(library, relative, number, function[0], code, side == 0, versions)


def _differing_line(envs: tuple[Environment, Environment], side: int, line: str, found: LibraryPlace) -> int:
    """Return the first line of a function that the other environment does not have; the given one if there is none."""
    theirs = envs[1 - side].find(found.file)
    sources = _source(line.rpartition(":")[0]), _source(str(theirs)) if theirs else ""
    spans = [[(a, b) for a, b, name, _ in _functions(source) if name == found.function] for source in sources]
    if not all(spans):
        return found.line
    first = max(start for start, end in spans[0] if start <= found.line <= end)
    bodies = []
    for source, (start, end) in zip(sources, (next(s for s in spans[0] if s[0] == first), spans[1][-1]), strict=True):
        bodies.append([text.partition("#")[0].strip() for text in source.splitlines()[start - 1 : end]])
    changes = SequenceMatcher(None, bodies[0], bodies[1], autojunk=False).get_opcodes()
    return next(
        (first + a for kind, a, b, _, _ in changes if kind != "equal" and b > a and any(bodies[0][a:b])), found.line
    )


def _places(rows: Iterable[TensorChange]) -> tuple[LibraryPlace, ...]:
    """Return the lines that decide, with the bytes of all that they decide, the most first."""
    sums: dict[LibraryPlace, int] = {}
    for row in rows:
        if row.decided:
            sums[row.decided] = sums.get(row.decided, 0) + row.added
    ordered = sorted(sums.items(), key=lambda item: -abs(item[1]))
    return tuple(replace(place, added=size) for place, size in ordered if size)


@cache
def _source(file: str) -> str:
    try:
        return Path(file).read_text(errors="replace")
    except OSError:
        return ""


@cache
def _functions(source: str) -> tuple[tuple[int, int, str, str], ...]:
    """Return (first line, last line, qualified name, body without positions) of every function of a file."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    found: list[tuple[int, int, str, str]] = []

    def visit(node: ast.AST, before: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
                name = f"{before}.{child.name}" if before else child.name
                if isinstance(child, _FUNCTIONS):
                    found.append((child.lineno, child.end_lineno or child.lineno, name, _body(child)))
                visit(child, name)
            else:
                visit(child, before)

    visit(tree, "")
    return tuple(found)


def _body(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return what a function does, without its docstring and where it stands."""
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return "\n".join([ast.dump(node.args), *map(ast.dump, body)])


@cache
def _bodies(source: str) -> dict[str, frozenset[str]]:
    """Return the bodies of a file's functions by name; one may be defined several times."""
    found: dict[str, set[str]] = {}
    for _, _, name, body in _functions(source):
        found.setdefault(name, set()).add(body)
    return {name: frozenset(bodies) for name, bodies in found.items()}


def _function(source: str, line: int) -> tuple[str, str] | None:
    """Return the name and the body of the innermost function around a line."""
    around = [(first, name, body) for first, last, name, body in _functions(source) if first <= line <= last]
    return max(around)[1:] if around else None


def footprints(found: Upgrade) -> tuple[Footprint, Footprint]:
    """Return both sides as footprints, for what compares and draws these."""
    base, head = (
        Footprint(
            tuple(
                PhasePeak(
                    p.phase,
                    p.instant,
                    p.levels,
                    tuple(Line(share.role, share.label, share.bytes) for share in p.shares),
                )
                for p in answer.phases
            ),
            answer.source,
        )
        for answer in (found.base, found.head)
    )
    return base, head
