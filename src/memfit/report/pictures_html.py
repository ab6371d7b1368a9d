"""Two more pictures for the page of a timeline: a flame graph of the live bytes, and a map of the segments.

They are SVG without script: the title of each box is its name and size, which browsers show as a tooltip. The search of
a flame graph lights up the boxes with a text in their name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from memfit.explain.memory import Group, Memory
from memfit.nouns.tape import WRITTEN, Piece, Role, Segment
from memfit.report.document_html import clean
from memfit.report.words import ROLE_WORDS, part_word
from memfit.units import human

ROW = 19  # pixels of a row of the flame graph
NARROWEST = 0.001  # share of the width from which a box is drawn; the rest of its row is left blank
DEEPEST = 40  # rows of a flame graph
MOST_SEGMENTS = 160  # largest segments drawn; the others are counted
THIN = 0.002  # share of a segment below which neighbours of one role are drawn as one


@dataclass(slots=True)
class _Node:
    bytes: int = 0
    below: dict[str, _Node] = field(default_factory=dict)


def pictures(memory: Memory, stacks: Mapping[tuple[str, ...], int], segments: Sequence[Segment]) -> str:
    """Return the HTML below the timeline: the instant of `memory` by role and line, the end by stack, the segments.

    `stacks` are whole call stacks, which only a snapshot has, for its last instant; {} for other histories.
    """
    when = "when memory ran out" if memory.asked else WRITTEN if memory.instant == WRITTEN else "at the highest instant"
    made = flame(stacks_of_groups(memory.groups), f"Live tensors {when}", "by role and line")
    if stacks:
        made += flame(stacks, "Live tensors at the end of the recording", "by stack")
    return clean(made + segment_map(segments, when))  # names come from files


def stacks_of_groups(groups: Iterable[Group]) -> dict[tuple[str, ...], int]:
    """Return bytes by role, line and module, for histories without stacks."""
    found: dict[tuple[str, ...], int] = {}
    for group in groups:
        path = tuple(part for part in (part_word(group.role).title, group.line, group.module) if part)
        found[path] = found.get(path, 0) + group.bytes
    return found


# ---- the flame graph -----------------------------------------------------------------------------------------------


def flame(stacks: Mapping[tuple[str, ...], int], title: str, by: str) -> str:
    """Draw callers above their callees; the width of a box is its share of the bytes."""
    root = _Node()
    for path, size in stacks.items():
        node = root
        node.bytes += size
        for name in path[:DEEPEST]:
            node = node.below.setdefault(name, _Node())
            node.bytes += size
    boxes: list[str] = []
    rows = _boxes(root, 0.0, 0, max(root.bytes, 1), boxes)
    head = f"<h2>{title}: {human(root.bytes)} {by}</h2>\n"
    head += (
        '<label class="flame-search no-print">Search <input type="search" spellcheck="false"> <output></output></label>'
    )
    return f'{head}<svg class="flame" width="100%" height="{rows * ROW}">\n' + "\n".join(boxes) + "\n</svg>\n"


def _boxes(node: _Node, left: float, row: int, total: int, boxes: list[str]) -> int:
    """Draw the nodes below `node`, and return the number of rows so far."""
    deepest = row
    for name, child in sorted(node.below.items(), key=lambda pair: -pair[1].bytes):
        width = child.bytes / total
        if width >= NARROWEST:
            text = escape(name, quote=True)
            at = f'x="{100 * left:.3f}%" y="{row * ROW}" width="{100 * width:.3f}%" height="{ROW - 1}"'
            boxes.append(
                f'<svg class="box{len(boxes) % 3}" {at}><title>{text}: {human(child.bytes)}, {width:.1%}</title>'
                f'<rect width="100%" height="100%"/><text x="4" y="13">{text}</text></svg>'
            )
            deepest = max(deepest, _boxes(child, left, row + 1, total, boxes))
        left += width
    return max(deepest, row + bool(node.below))


# ---- the segments --------------------------------------------------------------------------------------------------


def segment_map(segments: Sequence[Segment], when: str) -> str:
    """Draw a line per segment, largest first, with its bytes as width; free bytes have the colour of the slack."""
    sizes = [(sum(piece.size for piece in s.pieces if piece.mapped), s) for s in segments]
    ordered = sorted(sizes, key=lambda pair: -pair[0])
    widest = max((size for size, _ in ordered), default=1) or 1
    held = sum(size for size, _ in ordered)
    free = sum(p.size for s in segments for p in s.pieces if p.mapped and p.alloc is None)
    more = f", the {MOST_SEGMENTS} largest drawn" if len(ordered) > MOST_SEGMENTS else ""
    held_by = f"{human(held)} reserved, {human(free)} of it without a tensor"
    head = f"<h2>{len(ordered)} segments {when}{more}: {held_by}</h2>\n"
    return head + "\n".join(_segment(s, size, widest) for size, s in ordered[:MOST_SEGMENTS]) + "\n"


def _segment(segment: Segment, size: int, widest: int) -> str:
    boxes, left = [], 0.0
    for role, part, label in _runs(segment.pieces, THIN * max(size, 1)):
        what, width = ROLE_WORDS[role].title if role else "free", 100 * part / max(size, 1)
        title = escape(f"{what}: {human(part)} {label}".strip(), quote=True)
        boxes.append(
            f'<rect class="{role or "slack"}" x="{left:.3f}%" width="{width:.3f}%" height="9">'
            f"<title>{title}</title></rect>"
        )
        left += width
    kind = ("small pool" if segment.small else "large pool") + (", expandable" if segment.expandable else "")
    title = f"{human(size)} at {segment.address:#x}, {kind}, stream {segment.stream}"
    wide = f"{100 * size / widest:.2f}%"
    return f'<svg class="segment" width="{wide}" height="9" role="img" aria-label="{title}">{"".join(boxes)}</svg>'


def _runs(pieces: Sequence[Piece], thin: float) -> list[tuple[Role | None, int, str]]:
    """Return (role, bytes, label) of the pieces; thin neighbours of one role are joined."""
    found: list[tuple[Role | None, int, str]] = []
    for piece in pieces:
        if not piece.mapped:
            continue
        role = piece.alloc.role if piece.alloc else None
        label = piece.alloc.label if piece.alloc else ""
        if found and found[-1][0] == role and (piece.size < thin or found[-1][1] < thin):
            found[-1] = (role, found[-1][1] + piece.size, "several")
        else:
            found.append((role, piece.size, label))
    return found
