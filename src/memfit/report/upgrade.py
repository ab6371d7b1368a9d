"""The answer of `memfit diff` in a terminal: what an upgrade moves, which line of a library decides it, the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from memfit.nouns.upgrade import LibraryPlace, TensorChange, Upgrade
from memfit.report.check import role_words, signed
from memfit.report.layout import Column, Grid, commands, hanging, paragraphs, text
from memfit.report.words import ROLE_WORDS, VERDICT_WORDS, phase_title
from memfit.units import human, in_unit, shared_unit

SHOWN = 6  # tensors and lines that are listed; the JSON has more
UNEXPLAINED = 0.5  # of what moved: if the named lines decide less, it is said


def upgrade_view(found: Upgrade, next_up: Sequence[str] = ()) -> Group:
    """Show the answer of `memfit diff`."""
    first, second = found.environments
    words, style = VERDICT_WORDS[found.head.verdict]
    rows = [verdict_line(found), change_line(found)]
    parts: list[RenderableType] = [
        text(f"{found.title} on {found.card}: {second} against {first}", "bold"), "",
        hanging(Text(words, style), rows), "", paragraphs(_rows(found)), "", _phases(found),
    ]  # fmt: skip
    if found.tensors:
        parts += ["", _tensors(found)]
    if next_up:
        parts += ["", commands(next_up)]
    return Group(*parts)


def verdict_line(found: Upgrade) -> str:
    """Return '18.6 GiB of 23.2 GiB, was 15.1 GiB: fits -> does not fit'."""
    before, after = (VERDICT_WORDS[one.verdict][0].lower() for one in (found.base, found.head))
    moved = f"{before} -> {after}" if before != after else f"{after}, as before"
    sizes = f"{human(found.head.need)} reserved of {human(found.head.usable)}, was {human(found.base.need)}"
    return f"{sizes}: {moved}"


def change_line(found: Upgrade) -> str:
    """Return what the upgrade adds, and at which instant."""
    difference = found.difference
    where = f"at {difference.instant} ({phase_title(difference.phase)})"
    if difference.same:
        return "the same bytes in every phase"
    if not difference.added:
        return f"the upgrade moves bytes between roles {where}"
    return f"the upgrade {'adds' if difference.added > 0 else 'saves'} {human(abs(difference.added))} {where}"


def place_words(one: LibraryPlace) -> str:
    """Return 'transformers/loss/loss_utils.py:46: logits = logits.float() (transformers 4.49.0 -> 5.23.0)'."""
    before, after = (version or "not installed" for version in one.versions)
    versions = f"{one.library} {before}" if before == after else f"{one.library} {before} -> {after}"
    side = ("no longer kept by " if one.keeps else "no longer so: ") if one.only_base else "kept by " * one.keeps
    return f"{signed(one.added)}, {side}{one.place}: {one.code} ({versions})"


def _rows(found: Upgrade) -> Iterator[tuple[str, str]]:
    said = ", ".join(f"{v.library} {v.base or 'not installed'} -> {v.head or 'not installed'}" for v in found.versions)
    yield "versions:", said or "the same in both environments"
    if not found.difference.same:
        yield "by role:", role_words(found.difference)
    for number, one in enumerate(found.places[:SHOWN]):
        yield "" if number else "decided by:", place_words(one)
    if note := unexplained(found):
        yield "note:", note
    for side, answer in zip(found.environments, (found.base, found.head), strict=True):
        if answer.ran_out:
            yield "note:", f"{side}: out of memory at {answer.ran_out}"
        if answer.leaks:
            yield "note:", f"{side}: grows by {human(sum(leak.per_step for leak in answer.leaks))} a step"
        if answer.not_understood:
            yield "note:", f"{side}: judged without what {', '.join(answer.not_understood)} changes"


def unexplained(found: Upgrade) -> str:
    """Return a sentence on bytes that no line decides; "" where lines decide most of what moved."""
    tensors = [row for row in found.tensors if row.role != "fragmentation"]
    moved = sum(abs(row.added) for row in tensors)
    left = sum(abs(row.added) for row in tensors if row.decided is None)
    if not moved or left < UNEXPLAINED * moved:
        return ""
    return (
        f"{human(left)} of {human(moved)} that moved are allocated by lines that are the same in both: what is kept "
        "of them, and how long, differs"
    )


def _phases(found: Upgrade) -> Grid:
    changes = found.difference.phases
    unit = shared_unit(max((size for c in changes for size in (c.base, c.head) if size), default=0))
    columns = [Column(f"phase, {unit} reserved")]
    columns += [Column(name, right=True) for name in ("before", "after", "difference")]
    rows: list[list[Text | str]] = []
    for change in changes:
        sizes = ["-" if size is None else in_unit(size, unit) for size in (change.base, change.head)]
        gap = "" if change.base is None or change.head is None else signed(change.head - change.base)
        rows.append([phase_title(change.phase), *sizes, gap])
    return Grid(columns, rows)


def _tensors(found: Upgrade) -> Grid:
    rows = found.tensors[:SHOWN]
    unit = shared_unit(max(max(row.base, row.head) for row in rows))
    columns = [Column(f"what moved, {unit}", wraps=24)]
    columns += [Column(name, right=True) for name in ("before", "after", "difference")]
    columns.append(Column("allocated at", wraps=20))
    cells: list[list[Text | str]] = [
        [
            text(f"{ROLE_WORDS[row.role].title}: {row.label}"), in_unit(row.base, unit), in_unit(row.head, unit),
            signed(row.added), _line(row),
        ]
        for row in rows
    ]  # fmt: skip
    return Grid(columns, cells)


def _line(row: TensorChange) -> str:
    """Return the innermost line that is not PyTorch's own, else the innermost."""
    return next((line for line in row.lines if not line.startswith("torch/")), row.lines[0] if row.lines else "")
