"""Draw a Tape as HTML that needs no network: bytes by role over its events, with names in a tooltip.

The drawing has at most COLUMNS columns. Each shows the highest instant of its events, so that no peak is lost, and
names the largest tensors alive then. It is SVG; the script of the views only fills the tooltip.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from itertools import islice, pairwise

import msgspec

from memfit.allocator import Allocator, OutOfMemory
from memfit.allocator.levels import Levels, levels_of
from memfit.allocator.player import alive_at_start
from memfit.nouns.alloc_settings import AllocSettings, Torch
from memfit.nouns.finding import Part, part_of
from memfit.nouns.footprint import peak_maker
from memfit.nouns.tape import ROLES, WRITTEN, Alloc, Free, Mark, Oom, Tape
from memfit.report.document_html import Look, clean, document, swatch
from memfit.report.words import part_word, phase_title
from memfit.units import gib, human, several

COLUMNS = 1200  # columns of the drawing; a screen has not many more pixels
NAMED = 6  # tensors named per column and role
LETTER = 7  # pixels of a letter of a phase's name, about; one that has no room is left out
SCREEN, PHONE = 8, 2.6  # pixels of a per cent of the drawing, on a screen and on a phone
EDGE = 97  # per cent of the width beyond which the peak's word stands left of it
WIDTH, HEIGHT = 1200, 400  # units of the drawing
FAR = 2.5  # a card's line at more than this many times the peak is not drawn, to keep the run readable
# how the instants of a part of a step begin -> its name
STEP_PARTS = {
    "forward": "forward", "next part": "forward", "loss": "forward", "backward": "backward", "optimizer": "optimizer",
    "saving": "saving",
}  # fmt: skip
SHOWN: tuple[Part, ...] = ("unknown", *(role for role in ROLES if role not in ("context", "fragmentation")))


@dataclass(slots=True)
class PeakColumn:
    """The highest instant of some events: bytes by role (as SHOWN), and what the allocator held."""

    event: int
    roles: list[int]
    total: int
    allocated: int
    reserved: int
    tensors: tuple[int, ...] = ()  # places in the list of named tensors


@dataclass(slots=True)
class Drawing:
    """What a page shows of a tape."""

    columns: list[PeakColumn]
    marks: list[tuple[int, Mark]]  # with the column each begins at
    named: list[Alloc]
    born: list[int]  # event that allocated each of them; -1: before the first
    events: int
    oom: OutOfMemory | None
    rest: str = ""  # the name of what no role is known of, where it has one
    edge: str = "reserved"  # the name of the upper edge

    def title(self, part: Part) -> str:
        """Return the name of a role."""
        return self.rest if self.rest and part == "unknown" else part_word(part).title


def timeline_html(
    title: str, tape: Tape, settings: AllocSettings, torch: Torch, look: Look, capacity: int | None = None,
    total_memory: int | None = None, below: str = "",
) -> bytes:  # fmt: skip
    """Return a page of its own in UTF-8. `capacity` in bytes draws the card's line.

    look: style and script of all views. total_memory: the card's total in out-of-memory messages, as for `replay`.
    below: HTML of more pictures, under the legend.
    """
    drawing = sample(tape, settings, torch, capacity, total_memory)
    facts = f'<p class="dim">{escape(_facts(drawing, tape, torch, capacity))}</p>'
    body = f"<h1>{escape(title)}</h1>\n{facts}\n{plot(drawing, capacity)}\n{below}"
    return document(title, body, look)


def plot_html(
    tape: Tape, settings: AllocSettings, torch: Torch, capacity: int | None = None, go_on: bool = False,
    levels: Levels | None = None,
) -> str:  # fmt: skip
    """Return the timeline of a run as a piece of a page; see `timeline_html`. levels: of the run, if it was played."""
    drawing = sample(tape, settings, torch, capacity, go_on=go_on, levels=levels)
    facts = escape(_facts(drawing, tape, torch, capacity))
    return clean(f'<p class="dim">{facts}</p>\n{plot(drawing, capacity)}')  # labels come from files


def sample(
    tape: Tape, settings: AllocSettings, torch: Torch, capacity: int | None = None, total_memory: int | None = None,
    go_on: bool = False, levels: Levels | None = None, columns: int = COLUMNS,
) -> Drawing:  # fmt: skip
    """Turn the tape into columns; it ends where memory runs out, with `go_on` as `play` does.

    levels: of the run with these settings on this card; without them the tape is played. columns: at most so many.
    """
    if levels is None:
        allocator = Allocator(capacity, settings, torch, total_memory=total_memory)
        levels = levels_of(allocator, tape.start, tape.events, go_on=go_on)
    width = max(1, -(-len(tape.events) // columns))
    drawing = Drawing([], [], [], [], len(tape.events), levels.oom)
    for begin in range(0, len(levels.allocated), width):
        held = levels.allocated[begin : begin + width]
        most = max(held)
        reserved = max(levels.reserved[begin : begin + width])
        drawing.columns.append(PeakColumn(begin + held.index(most), [], 0, most, reserved))
    _fill(drawing, tape, levels, width)
    return drawing


def _fill(drawing: Drawing, tape: Tape, levels: Levels, width: int) -> None:
    """Give each column the bytes by role at its instant and the largest tensors of each; and list the marks."""
    place = {part: number for number, part in enumerate(SHOWN)}
    alive: list[dict[int, tuple[int, int, Alloc]]] = [{} for _ in SHOWN]  # by role, then by id
    roles, role_of = [0] * len(SHOWN), dict[int, int]()
    for alloc in alive_at_start(tape.start):
        role_of[alloc.id] = role = place[part_of(alloc)]
        alive[role][alloc.id] = (alloc.size, -1, alloc)
        roles[role] += alloc.size
    numbers: dict[tuple[int, int], int] = {}  # (id, birth) -> place among the named
    instants = {column.event: column for column in drawing.columns}
    for index, event in enumerate(islice(tape.events, len(levels.allocated))):
        if type(event) is Alloc:
            role_of[event.id] = role = place[part_of(event)]
            alive[role][event.id] = (event.size, index, event)
            roles[role] += event.size
        elif type(event) is Free:
            role = role_of.pop(event.id)
            roles[role] -= alive[role].pop(event.id)[0]
        elif type(event) is Mark:
            drawing.marks.append((index // width, event))
        if index not in instants:
            continue
        column = instants[index]
        column.roles = roles.copy()
        if type(event) is Oom and index in levels.given:
            column.roles[place["temporaries"]] += event.size
        column.total = sum(column.roles)
        column.tensors = tuple(_named(drawing, numbers, alive))


def _named(
    drawing: Drawing, numbers: dict[tuple[int, int], int], alive: Iterable[dict[int, tuple[int, int, Alloc]]]
) -> Iterable[int]:  # fmt: skip
    """Yield the places of the largest tensors of each role, adding those that are new to the drawing's."""
    for tensors in alive:
        for _, born, alloc in heapq.nlargest(NAMED, tensors.values(), key=lambda row: row[0]):
            if (alloc.id, born) not in numbers:
                numbers[alloc.id, born] = len(drawing.named)
                drawing.named.append(alloc)
                drawing.born.append(born)
            yield numbers[alloc.id, born]


# ---- the drawing ---------------------------------------------------------------------------------------------------


def top_of(drawing: Drawing, capacity: int | None, others: Iterable[int] = ()) -> int:
    """Return the bytes at the upper edge. others: further bytes that must be visible."""
    peak = max((*(column.reserved for column in drawing.columns), *others, 1))
    line = capacity if capacity is not None and capacity <= FAR * peak else 0
    return int(1.06 * max(peak, line))


def _y(size: int, top: int) -> str:
    return f"{HEIGHT - size * HEIGHT / top:.1f}"


def areas(drawing: Drawing, top: int) -> str:
    """Stack the roles, and above them the allocator's other reserved bytes, with their edge as a line."""
    if not drawing.columns:
        return ""
    columns = drawing.columns * (1 + (len(drawing.columns) == 1))  # one instant is as wide as the page
    xs = [f"{number * WIDTH / (len(columns) - 1):.1f}" for number in range(len(columns))]
    floor = [0] * len(xs)
    drawn = []
    for number, role in enumerate(SHOWN):
        ceiling = [low + column.roles[number] for low, column in zip(floor, columns, strict=True)]
        if ceiling != floor:
            drawn.append(_area(role, xs, floor, ceiling, top))
        floor = ceiling
    reserved = [column.reserved for column in columns]
    drawn.append(_area("slack", xs, floor, reserved, top))
    edge = " ".join(f"{x},{_y(size, top)}" for x, size in zip(xs, reserved, strict=True))
    return "\n".join([*drawn, f'<polyline class="reserved" points="{edge}"/>'])


def _area(name: str, xs: list[str], low: list[int], high: list[int], top: int) -> str:
    upper = [f"{x},{_y(size, top)}" for x, size in zip(xs, high, strict=True)]
    lower = [f"{x},{_y(size, top)}" for x, size in zip(reversed(xs), reversed(low), strict=True)]
    return f'<polygon class="{name}" points="{" ".join([*upper, *lower])}"/>'


def plot(drawing: Drawing, capacity: int | None, top: int | None = None, over: str = "", what: str = "event") -> str:
    """Return the drawing with its legend and the data that views.js shows under the pointer.

    top: bytes at the upper edge; over: SVG that lies above the areas; what: what is counted along the axis.
    """
    top = top or top_of(drawing, capacity)
    peak = _peak_column(drawing)
    late = len(drawing.columns) < 2 * peak  # so that the words of peak and card stand apart
    over += _peak(drawing, peak, top) + _card(capacity, top, late)
    label = f"Bytes of GPU memory by role over the run's {what}s; arrow keys move the cursor"
    drawn = _figure(drawing, top, label, (parts(drawing) + _axis(top), over), what)
    return f'{drawn}<ul class="legend">{_legend(drawing)}</ul>'


def lane(drawing: Drawing, capacity: int | None, top: int, label: str) -> str:
    """Return a low drawing, as of one of several ranks, with `top` bytes at its upper edge."""
    full = _card_line(capacity, top) if capacity is not None and capacity <= top else ""
    return _figure(drawing, top, f"{label}; arrow keys move the cursor", (_axis(top, 3), full), kind="plot lane")


def _figure(
    drawing: Drawing, top: int, label: str, around: tuple[str, str], what: str = "event", kind: str = "plot"
) -> str:
    """Return the areas of a drawing above its phases, and the data. around: SVG that lies below and above the areas."""
    under, over = around
    return (
        f'<figure class="{kind}" tabindex="0" role="img" aria-label="{escape(label, quote=True)}">'
        f"<svg>{bands(drawing)}{under}"
        f'<svg class="areas" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">{areas(drawing, top)}</svg>'
        f'{over}<line class="cursor" y1="0" y2="100%"/></svg>'
        f'<script type="application/json">{_data(drawing, top, what)}</script></figure>'
    )


def bands(drawing: Drawing) -> str:
    """Draw phases as shades behind the areas, with their names at the top where they have room."""
    spans: list[tuple[str, int]] = []
    for column, mark in drawing.marks:
        if not spans or spans[-1][0] != mark.phase:
            spans.append((mark.phase, column))
    last = max(len(drawing.columns) - 1, 1)
    made = []
    for number, (phase, begin) in enumerate(spans):
        end = spans[number + 1][1] if number + 1 < len(spans) else last
        left, width = 100 * begin / last, 100 * max(end - begin, 0) / last
        title = escape(phase_title(phase), quote=True)
        shade = f'<rect class="band" x="{left:.2f}%" width="{width:.2f}%" height="100%"/>' if number % 2 else ""
        pixels = LETTER * len(phase_title(phase)) + 6
        kind = "named slim" if width * PHONE < pixels else "named"
        box = f'<svg class="{kind}" x="{left:.2f}%" y="-20" width="{width:.2f}%" height="20">'  # cuts what has no room
        name = f'{box}<text x="6" y="13">{title}</text></svg>' if width * SCREEN > pixels else ""
        made.append(f'<g><title>{title}</title>{shade}<line class="edge" x1="{left:.2f}%" x2="{left:.2f}%" y1="-20" '
                    f'y2="100%"/>{name}</g>')  # fmt: skip
    return "\n".join(made)


def parts(drawing: Drawing) -> str:
    """Draw under the axis which part of a step runs: forward, backward, optimizer or saving."""
    last = max(len(drawing.columns) - 1, 1)
    made = []
    for (name, begin), (_, end) in pairwise([*_step_parts(drawing), ("", last)]):
        if not name or end <= begin:
            continue
        left, width = 100 * begin / last, 100 * (end - begin) / last
        slim = ' class="slim"' if width * PHONE < LETTER * len(name) else ""
        text = f'<text{slim} x="{left + width / 2:.2f}%" y="100%" dy="19" text-anchor="middle">{name}</text>'
        made.append(
            f'<g><title>{name}</title><rect class="{name}" x="{left:.2f}%" y="100%" width="{width:.2f}%" height="6"/>'
            f"{text if width * SCREEN > LETTER * len(name) else ''}</g>"
        )
    return "\n".join(made)


def _step_parts(drawing: Drawing) -> list[tuple[str, int]]:
    """Return the name of each part of a step, "" for what is none, and the column that it begins at."""
    spans: list[tuple[str, int]] = []
    for column, mark in drawing.marks:
        name = next((name for begin, name in STEP_PARTS.items() if mark.instant.startswith(begin)), "")
        if not spans or spans[-1][0] != name:
            spans.append((name, column))
    return spans


def _axis(top: int, most: int = 8) -> str:
    """Draw lines at round numbers of GiB or MiB, at most so many and at least half of them."""
    step = 1 << 20
    while top / step > most:
        step *= 2
    lines = []
    for size in range(0, top, step):
        y = _down(size, top)
        name = human(size) if size else "0"
        lines.append(
            f'<line class="tick" x1="0" x2="100%" y1="{y}" y2="{y}"/>'
            f'<text x="-8" y="{y}" dy="4" text-anchor="end">{name}</text>'
        )
    return "\n".join(lines)


def _card(capacity: int | None, top: int, late: bool) -> str:
    """Draw the card's line. late: the peak is in the second half."""
    if capacity is None:
        return ""
    said = f"{human(capacity)} usable"
    if capacity > top:
        return f'<text x="8" y="14">{said}, far above</text>'  # a peak is rarely at the beginning
    at = 'x="6"' if late else 'x="100%" dx="-6" text-anchor="end"'
    return f'{_card_line(capacity, top)}<text class="on-card" {at} y="{_down(capacity, top)}" dy="-5">{said}</text>'


def _card_line(capacity: int, top: int) -> str:
    y = _down(capacity, top)
    return f'<line class="card" x1="0" x2="100%" y1="{y}" y2="{y}"/>'


def _down(size: int, top: int) -> str:
    return f"{100 - 100 * size / top:.2f}%"


def _peak_column(drawing: Drawing) -> int:
    """Return the column that made the peak, the one that a footprint names.

    Where everything was reserved before the first event, as in many recordings, it is the one with the most tensors.
    """
    columns = drawing.columns
    at = peak_maker((column.reserved, column.total) for column in columns) if columns else 0
    return at or max(range(len(columns)), key=lambda number: columns[number].total, default=0)


def _peak(drawing: Drawing, at: int, top: int) -> str:
    if len(drawing.columns) < 2:
        return ""
    part = next((mark for column, mark in reversed(drawing.marks) if column <= at), None)
    title = escape(f"peak: {phase_title(part.phase)}, {part.instant}" if part else "peak")
    x, y = 100 * at / (len(drawing.columns) - 1), _down(drawing.columns[at].total, top)
    end = ' text-anchor="end"' if x > EDGE else ""
    return (
        f'<g class="peak"><title>{title}</title><circle cx="{x:.2f}%" cy="{y}" r="4"/>'
        f'<text x="{x:.2f}%" y="{y}" dx="6" dy="-6"{end}>peak</text></g>'
    )


def _legend(drawing: Drawing) -> str:
    """List the roles on the page with the peak of each; they peak at different instants."""
    rows = ["<li>the most of each:</li>"]
    for number, role in enumerate(SHOWN):
        if peak := max((column.roles[number] for column in drawing.columns), default=0):
            rows.append(f"<li>{swatch(role)}{drawing.title(role)} <b>{human(peak)}</b></li>")
    slack = max((c.reserved - c.total for c in drawing.columns), default=0)
    if slack:
        rows.append(f"<li>{swatch('slack')}{drawing.edge}, no tensor <b>{human(slack)}</b></li>")
    named = {name for name, _ in _step_parts(drawing)}
    rows += [f"<li>{swatch(name)}{name}</li>" for name in dict.fromkeys(STEP_PARTS.values()) if name in named]
    return "\n".join(rows)


def _facts(drawing: Drawing, tape: Tape, torch: Torch, capacity: int | None) -> str:
    peak = max((column.reserved for column in drawing.columns), default=0)
    tensors = max((column.total for column in drawing.columns), default=0)
    facts = [
        WRITTEN if tape.is_instant else several(drawing.events, "event"), tape.source, f"PyTorch {torch[0]}.{torch[1]}",
        f"{'' if tape.is_instant else 'peak '}{gib(peak, 2)} GiB reserved, {gib(tensors, 2)} GiB of tensors",
    ]  # fmt: skip
    if drawing.oom is not None:
        facts.append(drawing.oom.message)
    elif (failed := next((e for e in reversed(tape.events) if isinstance(e, Oom)), None)) and capacity is None:
        facts.append(f"{human(failed.size)} were refused")
    elif capacity is not None:
        facts.append(f"runs on {human(capacity)}")
    return " · ".join(facts)


def _data(drawing: Drawing, top: int, what: str) -> str:
    """Return the tooltip's data as JSON that cannot end the script element."""
    marks = [[column, phase_title(mark.phase), mark.instant] for column, mark in drawing.marks]
    data = {
        "roles": [[role, drawing.title(role)] for role in SHOWN],
        "columns": [[c.event, c.roles, c.allocated, c.reserved, c.tensors] for c in drawing.columns],
        "tensors": [
            [a.label, a.size, SHOWN.index(part_of(a)), born, a.stream]
            for a, born in zip(drawing.named, drawing.born, strict=True)
        ],
        "marks": marks, "top": top, "what": what, "edge": drawing.edge,
    }  # fmt: skip
    return msgspec.json.encode(data).decode().replace("<", "\\u003c")
