"""Findings from what a text says: its signs together, the numbers of its messages, and arithmetic on the run it names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from memfit.explain.clue import FAINT, STRONG, SURE, WEAK, Clue
from memfit.explain.evidence import Evidence
from memfit.explain.oom_text import WSL, Message
from memfit.explain.signs import SIGNS, Sign
from memfit.finding import Proof
from memfit.units import GIB, MIB, human

SHARE_FRAGMENTED = 0.05  # of the card. Source: reports with more than 5 to 10 % of it reserved but unallocated
CONTEXT = 1 * GIB  # bytes of one process without NCCL: contexts of 0.1 to 0.6 GiB are known, and kernels besides
CONTEXT_OF_A_RANK = (200 * MIB, 1500 * MIB)  # what another rank's bare context takes; a run on the card takes more
STATES = 16  # bytes per weight of full training with AdamW: weights, gradients, two states, and their fp32 copies


def clues(evidence: Evidence) -> list[Clue]:
    """Everything that a text, its messages and its figures point at."""
    found = [clue for sign in SIGNS if (clue := _seen(sign, evidence))]
    for message in evidence.messages:
        found += [clue for rule in RULES if (clue := rule(message, evidence))]
    return found + [clue for clue in (_sizing(evidence), _alone(evidence)) if clue]


def _seen(sign: Sign, evidence: Evidence) -> Clue | None:
    if sign.at and evidence.when not in sign.at:
        return None
    if sign.forbidden and sign.forbidden.search(evidence.text):
        return None
    hits = [pattern.search(evidence.text) for pattern in sign.patterns]
    if not all(hits):
        return None
    words = ", ".join(repr(hit[0][:80]) for hit in hits if hit)
    said = f"it says {words}" if words else f"it failed in the phase: {evidence.when}"
    return Clue(sign.cause, sign.weight, Proof(said))


# ---- the numbers of a message --------------------------------------------------------------------------------------


def _fragmented(m: Message, evidence: Evidence) -> Clue | None:
    if not m.unallocated or not m.total or evidence.memory:  # a history knows it better
        return None
    share = m.unallocated / m.total
    enough = m.tried is not None and m.unallocated + (m.free or 0) >= m.tried
    if not enough:
        return None
    proof = Proof(
        f"{human(m.unallocated)} are reserved without a tensor, {share:.0%} of the card; {human(m.tried or 0)} were asked for",
        m.unallocated,
    )
    if share >= SHARE_FRAGMENTED and (m.tried or 0) <= m.unallocated:
        return Clue("fragmentation", 88, proof)
    return Clue("fragmentation", FAINT, proof)  # so much lies in pieces of any card that is full


def _others(m: Message, evidence: Evidence) -> Clue | None:
    """Other processes that the message names; rows of bare contexts are ranks that went to the wrong card."""
    real = [size for _, size in m.others if size < WSL]
    low, high = CONTEXT_OF_A_RANK
    if len(real) > 1 and all(low <= size <= high for size in real):
        proof = Proof(f"{len(real)} processes hold a context of about {human(real[0])} each", sum(real))
        return Clue("ranks-on-one-gpu", SURE, proof)
    foreign = _foreign(m, real)
    if not foreign or not m.total or foreign < CONTEXT or foreign < 0.1 * m.total:
        return None
    return Clue("other-process", SURE, Proof(f"{human(foreign)} of the card are held by other processes", foreign))


def _foreign(m: Message, real: list[int]) -> int:
    """Bytes of other processes. Beside `in_process` the message names others alone; a lone row may be this process."""
    if m.in_process is not None:
        held = sum(real)
        if m.total is not None and m.free is not None:
            return max(held, m.total - m.free - m.in_process)
        return held
    return sum(real) - max(real, default=0) if m.reserved else 0


def _spilled(m: Message, evidence: Evidence) -> Clue | None:
    if not any(size >= WSL for _, size in m.others) and (m.in_process or 0) < WSL:
        return None
    return Clue("spill", STRONG, Proof("17179869184 GiB is how Windows counts what it does not know"))


def _outside(m: Message, evidence: Evidence) -> Clue | None:
    """In this process, but not PyTorch's: contexts, NCCL, an engine with memory of its own."""
    if m.reserved is None or (m.in_process or 0) >= WSL:
        return None
    if m.in_process is None:  # before 2.1 nothing tells whose they are
        rest = m.outside or 0
        if not m.total or rest < max(2 * CONTEXT, 0.2 * m.total):
            return None
        return Clue("other-process", STRONG + 5, Proof(f"{human(rest)} of the card are not this allocator's", rest))
    rest = m.in_process - m.reserved
    if rest < 2 * CONTEXT:
        return None
    return Clue(
        "nccl", STRONG, Proof(f"{human(rest)} of this process are not PyTorch's: contexts, NCCL, other libraries", rest)
    )


def _on_the_host(m: Message, evidence: Evidence) -> Clue | None:
    return (
        Clue("host-ram", 85, Proof("the host's own words: killed, or no memory of the CPU"))
        if m.kind == "host"
        else None
    )


def _engine(m: Message, evidence: Evidence) -> Clue | None:
    return Clue("inference-engine", SURE, Proof("the message is vLLM's own")) if m.kind == "vllm" else None


RULES: tuple[Callable[[Message, Evidence], Clue | None], ...] = (
    _fragmented, _others, _spilled, _outside, _on_the_host, _engine,
)  # fmt: skip


# ---- arithmetic on what the text names -----------------------------------------------------------------------------

_BILLIONS = re.compile(r"(?<![\w.])(\d{1,4}(?:\.\d{1,3})?) ?b\b(?!\s?/s)")
_MODEL = re.compile(r"[a-z][\w.]*-(?:\w+-){0,3}?(\d{1,4}(?:\.\d{1,3})?)b\b")
_CARDS = re.compile(r"(?<![\w.])(\d{1,4}) ?(?:x\b|x(?=\d)|\*(?= ?\w))")
_CARD = re.compile(r"(?<![\w.])(\d{1,3}(?:\.\d{1,2})?) ?gi?b\b")
_FROZEN = re.compile(r"\bq?lora\b|peft|adapter|prefix|4[- ]?bit|8[- ]?bit|bnb|grpo")
_FULL = re.compile(r"\bfull\b|\bfft\b|zero|fsdp|adamw?\b|pretrain")
_RAN_OUT = re.compile(r"\boom\b|out of memory|tried to allocate|readme|expected|claims|should fit|does not fit")
_LATE = re.compile(
    r"(?:at|after) (?:step )?\d{2,}\+?(?: steps|\b(?! ?%))|epoch|\bonly (?:when|if|with|after|once)\b"
)  # it ran, so weights and states have room
SHARD_OF = (
    ("parameters", re.compile(r"zero[-_ ]?3|stage.{0,3}3\b|fsdp|fully_shard")),
    ("gradients", re.compile(r"zero[-_ ]?2|stage.{0,3}2\b")),
)


@dataclass(frozen=True, slots=True)
class Run:
    """What a text names of a run: weights, cards, bytes of each, and what of 16 bytes per weight lies on each card."""

    weights: float
    cards: int
    each: int
    states: float  # bytes of weights, gradients and states on one card


def run_of(evidence: Evidence) -> Run | None:
    """The run, where model size and card are named."""
    text = evidence.text
    model = _MODEL.search(text) or _BILLIONS.search(text)
    message = evidence.message
    total = message.total if message else None
    card = _CARD.search(text)
    if not model or (total is None and not card):
        return None
    cards = int(found[1]) if (found := _CARDS.search(text)) else 1
    each = total if total is not None else int(float(card[1]) * GIB)  # type: ignore[index]
    weights = float(model[1]) * 1e9
    how = next((name for name, pattern in SHARD_OF if pattern.search(text)), "")
    per_weight = {"parameters": STATES / cards, "gradients": 2 + 2 + (STATES - 4) / cards, "": STATES}[how]
    return Run(weights, cards, each, weights * per_weight)


def _sizing(evidence: Evidence) -> Clue | None:
    """Full training whose weights, gradients and states leave no room for activations."""
    run = run_of(evidence)
    if run is None or evidence.when in ("save", "merge", "resume", "predict"):
        return None
    if _FROZEN.search(evidence.text) or _LATE.search(evidence.text):
        return None
    share = run.states / run.each
    if share < 0.6:
        return None
    weight = 85 if share >= 0.75 and _FULL.search(evidence.text) and "offload" not in evidence.text else STRONG + 5
    if not _RAN_OUT.search(evidence.text):
        weight = WEAK
    proof = f"{run.weights / 1e9:g} B weights x {STATES} B over {run.cards} card{'s' * (run.cards > 1)}: {share:.0%} of each"
    return Clue("capacity", weight, Proof(proof, int(run.states)))


def _alone(evidence: Evidence) -> Clue | None:
    """Nothing else is known: loading onto one card failed, so it is too small for the weights."""
    run = run_of(evidence)
    if evidence.when == "load" and run and run.cards > 1 and not any(p.search(evidence.text) for _, p in SHARD_OF):
        return Clue(
            "replicated", WEAK + 8, Proof(f"{run.cards} cards, nothing that shards: every process loads all weights")
        )
    if evidence.when == "load":
        return Clue("capacity", WEAK, Proof("it failed while the weights were loaded"))
    if evidence.when in ("forward", "backward") and evidence.messages:
        return Clue("activations", FAINT, Proof(f"it failed in the {evidence.when} pass"))
    return None
