"""A plan as HTML: verdict, bytes by role against the card, every share with its formula, ladder, cards and facts.

The pieces are strings of HTML without script and without inline styles, so that they stand under a strict
Content-Security-Policy. All texts are escaped here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from memfit.nouns.footprint import Footprint, PhasePeak
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Judgement, Plan, Rung
from memfit.report.bar import NCCL, BarPart, shares
from memfit.report.cards_html import cards_html
from memfit.report.document_html import breakable, html_table, swatch, term, words
from memfit.report.estimate import arithmetic
from memfit.report.plan import asked_words, facts, recipe_lines, verdicts, why
from memfit.report.words import (
    ROLE_WORDS,
    VERDICT_WORDS,
    Word,
    card_room,
    card_title,
    instant,
    phase_title,
    tokens,
)
from memfit.units import cell, gib, human, shared_unit

if TYPE_CHECKING:
    from memfit.closed_form.why import Kept, Why

Link = Callable[[Recipe], str]  # a recipe -> what the page asks for to show it
LEVELS = {
    "requested": "bytes of tensors, as the code asked for them",
    "allocated": "the same, rounded up to the allocator's blocks: torch.cuda.max_memory_allocated()",
    "reserved": "with what the allocator holds and no tensor uses: torch.cuda.max_memory_reserved(), which must fit",
    "device": "with CUDA's context and NCCL's buffers: what nvidia-smi shows",
}
_NUMBER, _NAME = 0.11, 0.36  # shares of the width from which a part of a bar holds its number, and its name too
_OTHER = Word("other instants, and rounding", "other", "#b9bcc1")
MOST_TENSORS = 40  # tensors of one table


def answer_html(plan: Plan, explained: Why | None = None, ladder: bool = True) -> str:
    """Return the whole answer. explained: the arithmetic of the peak; ladder: with the ladder in it."""
    job = plan.job
    head = f"{job.architecture.title} on {card_title(job.gpu, job.num_gpus)}"
    parts = [
        f'<h1>{words(head)}</h1><p class="dim">{words(card_room(job.gpu, plan.judgement.usable, job.num_gpus))} · '
        f"{words(asked_words(plan))}</p>",
        verdict_html(plan),
        shares_html(plan.footprint, plan.judgement, job.gpu, explained),
        tensors_html(plan.footprint.peak, explained),
        ladder_html(plan) if ladder else "",
        cards_html(plan),
        phases_html(plan.footprint),
        facts_html(facts(plan)),
    ]
    return "\n".join(part for part in parts if part)


def verdict_html(plan: Plan) -> str:
    """Return the verdict with its recipe, peak and worst instant; of a misfit, the closest recipe."""
    return "".join(_verdict(judgement, lines) for judgement, lines in verdicts(plan))


def recipe_html(recipe: Recipe, footprint: Footprint, judgement: Judgement) -> str:
    """Return the verdict on one recipe."""
    return _verdict(judgement, recipe_lines(recipe, footprint, judgement))


def _verdict(judgement: Judgement, lines: Sequence[str]) -> str:
    title, _ = VERDICT_WORDS[judgement.verdict]
    said = "".join(f"<p>{_glossed(line)}</p>" for line in lines)
    return f'<div class="verdict {judgement.verdict}" role="status"><strong>{title}</strong>{said}</div>'


# ---- bars ----------------------------------------------------------------------------------------------------------


def shares_html(footprint: Footprint, judgement: Judgement, gpu: Gpu, explained: Why | None = None) -> str:
    """Return the bar of the four levels, of which a switch shows one, with the card's line and a legend.

    explained: the arithmetic of the peak, for what a part of the bar shows under the pointer.
    """
    peak = footprint.peak
    tips = _tips(peak, explained)
    tensors = [part for part in shares(peak, judgement) if part.word not in (ROLE_WORDS["fragmentation"], NCCL)]
    made = {
        "requested": (tensors + _rest(peak.levels.requested, peak), judgement.usable, "usable"),
        "allocated": (tensors + _rest(peak.levels.allocated, peak), judgement.usable, "usable"),
        "reserved": (list(shares(peak, judgement)), judgement.usable, "usable"),
        "device": ([BarPart(ROLE_WORDS[role], size) for role, size in peak.by_role.items()], gpu.total_bytes, "card"),
    }
    labels, bars = [], []
    for level, (parts, limit, what) in made.items():
        on = " checked" if level == "reserved" else ""
        labels.append(f'<label><input type="radio" name="level" value="{level}"{on}>{level}</label>')
        size = human(sum(part.bytes for part in parts))
        bars.append(f'<div class="level {level}"><p class="dim">{term(level)} {size}: {LEVELS[level]}</p>'
                    f"{bar_svg(parts, limit, what, tips)}{legend(parts)}</div>")  # fmt: skip
    switch = f'<fieldset class="levels"><legend>level</legend>{"".join(labels)}</fieldset>'
    return f'<section class="shares" aria-label="bytes by role">{switch}{"".join(bars)}</section>'


def _rest(level: int, peak: PhasePeak) -> list[BarPart]:
    return [BarPart(_OTHER, level - peak.tensors)] if level > peak.tensors else []


def _tips(peak: PhasePeak, explained: Why | None) -> dict[str, str]:
    """Return what each role consists of, a line a share, with its formula in numbers."""
    formulas = _formulas(explained)
    found: dict[str, str] = {}
    for line in peak.lines:
        formula = formulas.get((line.role, line.label), line.formula)
        said = f"{line.label} {human(line.bytes)}{f' = {formula}' if formula else ''}"
        title = ROLE_WORDS[line.role].title
        found[title] = f"{found[title]}\n{said}" if title in found else said
    return found


def _formulas(explained: Why | None) -> dict[tuple[str, str], str]:
    return {} if explained is None else {(r.role, r.label): f"{r.words}: {arithmetic(r)}" for r in explained.reasons}


def bar_svg(parts: Sequence[BarPart], limit: int, what: str, tips: Mapping[str, str], most: int = 0) -> str:
    """Return one bar with a line at `limit` bytes. A part holds its number, and its name, where they have room.

    most: bytes of the whole width, for bars that stand below each other.
    """
    need = sum(part.bytes for part in parts)
    scale, unit, drawn, left = max(need, limit, most) or 1, shared_unit(need), [], 0.0
    for part in parts:
        width = part.bytes / scale
        size = cell(part.bytes, unit)
        label = f"{part.word.title} {size}" if width >= _NAME else size if width >= _NUMBER else ""
        title = f"{part.word.title}: {human(part.bytes)}, {part.bytes / max(need, 1):.0%}"
        tip = "\n".join(map(words, [title, *tips.get(part.word.title, "").split("\n")])).strip()
        drawn.append(
            f'<g tabindex="0" role="img" aria-label="{words(title)}"><title>{tip}</title>'
            f'<rect class="{role_class(part.word)}" x="{100 * left:.3f}%" y="18" width="{100 * width:.3f}%" '
            f'height="34"/><text x="{100 * (left + width / 2):.3f}%" y="40" text-anchor="middle">'
            f"{words(label)}</text></g>"
        )
        left += width
    at = limit / scale
    anchor = "end" if at > 0.5 else "start"
    said = f"{gib(limit)} GiB {what}"
    return (
        f'<svg class="bar" width="100%" height="58" role="group" aria-label="{words(human(need))} of {words(said)}">'
        f'<rect class="ground" x="0" y="18" width="100%" height="34"/>{"".join(drawn)}'
        f'<line class="limit" x1="{100 * at:.3f}%" x2="{100 * at:.3f}%" y1="14" y2="58"/>'
        f'<text class="word" x="{100 * at:.3f}%" y="11" text-anchor="{anchor}">{said}</text></svg>'
    )


def role_class(word: Word) -> str:
    """Return the CSS class with the colour of a part."""
    return next((role for role, w in ROLE_WORDS.items() if w is word), "nccl" if word is NCCL else "unknown")


def legend(parts: Iterable[BarPart]) -> str:
    """Return the parts that do not round to 0, with their colours."""
    rows = []
    for part in parts:
        name = role_class(part.word)
        title = term(name, part.word.title) if name in ROLE_WORDS else part.word.title
        rows.append(f"<li>{swatch(name)}{title} <b>{human(part.bytes)}</b></li>")
    return f'<ul class="legend">{"".join(rows)}</ul>'


# ---- tables --------------------------------------------------------------------------------------------------------


def tensors_html(peak: PhasePeak, explained: Why | None) -> str:
    """Return every named share of the peak, with its formula in numbers where there is one, and its tensors."""
    unit, order = shared_unit(peak.levels.device), list(ROLE_WORDS)
    formulas = _formulas(explained)
    rows = (
        (f"{swatch(line.role)}{term(line.role, ROLE_WORDS[line.role].title)}", words(line.label),
         words(cell(line.bytes, unit, 2)), words(formulas.get((line.role, line.label), line.formula)))
        for line in sorted(peak.lines, key=lambda x: (order.index(x.role), -x.bytes))
    )  # fmt: skip
    title = "formula" if formulas or any(line.formula for line in peak.lines) else ""  # a trace has none
    made = f'<h2>Every share at the worst instant</h2><p class="dim">{words(instant(peak))}</p>'
    made += html_table(("role", "what", f">{unit}", f"={title}"), rows, kind="stacked")
    if explained is not None:
        for title, group in (("Kept by the forward pass for the backward pass", explained.kept),
                             ("Other tensors at the worst instant", explained.working)):  # fmt: skip
            made += _kept_html(title, group) if group else ""
    return made


def _kept_html(title: str, group: Sequence[Kept]) -> str:
    total = human(sum(kept.total for kept in group))
    rows = [
        (breakable(k.label if k.where == "block" else f"{k.where}: {k.label}"), human(k.bytes), tokens(k.count),
         human(k.total)) for k in group[:MOST_TENSORS]
    ]  # fmt: skip
    if rest := group[MOST_TENSORS:]:
        rows.append((f"{len(rest)} smaller rows", "", "", human(sum(k.total for k in rest))))
    table = html_table(("tensor", ">each", ">x tensors", ">together"), rows, kind="long")
    return f"<details><summary>{title}: {total}</summary>{table}</details>"


def phases_html(footprint: Footprint) -> str:
    """Return the peak of every phase."""
    unit = shared_unit(footprint.peak.levels.reserved)
    levels = ("requested", "allocated", "reserved", "device")
    rows = (
        (words(phase_title(p.phase)), *(words(cell(getattr(p.levels, x), unit)) for x in levels), words(p.instant))
        for p in footprint.phases
    )
    marks = ("chosen" if p.phase == footprint.peak.phase else "" for p in footprint.phases)
    heads = ("phase", *(f">{level}" for level in levels), "=worst instant")
    return f"<h2>Phases, in {unit}</h2>{html_table(heads, rows, marks, kind='stacked phases')}"


def facts_html(rows: Iterable[tuple[str, str]]) -> str:
    """Return labelled lines: recipe, quality, notes, time, cost, what is assumed and what is not known."""
    made = "".join(
        f"<dt>{_label(label)}</dt><dd>{_glossed(line) if label == 'recipe:' else words(line)}</dd>"
        for label, line in rows
    )
    return f"<h2>What else there is to know</h2><dl>{made}</dl>"


# words of recipes and verdicts -> the entry of the glossary that explains them
_GLOSSED = {
    "micro-batch": "micro-batch", "peak": "peak", "reserved": "reserved", "headroom": "headroom", "QLoRA": "QLoRA",
    "LoRA": "LoRA", "checkpointing": "activation checkpointing", "bf16-mixed": "bf16-mixed", "bf16": "bf16",
    "bf16-master": "bf16-master", "fp16-mixed": "fp16-mixed", "fp32": "fp32", "fused loss": "fused loss",
    "chunked loss": "chunked loss", "full loss": "logits", "attention": "attention kernel", "AdamW": "optimizer states",
    "offload": "offload", "shard": "shard", "packing": "packing", "trainer": "trainer", "NCCL": "NCCL",
}  # fmt: skip
_WORD = re.compile("|".join(rf"(?<![\w-]){word}(?![\w-])" for word in sorted(_GLOSSED, key=len, reverse=True)))


def _glossed(line: str) -> str:
    """Return a line with its words linked to the glossary."""
    made, at = "", 0
    for found in _WORD.finditer(line):
        made += words(line[at : found.start()]) + term(_GLOSSED[found[0]], found[0])
        at = found.end()
    return made + words(line[at:])


# labels of facts -> the entry of the glossary that explains them
_EXPLAINED = {
    "recipe:": "recipe", "time:": "roofline", "refused:": "ladder", "not known:": "band", "host RAM:": "offload",
    "largest:": "headroom", "quality:": "precision",
}  # fmt: skip


def _label(label: str) -> str:
    return term(_EXPLAINED[label], label) if label in _EXPLAINED else words(label)


# ---- the ladder ----------------------------------------------------------------------------------------------------

_ROW = 66  # pixels of a rung: two lines of text, which a phone has room for, and a bar


def ladder_html(plan: Plan, link: Link | None = None) -> str:
    """Return the ladder as a waterfall: what each technique saves and costs, from the plain recipe to the answer.

    link: makes the rungs clickable.
    """
    rungs = plan.ladder
    if len(rungs) < 2:
        return ""
    usable = plan.judgement.usable
    scale = max(*(rung.judgement.need for rung in rungs), usable) or 1
    drawn = "".join(_rung(rung, i, rungs[i - 1] if i else None, scale, link) for i, rung in enumerate(rungs))
    at = f"{100 * usable / scale:.3f}%"
    height = _ROW * len(rungs) + 18
    line = "".join(  # on the bars alone, so that it crosses no text
        f'<line class="limit" x1="{at}" x2="{at}" y1="{top}" y2="{top + 26}"/>' for top in range(50, height, _ROW)
    )
    anchor = "end" if usable / scale > 0.5 else "start"
    said = f'<text class="dim" x="{at}" y="12" text-anchor="{anchor}">{gib(usable)} GiB usable</text>'
    title = "<h2>The ladder: each technique on top of those above it</h2>"
    click = " A click asks for the recipe up to there." if link else ""
    dotted = f"<p class='dim'>Dotted is what the technique saves.{click}</p>"
    return (
        f'{title}{dotted}<svg class="waterfall" width="100%" height="{height}" role="group" '
        f'aria-label="ladder">{said}{drawn}{line}</svg>{_settings(rungs)}'
    )


def _rung(rung: Rung, index: int, before: Rung | None, scale: int, link: Link | None) -> str:
    judgement, top = rung.judgement, 18 + index * _ROW
    need, unit = judgement.need, shared_unit(max(judgement.need, 1))
    said = rung.why or why(judgement)
    time = "" if index == 0 else f" · {rung.step_time:.2f}x the time"
    saved = "" if before is None else f" · saves {human(max(rung.saved, 0))}"
    title = f"{rung.title}: {cell(need, unit)} {unit}{saved}{time} · {said}"
    over = f' data-over="{words(link(rung.recipe))}" tabindex="0" role="button"' if link else ' role="img"'
    ghost = ""
    if before is not None and before.judgement.need > need:
        x, width = 100 * need / scale, 100 * (before.judgement.need - need) / scale
        ghost = f'<rect class="saved" x="{x:.3f}%" y="{top + 36}" width="{width:.3f}%" height="18"/>'
    return (
        f'<g{over} aria-label="{words(title)}"><title>{words(title)}</title>'
        f'<rect x="0" y="{top}" width="100%" height="{_ROW}" fill="transparent"/>'
        f'<text x="0" y="{top + 14}">{words(rung.title)}</text>'
        f'<text class="dim" x="0" y="{top + 30}">{words(cell(need, unit))} {unit} · {words(said)}{words(time)}</text>'
        f'<rect class="need {judgement.verdict}" x="0" y="{top + 36}" width="{100 * need / scale:.3f}%" height="18"/>'
        f"{ghost}</g>"
    )


def _settings(rungs: Sequence[Rung]) -> str:
    """Return what each technique costs in quality, and the setting that turns it on in each framework."""
    rows = []
    for rung in rungs:
        if rung.flags or rung.caveat:
            title = rung.title.removeprefix("+ ")
            flags = "<br>".join(f"{words(name)}: <code>{words(flag)}</code>" for name, flag in rung.flags.items())
            rows.append((words(title), words(rung.caveat), flags))
    if not rows:
        return ""
    table = html_table(("technique", "cost in quality", "=setting"), rows, kind="stacked")
    return f"<details><summary>What each costs in quality, and its setting in each framework</summary>{table}</details>"
