"""The noun Clue: a cause, how much speaks for it, and why; and the scale that rules of text and history share."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.nouns.finding import Cause, Proof

# how much a sign says: SURE is said with certainty (a mechanism's own words), TOLD never (words of several concepts), FAINT only
# as possible
SURE, TOLD, STRONG, WEAK, FAINT = 90, 82, 70, 50, 30
SHOWN = 10  # what a history shows over what a text says of the same thing


@dataclass(frozen=True, slots=True)
class Clue:
    """`line`: the user's own line it happens at, where that is known. `seen`: in a frame, an error's own line, the numbers of a
    message or a history; false of words, of settings, and of sums that assume what was not said. Only what was seen is certain."""

    cause: Cause
    weight: int
    proof: Proof
    line: str = ""
    seen: bool = True
