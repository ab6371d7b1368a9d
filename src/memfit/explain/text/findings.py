"""Findings from what a text says: its signs, and the numbers of its messages. Arithmetic on the run is in figures.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from memfit.explain.clue import FAINT, STRONG, SURE, TOLD, WEAK, Clue
from memfit.explain.evidence import Evidence
from memfit.explain.oom_message import WSL, Message
from memfit.explain.text.circumstances import smaller_batch, went_on
from memfit.explain.text.figures import ALIKE, FIGURES, SEVERAL, card_of
from memfit.explain.text.signs import SIGNS, Sign
from memfit.nouns.finding import Cause, Proof
from memfit.units import GIB, MIB, human

# what asks is what these are: the frame that failed shows them. Of all others a traceback tells who asked last, not who was there
SHOWN_BY_FRAMES: frozenset[Cause] = frozenset([
    "attention", "data-parallel", "dequantized", "eval-generate", "eval-logits", "exception", "fsdp-upcast", "fsdp-wrap", "host-ram",
    "inference-engine", "input-grads", "kbit-upcast", "load-peak", "logits", "merge", "optimizer-states", "optimizer-step", "quantize-peak",
    "replicated", "resume-states", "save-gather", "stale-checkpoint", "zero3-init",
])  # fmt: skip
# the user's lines name what there is: never certain
NAMED_BY_CODE: frozenset[Cause] = frozenset(
    ["companion-models", "group-batch", "kv-cache", "pairs", "ranks-on-one-gpu", "reference-model"]
)
STRETCH = 2000  # characters around a sign's first words in which its others must be
MOST_TRIES = 20  # places of the first words that are looked at
SHARE_FRAGMENTED = 0.05  # of the card. Source: reports with more than 5 to 10 % of it reserved but unallocated
SHARE_PIECES = 0.02  # of the card: more than lies in pieces of any full card, and more than its small requests ask for
CONTEXT = 1 * GIB  # bytes of one process without NCCL: contexts of 0.1 to 0.6 GiB are known, and kernels besides
CONTEXT_OF_A_RANK = (200 * MIB, 1500 * MIB)  # what another rank's bare context takes; a run on the card takes more
HUGE = 0.3  # of the card: a request that no sum of small ones makes
STARTED = 16  # how far the numbers of processes are apart that one launcher started
OVER = 1.02  # of the card: more than it has, beyond what is lost in printing


def clues(evidence: Evidence) -> list[Clue]:
    """Everything that a text, its messages and its figures point at."""
    found = [clue for sign in SIGNS if (clue := _seen(sign, evidence))]
    if evidence.memory is not None:  # the words of a traceback tell who asked last, a history who was there
        found = [replace(clue, weight=min(clue.weight, STRONG - 1), seen=False) for clue in found]
    for message in evidence.messages:
        found += [clue for rule in RULES if (clue := rule(message, evidence))]
    found += [clue for figure in FIGURES if (clue := figure(evidence))]
    if went_on(evidence) is None:
        return found
    smaller = smaller_batch(evidence)  # what a retry is suspected of did not happen
    return [*(clue for clue in found if clue.cause != "exception"), *([smaller] if smaller else [])]


def _seen(sign: Sign, evidence: Evidence) -> Clue | None:
    if sign.at and evidence.when not in sign.at:
        return None
    shown, named = sign.cause in SHOWN_BY_FRAMES, sign.cause in NAMED_BY_CODE
    text = evidence.told if shown or named else evidence.prose
    if sign.forbidden and sign.forbidden.search(text):
        return None
    hits = _together(sign.patterns, text)
    if hits is None:
        return None
    words = ", ".join(repr(hit[0][:80]) for hit in hits)
    said = f"it says {words}" if words else f"it failed in the phase: {evidence.when}"
    seen = shown and bool(evidence.frames) and all(pattern.search(evidence.traced) for pattern in sign.patterns)
    only_code = named and not all(pattern.search(evidence.prose) for pattern in sign.patterns)
    return Clue(sign.cause, min(sign.weight, STRONG) if only_code else sign.weight, Proof(said), seen=seen)


def _together(patterns: Sequence[re.Pattern[str]], text: str) -> list[re.Match[str]] | None:
    """A match of each, in one stretch of the text: in a log words that stand far apart say nothing together."""
    if not patterns:
        return []
    for first in islice(patterns[0].finditer(text), MOST_TRIES):
        begin, end = max(first.start() - STRETCH, 0), first.end() + STRETCH
        hits = [first, *(hit for pattern in patterns[1:] if (hit := pattern.search(text, begin, end)))]
        if len(hits) == len(patterns):
            return hits
    return None


# ---- the numbers of a message --------------------------------------------------------------------------------------


def _fragmented(m: Message, evidence: Evidence) -> Clue | None:
    total = m.total or card_of(evidence.text)
    if not m.unallocated or evidence.memory:  # a history knows it better
        return None
    if not total:
        proof = Proof(f"{human(m.unallocated)} are reserved without a tensor", m.unallocated)
        return Clue("fragmentation", 80, proof) if m.unallocated >= max(m.tried or 0, GIB) else None
    share = m.unallocated / total
    enough = m.tried is not None and m.unallocated + (m.free or 0) >= m.tried
    if not enough:
        return None
    proof = Proof(
        f"{human(m.unallocated)} are reserved without a tensor, {share:.0%} of the card; {human(m.tried or 0)} were asked for",
        m.unallocated,
    )
    tried = m.tried or 0
    if share >= SHARE_FRAGMENTED and tried <= m.unallocated:
        return Clue(
            "fragmentation", 84, proof
        )  # likely, not certain: of two later reports another cause had left the pieces
    if min(share, tried / total) >= SHARE_PIECES:  # a large request that had room, though not in one piece
        return Clue("fragmentation", WEAK, proof)
    return None if share < SHARE_PIECES and tried else Clue("fragmentation", FAINT, proof)


def _others(m: Message, evidence: Evidence) -> Clue | None:
    """Other processes that the message names; rows of bare contexts are ranks that went to the wrong card."""
    real = [size for _, size in m.others if size < WSL]
    low, high = CONTEXT_OF_A_RANK
    if len(real) > 1 and all(low <= size <= high for size in real):
        proof = Proof(f"{len(real)} processes hold a context of about {human(real[0])} each", sum(real))
        return Clue("ranks-on-one-gpu", SURE, proof)
    like = sorted(real)[-2:]
    if len(like) == 2 and like[0] >= max(CONTEXT, ALIKE * like[1]):
        return Clue("ranks-on-one-gpu", 80, Proof(f"{len(real)} processes hold about as much of it each", sum(real)))
    if (ranks := _siblings(m, real)) is not None:
        return ranks
    foreign = _foreign(m, real)
    if not foreign or not m.total or foreign < CONTEXT or foreign < 0.1 * m.total:
        return None
    weight = SURE + 5 if m.allocated == 0 else SURE  # where this one had nothing yet, no word of it matters
    return Clue("other-process", weight, Proof(f"{human(foreign)} of the card are held by {_named(m, real)}", foreign))


def _siblings(m: Message, real: list[int]) -> Clue | None:
    """Several processes besides this one that hold the same, and were started one after another: ranks, or loaders of data."""
    own = _own(m, real)
    beside = [(process, size) for process, size in m.others if size < WSL and size != own]
    sizes, numbers = [size for _, size in beside], [process for process, _ in m.others]
    if len(beside) < 2 or min(sizes) < ALIKE * max(sizes) or max(numbers) - min(numbers) > STARTED:
        return None
    said = f"{len(beside)} processes started beside this one hold {human(sizes[0])} each"
    return Clue("ranks-on-one-gpu", TOLD, Proof(said, sum(sizes)))


def _own(m: Message, real: list[int]) -> int:
    """Bytes of the row that is this process, 0 where there is none: beside `in_process` a message names others alone."""
    if m.in_process is not None or not m.reserved or not real:
        return 0
    return min(
        (size for size in real if size >= m.reserved), key=lambda size: size - (m.reserved or 0), default=max(real)
    )


def _foreign(m: Message, real: list[int]) -> int:
    """Bytes of other processes. A lone row may be this process."""
    held = sum(real) - _own(m, real)
    if m.in_process is not None:
        return max(held, m.total - m.free - m.in_process) if m.total is not None and m.free is not None else held
    return held if m.reserved else 0


def _named(m: Message, real: list[int]) -> str:
    """'process 3021', 'other processes'."""
    own = _own(m, real)
    others = [(process, size) for process, size in m.others if size < WSL and size != own]
    return f"process {others[0][0]}" if len(others) == 1 else "other processes"


def _spilled(m: Message, evidence: Evidence) -> Clue | None:
    if m.total and m.kind != "mps" and (m.allocated or 0) > OVER * m.total:
        said = (
            f"{human(m.allocated or 0)} are allocated on a card of {human(m.total)}: the rest lies in the host's memory"
        )
        return Clue("spill", 84, Proof(said, (m.allocated or 0) - m.total))
    if not any(size >= WSL for _, size in m.others) and (m.in_process or 0) < WSL:
        return None
    return Clue("spill", STRONG, Proof("17179869184 GiB is how Windows counts what it does not know"))


def _outside(m: Message, evidence: Evidence) -> Clue | None:
    """In this process, but not PyTorch's: contexts, NCCL, an engine with memory of its own."""
    if m.in_process is None:
        return _elsewhere(m, evidence)
    if m.reserved is None or m.in_process >= WSL:
        return None
    rest = m.in_process - m.reserved
    if rest < 2 * CONTEXT:
        return None
    return Clue(
        "nccl", STRONG, Proof(f"{human(rest)} of this process are not PyTorch's: contexts, NCCL, other libraries", rest)
    )


def _elsewhere(m: Message, evidence: Evidence) -> Clue | None:
    """Before 2.1 nothing tells whose the rest of the card is: ranks that went to this one, where there are several."""
    if not m.total or m.free is None or m.allocated is None:
        return None
    rest = m.total - m.free - (m.reserved or m.allocated)
    if rest < max(2 * CONTEXT, (0.2 if m.reserved else 0.5) * m.total):
        return None
    proof = Proof(f"{human(rest)} of the card are not this allocator's", rest)
    cause: Cause = "ranks-on-one-gpu" if SEVERAL.search(evidence.text) else "other-process"
    return Clue(cause, 76, proof)


# what a killed process is told of here is the card that it did not give back, not the host that ran out
_LEFT_BEHIND = re.compile(
    r"(?:gpu|video|card|vram)(?:'?s)? ?memory (?:\w+ ){0,2}(?:stays?|remains?|still|kept|not (?:be )?(?:freed|released))"
)

# a signal alone may be a person's or a scheduler's
_HOST_SAYS = re.compile(r"cpuallocator|unable to allocate|memoryerror|oom-kill|killed process|cannot allocate memory")


def _on_the_host(m: Message, evidence: Evidence) -> Clue | None:
    if m.kind != "host" or _LEFT_BEHIND.search(evidence.text):
        return None
    alone = all(other.kind == "host" for other in evidence.messages)
    named = _HOST_SAYS.search(evidence.text) is not None
    proof = "the host's own words: no memory of the CPU" if named else "it was killed from outside, without an error"
    return Clue("host-ram", 88 if alone else STRONG, Proof(proof), seen=named)


def _engine(m: Message, evidence: Evidence) -> Clue | None:
    return Clue("inference-engine", SURE, Proof("the message is vLLM's own")) if m.kind == "vllm" else None


def _one_request(m: Message, evidence: Evidence) -> Clue | None:
    """An evaluation asks for a good part of the card at once: its batch, not what it gathered."""
    tried = m.tried or 0
    if m.total and tried >= HUGE * m.total and evidence.when == "eval":
        return Clue("eval-batch", 62, Proof(f"one request of {tried / m.total:.0%} of the card", tried))
    return None


def _communicator(m: Message, evidence: Evidence) -> Clue | None:
    return Clue("nccl", 80, Proof("NCCL's own message: it found no room for its buffers")) if m.kind == "nccl" else None


RULES: tuple[Callable[[Message, Evidence], Clue | None], ...] = (
    _fragmented, _others, _spilled, _outside, _on_the_host, _engine, _one_request, _communicator,
)  # fmt: skip
