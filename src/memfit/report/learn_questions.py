"""The questions of Learn: each right answer is computed from the reader's run, and its working is shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memfit.nouns.tape import Role
from memfit.planner.lesson import HALF, Lesson
from memfit.report.document_html import words
from memfit.report.words import ROLE_WORDS, instant, tokens
from memfit.units import GB, GIB, MIB, gib

WITHIN = 0.03  # share by which a number may be off
NONE = "none of them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question: a number with its unit, or one of several choices."""

    key: str
    text: str
    number: float = 0.0
    unit: str = ""
    choice: str = ""
    choices: tuple[str, ...] = ()
    working: str


def questions(lesson: Lesson) -> tuple[Question, ...]:
    """Return the questions that the reader's run can ask."""
    return (*_of_weights(lesson), *_of_tokens(lesson), *_of_the_card(lesson), *_of_the_run(lesson))


def _of_weights(lesson: Lesson) -> Iterator[Question]:
    a, n = lesson.architecture, lesson.architecture.parameters
    yield Question(
        key="weights", text=f"{a.name} has {tokens(n)} weights. How many GB (10^9 bytes) do they take in bf16?",
        number=n * HALF / GB, unit="GB", working=f"{tokens(n)} x 2 B",
    )  # fmt: skip
    each = sum(size for _, size in _precision(lesson, "bf16-master"))
    yield Question(
        key="static", number=n * each / GB, unit="GB",
        text="All of them are trained with AdamW, in bf16 with an fp32 master copy. How many GB before any activation?",
        working=f"2 weights + 2 gradients + 4 master + 4 momentum + 4 variance = {each:g} B; {tokens(n)} x {each:g} B",
    )  # fmt: skip
    eight = next(row for row in lesson.read if "8-bit" in row.name)
    small = sum(size for name, size in eight.parts if name != "scales")
    yield Question(
        key="eight-bit",
        number=small,
        unit="B",
        text="With an 8-bit AdamW in place of the fp32 states, scales not counted: how many bytes is each weight?",
        working=f"{each:g} - 8 for two fp32 states + 2 for two of 8 bits",
    )
    if lesson.recipe.method != "full":
        share = 100 * lesson.trained / n
        yield Question(
            key="adapters",
            number=share,
            unit="%",
            text=f"This run trains {tokens(lesson.trained)} adapter weights. What share of the model is that?",
            working=f"{tokens(lesson.trained)} / {tokens(n)}: gradients and states exist for these alone",
        )
    yield Question(
        key="sharded", number=n * each / GB / 8, unit="GB",
        text=f"The {each:g} bytes a weight of above are sharded over 8 cards (ZeRO-3, FSDP). How many GB on each, "
        "before activations and gathered blocks?", working=f"{tokens(n)} x {each:g} B / 8",
    )  # fmt: skip


def _precision(lesson: Lesson, name: str) -> tuple[tuple[str, float], ...]:
    return next(row.parts for row in lesson.precisions if row.name == name)


def _of_tokens(lesson: Lesson) -> Iterator[Question]:
    a, r = lesson.architecture, lesson.recipe
    batch = f"{tokens(r.micro_batch)} x {tokens(r.sequence_length)} tokens"
    yield Question(
        key="checkpointed", number=lesson.rule / MIB, unit="MiB",
        text=f"Full checkpointing keeps the input of each of {len(a.layers)} blocks, {tokens(a.width)} wide, in 16 "
        f"bits. How many MiB for a micro-batch of {batch}?",
        working=f"{batch} x {tokens(a.width)} x {len(a.layers)} x 2 B / 2^20",
    )  # fmt: skip
    if lesson.scores:
        heads = a.layers[0].attention.heads
        yield Question(
            key="scores", number=lesson.scores / MIB, unit="MiB",
            text=f"Eager attention with {heads} heads writes its scores in 16 bits. How many MiB is that in one layer?",
            working=f"{tokens(r.micro_batch)} x {heads} x {tokens(r.sequence_length)} x {tokens(r.sequence_length)} x "
            "2 B / 2^20; FlashAttention and sdpa never write them",
        )  # fmt: skip
    if lesson.logits:
        yield Question(
            key="logits", number=3 * lesson.logits / MIB, unit="MiB",
            text=f"The vocabulary has {tokens(a.vocabulary)} entries. How many MiB are the logits of the micro-batch "
            "in 16 bits and once more in fp32?",
            working=f"{batch} x {tokens(a.vocabulary)} x (2 + 4) B / 2^20; a fused loss never makes them",
        )  # fmt: skip


def _of_the_card(lesson: Lesson) -> Iterator[Question]:
    gpu, size = lesson.job.gpu, HALF * lesson.architecture.parameters
    yield Question(
        key="gib", number=gpu.sold_bytes / GIB, unit="GiB",
        text=f"The {gpu.name} is sold with {gpu.sold_bytes / GB:,.0f} GB (10^9 bytes). How many GiB (2^30) is that?",
        working=f"{gpu.sold_bytes / GB:,.0f} x 10^9 / 2^30; CUDA reports {gib(gpu.total_bytes)} GiB, and the context "
        f"takes {gib(gpu.context_bytes, 2)} of them",
    )  # fmt: skip
    if gpu.pcie_bandwidth:
        yield Question(
            key="pcie",
            number=size / gpu.pcie_bandwidth,
            unit="s",
            text=f"How many seconds do the 16-bit weights take over its PCIe, at {gpu.pcie_bandwidth / GB:,.0f} GB/s?",
            working=f"{size / GB:,.2f} GB / {gpu.pcie_bandwidth / GB:,.0f} GB/s; with weights in host RAM, each pass",
        )


def _of_the_run(lesson: Lesson) -> Iterator[Question]:
    peak = lesson.footprint.peak
    instants = tuple(dict.fromkeys(instant(p) for p in lesson.footprint.needed))
    if len(instants) > 1:
        yield Question(
            key="instant", text="At which instant does this run need most?", choice=instant(peak), choices=instants,
            working=f"{gib(peak.levels.reserved)} GiB reserved: it made the level that later phases find",
        )  # fmt: skip
    roles: tuple[Role, ...] = ("parameters", "gradients", "optimizer_states", "activations", "temporaries")
    yield Question(
        key="grows", text="The micro-batch is doubled. What grows most at the peak?",
        choice=ROLE_WORDS[lesson.grows].title, choices=tuple(ROLE_WORDS[role].title for role in roles),
        working="memfit estimated both; weights, gradients and states do not depend on the tokens of a micro-batch",
    )  # fmt: skip
    titles = tuple(rung.title.removeprefix("+ ") for rung in lesson.rungs)
    first = next((t for t, rung in zip(titles, lesson.rungs, strict=True) if rung.judgement.verdict == "fits"), NONE)
    yield Question(
        key="first", text=f"In this order, which technique is the first with which it fits the {lesson.job.gpu.name}?",
        choice=first, choices=(*titles, NONE), working="the table of techniques above has the peak of each",
    )  # fmt: skip


# ---- as HTML -------------------------------------------------------------------------------------------------------


def questions_html(asked: Sequence[Question], model: str) -> str:
    """Return the questions as forms that the page checks; `model` separates what a reader answered for several."""
    forms = "".join(_form(number, question) for number, question in enumerate(asked, 1))
    return f'<div class="questions" data-run="{words(model)}"><p class="score" role="status"></p>{forms}</div>'


def _form(number: int, q: Question) -> str:
    """Return one question: its fields, the button, where the page says how it was answered, and the working."""
    key, text = words(q.key), f"{number}. {words(q.text)}"
    if q.choices:
        options = "".join(
            f'<label><input type="radio" name="{key}" value="{words(choice)}"> {words(choice)}</label>'
            for choice in q.choices
        )
        fields = f"<fieldset><legend>{text}</legend>{options}</fieldset>"
        right, working = q.choice, f"<b>{words(q.choice)}</b>: {words(q.working)}"
    else:
        fields = (
            f'<label for="ask-{key}">{text} <span class="dim">(to {WITHIN:.0%})</span></label>'
            f'<input id="ask-{key}" name="{key}" inputmode="decimal" autocomplete="off"> {words(q.unit)} '
        )
        shown = f"{q.number:,.2f}" if q.number >= 1 else f"{q.number:.3g}"
        right, working = f"{q.number:.9g}", f"<b>{shown} {words(q.unit)}</b>: {words(q.working)}"
    return (
        f'<form class="question" data-answer="{words(right)}" data-within="{0 if q.choices else WITHIN}">{fields}'
        '<button type="submit">Check</button> <output></output>'
        f"<details><summary>Working</summary><p>{working}</p></details></form>"
    )
