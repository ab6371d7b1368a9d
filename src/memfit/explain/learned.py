"""What the words of a report say of its cause, by a linear model that was fitted to reports whose cause is known.

Signs know mechanisms; this knows how people write. It speaks only on prose of a report's length, beside the signs, and never makes
a finding certain. Fitted by benchmarks/learn_causes.py: multinomial logistic regression on tf-idf of pieces of words, so that
"evaluating", "eval_steps" and "evaluation" have something in common.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import cache
from typing import Any

from memfit import catalogue
from memfit.explain.evidence import Evidence
from memfit.finding import Cause, Proof

PIECES = (3, 4, 5)  # characters, a space before and after every word included
LONGEST = 3_000  # characters: the reports it was fitted to have up to 1,100; a log has words of other kinds
FEWEST = 10  # words that a text must have: a phrase alone is the signs'
POINTS = 10  # of a clue's weight, for one natural logarithm of probability: see docs/decisions.md
QUIET = 60  # weight up to which signs say nothing beside words: one of twelve was right in reports they were not written with
HEARD = 0.05  # probability from which a cause stands beside those of the signs
ALONE = 0.2  # and where no sign was seen; of 47 such reports above it 35 were named aright, in cross-validation
SHOWN = 6  # words told as evidence
FORM = frozenset(
    ["|", "repo:", "framework:", "model:", "hardware:", "config:", "phase:", "oom_message:"]
)  # the form's words, not the reporter's
_SIZE = r"[\d.]+ ?[kmgt]?i?b(?:ytes)?"
PRINTED = re.compile(  # what Python and PyTorch, in all its versions, write themselves: frames and numbers are for the signs
    r'traceback \(most recent call last\):.*?(?=[\w.]*error:|cuda out of memory|$)|file "[^"]*", line \d+, in \S+|\{\'[^}]*\}|'
    rf"(?:torch\.)?(?:cuda\.)?outofmemoryerror:|runtimeerror:|cuda out of memory\.|tried to allocate {_SIZE}\.?"
    rf"|\(gpu \d+; {_SIZE} total capacity[^)]*\)|gpu \d+ has a total capac\w+ of {_SIZE} of which {_SIZE} is free\.?"
    rf"|including non-pytorch memory, this process has {_SIZE} memory in use\.?|process \d+ has {_SIZE} memory in use\.?"
    rf"|of the allocated memory {_SIZE} is allocated by pytorch,? and {_SIZE} is reserved by pytorch but unallocated\.?"
    r"|if reserved (?:but unallocated )?memory is [^.]*\.|see documentation for memory management(?: and pytorch_\w+)?(?: \([^)]*\))?"
)
SUBJECT = re.compile(r"memory|\bv?ram\b|\boom")  # a log that mentions none of it is not about it
UNIT = 0.1  # of the weights, which are stored as integers


@cache
def _model() -> dict[str, Any]:
    return catalogue.words_of_causes()


def probabilities(evidence: Evidence) -> dict[Cause, float]:
    """Of each cause that the reports had; {} where the text is none of a report, or has none of their words."""
    text = evidence.text
    if len(text) > LONGEST or evidence.memory is not None or not SUBJECT.search(text) or len(_words(text)) < FEWEST:
        return {}
    model = _model()
    told = tfidf(text)
    if not told:
        return {}
    scores = [UNIT * bias for bias in model["bias"]]
    for piece, value in told.items():
        for number, weight in enumerate(model["pieces"][piece][1:]):
            scores[number] += UNIT * weight * value
    top = max(scores)
    powers = [math.exp(score - top) for score in scores]
    return {cause: power / sum(powers) for cause, power in zip(model["causes"], powers, strict=True)}


def heard(chances: dict[Cause, float], signs: bool) -> set[Cause]:
    """The causes that words make a finding: beside signs, or alone."""
    return {cause for cause, chance in chances.items() if chance >= (HEARD if signs else ALONE)}


def standing(weight: int, chance: float) -> float:
    """How a cause stands: the weight of its best sign as far as it is no whisper, and what the words say of it."""
    return max(weight - QUIET, 0) + POINTS * math.log(chance)


def pieces(text: str) -> list[str]:
    """Of all words, in their order and as often as they come."""
    return [piece for word in _words(text) for piece in _cut(word)]


def _words(text: str) -> list[str]:
    return [word for word in PRINTED.sub(" ", text.lower()).split() if word not in FORM]


def _cut(word: str) -> list[str]:
    whole = f" {word} "
    return [whole[i : i + n] for n in PIECES for i in range(len(whole) - n + 1)]


def tfidf(text: str) -> dict[str, float]:
    """Known pieces: (1 + ln count) x inverse document frequency, as a vector of length one."""
    known = _model()["pieces"]
    counts = Counter(piece for piece in pieces(text) if piece in known)
    told = {piece: (1 + math.log(count)) * known[piece][0] for piece, count in counts.items()}
    length = math.sqrt(sum(value * value for value in told.values()))
    return {piece: value / length for piece, value in told.items()}


def proof(evidence: Evidence, cause: Cause) -> Proof:
    """The words that spoke most for the cause."""
    model, told = _model(), tfidf(evidence.text)
    number = 1 + model["causes"].index(cause)
    spoke = {piece: value * model["pieces"][piece][number] for piece, value in told.items()}
    words = {word: sum(spoke.get(piece, 0) for piece in _cut(word)) for word in _words(evidence.text)}
    best = sorted((word for word in words if words[word] > 0), key=lambda word: -words[word])[:SHOWN]
    return Proof("reports with this cause say: " + ", ".join(word.strip(",.;:()") for word in best))
