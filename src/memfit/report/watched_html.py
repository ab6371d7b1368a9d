"""A watched run as HTML: its memory over time, laid over the predicted band of each phase, with alarms and leaks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import reduce
from html import escape
from itertools import groupby

from memfit.allocator.replay import highest
from memfit.footprints.band import bands, level_of
from memfit.footprints.footprint_of_watch import by_phase, measured_by
from memfit.nouns.footprint import Footprint, Levels
from memfit.nouns.sample import METERS, Alarm, Sample, Watched
from memfit.nouns.tape import Mark, Phase
from memfit.report.document_html import clean, html_table, swatch, words
from memfit.report.timeline_html import COLUMNS, SHOWN, Drawing, PeakColumn, plot, top_of
from memfit.report.watching import alarm_line, leak_lines, level_cell, levels_of, sampling
from memfit.report.words import DOT, clock, phase_title
from memfit.units import human, in_unit, several, shared_unit

Band = Mapping[Phase, tuple[int, int]]
_ALARMS = {"failed": "FAILED", "card": "CARD NEARLY FULL", "band": "ABOVE THE PREDICTION", "leak": "MEMORY GROWS"}


def watched_html(watched: Watched, predicted: Footprint | None = None) -> str:
    """Return the view of a run, under way or over.

    predicted: what the run is compared with; by default what it was started with.
    """
    header, samples = watched.header, watched.samples
    level = METERS[header.meter].compared
    allowed = bands(predicted or header.predicted, level)
    alarms = [alarm for alarm in watched.alarms if predicted is None or alarm.kind != "band"]  # of another prediction
    watched = replace(watched, alarms=tuple(alarms))
    head = f'<h1>{words(header.name)}</h1><p class="dim">{words(_facts(watched))}</p>'
    if not samples:
        return f'{head}<p class="dim">No sample yet.</p>'
    peaks = by_phase(samples)
    drawing, room = _drawn(watched), _room(watched)
    top = top_of(drawing, room, (allowed[phase][1] for phase in peaks if phase in allowed))
    drawn = plot(drawing, room, top, _overlay(drawing, watched, allowed, top), "sample")
    shown = {"prediction": "predicted band of each phase" if allowed else "", "warning": "warning" if alarms else ""}
    drawn += (
        f'<ul class="legend">{"".join(f"<li>{swatch(key)}{said}</li>" for key, said in shown.items() if said)}</ul>'
    )
    return clean("\n".join((head, _verdict(watched, peaks, allowed), drawn, _phases(watched, peaks, allowed))))


def _facts(watched: Watched) -> str:
    header, samples = watched.header, watched.samples
    facts = [*([header.card] if header.card else []), f"measured: {measured_by(watched)}"]
    if samples and METERS[header.meter].roles:
        facts.append(several(samples[-1].step, "step"))
    return DOT.join([*facts, *([clock(samples[-1].seconds)] if samples else []), *sampling(watched)])


def _verdict(watched: Watched, peaks: Mapping[Phase, Levels], allowed: Band) -> str:
    level = METERS[watched.header.meter].compared
    above = [p for p, levels in peaks.items() if level and p in allowed and level_of(levels, level) > allowed[p][1]]
    raised = {alarm.kind for alarm in watched.alarms} | ({"band"} if above else set())
    if worst := next((kind for kind in _ALARMS if kind in raised), None):
        style, title = "misfit", _ALARMS[worst]
    elif allowed and any(phase in allowed for phase in peaks):
        style, title = "fits", "INSIDE THE PREDICTION"
    else:
        style, title = "not_judged", "MEASURED"
    said = {alarm.phase for alarm in watched.alarms if alarm.kind == "band"}
    lines = [f"above the predicted band: {phase_title(phase)}" for phase in above if phase not in said]
    lines += [alarm_line(alarm) for alarm in watched.alarms if alarm.kind != "leak"]
    lines += [line.strip() for leak in watched.leaks for line in leak_lines(leak)]
    if not allowed:
        lines.append(
            "No prediction is compared: name the model and its card, or start the run with --predicted."
            if level else "Not compared with a prediction, which is for a card: the run was measured without one."
        )  # fmt: skip
    body = "".join(f"<p>{words(line)}</p>" for line in lines)
    return f'<div class="verdict {style}" role="status"><strong>{title}</strong>{body}</div>'


def _room(watched: Watched) -> int | None:
    """Return the bytes of the card for what is drawn: all of it, or what is left beside the context and others."""
    total, level = watched.header.total, METERS[watched.header.meter].compared
    if not total:
        return None
    if level != "reserved":
        return total
    return max(total - max(max(s.now.device - s.now.reserved, 0) for s in watched.samples), 0)


# ---- the drawing ---------------------------------------------------------------------------------------------------


def _drawn(watched: Watched) -> Drawing:
    """Return the samples as columns of equal time, each the highest of its samples."""
    samples = watched.samples
    last = max(samples[-1].seconds, 1e-9)
    columns: list[PeakColumn] = []
    marks: list[tuple[int, Mark]] = []
    phase = None
    number = min(COLUMNS, len(samples))
    for place, group in groupby(enumerate(samples), lambda row: min(int(row[1].seconds / last * number), number - 1)):
        rows = list(group)
        for _, sample in rows:
            if sample.phase != phase:
                phase = sample.phase
                marks.append((place, Mark(phase, f"step {sample.step:,}")))
        while len(columns) < place:  # no sample in that time: what was known before still holds
            columns.append(columns[-1] if columns else _column(watched, rows[0][1], rows[0][1].peak, rows[0][0], None))
        peak = reduce(highest, (sample.peak for _, sample in rows))
        columns.append(_column(watched, rows[-1][1], peak, rows[-1][0], columns[-1] if columns else None))
    facts = METERS[watched.header.meter]
    rest = "other tensors" if facts.roles else "memory of the card" if facts.compared else "resident memory"
    return Drawing(columns, marks, [], [], len(samples), None, rest, facts.compared or "resident")


def _column(watched: Watched, sample: Sample, peak: Levels, index: int, before: PeakColumn | None) -> PeakColumn:
    """Return a column: what is known to be parameters and states, and the rest under "unknown".

    Where tensors were not counted, those of the column `before` still hold.
    """
    facts = METERS[watched.header.meter]
    alive = (peak.requested or peak.allocated) if facts.roles else peak.device
    held = peak.reserved if facts.compared == "reserved" else peak.device
    if facts.roles and facts.compared is None and not peak.allocated:
        roles, alive = (before.roles, before.total) if before else ([0] * len(SHOWN), 0)
        return PeakColumn(index + 1, roles, alive, alive, max(held, alive))
    roles = [0] * len(SHOWN)
    sure = dict(watched.shares) if facts.roles and sample.phase != "load" else {}
    for role, size in sure.items():
        if role in SHOWN and (role == "parameters" or sample.step > 0):
            roles[SHOWN.index(role)] = size
    if sum(roles) > alive:  # the model was still growing
        roles = [0] * len(SHOWN)
    roles[SHOWN.index("unknown")] = alive - sum(roles)
    return PeakColumn(index + 1, roles, alive, peak.allocated, max(held, alive))


def _overlay(drawing: Drawing, watched: Watched, allowed: Band, top: int) -> str:
    """Draw the predicted band of each phase over the time it took, and a line at every alarm."""
    last, made = max(len(drawing.columns) - 1, 1), []
    for phase, begin, end in _spans(drawing):
        if phase in allowed:
            low, high = allowed[phase]
            title = f"{phase_title(phase)}: predicted {human(low)} to {human(high)}"
            left, width = 100 * begin / last, 100 * max(end - begin, 0.5) / last
            made.append(
                f'<g><title>{escape(title)}</title><rect class="predicted" x="{left:.2f}%" width="{width:.2f}%" '
                f'y="{100 - 100 * high / top:.2f}%" height="{100 * (high - low) / top:.2f}%"/></g>'
            )
    for alarm in watched.alarms:
        x = f"{100 * _raised_at(alarm, watched) / max(watched.samples[-1].seconds, 1e-9):.2f}%"
        title = words(alarm_line(alarm))
        made.append(f'<g><title>{title}</title><line class="alarm" x1="{x}" x2="{x}" y1="0" y2="100%"/></g>')
    return "\n".join(made)


def _raised_at(alarm: Alarm, watched: Watched) -> float:
    """Return the seconds at which an alarm was raised: from outside, where every step is 0, its bytes say it."""
    level = {"card": "device", "band": METERS[watched.header.meter].compared or "device"}.get(alarm.kind)
    later = (s for s in watched.samples if s.step >= alarm.step)
    if level:
        later = (s for s in later if s.phase == alarm.phase and level_of(s.peak, level) >= alarm.bytes)
    ends = alarm.kind in ("failed", "unsure")  # raised when the run, or the watch of it, ended
    return (watched.samples[-1] if ends else next(later, watched.samples[-1])).seconds


def _spans(drawing: Drawing) -> Iterator[tuple[Phase, int, int]]:
    """Yield each phase without a break, with its first column and the one after its last."""
    ends = [column for column, _ in drawing.marks[1:]] + [len(drawing.columns) - 1]
    for (column, mark), end in zip(drawing.marks, ends, strict=True):
        yield mark.phase, column, end


def _phases(watched: Watched, peaks: Mapping[Phase, Levels], allowed: Band) -> str:
    """Return the peak of each phase beside its band."""
    facts = METERS[watched.header.meter]
    unit = shared_unit(max(peak.device for peak in peaks.values()))
    titles = (f">{title}" for title in levels_of(facts).values())
    heads = (f"peak, {unit}", *titles, *(("=prediction",) if allowed else ()))
    rows = []
    for phase, peak in peaks.items():
        cells = [level_cell(facts, peak, level, unit) for level in levels_of(facts)]
        cells += [_against(peak, allowed.get(phase), facts.compared or "device", unit)] if allowed else []
        rows.append((words(phase_title(phase) if facts.roles else "run"), *cells))
    return f"<h2>Peak of each phase</h2>{html_table(heads, rows, kind='stacked phases')}"


def _against(peak: Levels, band: tuple[int, int] | None, level: str, unit: str) -> str:
    if band is None:
        return "-"
    found, (low, high) = level_of(peak, level), band
    place = "above" if found > high else "below" if found < low else "inside"
    return f"<b>{place}</b> the predicted {in_unit(low, unit)} to {in_unit(high, unit)}"
