"""A watched run as Evidence: its highest look, the roles that were told apart, and the leaks that were found."""

from __future__ import annotations

from memfit.explain.clue import SHOWN, SURE, Clue
from memfit.explain.evidence import Evidence
from memfit.explain.memory import Group, Memory
from memfit.nouns.finding import Proof
from memfit.nouns.sample import Leak, Watched
from memfit.units import human

BETWEEN = "there between steps"  # in place of a line: shares are measured then


def evidence_of(run: Watched) -> Evidence:
    """What the log of a watched run shows. A run without a look has no memory."""
    if not run.samples:
        return Evidence(seen=tuple(map(_leak, run.leaks)))
    top = max(run.samples, key=lambda sample: sample.peak.allocated)
    size = top.peak.allocated
    groups = [Group(role, BETWEEN, share, 1, share) for role, share in run.shares if share]
    rest = size - sum(group.bytes for group in groups)
    if rest > 0:
        groups.append(Group("unknown", "in a step, or not told apart", rest, 1, rest))
    reserved = max(top.peak.reserved, size) if run.header.meter == "cuda" else size  # others do not know it
    failed = next((alarm.bytes for alarm in run.alarms if alarm.kind == "failed"), 0)
    memory = Memory(size, size, reserved, run.header.total or None, failed, top.phase, "", tuple(groups))
    return Evidence(memory=memory, seen=tuple(map(_leak, run.leaks)))


def _leak(leak: Leak) -> Clue:
    """The line is that of who keeps most of it."""
    holder = leak.holders[0] if leak.holders else None
    kept = f", kept by '{holder.name}'" if holder else ""
    proof = Proof(f"{human(leak.per_step)} more every {leak.unit} since {leak.unit} {leak.since}{kept}", leak.bytes)
    return Clue("leak", SURE + SHOWN + 5, proof, holder.place if holder else "")
