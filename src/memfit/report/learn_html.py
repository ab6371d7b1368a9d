"""The view Learn as HTML: where memory goes, levels of memory, techniques, cards, leaks, failures, questions, words.

Figures are those of a Lesson, which memfit computed for the reader's run; texts come from learn.toml and the glossary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memfit.explain.remedies import REMEDIES
from memfit.nouns.finding import CAUSES
from memfit.nouns.gpu import Gpu
from memfit.nouns.plan import Alternative, Rung
from memfit.planner.lesson import Lesson, RoleSum, WidthRow
from memfit.planner.rungs import STEPS
from memfit.report.document_html import html_table, slug, swatch, words
from memfit.report.learn_questions import questions, questions_html
from memfit.report.reference import Term
from memfit.report.words import (
    DOT,
    ROLE_WORDS,
    card_title,
    clock,
    instant,
    phase_title,
    recipe_facts,
    short_recipe,
)
from memfit.units import GB, KIB, billions, cell, gib, human, rough, shared_unit

Texts = Mapping[str, Any]
REGISTERS = 64 * 1024 * 4  # bytes in each multiprocessor, see the row of learn.toml
SECTIONS = {
    "memory": "Where training memory goes", "hierarchy": "The levels of memory",
    "techniques": "Techniques, in the order to apply them", "hardware": "Card by card",
    "leaks": "Three classic leaks", "oom": "A field guide to the out-of-memory, by phase",
    "check": "Check yourself", "papers": "Further reading", "glossary": "Glossary",
}  # fmt: skip


def learn_html(lesson: Lesson, texts: Texts, known: Sequence[Term], note: str = "") -> str:
    """Return the whole view. note: what to say of the run that the figures are of."""
    said = figures(lesson)
    made = {
        "memory": _memory(lesson, texts, said), "hierarchy": _hierarchy(lesson, texts),
        "techniques": _techniques(lesson, texts, said), "hardware": _hardware(lesson),
        "leaks": _leaks(texts, said), "oom": _oom(lesson, texts),
        "check": questions_html(questions(lesson), lesson.architecture.title), "papers": _papers(texts),
        "glossary": _glossary(known),
    }  # fmt: skip
    job = lesson.job
    run = f"{job.architecture.title} on {card_title(job.gpu, lesson.recipe.num_gpus)}"
    contents = "".join(f'<li><a href="#learn-{key}">{title}</a></li>' for key, title in SECTIONS.items())
    parts = "".join(
        f'<h2 id="learn-{key}">{title}</h2>{_paragraph(texts["intro"].get(key, ""))}{made[key]}'
        for key, title in SECTIONS.items()
    )
    return (
        f"<h1>Learn</h1>{_paragraph(note)}"
        f'<p class="dim">All figures are computed for {words(run)}: {words(DOT.join(recipe_facts(lesson.recipe)))}</p>'
        f'<ol class="contents" aria-label="contents">{contents}</ol>{parts}'
    )


def figures(lesson: Lesson) -> dict[str, str]:
    """Return the figures that texts name in braces."""
    peak, pcie = lesson.footprint.peak, lesson.job.gpu.pcie_bandwidth
    slack = peak.by_role.get("fragmentation", 0)
    return {
        "kept": rough(lesson.kept), "without": rough(lesson.kept_without), "with": rough(lesson.kept_with),
        "rule": rough(lesson.rule), "logits": rough(lesson.logits), "scores": rough(lesson.scores),
        "standing": rough(lesson.standing), "fragmentation": rough(slack), "reserved": rough(peak.levels.reserved),
        "expandable": rough(lesson.expandable) if lesson.expandable else "an amount that is not known",
        "qlora": _qlora(lesson),
        "seven": next(f"{row.total / GB:.1f} GB" for row in lesson.read if "QLoRA" in row.name),
        "share": f"{slack / max(peak.tensors, 1):.0%}",
        "pcie": f"{pcie / GB:.0f} GB/s" if pcie else "a rate that is not known",
    }  # fmt: skip


def _qlora(lesson: Lesson) -> str:
    found = next((rung for rung in lesson.rungs if rung.recipe.method == "qlora"), None)
    if found is None:
        return f"memfit plan {lesson.architecture.name} --method qlora says how much for this model"
    r = found.recipe
    return f"{rough(found.judgement.need)} for this model, micro-batch {r.micro_batch} of {r.sequence_length:,} tokens"


def _paragraph(text: str) -> str:
    return f"<p>{words(text)}</p>" if text else ""


def _cell(size: int, unit: str) -> str:
    """Return bytes as a number of `unit` for a table; '<0.1' escaped."""
    return words(cell(size, unit))


def _link(key: str, text: str) -> str:
    return f'<a href="#learn-{key}">{words(text)}</a>'


# ---- where memory goes ---------------------------------------------------------------------------------------------


def _memory(lesson: Lesson, texts: Texts, said: Mapping[str, str]) -> str:
    unit = shared_unit(max(line.whole for line in lesson.sums))
    rows = [_sum_row(line, unit, texts["why"]) for line in lesson.sums]
    heads = ("", ">rule", ">memfit", ">at the peak")
    total = sum(line.rule for line in lesson.sums)
    peak = lesson.footprint.peak
    size = lesson.architecture.parameters
    return (
        f"<h3>The mental calculator for this run, in {unit}</h3>"
        f"{html_table(heads, rows)}"
        f"{_paragraph(_elsewhere(lesson))}"
        f"<p>The rule says {rough(total)}. memfit says {rough(lesson.judgement.need)} reserved, at the worst instant: "
        f"{words(instant(peak))}. A peak is one instant, so it is no sum of everything that exists at some time.</p>"
        f"<h3>Bytes of each weight, trained with AdamW</h3>{_widths(lesson.precisions, size)}"
        f"<p>“bf16 AdamW” means any of the first three to different people, so memfit gives each its own "
        f"{_link('term-precision', 'name')}. What counts is what is stored, not what products are computed in.</p>"
        f"<h3>Bytes of optimizer states for each weight in 16 bits</h3>{_widths(lesson.optimizers, size)}"
        f"{_paragraph(texts['intro']['paged'])}"
        f"<h3>Bytes of each weight alone</h3>{_widths(lesson.stored, size)}"
        "<p>4 and 8 bits are for the matrices of the blocks; embeddings, norms and head stay in 16 bits, and the "
        "scales come on top. So the model is larger than its weights times half a byte.</p>"
        f"<h3>Figures you will have read</h3>{html_table(('', '>GB'), map(_read, lesson.read))}"
        f"{_paragraph(texts['intro']['read'])}"
        f"<dl class='claims'>{''.join(_claim(row, said) for row in texts['said'])}</dl>"
    )


def _elsewhere(lesson: Lesson) -> str:
    """Return what of the rule lies on other cards, or in host RAM."""
    r = lesson.recipe
    said = [f"The rule is for all weights on one card; memfit's columns are of each of the {r.num_gpus} cards, after "
            "sharding."] if r.num_gpus > 1 and r.shard != "none" else []  # fmt: skip
    said += ["What is offloaded is in host RAM, so it is in the rule alone."] if r.offload != "none" else []
    return " ".join(said)


def _sum_row(line: RoleSum, unit: str, why: Mapping[str, str]) -> tuple[str, ...]:
    role = f"{swatch(line.role)}{_link(f'term-{slug(line.role)}', ROLE_WORDS[line.role].title)}"
    whole = _cell(line.whole, unit) if line.rule or line.whole != line.at_peak else "-"
    rule = _cell(line.rule, unit) if line.words else "-"
    product = f"<b>{words(line.words)}</b>. " if line.words else ""
    return role, rule, whole, _cell(line.at_peak, unit), f"{product}{words(why[line.role])}"


def _widths(rows: Sequence[WidthRow], parameters: int) -> str:
    """Return rows of bytes per weight, and of `parameters` weights together."""
    names = tuple(dict.fromkeys(name for row in rows for name, _ in row.parts))
    several = len(names) > 1
    together = (">together",) if several else ()
    heads = ("", *(f">{name}" for name in names), *together, f">GB of {billions(parameters)} weights")
    found = []
    for row in rows:
        parts = dict(row.parts)
        cells = [_bytes(parts[name]) if name in parts else "" for name in names]
        total = [_bytes(sum(parts.values()))] if several else []
        found.append((words(row.name), *cells, *total, f"{row.total / GB:,.2f}"))
    return html_table(heads, found)


def _read(row: WidthRow) -> tuple[str, ...]:
    """Return a figure of articles, and below it the sum that makes it."""
    each = sum(size for _, size in row.parts)
    parts = " + ".join(f"{_bytes(size)} {name}" for name, size in row.parts)
    return words(row.name), f"{row.total / GB:,.2f}", f"{parts} = {_bytes(each)} bytes of each weight"


def _bytes(each: float) -> str:
    """Return bytes per weight: '2', '0.563', '0.01'."""
    return f"{each:.3f}".rstrip("0").rstrip(".") if each >= 0.001 or not each else words("<0.001")


def _claim(row: Mapping[str, str], said: Mapping[str, str]) -> str:
    return f"<dt>{words(row['claim'])}</dt><dd>{words(row['answer'].format_map(said))}</dd>"


# ---- the levels of memory ------------------------------------------------------------------------------------------


def _hierarchy(lesson: Lesson, texts: Texts) -> str:
    gpu = lesson.job.gpu
    sizes = _sizes(gpu, texts, lesson.job.host_memory)
    rows = [
        (
            words(row["name"]), size, rate, words(row["latency"] or "-"),
            f"{f'{made}. ' if made else ''}Shared by {words(row['scope'])}. {words(row['note'])}",
        )
        for row, (size, rate, made) in zip(texts["level"], sizes, strict=True)
    ]  # fmt: skip
    heads = ("", f">{gpu.name}", ">rate", ">cycles")
    return f"{html_table(heads, rows)}{_moved(lesson)}{_paragraph(texts['intro']['sources'])}"


def _sizes(gpu: Gpu, texts: Texts, host: int) -> tuple[tuple[str, str, str], ...]:
    """Return size, rate and the product that made the size of each level on a card; '-' where they are not known."""
    count = gpu.sm_count if gpu.vendor == "NVIDIA" else 0
    cache = texts["cache"].get("{}.{}".format(*(gpu.compute_capability or (0, 0))), 0)
    second = texts["second"].get(gpu.short, 0)
    pool = "the same memory" if gpu.pool_bytes else human(host) if host else "-"
    through = "" if gpu.link_bandwidth else "This card has no NVLink: over PCIe"
    return (
        (*_each(count, REGISTERS // KIB),),
        (*_each(count, cache),),
        (f"{second} MB" if second else "-", "-", ""),
        (human(gpu.total_bytes), _rate(gpu.bandwidth), ""),
        ("-", _rate(gpu.link_bandwidth or gpu.pcie_bandwidth), through),
        (pool, _rate(gpu.pcie_bandwidth), ""),
    )


def _each(count: int, kib: int) -> tuple[str, str, str]:
    known = bool(count and kib)
    return (human(count * kib * KIB), "-", f"{count} x {kib} KiB") if known else ("-", "-", "")


def _rate(value: float) -> str:
    return f"{value / 1e12:.2f} TB/s" if value >= 1e12 else f"{value / GB:,.0f} GB/s" if value else "-"


def _moved(lesson: Lesson) -> str:
    """Return how long the model's weights take to move once, from device memory and over PCIe."""
    gpu, size = lesson.job.gpu, 2 * lesson.architecture.parameters
    if not (gpu.bandwidth and gpu.pcie_bandwidth):
        return ""
    near, far = size / gpu.bandwidth, size / gpu.pcie_bandwidth
    return (
        f"<p>All weights of {words(lesson.architecture.title)} in 16 bits ({size / GB:,.1f} GB) are read once from "
        f"device memory in {_short(near)}, and over PCIe in {_short(far)}: {far / near:,.0f} times as long. That "
        "factor is the price of offloading.</p>"
    )


def _short(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms" if seconds < 1 else clock(seconds)


# ---- techniques and cards ------------------------------------------------------------------------------------------


def _techniques(lesson: Lesson, texts: Texts, said: Mapping[str, str]) -> str:
    first = next((rung for rung in lesson.rungs if rung.judgement.verdict == "fits"), None)
    unit = shared_unit(min((rung.judgement.need for rung in lesson.rungs), default=0))
    rows = [_rung_row(i, rung, unit, rung is first) for i, rung in enumerate(lesson.rungs)]
    heads = ("", f">saves {unit}", f">peak {unit}", ">time")
    stop = f"The first row that fits is “{words(_title(first))}”." if first else "No row fits one card of this kind."
    taken = {rung.key for rung in lesson.rungs}
    does = "".join(
        f"<dt>{words(_title(rung))}</dt><dd>{words(texts['does'][rung.key])}{_settings(rung)}</dd>"
        for rung in lesson.rungs
        if rung.key in texts["does"]
    )
    others = [key for key in texts["does"] if key not in taken]
    rest = "".join(
        f"<dt>{words(STEPS[key].title.removeprefix('+ '))}</dt><dd>{words(texts['does'][key])}</dd>" for key in others
    )
    beside = "".join(
        f"<dt>{_link('term-' + slug(row['term']), row['name'])}</dt><dd>{words(row['text'].format_map(said))}</dd>"
        for row in texts["beside"]
    )
    return (
        f"{html_table(heads, rows)}<p>{stop} Times are relative to the first row, by a "
        f"{_link('term-roofline', 'roofline')}. In a terminal: <code>memfit techniques</code></p>"
        f"<h3>What each one does</h3><dl class='claims'>{does}</dl>"
        f"<h3>Beside the order</h3><dl class='claims'>{beside}</dl>"
        f"<h3>Not in this run's list: in use already, or without use here</h3><dl class='claims'>{rest}</dl>"
    )


def _title(rung: Rung) -> str:
    return rung.title.removeprefix("+ ")


def _rung_row(index: int, rung: Rung, unit: str, first: bool) -> tuple[str, ...]:
    judgement = rung.judgement
    title = f"<b>{words(rung.title)}</b>" if first else words(rung.title)
    cost = f" Cost in quality: {words(rung.caveat)}." if rung.caveat else ""
    return (
        f'<span class="mark {judgement.verdict}"></span>{title}', "-" if not index else _cell(rung.saved, unit),
        _cell(judgement.need, unit), f"{rung.step_time:.2f}x", f"{words(rung.why)}.{cost}",
    )  # fmt: skip


def _settings(rung: Rung) -> str:
    made = "<br>".join(f"{words(name)}: <code>{words(flag)}</code>" for name, flag in rung.flags.items())
    return f"<details><summary>its setting in each framework</summary><p>{made}</p></details>" if made else ""


def _hardware(lesson: Lesson) -> str:
    rows = [_card_row(gpu, option, gpu.short == lesson.job.gpu.short) for gpu, option in lesson.cards]
    table = html_table(("", ">usable", ">peak", ">headroom", ">step"), rows)
    return f"{table}<p>{words(' '.join(_advice(lesson)))} In a terminal: <code>memfit gpus</code> lists all cards.</p>"


def _card_row(gpu: Gpu, option: Alternative | None, own: bool) -> tuple[str, ...]:
    name = f"<b>{words(gpu.name)}</b>" if own else words(gpu.name)
    memory = f"Memory at {_rate(gpu.bandwidth)}. " if gpu.bandwidth else ""
    if option is None:
        return name, gib(gpu.usable_bytes()), "-", "-", "-", f"{memory}Nothing fits one of them."
    step = clock(option.seconds_per_step) if option.seconds_per_step else "-"
    need, left = option.judgement.need, option.judgement.headroom
    return name, gib(gpu.usable_bytes()), gib(need), gib(left), step, f"{memory}{words(short_recipe(option.recipe))}."


_METHODS = {"full": "all weights", "lora": "LoRA adapters", "qlora": "QLoRA adapters"}


def _advice(lesson: Lesson) -> list[str]:
    """Return the smallest of the cards for each way to train, and what nothing fits."""
    found: dict[str, list[Gpu]] = {}
    for gpu, option in lesson.cards:
        if option is not None:
            found.setdefault(option.recipe.method, []).append(gpu)
    said = []
    for method, gpus in found.items():
        names = " or ".join(gpu.name for gpu in gpus if gpu.sold_bytes == gpus[0].sold_bytes)
        said.append(f"The smallest of these on which the planner trains {_METHODS[method]}: {names}.")
    if "full" not in found:
        said.append("None of them trains all weights by itself: that takes several cards and sharding.")
    return said


# ---- leaks and failures --------------------------------------------------------------------------------------------


def _leaks(texts: Texts, said: Mapping[str, str]) -> str:
    return "".join(
        f"<h3>{words(row['name'])}</h3>"
        f"<div class='pair'><div><p class='dim'>leaks</p><pre>{_code(row['wrong'])}</pre></div>"
        f"<div><p class='dim'>does not</p><pre>{_code(row['right'])}</pre></div></div>"
        f"<p>{words(row['text'].format_map(said))}</p><p><b>Fix:</b> {words(row['fix'])}</p>"
        for row in texts["leak"]
    )


def _code(text: str) -> str:
    return "\n".join(map(words, text.split("\n")))


def _oom(lesson: Lesson, texts: Texts) -> str:
    peaks = {peak.phase: peak for peak in lesson.footprint.phases}
    parts = [f"<h3>The message</h3>{_paragraph(texts['message']['text'])}<pre>{_code(texts['message']['code'])}</pre>"]
    for row in texts["phase"]:
        here = [peaks[name] for name in row["phases"] if name in peaks]
        figure = "".join(
            f" This run, {words(phase_title(peak.phase))}: {rough(peak.levels.reserved)} reserved, "
            f"{words(peak.instant)}." for peak in here
        )  # fmt: skip
        causes = "".join(
            f"<dt>{words(CAUSES[cause])}</dt><dd>{words('; or '.join(r.text for r in REMEDIES[cause][:3]))}</dd>"
            for cause in row["causes"]
        )
        parts.append(
            f"<h3>{words(row['name'])}</h3><p class='dim'>{words(row['signs'])}.{figure}</p>"
            f"<dl class='claims'>{causes}</dl>"
        )
    return "".join(parts)


def _papers(texts: Texts) -> str:
    rows = ((words(row["name"]), words(row["about"]), words(row["by"])) for row in texts["paper"])
    return html_table(("title", "about"), rows)


# ---- words ---------------------------------------------------------------------------------------------------------


def _glossary(known: Sequence[Term]) -> str:
    rows = "".join(_term(entry) for entry in known)
    return (
        '<p><label for="glossary-filter">Search</label><input id="glossary-filter" type="search" '
        'data-filter="glossary-entries" autocomplete="off" spellcheck="false"></p>'
        f'<dl class="glossary" id="glossary-entries">{rows}</dl>'
    )


def _term(entry: Term) -> str:
    also = f'<p class="dim">also: {words(", ".join(entry.also))}</p>' if entry.also else ""
    see = ", ".join(_link(f"term-{slug(name)}", name) for name in entry.see)
    return (
        f'<div id="learn-term-{slug(entry.name)}"><dt>{words(entry.name)}</dt><dd>{words(entry.means)} '
        f"{words(entry.more)}{also}{f'<p>see {see}</p>' if see else ''}</dd></div>"
    )
