"""The JSON document of an explanation, one of those that codec.py reads and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct

from memfit.nouns.finding import Finding, Remedy
from memfit.nouns.message import Message

if TYPE_CHECKING:
    from memfit.explain import Evidence


class ExplainDoc(Struct, frozen=True, kw_only=True):
    """`memfit explain --json`. `findings` are ranked; the first is the cause, "not-known" where none was found."""

    schema: Literal["memfit.explain/1"] = "memfit.explain/1"
    source: Literal["text", "history"]
    when: Annotated[str, Meta(description="the part of a run it failed in, '' where that is not known")]
    findings: tuple[Finding, ...]
    messages: Annotated[tuple[Message, ...], Meta(description="the out-of-memory messages in the text, fullest first")]
    shortfall: Annotated[int | None, Meta(description="bytes that were missing, where a message or history shows it")]
    lacks: Annotated[
        tuple[str, ...],
        Meta(description="what the text lacks and would tell the causes apart; none where the first is certain"),
    ] = ()
    recipe: Annotated[
        Remedy | None, Meta(description="a recipe of the planner that needs the shortfall less, else null")
    ] = None
    earlier: Annotated[
        tuple[Finding, ...],
        Meta(description="in order, the cause of each failure in the log before the last, which is explained"),
    ] = ()
    left_out: Annotated[int, Meta(description="bytes of a long log that were not kept")] = 0
    device: Annotated[int | None, Meta(description="the number of a snapshot's card, else null")] = None


def explain_doc(
    evidence: Evidence,
    findings: tuple[Finding, ...],
    recipe: Remedy | None = None,
    earlier: tuple[Finding, ...] = (),
    left_out: int = 0,
    device: int | None = None,
) -> ExplainDoc:
    """Return an explanation as a document. `recipe` is the planner's answer to the shortfall."""
    from memfit.explain import wanted  # whose patterns take longer to compile than the other documents to write

    memory = evidence.memory
    return ExplainDoc(
        source="history" if memory else "text", when=evidence.when or (memory.phase if memory else ""),
        findings=findings, messages=evidence.messages, shortfall=evidence.shortfall, lacks=wanted(evidence, findings),
        recipe=recipe, earlier=earlier, left_out=left_out, device=device,
    )  # fmt: skip
