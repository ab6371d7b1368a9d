"""Clues from a text: its signs, and the numbers of its messages. Arithmetic on the run itself is in figures.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from memfit.explain.evidence import FAINT, FIRM, STRONG, SURE, WEAK, Clue, Evidence
from memfit.explain.oom_message import WSL
from memfit.explain.remedies import processes_of
from memfit.explain.text.circumstances import smaller_batch, went_on
from memfit.explain.text.figures import ALIKE, FIGURES, SEVERAL, card_of
from memfit.explain.text.signs import SIGNS, Sign
from memfit.nouns.finding import Cause, Proof
from memfit.nouns.message import Message
from memfit.units import GIB, MIB, human

# causes that the failed request itself belongs to, so the frame that failed proves them. Of all other causes a
# traceback shows only who asked last, not who filled the card
SHOWN_BY_FRAMES: frozenset[Cause] = frozenset([
    "attention", "data-parallel", "dequantized", "eval-generate", "eval-logits", "exception", "fsdp-upcast",
    "fsdp-wrap", "host-ram",
    "inference-engine", "input-grads", "kbit-upcast", "load-peak", "logits", "merge", "optimizer-states",
    "optimizer-step", "quantize-peak",
    "replicated", "resume-states", "save-gather", "stale-checkpoint", "zero3-init",
])  # fmt: skip
# causes that the user's own lines may name without showing them: never certain
NAMED_BY_CODE: frozenset[Cause] = frozenset(
    ["companion-models", "group-batch", "kv-cache", "pairs", "ranks-on-one-gpu", "reference-model"]
)
STRETCH = 2000  # characters around a match of a sign's first pattern in which its others must match
MOST_TRIES = 20  # matches of the first pattern that are tried
SHARE_FRAGMENTED = 0.05  # of the card. Source: reports with more than 5 to 10 % of it reserved but unallocated
SHARE_PIECES = 0.02  # of the card: more than any full card has in pieces, and more than small requests need
CONTEXT = 1 * GIB  # bytes of one process without NCCL: contexts take 0.1 to 0.6 GiB, and kernels more
ORDINARY_REST = 4 * CONTEXT  # with NCCL, whose buffers take 0.5 to 1 GiB for each process group
CONTEXT_OF_A_RANK = (200 * MIB, 1500 * MIB)  # what the bare context of another rank takes; training takes more
HUGE = 0.3  # of the card: a request that is surely a single large tensor
ONE_BLOCK = 4 * GIB  # bytes of one allocation on Arc cards, where Level Zero's limit is not relaxed
SMALL_REST, LARGE_REST = 0.1, 1.0  # of the bytes in tensors: from which other memory of the process counts, and most
STARTED = 16  # largest distance of the process ids that one launcher starts
FILLED = 0.75  # of the card: when a model comes to it, what has been taken are weights
OVERSIZED = 74  # weight of a request larger than the card: which tensor it was may be known better
MOVING_FRAMES = 12  # innermost frames that show whether a model is moved or sharded
OVER = 1.02  # of the card: more than it has, beyond the rounding of printed sizes


def clues(evidence: Evidence) -> list[Clue]:
    """Return everything that a text, its messages and its figures point at."""
    found = [clue for sign in SIGNS if (clue := _matched(sign, evidence))]
    if evidence.memory is not None:  # a traceback shows who asked last, a history who filled the card
        found = [replace(clue, weight=min(clue.weight, STRONG - 1), measured=False) for clue in found]
    for message in evidence.messages:
        found += [clue for rule in RULES if (clue := rule(message, evidence))]
    found += [clue for figure in FIGURES if (clue := figure(evidence))]
    if went_on(evidence) is None:
        return found
    smaller = smaller_batch(evidence)  # and the retry kept no tensors alive
    return [*(clue for clue in found if clue.cause != "exception"), *([smaller] if smaller else [])]


def _matched(sign: Sign, evidence: Evidence) -> Clue | None:
    if sign.at and evidence.when not in sign.at:
        return None
    shown, named = sign.cause in SHOWN_BY_FRAMES, sign.cause in NAMED_BY_CODE
    text = evidence.relevant if shown or named else evidence.outside_code
    if sign.forbidden and sign.forbidden.search(text):
        return None
    hits = _together(sign.patterns, text)
    if hits is None:
        return None
    words = ", ".join(repr(hit[0][:80]) for hit in hits)
    proof = Proof(f"the text has {words}" if words else f"it failed in the phase: {evidence.when}")
    measured = shown and bool(evidence.frames) and all(pattern.search(evidence.failure) for pattern in sign.patterns)
    only_code = named and not all(pattern.search(evidence.outside_code) for pattern in sign.patterns)
    return Clue(sign.cause, min(sign.weight, STRONG) if only_code else sign.weight, proof, measured=measured)


def _together(patterns: Sequence[re.Pattern[str]], text: str) -> list[re.Match[str]] | None:
    """Return a match of each pattern within one stretch of the text; further apart they do not belong together."""
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
    if not m.unallocated or evidence.memory:  # a history shows it exactly
        return None
    if not total:
        proof = Proof(f"{human(m.unallocated)} are reserved without a tensor", m.unallocated)
        return Clue("fragmentation", 80, proof) if m.unallocated >= max(m.tried or 0, GIB) else None
    share = m.unallocated / total
    enough = m.tried is not None and m.unallocated + (m.free or 0) >= m.tried
    if not enough:
        return None
    tried = m.tried or 0
    sizes = (
        f"{human(m.unallocated)} are reserved without a tensor, {share:.0%} of the card; {human(tried)} were requested"
    )
    proof = Proof(sizes, m.unallocated)
    if share >= SHARE_FRAGMENTED and tried <= m.unallocated:
        return Clue("fragmentation", 84, proof)  # not certain: another cause may have left the pieces
    if min(share, tried / total) >= SHARE_PIECES:  # a large request that had room, though not in one piece
        return Clue("fragmentation", WEAK, proof)
    return None if share < SHARE_PIECES and tried else Clue("fragmentation", FAINT, proof)


def _others(m: Message, evidence: Evidence) -> Clue | None:
    """Judge the other processes that the message names: bare contexts are of ranks that went to the wrong card."""
    if m.limited:
        return None
    real = [size for _, size in m.others if size < WSL]
    low, high = CONTEXT_OF_A_RANK
    if len(real) > 1 and all(low <= size <= high for size in real):
        proof = Proof(f"{len(real)} processes hold about {human(real[0])} each, the size of a bare context", sum(real))
        return Clue("ranks-on-one-gpu", SURE, proof)
    like = sorted(real)[-2:]
    if len(like) == 2 and like[0] >= max(CONTEXT, ALIKE * like[1]):
        proof = Proof(f"{len(real)} processes hold about as much of the card each", sum(real))
        return Clue("ranks-on-one-gpu", 80, proof)
    if (ranks := _siblings(m, real)) is not None:
        return ranks
    foreign = _foreign(m, real)
    if not foreign or not m.total or foreign < CONTEXT or foreign < 0.1 * m.total:
        return None
    weight = SURE + 5 if m.allocated == 0 else SURE  # this process had nothing yet
    return Clue("other-process", weight, Proof(f"{human(foreign)} of the card are held by {_named(m, real)}", foreign))


def _siblings(m: Message, real: list[int]) -> Clue | None:
    """Return a clue for several other processes of one size that were started together: ranks, or data loaders."""
    own = _own(m, real)
    beside = [(process, size) for process, size in m.others if size < WSL and size != own]
    sizes, numbers = [size for _, size in beside], [process for process, _ in m.others]
    if len(beside) < 2 or min(sizes) < ALIKE * max(sizes) or max(numbers) - min(numbers) > STARTED:
        return None
    proof = Proof(f"{len(beside)} processes started beside this one hold {human(sizes[0])} each", sum(sizes))
    return Clue("ranks-on-one-gpu", FIRM, proof)


def _own(m: Message, real: list[int]) -> int:
    """Return the bytes of the row that is this process, 0 for none: a message with `in_process` lists only others."""
    if m.in_process is not None or not m.reserved or not real:
        return 0
    return min(
        (size for size in real if size >= m.reserved), key=lambda size: size - (m.reserved or 0), default=max(real)
    )


def _foreign(m: Message, real: list[int]) -> int:
    """Return the bytes of other processes. A single row may be this process."""
    held = sum(real) - _own(m, real)
    if m.in_process is not None:
        return max(held, m.total - m.free - m.in_process) if m.total is not None and m.free is not None else held
    return held if m.reserved else 0


def _named(m: Message, real: list[int]) -> str:
    """Return 'process 3021' for a single other process, else 'other processes'."""
    own = _own(m, real)
    others = [(process, size) for process, size in m.others if size < WSL and size != own]
    return f"process {others[0][0]}" if len(others) == 1 else "other processes"


def _spilled(m: Message, evidence: Evidence) -> Clue | None:
    if m.total and m.kind != "mps" and (m.allocated or 0) > OVER * m.total:
        held = f"{human(m.allocated or 0)} are allocated on a card of {human(m.total)}"
        sizes = f"{held}: the rest is in the host's memory"
        return Clue("spill", 84, Proof(sizes, (m.allocated or 0) - m.total))
    if not any(size >= WSL for _, size in m.others) and (m.in_process or 0) < WSL:
        return None
    return Clue("spill", STRONG, Proof("17179869184 GiB is what Windows reports where it does not know a size"))


def _outside(m: Message, evidence: Evidence) -> Clue | None:
    """Return a clue for memory of this process that is not PyTorch's: contexts, NCCL, an engine's own allocator."""
    if m.in_process is None:
        return _elsewhere(m, evidence)
    if m.reserved is None or m.in_process >= WSL:
        return None
    rest = m.in_process - m.reserved
    if rest < max(ORDINARY_REST, SMALL_REST * (m.allocated or 0)):  # tensors hold the card
        return None
    tensors = f", beside {human(m.allocated)} of tensors" if m.allocated else ""
    proof = Proof(f"{human(rest)} of this process are not PyTorch's{tensors}: contexts, NCCL, other libraries", rest)
    return Clue("nccl", STRONG if rest >= LARGE_REST * (m.allocated or 0) else WEAK, proof)


def _elsewhere(m: Message, evidence: Evidence) -> Clue | None:
    """Judge the rest of the card in messages before torch 2.1, which do not name its owner: other ranks, if any."""
    if not m.total or m.free is None or m.allocated is None or m.limited:
        return None
    rest = m.total - m.free - (m.reserved or m.allocated)
    if rest < max(2 * CONTEXT, (0.2 if m.reserved else 0.5) * m.total):
        return None
    proof = Proof(f"{human(rest)} of the card do not belong to this allocator", rest)
    cause: Cause = "ranks-on-one-gpu" if SEVERAL.search(evidence.text) else "other-process"
    return Clue(cause, 76, proof)


# a killed process that did not give the card's memory back: the host did not run out
_LEFT_BEHIND = re.compile(
    r"(?:gpu|video|card|vram)(?:'?s)? ?memory (?:\w+ ){0,2}(?:stays?|remains?|still|kept|not (?:be )?(?:freed|"
    r"released))"
)

# a signal alone may come from a person or a scheduler
_HOST_ERROR = re.compile(r"cpuallocator|unable to allocate|memoryerror|oom-kill|killed process|cannot allocate memory")


def _on_the_host(m: Message, evidence: Evidence) -> Clue | None:
    if m.kind != "host" or _LEFT_BEHIND.search(evidence.text):
        return None
    alone = all(other.kind == "host" for other in evidence.messages)
    if many := processes_of(evidence.text):
        proof = f"it was killed while {many} processes prepared the dataset, each with a share of it in host memory"
        return Clue("host-ram", SURE if alone else STRONG, Proof(proof), measured=False)
    named = _HOST_ERROR.search(evidence.text) is not None
    proof = "the error is about the host's memory" if named else "it was killed from outside, without an error"
    return Clue("host-ram", 88 if alone else STRONG, Proof(proof), measured=named)


def _engine(m: Message, evidence: Evidence) -> Clue | None:
    return Clue("inference-engine", SURE, Proof("the message is vLLM's own")) if m.kind == "vllm" else None


def _one_request(m: Message, evidence: Evidence) -> Clue | None:
    """Return a clue where an evaluation requests much of the card at once: for its batch, not for what it gathered."""
    tried = m.tried or 0
    if m.total and tried >= HUGE * m.total and evidence.when == "eval":
        return Clue("eval-batch", 62, Proof(f"one request of {tried / m.total:.0%} of the card", tried))
    return None


_WHERE = {"eval": " in the evaluation", "loss": " in the loss", "forward": " in the forward pass",
          "backward": " in the backward pass", "optimizer": " in the optimizer step"}  # fmt: skip
_PLATFORM = {"mps": "Metal makes no single buffer of", "xpu": "this platform makes no single allocation of"}


def _oversized(m: Message, evidence: Evidence) -> Clue | None:
    """Return a clue where one request is more than the card has, or than its platform allocates at once."""
    tried = m.tried or 0
    at = f", requested at {evidence.frames[-1].short}" if evidence.frames else ""
    at += _WHERE.get(evidence.when, "")
    if m.too_large:
        what = _PLATFORM.get(m.kind, "no single allocation may have")
        return Clue("oversized", SURE, Proof(f"{what} {human(tried)}{at}", tried), evidence.line)
    enough = m.total is not None and m.total - (m.allocated or 0) >= tried
    if m.kind == "xpu" and tried > ONE_BLOCK and enough:
        sizes = f"{human(tried)} in one piece{at}: Arc cards allocate at most 4 GiB at once, and enough is free"
        return Clue("oversized", FIRM, Proof(sizes, tried), evidence.line)
    if m.total and tried > m.total and evidence.memory is None:  # a history shows what the tensor is
        proof = Proof(f"one tensor of {human(tried)}{at}; the whole card has {human(m.total)}", tried)
        return Clue("oversized", OVERSIZED, proof, evidence.line)
    return None


_SHARDING = re.compile(r"distributed/fsdp|fsdp2?_|fully_shard|distribute_tensor|deepspeed/runtime/zero")
_MOVING = re.compile(r"_apply|\bconvert\b|\.to\(|\.cuda\(|dispatch_model|set_module_tensor")


def _weights_alone(m: Message, evidence: Evidence) -> Clue | None:
    """Return a clue where the card was full of tensors while a model moved there, or before FSDP had sharded it."""
    if not m.allocated or not m.total or evidence.memory or evidence.when not in ("load", "prepare", "init"):
        return None
    if m.allocated < FILLED * m.total:
        return None
    sizes = f"{human(m.allocated or 0)} of {human(m.total or 0)}"
    inner = " ".join(f"{f.path.replace(chr(92), '/')} {f.function} {f.code}" for f in evidence.frames[-MOVING_FRAMES:])
    if _SHARDING.search(inner.lower()):
        proof = Proof(f"{sizes} were weights before FSDP had sharded them: each rank begins with all", m.allocated)
        return Clue("load-peak", FIRM + 2, proof)
    if _MOVING.search(inner):
        proof = Proof(f"{sizes} were taken when a model was still being moved there", m.allocated)
        return Clue("capacity", STRONG + 2, proof)
    return None


def _communicator(m: Message, evidence: Evidence) -> Clue | None:
    proof = Proof("the message is NCCL's own: there was no room for its buffers")
    return Clue("nccl", 80, proof) if m.kind == "nccl" else None


RULES: tuple[Callable[[Message, Evidence], Clue | None], ...] = (
    _fragmented, _others, _spilled, _outside, _on_the_host, _engine, _one_request, _oversized, _weights_alone,
    _communicator,
)  # fmt: skip
