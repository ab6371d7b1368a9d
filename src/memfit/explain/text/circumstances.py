"""Circumstances that a text shows beside the cause: nothing ran out on the card, the run went on, a limit was set."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from memfit.explain.evidence import Clue, Evidence
from memfit.explain.frames import is_printed
from memfit.explain.remedies import NONE
from memfit.nouns.finding import Proof, Remedy
from memfit.units import MIB, human

TOO_LARGE = 60  # weight of "activations" where a smaller batch went through: little else grows with the batch
RETRY = 800  # characters after an error in which its handler announces the next try
CARVED = 1.5  # times what HIP offers, from which the driver's figure is another pool of memory
POOLS = 0.25  # share of what is allocated from which private pools are reported

# the line of an error, quoted in a text that no program printed
_QUOTED = re.compile(r"\b[a-z_.]*(?:error|exception): ")
_RAN_OUT = re.compile(
    r"\boom|out of memory|outofmemory|tried to allocate|(?:unable|failed|not|can't|cannot) (?:to )?allocate|"
    r"not enough (?:\w+ ){0,3}(?:memory|v?ram)"
    r"|\b(?:ran|runs?|running) out\b(?! of time)|resource_?exhausted|bad_alloc|alloc_failed|"
    r"exceed\w* (?:\w+ ){0,2}memory|oom_kill"
    r"|paging file is too small|enough gpu ram|dataloader worker \(pid|no space left on device\W+/dev/shm"
    r"|invalid buffer size|memory block with size larger than|abruptly died during map"
    r"|exit ?code\W{1,4}-9\b|signal 9\b"  # of one process: torchrun and Slurm then stop the others by other signals
)
# mentions of an out-of-memory that did not happen
_AVOIDED = re.compile(
    r"\b(?:avoid\w*|prevent\w*|against|(?:risk|chance)s? of) (?:\w+ ){0,2}?(?:out[- ]of[- ]memory|outofmemory\w*|"
    r"oom\w*|running out)(?: errors?)?"
    r"|\boom[- ]?killer (?:is |was )?(?:disabled|off|not)\b"
)
_KILLED = re.compile(r"\bkilled\b|bus error")
_STOPPED = re.compile(
    r"due to time limit|due to preemption|\bcancelled (?:at|by)\b|keyboardinterrupt|(?<!closing signal )sigterm|"
    r"signal 15|exit ?code\W+-15"
)
# autograd's error where checkpointed blocks have no input that requires a gradient, which is one of the causes
_NO_GRADIENT = re.compile(r"does not require grad")
_LAST = re.compile(r".*(?:out of memory|outofmemory\w*|tried to allocate)")
_WENT_ON = re.compile(
    r"\b(?:train\w*|fit\w*)\W+(?:\w+\W+){0,3}?(?:complet\w+|finish\w+|done)\b|['\"]train_runtime|\bstep \d+:? loss"
    r"|\{['\"](?:eval_)?loss['\"]: "  # as transformers' Trainer prints it
)
_FAILED = re.compile(r"\w*error\b|traceback|\bkilled\b|exit ?code|\(failed")
_NEXT = re.compile(
    r"(?:retry\w*|try\w*|again|reduc\w+|decreas\w+|lower\w+|halv\w+|fall\w*|"
    r"drop\w*)[^.;:]{0,40}?(batch[ _]?size\W{0,4}(?:\w+ ){0,2}?\d+)"
)
_ON_CHIP = re.compile(
    r"out of resources?: shared memory,? required:? (\d+),? hardware limit:? (\d+)|out of resources?: shared memory"
)
# the memory of a card as the kernel's driver prints it
_SET_ASIDE = re.compile(r"\bamdgpu: vram: (\d{3,8})m\b|\bdetected vram ram=(\d{3,8})m\b")
_MIG = re.compile(r"\bmig (?:device )?\W?(\d+g\.\d+gb)|\bmig-[0-9a-f-]{8,}")


@dataclass(frozen=True, slots=True)
class Circumstance:
    """A fact beside the cause. `title` is used where no cause is known; `proof` and `remedies` precede the cause's."""

    title: str
    proof: Proof
    remedies: tuple[Remedy, ...] = ()


def ran_out(evidence: Evidence) -> bool:
    """Does the text report that memory ran out? A signal counts unless a person or a scheduler sent it."""
    happened = _AVOIDED.sub(" ", evidence.text)
    reported = happened == evidence.text or any(message.facts > 1 for message in evidence.messages)
    if (reported and any(message.kind != "host" for message in evidence.messages)) or _RAN_OUT.search(happened):
        return True
    if not reported:
        return False
    return bool(evidence.messages or _KILLED.search(evidence.text)) and not _STOPPED.search(evidence.text)


def ended_otherwise(evidence: Evidence) -> bool:
    """Is this a log in which no memory ran out?"""
    if evidence.memory is not None or evidence.clues:
        return False
    if not (is_printed(evidence.text) or _QUOTED.search(evidence.text)):
        return False
    return not (ran_out(evidence) or _NO_GRADIENT.search(evidence.text))


def only_on_chip(evidence: Evidence) -> bool:
    """Did only the on-chip memory of one block of a kernel run out, and none of the card's?"""
    return bool(evidence.messages) and all(message.kind == "on-chip" for message in evidence.messages)


def went_on(evidence: Evidence) -> str | None:
    """Return what a run tried after its last error ("batch size 16"), "" where it is not printed, None if it ended."""
    last = _LAST.match(evidence.text)
    if last is None or not is_printed(evidence.text):
        return None
    rest = evidence.text[last.end() :]
    if not _WENT_ON.search(rest) or _FAILED.search(rest):
        return None
    found = _NEXT.search(rest[:RETRY])
    return found[1] if found else ""


def smaller_batch(evidence: Evidence) -> Clue | None:
    """Return a clue where the same run went on with a smaller batch."""
    tried = went_on(evidence)
    if not tried:
        return None
    proof = Proof(f"with {tried} the run went on, so what grows with the batch was too much")
    return Clue("activations", TOO_LARGE, proof)


def circumstances(evidence: Evidence) -> tuple[Circumstance, ...]:
    """Return all circumstances that the text shows, the most important first."""
    return tuple(found for rule in _RULES if (found := rule(evidence)))


def _on_chip(evidence: Evidence) -> Circumstance | None:
    found = _ON_CHIP.search(evidence.text)
    if found is None or not only_on_chip(evidence):  # autotuning prints it too, and goes on
        return None
    sizes = f": {human(int(found[1]))} of {human(int(found[2]))}" if found[1] else ""
    return Circumstance(
        "a kernel needs more on-chip memory than there is; none of the card's memory ran out",
        Proof(f"'shared memory' here is the on-chip memory of one block of a Triton kernel{sizes}"),
        (Remedy("smaller block sizes (BLOCK_M, BLOCK_N) or fewer num_stages of the kernel; a newer triton", NONE),),
    )


def _recovered(evidence: Evidence) -> Circumstance | None:
    if went_on(evidence) is None:
        return None
    return Circumstance("the error was caught, and the run went on", Proof("the run went on after the error"))


def _ended_for_another_reason(evidence: Evidence) -> Circumstance | None:
    last = _LAST.match(evidence.text)
    if last is None or not is_printed(evidence.text):
        return None
    on, failed = _WENT_ON.search(evidence.text, last.end()), _FAILED.search(evidence.text, last.end())
    if on is None or failed is None or failed.start() < on.start():
        return None
    proof = Proof("the run went on after it, and ended for another reason")
    return Circumstance("memory ran out and the error was caught; something else ended the run", proof)


def _allowed(evidence: Evidence) -> Circumstance | None:
    m, memory = evidence.message, evidence.memory
    if m is not None and m.limited:
        allowed, free = m.allowed or 0, m.free or 0
    elif memory is not None and memory.barred:
        allowed, free = memory.limit, memory.barred
    else:
        return None
    limit = f"this process may use {human(allowed)}, and {human(free)} of the card are free"
    return Circumstance(
        "the limit that was set for this process was reached; the card is not full",
        Proof(limit, allowed),
        (Remedy("a larger torch.cuda.set_per_process_memory_fraction(...), or none", NONE),),
    )


def _pools(evidence: Evidence) -> Circumstance | None:
    m = evidence.message
    if m is None or not m.private or m.private < POOLS * (m.allocated or 0):
        return None
    return Circumstance(
        "private pools of CUDA graphs hold much of the memory",
        Proof(f"{human(m.private)} are in private pools of CUDA graphs, which nothing else can use", m.private),
        (Remedy("fewer captured shapes, one pool for all graphs (pool=), or no CUDA graphs", "slower launches"),),
    )


def _slice(evidence: Evidence) -> Circumstance | None:
    found = _MIG.search(evidence.text)
    if found is None:
        return None
    name = f" ({found[1]})" if found[1] else ""
    total = evidence.message.total if evidence.message else None
    proof = Proof(f"the card is a MIG slice of one{name}", total)
    return Circumstance("the process has only a slice of the card", proof)


def _carve_out(evidence: Evidence) -> Circumstance | None:
    """Return that HIP offers an APU less than the memory which the driver has set aside for it."""
    found, m = _SET_ASIDE.search(evidence.text), evidence.message
    if found is None or m is None or m.kind != "hip" or not m.total:
        return None
    aside = int(found[1] or found[2]) * MIB
    if aside < CARVED * m.total:
        return None
    sizes = f"the driver has {human(aside)} of VRAM, and HIP offers {human(m.total)}"
    return Circumstance(
        "HIP offers less than the memory that is set aside for the card",
        Proof(f"{sizes}: on an APU it counts the system memory it may map (GTT), not the carve-out", m.total),
        (Remedy("a smaller carve-out in the firmware and a larger GTT: ttm.pages_limit, amdgpu.gttsize",
            "memory of the host"),),
    )  # fmt: skip


_RULES: tuple[Callable[[Evidence], Circumstance | None], ...] = (
    _on_chip, _recovered, _ended_for_another_reason, _allowed, _pools, _carve_out, _slice,
)  # fmt: skip
