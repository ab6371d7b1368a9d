"""Why memory ran out: from Evidence to Findings, the best first. Pure: texts and histories are read elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from memfit.explain.clue import Clue
from memfit.explain.evidence import Evidence, Root, read_text
from memfit.explain.frames import Frame
from memfit.explain.history.findings import memory_clues
from memfit.explain.memory import Memory, holders
from memfit.explain.oom_message import Message, messages
from memfit.explain.remedies import remedies_of
from memfit.explain.text.circumstances import Circumstance, circumstances, ended_otherwise, only_on_chip
from memfit.explain.text.findings import clues
from memfit.nouns.finding import CAUSES, PEAKS, Cause, Confidence, Finding, Proof, Remedy

Price = Callable[[Remedy], int | None]
CERTAIN, LIKELY = 85, 55  # weights of clues from which a cause is called so
MOST = 4  # findings told
LESS = 0.5  # of the bytes of the first cause, below which another is no rival
RIVAL = 15  # how near another cause must be to leave no certainty
NEAR = 25  # how much weaker a second finding may be and still be told

__all__ = ["Clue", "Evidence", "Frame", "Memory", "Message", "Root", "explain", "messages", "read_text", "wanted"]


def explain(evidence: Evidence, price: Price | None = None) -> tuple[Finding, ...]:
    """The causes that the evidence points at, best first; one Finding "not-known" where it points at none.

    price: bytes a remedy saves, by the planner's estimate. What a history shows weighs more than what a text says.
    """
    around = circumstances(evidence)
    if ended_otherwise(evidence) or only_on_chip(evidence):
        return (_with(around, _unknown(evidence, around)),)
    told = [*(memory_clues(evidence) if evidence.memory else ()), *evidence.seen, *clues(evidence)]
    best: dict[Cause, int] = {}
    for clue in told:
        best[clue.cause] = max(best.get(clue.cause, 0), clue.weight)
    top = max(best.values(), default=0)
    loud = [cause for cause in best if best[cause] >= top - NEAR]
    ranked = sorted(loud, key=lambda cause: -best[cause])
    found = [
        _finding(cause, _confidence(cause, best, told), [c for c in told if c.cause == cause], evidence, price)
        for cause in ranked[:MOST]
    ]
    found.sort(key=lambda finding: finding.confidence != "certain")  # what holds most may be said less loudly
    first, *others = found or [_unknown(evidence, around)]
    return (_with(around, first), *others)


def wanted(evidence: Evidence, findings: Sequence[Finding]) -> tuple[str, ...]:
    """What the text does not say and would tell more; () where the cause is certain."""
    return () if findings[0].confidence == "certain" or only_on_chip(evidence) else evidence.lacks


def _confidence(cause: Cause, best: dict[Cause, int], told: list[Clue]) -> Confidence:
    if _certain(cause, best, told):
        return "certain"
    return "likely" if best[cause] >= LIKELY else "possible"


def _certain(cause: Cause, best: dict[Cause, int], told: list[Clue]) -> bool:
    """Seen in numbers, frames or a history, and nothing else is said nearly as loudly. Words and settings never are."""
    rivals = [other for other in best if other != cause and best[other] > best.get(cause, 0) - RIVAL]
    size = _shown(cause, told)
    smaller = size and all(0 < _shown(rival, told) < LESS * size for rival in rivals)  # beside much, little is no rival
    seen = any(clue.seen and clue.weight >= CERTAIN for clue in told if clue.cause == cause)
    return seen and (not rivals or bool(smaller)) and cause != "not-known"


def _shown(cause: Cause, told: list[Clue]) -> int:
    """The most bytes that a history shows of a cause."""
    return max((clue.proof.bytes or 0 for clue in told if clue.cause == cause and clue.seen), default=0)


def _finding(
    cause: Cause, confidence: Confidence, told: list[Clue], evidence: Evidence, price: Price | None
) -> Finding:
    proofs = tuple(dict.fromkeys(clue.proof for clue in sorted(told, key=lambda clue: -clue.weight)))
    line = next((clue.line for clue in told if clue.line), "") or evidence.line
    held = holders(evidence.memory.groups) if evidence.memory else ()
    found = (_priced(remedy, price) for remedy in remedies_of(cause, evidence))
    peak = PEAKS if evidence.memory and not evidence.memory.asked else {}
    return Finding(cause, peak.get(cause, CAUSES[cause]), proofs, held, tuple(found), confidence, line)


def _with(around: Sequence[Circumstance], finding: Finding) -> Finding:
    """The finding, what the text tells beside its cause first."""
    proofs = (*(found.proof for found in around), *finding.evidence)
    settings = (*(remedy for found in around for remedy in found.remedies), *finding.remedies)
    return replace(finding, evidence=proofs, remedies=settings)


def _priced(remedy: Remedy, price: Price | None) -> Remedy:
    return replace(remedy, saves=price(remedy)) if price and remedy.change else remedy


def _unknown(evidence: Evidence, around: Sequence[Circumstance]) -> Finding:
    """What there is, without a conclusion."""
    message = evidence.message
    said: list[Proof] = []
    if message is not None:
        named = (
            ("asked for", message.tried),
            ("allocated by PyTorch", message.allocated),
            ("reserved, not allocated", message.unallocated),
        )
        said = [Proof(text, size) for text, size in named if size is not None]
        if message.full:
            said.append(
                Proof(f"{message.full:.0%} of the card are tensors of this process: nobody else, and no pieces")
            )
    held = holders(evidence.memory.groups) if evidence.memory else ()
    answered = any(found.remedies for found in around) and not (message and message.full)
    return Finding(
        "not-known",
        around[0].title if around else CAUSES["not-known"],
        tuple(said),
        held,
        () if answered else remedies_of("not-known", evidence),
        "possible",
        evidence.line,
    )
