"""What the words of a report say of its cause, by a linear model that was fitted to reports whose cause is known.

Signs know mechanisms; this knows how people write. It speaks only on prose of a report's length, beside the signs, and never makes
a finding certain. Fitted by benchmarks/learn_causes.py: multinomial logistic regression on tf-idf of single words.
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

WORD = re.compile(r"[a-z]+")
LONGEST = 3_000  # characters: the reports it was fitted to have up to 1,100; a log has words of other kinds
FEWEST = 17  # of its words that a text must have: a phrase alone is the signs'
POINTS = 15  # of a clue's weight, for one natural logarithm of probability: see docs/decisions.md
HEARD = 0.2  # probability from which a cause stands beside those of the signs
ALONE = 0.3  # and where no sign was seen: nine of ten such were right in cross-validation
SHOWN = 6  # words told as evidence
FORM = frozenset(
    ["repo", "framework", "model", "hardware", "config", "phase", "oom", "message"]
)  # the form's words, not the reporter's
UNIT = 0.1  # of the weights, which are stored as integers


@cache
def _model() -> dict[str, Any]:
    return catalogue.words_of_causes()


def probabilities(evidence: Evidence) -> dict[Cause, float]:
    """Of each cause that the reports had; {} where the text is none of a report, or has none of their words."""
    if not evidence.text or len(evidence.text) > LONGEST or evidence.memory is not None:
        return {}
    model = _model()
    told = tfidf(evidence.text)
    if len(told) < FEWEST:
        return {}
    scores = [UNIT * bias for bias in model["bias"]]
    for word, value in told.items():
        for number, weight in enumerate(model["words"][word][1:]):
            scores[number] += UNIT * weight * value
    top = max(scores)
    powers = [math.exp(score - top) for score in scores]
    return {cause: power / sum(powers) for cause, power in zip(model["causes"], powers, strict=True)}


def heard(chances: dict[Cause, float], signs: bool, messages: bool) -> set[Cause]:
    """The causes that words make a finding: beside signs, or alone; a bare message says nothing of its cause."""
    enough = HEARD if signs else ALONE if not messages else 1.0
    return {cause for cause, chance in chances.items() if chance >= enough}


def tfidf(text: str) -> dict[str, float]:
    """Known words: (1 + ln count) x inverse document frequency, as a vector of length one."""
    known = _model()["words"]
    counts = Counter(word for word in WORD.findall(text) if word in known and word not in FORM)
    told = {word: (1 + math.log(count)) * known[word][0] for word, count in counts.items()}
    length = math.sqrt(sum(value * value for value in told.values()))
    return {word: value / length for word, value in told.items()}


def proof(evidence: Evidence, cause: Cause) -> Proof:
    """The words that spoke most for the cause."""
    model, told = _model(), tfidf(evidence.text)
    number = 1 + model["causes"].index(cause)
    spoke = {word: value * model["words"][word][number] for word, value in told.items()}
    best = sorted((word for word in spoke if spoke[word] > 0), key=lambda word: -spoke[word])[:SHOWN]
    return Proof("reports with this cause say: " + ", ".join(best))
