"""Findings from what a text says: its signs together, the numbers of its messages, and arithmetic on the run it names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from memfit.explain.clue import FAINT, STRONG, SURE, WEAK, Clue
from memfit.explain.concepts import FOUR_BIT, FSDP, MANY, ZERO3
from memfit.explain.evidence import Evidence
from memfit.explain.oom_text import WSL, Message
from memfit.explain.signs import SIGNS, Sign
from memfit.finding import Cause, Proof
from memfit.units import GIB, MIB, human

STRETCH = 2000  # characters around a sign's first words in which its others must be
MOST_TRIES = 20  # places of the first words that are looked at
SHARE_FRAGMENTED = 0.05  # of the card. Source: reports with more than 5 to 10 % of it reserved but unallocated
SHARE_PIECES = 0.02  # of the card: more than lies in pieces of any full card, and more than its small requests ask for
IDLE = 1.25  # reserved over allocated bytes from which the rest is told; a healthy run has up to 1.2 for a while
CONTEXT = 1 * GIB  # bytes of one process without NCCL: contexts of 0.1 to 0.6 GiB are known, and kernels besides
CONTEXT_OF_A_RANK = (200 * MIB, 1500 * MIB)  # what another rank's bare context takes; a run on the card takes more
ALIKE = 0.75  # processes of one run hold about the same, at least this share of each other
HUGE = 0.3  # of the card: a request that no sum of small ones makes
LARGE = 3e9  # weights from which a model is more than many a card has, when it is trained
STATES = 16  # bytes per weight of full training with AdamW: weights, gradients, two states, and their fp32 copies


def clues(evidence: Evidence) -> list[Clue]:
    """Everything that a text, its messages and its figures point at."""
    found = [clue for sign in SIGNS if (clue := _seen(sign, evidence))]
    for message in evidence.messages:
        found += [clue for rule in RULES if (clue := rule(message, evidence))]
    return found + [
        clue
        for clue in (_sizing(evidence), _measured(evidence), _idle(evidence), _listed(evidence), _alone(evidence))
        if clue
    ]


def _seen(sign: Sign, evidence: Evidence) -> Clue | None:
    if sign.at and evidence.when not in sign.at:
        return None
    if sign.forbidden and sign.forbidden.search(evidence.text):
        return None
    hits = _together(sign.patterns, evidence.text)
    if hits is None:
        return None
    words = ", ".join(repr(hit[0][:80]) for hit in hits)
    said = f"it says {words}" if words else f"it failed in the phase: {evidence.when}"
    return Clue(sign.cause, sign.weight, Proof(said))


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
    total = m.total or _card(evidence.text)
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
        return Clue("fragmentation", 88, proof)
    if (
        share >= SHARE_PIECES and tried >= SHARE_PIECES * total
    ):  # a large request that had room, though not in one piece
        return Clue("fragmentation", 58, proof)
    return Clue("fragmentation", FAINT, proof)  # so much lies in pieces of any card that is full


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
    cause: Cause = "ranks-on-one-gpu" if _SEVERAL.search(evidence.text) else "other-process"
    return Clue(cause, 76, proof)


def _on_the_host(m: Message, evidence: Evidence) -> Clue | None:
    if m.kind != "host":
        return None
    alone = all(other.kind == "host" for other in evidence.messages)
    return Clue("host-ram", 88 if alone else STRONG, Proof("the host's own words: killed, or no memory of the CPU"))


def _engine(m: Message, evidence: Evidence) -> Clue | None:
    return Clue("inference-engine", SURE, Proof("the message is vLLM's own")) if m.kind == "vllm" else None


def _one_request(m: Message, evidence: Evidence) -> Clue | None:
    """An evaluation asks for a good part of the card at once: its batch, not what it gathered."""
    if evidence.when != "eval" or not m.total or (m.tried or 0) < HUGE * m.total:
        return None
    return Clue("eval-batch", 62, Proof(f"one request of {(m.tried or 0) / m.total:.0%} of the card", m.tried))


def _communicator(m: Message, evidence: Evidence) -> Clue | None:
    return Clue("nccl", 80, Proof("NCCL's own message: it found no room for its buffers")) if m.kind == "nccl" else None


RULES: tuple[Callable[[Message, Evidence], Clue | None], ...] = (
    _fragmented, _others, _spilled, _outside, _on_the_host, _engine, _one_request, _communicator,
)  # fmt: skip


# ---- arithmetic on what the text names -----------------------------------------------------------------------------

_BILLIONS = re.compile(r"(?<![\w.])(\d{1,4}(?:\.\d{1,3})?) ?b\b(?!\s?/s)")
_MODEL = re.compile(r"(?<![\w.])[a-z][\w.]{0,40}-(?:\w+-){0,3}?(\d{1,4}(?:\.\d{1,3})?)b\b")
_EXPERTS = re.compile(r"(?<![\w.])(\d{1,3}) ?x ?(\d{1,3}(?:\.\d{1,2})?) ?b\b")
_CARDS = re.compile(
    r"(?<![\w.])(\d{1,4}) ?(?:x\b(?! ?\d+(?:\.\d+)? ?b\b)|x(?=\d)(?!\d+(?:\.\d+)? ?b\b)|\*(?= ?\w)|(?=gpus|cards))"
)
_SIZE = r"(?<![\w.])(\d{1,3}(?:\.\d{1,2})?) ?gi?b\b"
_CARD = re.compile(  # beside a card's name or count, not a size that something takes
    rf"hardware: [^|]{{0,40}}?{_SIZE}|(?:\b\d{{1,4}} ?x|[*×]|\ba?\d{{2,4}}s?(?: ti| sxm| pcie| nvl)?|gpus?|cards?|single|one|an?|on|per)\W{{1,3}}{_SIZE}"
    rf"|{_SIZE} (?:of )?(?:v?ram|gpus?|cards?|hbm|a100|h100|v100|nvidia|rtx)"
)
_SEVERAL = re.compile(rf"{MANY}|\b[2-9]\d* ?x\b|\bgpus\b|{FSDP}|zero[-_ ]?[123]")
_FULL = re.compile(r"\bfull\b|\bfft\b|zero|fsdp|adamw?\b|pretrain")
_RAN_OUT = re.compile(r"\boom|out of memory|outofmemory|tried to allocate|not enough|run(?:s|ning)? out")
_ASKED = re.compile(
    r"readme|\bdocs?\b|documentation|claim|expected|should fit|how much|requirement|minimum|is it possible|can i\b|can't|cannot|"
    r"(?:even|still|already) (?:with|at|on)|(?:batch(?: size|_size)?|bs|mbs|micro_batch_size)\W{0,3}1\b|any batch|does not fit|lowest|smallest|table"
)
_LATE = re.compile(
    r"(?:at|after) (?:step )?\d{2,}\+?(?: steps|\b(?! ?%))|epoch|\bonly (?:when|if|with|after|once)\b"
)  # it ran, so weights and states have room
SHARD_OF = (
    ("parameters", re.compile(rf"{ZERO3}|{FSDP}")),
    ("gradients", re.compile(r"zero[-_ ]?2|stage.{0,3}2\b")),
)
# GiB of cards that are named without their size, the larger where one name has two. Source: src/memfit/data/gpus.toml
CARDS = tuple(
    (size, re.compile(rf"\b(?:rtx ?|gtx ?|tesla ?|nvidia ?)?(?:{names})\b"))
    for size, names in (
        (11, r"[12]080 ?ti"), (12, r"k80|3060|4070"), (16, r"t4|p100|4080|4060 ?ti|a4000"), (24, r"[34]090(?: ?ti)?|l4|a10g?|a5000|titan rtx"),
        (32, r"v100|5090"), (48, r"a6000|6000 ada|a40|l40s?"), (80, r"a100|a800|h100|h800"), (96, r"h20|gh200"), (141, r"h200"),
        (180, r"g?b200"), (192, r"mi300x?"),
    )
)  # fmt: skip
# bytes that lie on a card per weight of a model that is not trained whole, at the least; the first row that is said
FROZEN = (
    (0.55, re.compile(FOUR_BIT)),
    (1.05, re.compile(r"8[- ]?bit|int8|fp8")),
    (2.0, re.compile(r"\blora\b|peft|adapter|prefix|grpo|dora|freeze|frozen")),
)


@dataclass(frozen=True, slots=True)
class Run:
    """What a text names of a run: weights, cards, bytes of each, and what of its bytes per weight lies on each card."""

    weights: float
    cards: int
    each: int
    per_weight: float  # of all cards
    states: float  # bytes of weights, gradients and states on one card
    frozen: bool


def run_of(evidence: Evidence) -> Run | None:
    """The run, where model size and card are named; None where there are several cards and nothing says how many."""
    text = evidence.text
    weights = _weights(text)
    message = evidence.message
    each = message.total if message and message.total else _card(text)
    if not weights or not each:
        return None
    found = _CARDS.search(text)
    if found is None and _SEVERAL.search(text):
        return None
    cards = int(found[1]) if found else 1
    frozen = next((size for size, pattern in FROZEN if pattern.search(text)), None)
    per_weight = frozen or STATES
    how = next((name for name, pattern in SHARD_OF if pattern.search(text)), "")
    of_all = {"parameters": per_weight / cards, "gradients": 4 + (per_weight - 4) / cards, "": per_weight}
    mine = per_weight if frozen and how == "gradients" else of_all[how]
    return Run(weights, cards, each, per_weight, weights * mine, frozen is not None)


def _card(text: str) -> int:
    """Bytes of the card that is named first, 0 for none."""
    if found := _CARD.search(text):
        return int(float(next(filter(None, found.groups()))) * GIB)
    return next((size * GIB for size, pattern in CARDS if pattern.search(text)), 0)


def _weights(text: str) -> float:
    """Weights of the model that is named first, 0 for none; experts share about an eighth of what they multiply."""
    if found := _EXPERTS.search(text):
        return float(found[1]) * float(found[2]) * 0.85e9
    found = _MODEL.search(text) or _BILLIONS.search(text)
    return float(found[1]) * 1e9 if found else 0.0


def _measured(evidence: Evidence) -> Clue | None:
    """A size that is not the card's and four bytes for each weight: they were loaded in 32 bits."""
    weights, card = _weights(evidence.text), _card(evidence.text)
    if evidence.when not in ("", "load", "prepare") or not weights:
        return None
    for number in re.findall(_SIZE, evidence.text):
        size = float(number) * 1e9
        if abs(size * GIB / 1e9 - card) > 0.05 * card and any(
            abs(unit * float(number) / weights - 4) < 0.2 for unit in (1e9, GIB)
        ):
            return Clue(
                "wrong-dtype", 78, Proof(f"{number} GB are 4 bytes for each of {weights / 1e9:g} B weights", int(size))
            )
    return None


def _sizing(evidence: Evidence) -> Clue | None:
    """Weights, gradients and optimizer states that leave no room for activations."""
    run = run_of(evidence)
    text = evidence.text
    if run is None or evidence.when in ("save", "merge", "resume", "predict", "load", "eval") or _LATE.search(text):
        return None
    share = run.states / run.each
    if share < 0.6:
        return None
    sure = share >= 0.75 and _FULL.search(text) and "offload" not in text and not run.frozen
    weight = 85 if sure else 76 if share >= 0.75 else 66
    if not _RAN_OUT.search(text) and not _ASKED.search(text):
        weight = WEAK
    if evidence.when == "loss":  # a whole forward pass had room
        weight = min(weight, 66)
    proof = f"{run.weights / 1e9:g} B weights x {run.per_weight:g} B over {run.cards} card{'s' * (run.cards > 1)}: {share:.0%} of each"
    return Clue("capacity", weight, Proof(proof, int(run.states)))


_LISTED = re.compile(
    r"(?<![\w.])(\d{1,2}) (?:n/a n/a )?(\d{3,8}) [cg+]{1,3} (?:\S+ ){1,4}?(\d{1,6}) ?mib"
)  # nvidia-smi's: card, process, size


def _listed(evidence: Evidence) -> Clue | None:
    """nvidia-smi's list of processes: one that is on two cards went to the wrong one."""
    cards: dict[str, set[str]] = {}
    for found in _LISTED.finditer(evidence.text):
        cards.setdefault(found[2], set()).add(found[1])
    stray = [process for process, on in cards.items() if len(on) > 1]
    if not stray:
        return None
    return Clue("ranks-on-one-gpu", SURE, Proof(f"nvidia-smi lists {len(stray)} processes on more than one card"))


_IDLE = tuple(re.compile(rf"{name}\W+(?:\w+\W+){{0,2}}?([\d.,]+) ?([mg])i?b") for name in ("allocated", "reserved"))


def _idle(evidence: Evidence) -> Clue | None:
    """Two figures of a report: what is reserved, and how much less of it is allocated."""
    found = [pattern.search(evidence.text) for pattern in _IDLE]
    if evidence.memory or evidence.when == "resume" or evidence.messages or not all(found):
        return None
    held, taken = (float(m[1].replace(",", "").strip(".")) * (GIB if m[2] == "g" else MIB) for m in found if m)
    if taken < IDLE * held:
        return None
    return Clue(
        "fragmentation",
        88,
        Proof(f"{human(int(taken))} are reserved, {human(int(held))} of them allocated", int(taken - held)),
    )


def _alone(evidence: Evidence) -> Clue | None:
    """Nothing else is known: loading onto one card failed, so it is too small for the weights."""
    run, text = run_of(evidence), evidence.text
    if evidence.when == "load" and run and run.cards > 1 and not any(p.search(text) for _, p in SHARD_OF):
        proof = Proof(f"{run.cards} cards, nothing that shards: every process loads all weights")
        return Clue("replicated", WEAK + 8, proof)
    if evidence.when == "load":
        return Clue(
            "capacity", WEAK + 6 * bool(run and run.cards == 1), Proof("it failed while the weights were loaded")
        )
    if (
        evidence.when in ("", "init", "forward", "backward")
        and _weights(text) >= LARGE
        and _RAN_OUT.search(text + " oom" * bool(evidence.messages))
    ):
        asked = _ASKED.search(text)
        said = f"'{asked[0]}', " if asked else ""
        return Clue(
            "capacity", 66 if asked else WEAK - 6, Proof(f"{said}a model of {_weights(text) / 1e9:g} B weights")
        )
    if evidence.when in ("forward", "backward") and evidence.messages:
        return Clue("activations", FAINT, Proof(f"it failed in the {evidence.when} pass"))
    return None
