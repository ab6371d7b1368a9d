"""What a report says of its cause, by a linear model that was fitted to reports whose cause is known.

Signs know mechanisms; this knows how people write, and how far each sign is to be trusted. It speaks only of prose of a report's
length and never makes a finding certain. Fitted by benchmarks/learn_causes.py: multinomial logistic regression on tf-idf of pieces
of words ("evaluating", "eval_steps" and "evaluation" have something in common), on tf-idf of words and pairs of them, and on signs.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from typing import cast

from memfit import catalogue
from memfit.catalogue.weights import Weights
from memfit.explain.clue import SURE, Clue
from memfit.explain.evidence import Evidence
from memfit.explain.text.circumstances import is_log
from memfit.nouns.finding import Cause, Proof

PIECES = (3, 4, 5)  # characters, a space before and after every word included
LONGEST = 3_000  # characters: the reports it was fitted to have up to 1,100; a log has words of other kinds
FEWEST = 10  # words that a text must have: a phrase alone is the signs'
TRUST = 0.2  # of a sign of weight SURE beside vectors of length one, before the fit; 0.1 does alike, 0.4 names 5 of a hundred less
HEARD = 0.05  # probability from which a cause stands beside those of the signs
ALONE = 0.2  # and where no sign was seen
SHOWN = 6  # words told as evidence
FORM = frozenset(
    ["|", "repo:", "framework:", "model:", "hardware:", "config:", "phase:", "oom_message:"]
)  # the form's words, not the reporter's
_SIZE = r"[\d.]+ ?[kmgt]?i?b(?:ytes)?"
PRINTED = re.compile(  # what Python, PyTorch in all its versions, and other libraries write themselves: frames and numbers are for the signs
    r'traceback \(most recent call last\):.*?(?=[\w.]*error:|cuda out of memory|$)|file "[^"]*", line \d+, in \S+|\{\'[^}]*\}|'
    rf"(?:torch\.)?(?:cuda\.)?outofmemoryerror:|runtimeerror:|(?:cuda|hip|xpu) out of memory\.|tried to allocate {_SIZE}\.?"
    rf"|\(gpu \d+; {_SIZE} total capacity[^)]*\)|gpu \d+ has a total capac\w+ of {_SIZE}(?: of which {_SIZE} is free)?\.?|{_SIZE} allowed;"
    rf"|including non-pytorch memory, this process has {_SIZE} memory in use\.?|process \d+ has {_SIZE} memory in use\.?"
    rf"|of the allocated memory {_SIZE} is allocated by pytorch,?(?: with {_SIZE} allocated in private pools \([^)]*\),)?"
    rf" and {_SIZE} is reserved by pytorch but unallocated\.?"
    r"|oom when allocating tensor with shape ?\[[^\]]*\] and type \w+ on \S+(?: by allocator \S+)?(?: \[op:\w+\])?"
    rf"|mps backend out of memory(?: \(mps allocated: {_SIZE}, other allocations: {_SIZE}, max allowed: {_SIZE}\)\.?)?|on (?:private|shared) pool\."
    r"|use pytorch_mps_high_watermark_ratio=0\.0 to disable [^.]*\.|please use `empty_cache` to release all unoccupied cached memory\."
    r"|cuda (?:driver )?error: out of memory|cuda kernel errors might be [^.]*\.|for debugging consider passing \w+=1\.?"
    r"|compile with `\w+` to enable device-side assertions\.?|error out of memory at line \d+ in file \S+"
    r"|(?:[\w.]*error: )?no available memory for the cache blocks\.|try increasing `gpu_memory_utilization`[^.]*engine\."
    r"|(?:[\w.]*error: )?resource_?exhausted: out of memory(?: while trying to allocate| allocating)? \d+ bytes\.?"
    r"|if reserved (?:but unallocated )?memory is [^.]*(?:\.|$)|see documentation for memory management(?: and pytorch_\w+)?(?: \([^)]*\))?"
)
SUBJECT = re.compile(r"memory|\bv?ram\b|\boom")  # a log that mentions none of it is not about it
_WORD = re.compile(r"[a-z_]+|\d+")
UNIT = 0.1  # of the weights, which are stored in a signed byte each


@cache
def _model() -> Weights:
    return catalogue.words_of_causes()


def probabilities(evidence: Evidence, clues: Iterable[Clue]) -> dict[Cause, float]:
    """Of each cause that the reports had; {} where the text is none of a report, or has none of their words.

    clues: what the text points at.
    """
    text = evidence.text
    prose = len(text) <= LONGEST and evidence.memory is None and not is_log(evidence)
    if not prose or not SUBJECT.search(text) or len(_split(text)) < FEWEST:
        return {}
    model, told = _model(), vector(evidence, clues)
    if not told:
        return {}
    scores = [UNIT * bias for bias in model.bias]
    for name, value in told.items():
        for number, weight in enumerate(model.weights(name)):
            scores[number] += UNIT * weight * value
    top = max(scores)
    powers = [math.exp(score - top) for score in scores]
    return {cast(Cause, cause): power / sum(powers) for cause, power in zip(model.classes, powers, strict=True)}


def heard(chances: Mapping[Cause, float], signs: bool) -> set[Cause]:
    """The causes that this makes a finding: beside signs, or alone."""
    return {cause for cause, chance in chances.items() if chance >= (HEARD if signs else ALONE)}


def vector(evidence: Evidence, clues: Iterable[Clue]) -> dict[str, float]:
    """The known features of a report by name, and their values."""
    known = _model().idf
    return {
        **_tfidf(pieces(evidence.text), known),
        **_tfidf(words(evidence.text), known),
        **{name: value for name, value in strengths(clues).items() if name in known},
    }


def _tfidf(names: Iterable[str], known: Mapping[str, float]) -> dict[str, float]:
    """(1 + ln count) x inverse document frequency, as a vector of length one."""
    counts = Counter(name for name in names if name in known)
    told = {name: (1 + math.log(count)) * known[name] for name, count in counts.items()}
    length = math.sqrt(sum(value * value for value in told.values()))
    return {name: value / length for name, value in told.items()}


def pieces(text: str) -> list[str]:
    """Of all words, in their order and as often as they come."""
    return [piece for word in _split(text) for piece in _cut(word)]


def words(text: str) -> list[str]:
    """All words and all pairs of neighbours, marked as no piece can be: "= word"."""
    plain = _WORD.findall(" ".join(_split(text)))
    return [*(f"= {word}" for word in plain), *(f"= {a} {b}" for a, b in itertools.pairwise(plain))]


def strengths(clues: Iterable[Clue]) -> dict[str, float]:
    """The heaviest sign of each cause."""
    best: dict[str, float] = {}
    for clue in clues:
        name = f"! {clue.cause}"
        best[name] = max(best.get(name, 0.0), TRUST * clue.weight / SURE)
    return best


def _split(text: str) -> list[str]:
    return [word for word in PRINTED.sub(" ", text.lower()).split() if word not in FORM]


def _cut(word: str) -> list[str]:
    whole = f" {word} "
    return [whole[i : i + n] for n in PIECES for i in range(len(whole) - n + 1)]


def proof(evidence: Evidence, cause: Cause) -> Proof:
    """The words that spoke most for the cause."""
    model, told = _model(), vector(evidence, ())
    number = model.classes.index(cause)
    spoke = {name: value * model.weights(name)[number] for name, value in told.items()}
    split = dict.fromkeys(_split(evidence.text))
    said = {w: sum(spoke.get(n, 0) for n in (*_cut(w), *(f"= {p}" for p in _WORD.findall(w)))) for w in split}
    best = sorted((word for word in said if said[word] > 0), key=lambda word: -said[word])[:SHOWN]
    return Proof("reports with this cause say: " + ", ".join(word.strip(",.;:()") for word in best))
