"""The report of a watched run: the live view, warnings and leaks as lines, and the summary at the end."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from memfit.footprints.band import CARD_SHARE, bands, level_of
from memfit.footprints.footprint_of_watch import by_phase, measured_by
from memfit.nouns.footprint import Levels
from memfit.nouns.sample import METERS, Alarm, Header, Leak, LeakHolder, MeterFacts, Status, Watched
from memfit.nouns.tape import Phase
from memfit.report.layout import Column, Ends, Grid, text
from memfit.report.words import DOT, clock, phase_title, visible
from memfit.units import gib, human, in_unit, several, shared_unit

WARNING, FINE, DIM = "bold red", "dodger_blue2", "dim"


class CardBar:
    """Draws the card's use now (solid), its peak so far (shaded), the predicted band and the 90 % line."""

    def __init__(self, header: Header, now: int, peak: int, band: tuple[int, int] | None) -> None:
        self.header, self.now, self.peak, self.band = header, now, peak, band

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        full, shade, empty, mark = ("#", "=", ".", "!") if options.ascii_only else ("█", "▒", "·", "╎")
        title = f"{gib(self.now)} of {gib(self.header.total)} GiB "
        width = max(options.max_width - len(title), 10)
        scale = max(self.header.total, self.peak, self.band[1] if self.band else 0)

        def at(size: int) -> int:
            return min(size * width // scale, width - 1)

        drawn = Text(title)
        solid = at(self.now) + 1
        over = self.peak >= self.header.total * CARD_SHARE
        drawn.append(full * solid, WARNING if over else FINE)
        drawn.append(shade * max(at(self.peak) + 1 - solid, 0), WARNING if over else FINE)
        drawn.append(empty * (width + len(title) - len(drawn)), DIM)
        marks = [self.header.total * 9 // 10, *(self.band or ())]
        for size, style in zip(marks, ("bold red", "bold", "bold"), strict=False):
            place = len(title) + at(size)
            drawn = Text.assemble(drawn[:place], (mark, style), drawn[place + 1 :])
        yield drawn


def live_view(status: Status) -> Group:
    """Return the live view of a run under way."""
    header, last = status.header, status.last
    facts = [
        visible(header.name),
        *([f"step {last.step:,}"] if METERS[header.meter].roles else []),
        clock(last.seconds),
    ]
    facts += [f"{clock(last.seconds / last.step)}/step"] if last.step else []
    head = Text.assemble(("memfit watch", "bold"), DOT, DOT.join(facts))
    card = f"{header.card}, others included" if last.whole_card else header.card
    parts: list[RenderableType] = [Ends(head, text(card or "no card", DIM))]
    level = METERS[header.meter].compared
    band = bands(header.predicted, level).get(last.phase)
    if header.total:
        beside = last.now.device - last.now.reserved if level == "reserved" else 0
        drawn = (band[0] + beside, band[1] + beside) if band else None
        peak = max(levels.device for levels in status.peaks.values())
        parts.append(CardBar(header, last.now.device, peak, drawn))
    parts += [phases_table(header, status.peaks, last.phase), *_warnings(status.alarms, status.leaks)]
    return Group(*parts)


def closing_view(watched: Watched) -> Group:
    """Return the summary of a run that is over."""
    header, samples = watched.header, watched.samples
    facts = [visible(header.name)]
    if METERS[header.meter].roles:
        facts.append(several(samples[-1].step if samples else 0, "step"))
    facts += [clock(samples[-1].seconds)] if samples else []
    head = Text.assemble(("memfit watch", "bold"), DOT, DOT.join(facts))
    parts: list[RenderableType] = [Ends(head, text(header.card, DIM))]  # that there is none, `measured` says
    meter = METERS[header.meter]
    unused = (
        "; not compared with the prediction, which is for a card" if header.predicted and not meter.compared else ""
    )
    parts.append(text(f"measured: {measured_by(watched)}{unused}", DIM))
    parts += [text(line, DIM) for line in sampling(watched)]
    parts += [phases_table(header, by_phase(samples)), *_warnings(watched.alarms, watched.leaks)]
    return Group(*parts)


def sampling(watched: Watched) -> list[str]:
    """Return how often tensors were counted and samples taken, unless at every step, and whether nothing was."""
    samples = watched.samples
    counted, every = sum(s.counted for s in samples), max((s.every for s in samples), default=1)
    lines = [f"tensors counted in {counted:,} of {several(len(samples), 'sample')}"] if counted < len(samples) else []
    if watched.header.meter == "rss" and not any(s.peak.device for s in samples):
        lines = ["nothing was measured: the command ended before its memory could be read"]
    return lines + [f"one sample per {every:,} steps: a step takes less time than 100 samples"] * (every > 1)


def phases_table(header: Header, peaks: Mapping[Phase, Levels], current: Phase | None = None) -> Grid:
    """Return the peak of each phase beside the predicted band, without levels that the meter does not read."""
    facts = METERS[header.meter]
    allowed = bands(header.predicted, facts.compared)
    unit = shared_unit(max((levels.device for levels in peaks.values()), default=0))
    columns = [Column(f"peak, {unit}")]
    columns += [Column(name, right=True, spare=2 * (level == "device")) for level, name in levels_of(facts).items()]
    if allowed:
        columns += [Column("predicted", right=True), Column("", spare=1)]
    rows = [_row(header, phase, levels, allowed.get(phase), current, unit) for phase, levels in peaks.items()]
    return Grid(columns, [row[: len(columns)] for row in rows])


def levels_of(facts: MeterFacts) -> dict[str, str]:
    """Return the levels that a meter reads, with the name of each."""
    return {
        **({"allocated": "allocated" if facts.compared else "tensors"} if facts.roles else {}),
        **({"reserved": "reserved"} if facts.compared == "reserved" else {}),
        "device": "device" if facts.compared else "resident",
    }


def level_cell(facts: MeterFacts, levels: Levels, level: str, unit: str) -> str:
    """Return one level in a unit; without a card, tensors may never have been counted."""
    size = level_of(levels, level)
    return in_unit(size, unit) if size or facts.compared else "-"


def _row(
    header: Header, phase: Phase, levels: Levels, band: tuple[int, int] | None, current: Phase | None, unit: str
) -> list[Text | str]:
    facts = METERS[header.meter]
    mark = "" if current is None else "▶ " if phase == current else "  "
    title = phase_title(phase) if facts.roles else "run"
    row: list[Text | str] = [Text(f"{mark}{title}", "bold" if phase == current else "")]
    row += [level_cell(facts, levels, level, unit) for level in levels_of(facts)]
    if band is None:
        return [*row, "", ""]
    low, high = band
    assert facts.compared is not None
    found = int(getattr(levels, facts.compared))
    verdict = Text("above", WARNING) if found > high else Text("below" if found < low else "inside", DIM)
    return [*row, f"{in_unit(low, unit)} to {in_unit(high, unit)}", verdict]


def _warnings(alarms: Iterable[Alarm], leaks: Iterable[Leak]) -> list[Text]:
    lines = [Text(alarm_line(alarm), WARNING) for alarm in alarms if alarm.kind != "leak"]
    for leak in leaks:
        first, *rest = leak_lines(leak)
        lines += [Text(first, WARNING), *map(Text, rest)]
    return lines


def alarm_line(alarm: Alarm) -> str:
    """Return one warning as one line."""
    where = f" ({phase_title(alarm.phase)}, step {alarm.step:,})" if alarm.step else ""
    return visible(f"warning: {alarm.text}{where}")


def leak_lines(leak: Leak) -> tuple[str, ...]:
    """Return the growth of a leak and its holders as lines."""
    span = f"{leak.unit}s {leak.since:,} to {leak.until:,}"
    grown = f"leak: {human(leak.per_step)} more per {leak.unit}, {human(leak.bytes)} over {span}"
    held = [f"  held by {holder_words(holder)}" for holder in leak.holders]
    return (grown, *(visible(line) for line in held or ["  held by: not known; no Python name leads to it"]))


def holder_words(holder: LeakHolder) -> str:
    """Return a holder as 'history[...] (4 tensors, 1.50 MiB more each time) at train.py:12: history.append(out)'."""
    where = f" at {holder.place}{f': {holder.code}' if holder.code else ''}" if holder.place else ""
    size = f", {human(holder.bytes)}" if holder.bytes else ""
    what = {
        "graph": f"the graph behind {holder.name} ({holder.count} nodes{size} more each time)",
        "cycle": holder.name,
        "unknown": f"{holder.name} ({holder.count} tensors{size})",
    }.get(
        holder.kind,
        f"{holder.name} ({holder.count} {'tensor' if holder.count == 1 else 'tensors'}{size} more each time)",
    )
    carried = holder.kind == "graph" and (_handed_on(holder) or ".state[" in holder.name)
    return what + where + ("; detach it before the next step" if carried else ADVICE[holder.kind])


def _handed_on(holder: LeakHolder) -> bool:
    """Return whether a line calls something with what the call's result replaces, as a recurrent state is."""
    left, _, right = holder.code.partition(" = ")
    name = re.escape(re.split(r"[.\[]", holder.name)[0])
    return bool(re.search(rf"\b{name}\b", left) and re.search(rf"\([^()]*\b{name}\b", right))


ADVICE = {
    "graph": "; sum numbers, not losses: add loss.item() or loss.detach()",
    "container": "",
    "variable": "",
    "cycle": "; break the cycle, or call gc.collect() now and then",
    "unknown": "",
}


def status_of(watched: Watched) -> Status:
    """Return a recorded run as it looked at its last sample."""
    peaks = by_phase(watched.samples)
    return Status(watched.header, watched.samples[-1], peaks, watched.alarms, watched.leaks)
