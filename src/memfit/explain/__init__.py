"""Why memory ran out: from Evidence to Findings, the best first.

A text (`read_text`), a recorded history (`history.reading.memory_of`) or a watched run (`read_watch`) becomes Evidence.
The rules of `text` and `history` turn it into clues, which are weighed here. This package reads no files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from memfit.explain.evidence import Clue, Evidence, Root, read_text, read_watch
from memfit.explain.frames import Frame
from memfit.explain.history.findings import memory_clues
from memfit.explain.memory import Memory, holders
from memfit.explain.oom_message import messages
from memfit.explain.remedies import ASK_FOR_LOG, remedies_of
from memfit.explain.text.circumstances import Circumstance, circumstances, ended_otherwise, only_on_chip
from memfit.explain.text.findings import clues
from memfit.nouns.finding import CAUSES, PEAKS, Cause, Confidence, Finding, Proof, Remedy
from memfit.nouns.message import Message
from memfit.units import human

Price = Callable[[Remedy], int | None]
CERTAIN, LIKELY = 85, 55  # weights of clues from which a cause may be called so
MOST_FINDINGS = 3
NEARLY = 0.7  # of the card, from which something needs nearly all of it
LASTING_PARTS = "weights, gradients and optimizer states"
SMALL = 0.5  # share of the bytes of the first cause below which another is no rival
RIVAL = 15  # difference of weights within which another cause leaves no certainty
NEAR = 25  # difference of weights within which a further cause is reported

__all__ = [
    "Clue", "Evidence", "Frame", "Memory", "Message", "Root", "explain", "messages", "read_text", "read_watch",
    "wanted",
]  # fmt: skip


def explain(evidence: Evidence, price: Price | None = None) -> tuple[Finding, ...]:
    """Return up to three causes, the best first, or one Finding "not-known" where no clue points at a cause.

    price: returns the bytes that a remedy saves, by the planner's estimate. A history outweighs what a text shows.
    """
    around = circumstances(evidence)
    if ended_otherwise(evidence) or only_on_chip(evidence):
        return (_with(around, _unknown(evidence, around)),)
    all_clues = [*(memory_clues(evidence) if evidence.memory else ()), *evidence.clues, *clues(evidence)]
    weights: dict[Cause, int] = {}
    for clue in all_clues:
        weights[clue.cause] = max(weights.get(clue.cause, 0), clue.weight)
    top = max(weights.values(), default=0)
    near = [cause for cause in weights if weights[cause] >= top - NEAR]
    findings = [
        _finding(
            cause, _confidence(cause, weights, all_clues), [c for c in all_clues if c.cause == cause], evidence, price
        )
        for cause in sorted(near, key=lambda cause: -weights[cause])
    ]
    findings.sort(key=lambda finding: finding.confidence != "certain")  # a certain cause may weigh less than a rival
    first, *others = findings[:MOST_FINDINGS] or [_unknown(evidence, around)]
    return (_with(around, _estimated(first, evidence)), *others)


def wanted(evidence: Evidence, findings: Sequence[Finding]) -> tuple[str, ...]:
    """Return what is missing in the text and would tell the causes apart; () where the first is certain."""
    return () if findings[0].confidence == "certain" or only_on_chip(evidence) else evidence.lacks


def _confidence(cause: Cause, weights: dict[Cause, int], all_clues: list[Clue]) -> Confidence:
    if _certain(cause, weights, all_clues):
        return "certain"
    return "likely" if weights[cause] >= LIKELY else "possible"


def _certain(cause: Cause, weights: dict[Cause, int], all_clues: list[Clue]) -> bool:
    """Was the cause measured, with no rival of nearly its weight and half its measured bytes?"""
    if cause == "not-known":
        return False
    measured = any(clue.measured and clue.weight >= CERTAIN for clue in all_clues if clue.cause == cause)
    rivals = [other for other in weights if other != cause and weights[other] > weights[cause] - RIVAL]
    size = _measured_bytes(cause, all_clues)
    small = size > 0 and all(0 < _measured_bytes(rival, all_clues) < SMALL * size for rival in rivals)
    return measured and (not rivals or small)


def _measured_bytes(cause: Cause, all_clues: list[Clue]) -> int:
    """Return the most bytes that a measured clue gives for a cause."""
    return max((clue.proof.bytes or 0 for clue in all_clues if clue.cause == cause and clue.measured), default=0)


def _finding(
    cause: Cause, confidence: Confidence, its_clues: list[Clue], evidence: Evidence, price: Price | None
) -> Finding:
    proofs = tuple(dict.fromkeys(clue.proof for clue in sorted(its_clues, key=lambda clue: -clue.weight)))
    line = next((clue.line for clue in its_clues if clue.line), "") or evidence.line
    held = holders(evidence.memory.groups) if evidence.memory else ()
    remedies = tuple(_priced(remedy, price) for remedy in remedies_of(cause, evidence))
    return Finding(cause, _title(cause, proofs, evidence.memory), proofs, held, remedies, confidence, line)


def _title(cause: Cause, proofs: Sequence[Proof], memory: Memory | None) -> str:
    """Return the sentence of a cause. Where no request failed it describes the peak: most of it is more than half."""
    size = max((proof.bytes or 0 for proof in proofs), default=0)
    if memory is None:
        return CAUSES[cause]
    if memory.asked:
        part = cause == "capacity" and size < NEARLY * memory.limit
        return f"{LASTING_PARTS} hold {size / memory.limit:.0%} of the card" if part else CAUSES[cause]
    most = 2 * size > memory.requested
    return PEAKS.get(cause, CAUSES[cause]).replace("most of", "most of" if most else "a part of")


def _estimated(finding: Finding, evidence: Evidence) -> Finding:
    """Return the finding with memfit's estimate of the run's own file as its last evidence."""
    if evidence.estimate is None or any(evidence.estimate.need == proof.bytes for proof in finding.evidence):
        return finding
    if finding.cause == "not-in-effect":
        return finding
    need = Proof("by memfit's estimate its file needs", evidence.estimate.need)
    return replace(finding, evidence=(*finding.evidence, need))


def _with(around: Sequence[Circumstance], finding: Finding) -> Finding:
    """Return the finding with the circumstances before its own evidence and remedies."""
    proofs = (*(one.proof for one in around), *finding.evidence)
    remedies = (*(remedy for one in around for remedy in one.remedies), *finding.remedies)
    return replace(finding, evidence=proofs, remedies=remedies)


def _priced(remedy: Remedy, price: Price | None) -> Remedy:
    return replace(remedy, saves=price(remedy)) if price and remedy.change else remedy


def _unknown(evidence: Evidence, around: Sequence[Circumstance]) -> Finding:
    """Return the finding "not-known" with the sizes of the message, or a request for the log."""
    message = evidence.message
    proofs: list[Proof] = []
    if message is not None:
        sizes = (
            ("requested", message.tried),
            ("allocated by PyTorch", message.allocated),
            ("reserved, not allocated", message.unallocated),
        )
        proofs = [Proof(text, size) for text, size in sizes if size is not None]
        if message.allocated and message.total and 2 * message.allocated > message.total:
            rest = (message.in_process or 0) - (message.reserved or message.in_process or 0)
            beside = f"; {human(rest)} more are contexts, NCCL and other libraries" if rest > 0 else ""
            alone = ": no other process, no pieces" if message.full else ""
            share = message.allocated / message.total
            proofs.insert(0, Proof(f"tensors of this process fill {share:.0%} of the card{alone}{beside}"))
    elif evidence.shows_nothing:
        proofs = [Proof("the text has no error message, traceback, setting or size that shows a cause")]
    held = holders(evidence.memory.groups) if evidence.memory else ()
    remedies = remedies_of("not-known", evidence)
    if any(one.remedies for one in around) and not (message and message.full):
        remedies = ()  # the circumstances have theirs
    elif evidence.shows_nothing:
        remedies = (ASK_FOR_LOG, *remedies)
    title = around[0].title if around else CAUSES["not-known"]
    return Finding("not-known", title, tuple(proofs), held, remedies, "possible", evidence.line)
