"""Findings from a recorded history: who was alive when memory ran out, since when, and what the pass under way asks for.

The passes before the one that failed are its measure: what it starts with more than they did was kept (a leak, optimizer
states), what it asks for more than they did is its own (a longer sample, another batch).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from memfit.explain.clue import SHOWN, STRONG, SURE, TOLD, WEAK, Clue
from memfit.explain.evidence import KEEPERS, Evidence, Root
from memfit.explain.memory import Group, Memory
from memfit.finding import Cause, Proof
from memfit.tape import GRADIENTS_ON
from memfit.units import human

TELLS = 0.10  # share of what is alive from which a holder explains anything
MOST_OF_IT = 0.60  # share from which it explains nearly everything
MORE = 1.15  # what a pass may ask more than the ones before it and still be like them
ORDINARY = 0.05  # share of a full card that lies in pieces in any run
SEGMENT = 20 << 20  # bytes of an ordinary segment (kLargeBuffer); the rest of one or two is always there
# share of what is reserved that a healthy run leaves unused for a while. Source: recorded runs, up to 0.2
CACHED = 0.25
LASTING = ("parameters", "optimizer_states", "gradients", "workspace")
KEEPS = 0.5  # share of what a pass had at its highest that may be there when the next begins: outputs, a leak
ALONE = 0.5  # share of a card from which one request says more than all that is there
GROWS = 1.5  # how much larger the largest of many is than their mean where each is longer than the last
COLLECTED = 5  # tensors of one line from which they are collected; without gradients a pass keeps two or three layers'

_LOSS = re.compile(r"log_?softmax|cross_?entropy|nll_loss|logits|lm_head|convert_to_fp32", re.IGNORECASE)
_ATTENTION = re.compile(r"att(?:entio)?n|(?<!log_)softmax|scaled_dot_product", re.IGNORECASE)
_SOFTMAX = re.compile(r"(?<!log_)softmax", re.IGNORECASE)  # not a loss's
_PRODUCTS = re.compile(r"\b(?:bmm|baddbmm)\b|Backward")  # of score matrices, where they are as large
_STATES = re.compile(r"zeros|full|exp_avg|momentum|_init_group", re.IGNORECASE)
_CACHE = re.compile(r"past|key_value|\bkv|kv_?cache|dynamiccache", re.IGNORECASE)
_OTHER_MODEL = re.compile(r"\bref|teacher|ema|old|best|frozen|backup|copy", re.IGNORECASE)
_REFERENCE = re.compile(r"^ref|reference|teacher", re.IGNORECASE)
_CHECKPOINT = re.compile(r"checkpoint|ckpt|state|saved|resume|loaded", re.IGNORECASE)


def memory_clues(evidence: Evidence) -> list[Clue]:
    """Everything the history and the live process point at."""
    memory = evidence.memory
    assert memory is not None
    return [clue for rule in RULES if (clue := rule(memory, evidence))]


def _fragmented(m: Memory, e: Evidence) -> Clue | None:
    if m.asked and m.capacity is not None:
        free = m.capacity - m.allocated
        if free < m.asked + max(ORDINARY * m.capacity, 2 * SEGMENT):
            return None
        enough = (m.turn < 0 or _passed(m)) and free > sum(map(_old, _kept(m))) + m.repeated[0]
        proof = Proof(f"{human(free)} are free, but not in one piece of {human(m.asked)}", free)
        return Clue("fragmentation", SURE + SHOWN + 5 if enough else STRONG, proof)
    idle = m.reserved - m.allocated
    if idle < max(CACHED * m.reserved, 2 * SEGMENT):
        return None
    return Clue(
        "fragmentation", WEAK, Proof(f"{human(idle)} are reserved without a tensor, {idle / m.reserved:.0%}", idle)
    )


def _kept(m: Memory) -> list[Group]:
    """Places whose tensors of three earlier passes or more are alive: nothing of an ordinary step is."""
    return [g for g in m.groups if g.role not in LASTING and len([t for t in g.turns if 0 <= t < m.turn]) >= 2]


def _old(group: Group) -> int:
    return group.bytes - group.now


def _passed(m: Memory) -> list[int]:
    """The passes before the one under way that let go of what they made: those it can be measured by.

    A module that runs twice before one backward makes two, the first of which is not over when the second begins.
    """
    lasting = m.of("gradients", "optimizer_states")  # made in the first, and no part of its working memory

    def kept(t: int) -> int:
        return m.floors[t + 1] - m.floors[t] - lasting * (t == 0) - m.batch * (t == m.turn - 1)

    alike = [t for t in range(m.turn) if m.evals[t] == m.evals[m.turn]]
    return [t for t in alike if kept(t) <= KEEPS * (m.peaks[t] - m.floors[t])]


def _again(m: Memory, e: Evidence) -> Clue | None:
    """Experiments or stages, each with a model or an optimizer of its own, none of which is let go of."""
    size, line = m.repeated
    if size < max(TELLS * m.requested, m.asked):
        return None
    root = _root(e, "models")
    size = max(size, root.bytes if root else 0)
    said = f"{human(size)} of models and optimizer states are of earlier ones that are still kept"
    proof = Proof(f"{said}, by '{root.name}'" if root else said, size)
    return Clue("leak", SURE + 3 * SHOWN, proof, root.line if root else line)


def _leaking(m: Memory, e: Evidence) -> Clue | None:
    kept = _kept(m)
    held, grown = sum(map(_old, kept)), _swollen(m)
    explains = held >= m.asked or held + grown >= MOST_OF_IT * m.requested
    if not kept or held < TELLS * m.requested or not explains:
        return None
    most = max(kept, key=_old)
    passes = len([t for t in most.turns if 0 <= t < m.turn])
    proof = Proof(
        f"{human(held)} of {passes} earlier forward passes are still alive, born at {most.line or most.module}", held
    )
    root = _root(e, *KEEPERS)
    grows = most.module.endswith("cat") and most.largest * most.count > GROWS * most.bytes  # a token more each time
    cause = "kv-cache" if grows and m.instant != GRADIENTS_ON else _kept_by(root, m)
    # before the backward that all of them may wait for, only who keeps them tells
    sure = root is not None or m.phase == "eval" or _outlived(kept, m)
    return Clue(cause, SURE + SHOWN if sure else TOLD, proof, root.line if root else most.line)


def _swollen(m: Memory) -> int:
    """How much more the pass under way needs than the least of those like it: what is kept may be read again in every pass."""
    needs = [m.peaks[t] - m.floors[t] for t in range(m.turn) if m.evals[t] == m.evals[m.turn]]
    return max(m.requested + m.asked - m.floors[m.turn] - min(needs), 0) if needs else 0


def _outlived(kept: Sequence[Group], m: Memory) -> bool:
    """A backward came, and what was made before it is still there."""
    oldest = min((t for g in kept for t in g.turns if t >= 0), default=m.turn)
    return any(m.trained[oldest + 1 : m.turn])  # the batch of the first was made after the backward before it


def _kept_by(root: Root | None, m: Memory) -> Cause:
    """What it is that a variable keeps."""
    if m.phase == "eval":
        return "eval-graph" if m.instant == GRADIENTS_ON else "eval-logits"
    if root is not None and root.what == "state" and not _outlived(_kept(m), m):
        return "activations"  # unrolled: all calls of a step wait for its backward
    return "kv-cache" if root is not None and _CACHE.search(root.name) else "leak"


def _root(e: Evidence, *whats: str) -> Root | None:
    found = [root for root in e.roots if root.what in whats]
    return max(found, key=lambda root: root.bytes, default=None)


def _hoarded(m: Memory, e: Evidence) -> Clue | None:
    """A variable of the program that holds much: a container of tensors, or a tensor with its whole graph."""
    root = _root(e, *KEEPERS)
    if root is None or root.bytes < TELLS * m.requested:
        return None
    proof = Proof(f"'{root.name}' keeps {root.count} tensors", root.bytes)
    if _CHECKPOINT.search(root.name) and root.what == "collection" and m.turn < 1:
        return Clue("stale-checkpoint", SURE + SHOWN, proof, root.line)
    earlier = any(0 <= t < m.turn for g in m.groups if g.role not in LASTING for t in g.turns)
    # a graph of the pass under way alone: a recurrent net reaches a weight often
    if root.what in ("graph", "state") and m.floors and not earlier:
        return None
    if root.count < 3 or root.bytes < (2 * TELLS) * m.requested:
        return None
    return Clue(_kept_by(root, m), SURE, proof, root.line)


def _exception(m: Memory, e: Evidence) -> Clue | None:
    root = _root(e, "exception")
    if root is None or root.bytes < TELLS * m.requested:
        return None
    proof = Proof(f"the traceback of '{root.name}' keeps {root.count} tensors", root.bytes)
    return Clue("exception", SURE + SHOWN + 5, proof, root.line)


def _twice(m: Memory, e: Evidence) -> Clue | None:
    """Two models, or a model and a bare copy of its tensors."""
    models = sorted((root for root in e.roots if root.what == "model"), key=lambda root: -root.bytes)
    if len(models) < 2 or models[1].bytes < 0.5 * models[0].bytes or models[1].bytes < TELLS * m.requested:
        return None
    second = next((root for root in models if _OTHER_MODEL.search(root.name)), models[1])
    names = " and ".join(f"'{root.name}'" for root in models[:2])
    cause: Cause = "reference-model" if _REFERENCE.search(second.name) else "two-copies"
    return Clue(cause, SURE + SHOWN - 1, Proof(f"{names} are both on the card", models[1].bytes), second.line)


def _wide(m: Memory, e: Evidence) -> Clue | None:
    """Weights in 32 bits that would have had room in 16, or in 64 where 32 would do."""
    model = _root(e, "model")
    if model is None or m.capacity is None:
        return None
    if model.is_double and (m.requested + m.asked) // 2 <= m.capacity:
        proof = Proof(
            f"{human(model.double)} of '{model.name}' are in 64 bits, and so is all that it computes", model.double
        )
        return Clue("wrong-dtype", SURE + SHOWN, proof, model.line)
    if model.wide < TELLS * m.requested or m.phase != "load":
        return None
    if model.bytes - model.wide < model.wide or m.requested + m.asked - model.wide // 2 <= m.capacity:
        return Clue(
            "wrong-dtype", SURE, Proof(f"{human(model.wide)} of '{model.name}' are in 32 bits", model.wide), e.line
        )
    return None


def _upcast(m: Memory, e: Evidence) -> Clue | None:
    """A model in 16 bits whose embedding or head is in 32."""
    model = _root(e, "model")
    if model is None or not model.wide or model.wide > 0.9 * model.bytes or model.wide < TELLS * m.requested:
        return None
    return Clue(
        "kbit-upcast",
        SURE,
        Proof(f"{human(model.wide)} of '{model.name}' are in 32 bits, the rest is narrower", model.wide),
        model.line,
    )


def _stepping(m: Memory, e: Evidence) -> Clue | None:
    if not m.instant.startswith("optimizer step"):
        return None
    fresh = [g for g in m.groups if g.fresh]
    states = sum(g.fresh for g in fresh if g.role == "optimizer_states" or _STATES.search(g.module))
    passing = sum(g.fresh for g in fresh) - states
    inner = " ".join(f"{frame.function} {frame.code}" for frame in e.frames[-6:])
    makes = bool(_STATES.search(inner + m.asker)) if inner or m.asker else states >= passing
    if not makes:
        proof = Proof("temporaries of the step, beside states that are there", passing + m.asked)
        return Clue("optimizer-step", SURE + SHOWN, proof, e.line)
    return Clue("optimizer-states", SURE + SHOWN, Proof(_states_so_far(m, states), states + m.asked), e.line)


def _states_so_far(m: Memory, made: int) -> str:
    """What the first step has made, and what it comes to for all weights."""
    needed = _all_states(m)
    of = f" of {human(needed)} so far" if needed > made + m.asked else ""
    return f"the first step makes the states: {human(made + m.asked)}{of}"


def _all_states(m: Memory) -> int:
    """Bytes of the optimizer's states once every weight with a gradient has them, by the weights that have; 0: not told."""
    sizes: dict[tuple[str, str], tuple[int, int]] = {}
    for g in m.groups:
        count, size = sizes.get((g.role, g.module), (0, 0))
        sizes[g.role, g.module] = (count + g.count, size + g.bytes)
    trained = {
        name: sizes["parameters", name]
        for role, title in sizes
        if role == "gradients" and ("parameters", name := title.removeprefix("gradient of ")) in sizes
    }
    known = 0.0
    for (role, title), (count, size) in sizes.items():
        name = title.partition(" of ")[2]
        if role == "optimizer_states" and name in trained:
            known += size / count * trained[name][0]
    stated = {title.partition(" of ")[2] for role, title in sizes if role == "optimizer_states"}
    weights = sum(size for name, (_, size) in trained.items() if name in stated)
    return round(known / weights * sum(size for _, size in trained.values())) if weights else 0


def _too_much(m: Memory, e: Evidence) -> Clue | None:
    """The first step shows it: weights, gradients and all states are more than the card has."""
    states = _all_states(m) if m.instant.startswith("optimizer step") else 0
    need = m.of("parameters", "gradients") + states
    if not states or m.capacity is None or need <= m.capacity:
        return None
    said = f"weights, gradients and {human(states)} of states need {human(need)}, the card has room for {human(m.capacity)}"
    return Clue("capacity", SURE - 5, Proof(said, need), e.line)


def _grown(m: Memory, e: Evidence) -> Clue | None:
    """What this pass starts with, and asks for, more than an earlier one of its kind."""
    alike = [t for t in range(m.turn) if m.evals[t] == m.evals[m.turn]]
    if not alike or m.instant.startswith("optimizer") or m.phase == "load":
        return None
    demand = m.requested + m.asked - m.floors[m.turn]
    before = max((m.peaks[t] - m.floors[t] for t in _passed(m)), default=demand)
    stepped = sum(m.trained[: m.turn]) > 1  # the states are no news: a step had room beside them
    floor = m.floors[m.turn] - m.batch - min(m.floors[t] for t in (alike[1:] if stepped else ()) or alike)
    if demand > MORE * before and demand - before > floor - m.of("optimizer_states") * (len(alike) == 1):
        proof = Proof(f"this pass needs {human(demand)}, none before it more than {human(before)}", demand - before)
        return Clue("eval-batch" if m.phase == "eval" else "long-sample", SURE + 2, proof, e.line)
    states = m.of("optimizer_states")
    if m.asked and states >= TELLS * m.requested and floor >= 0.7 * states and len(alike) <= 2 and not stepped:
        proof = Proof(f"the first step had room; since it ended, {human(states)} of optimizer states are there", states)
        return Clue("optimizer-states", SURE + 3, proof, e.line)
    return None


def _evaluating(m: Memory, e: Evidence) -> Clue | None:
    if m.phase != "eval":
        return None
    if m.instant == GRADIENTS_ON:
        return Clue("eval-graph", SURE, Proof("the evaluation runs with gradients on"), e.line)
    gradients = m.of("gradients")
    if gradients >= TELLS * m.requested and gradients >= m.asked:
        return Clue("eval-leftovers", SURE, Proof("gradients of training are still there", gradients), e.line)
    alike = max(m.groups, key=lambda g: g.now, default=None)
    if alike and alike.count >= COLLECTED and alike.now > 0.5 * (m.requested + m.asked - m.floors[m.turn]):
        proof = Proof(
            f"{alike.count} tensors of {alike.line or alike.module} are kept, and no backward is to come", alike.now
        )
        return Clue("eval-logits", SURE - 5, proof, alike.line)
    trained = [m.peaks[t] - m.floors[t] for t in range(m.turn) if not m.evals[t]]
    if trained:
        return Clue(
            "eval-batch", STRONG, Proof("the evaluation's own batch does not fit beside the model", m.asked), e.line
        )
    return None


def _share(m: Memory, pattern: re.Pattern[str]) -> tuple[int, str]:
    """Bytes of the pass under way born at places that match, the failed request among them; and the largest's line."""
    found = [
        g
        for g in m.groups
        if (g.now or m.turn < 0) and g.role in ("activations", "temporaries") and pattern.search(g.module)
    ]
    asked = m.asked if pattern.search(m.asker) else 0
    lines: dict[str, int] = {}
    for g in [g for g in found if g.role == "activations"] or found:
        lines[g.line] = lines.get(g.line, 0) + g.bytes
    line = max(lines, key=lines.__getitem__, default="")
    return sum(g.now if m.turn >= 0 else g.bytes for g in found) + asked, line


def _logits(m: Memory, e: Evidence) -> Clue | None:
    size, line = _share(m, _LOSS)
    if size < 2 * TELLS * (m.requested + m.asked):
        return None
    return Clue(
        "logits", SURE, Proof("logits and their copies in the loss", size), e.line if e.when == "loss" else line
    )


def _attention(m: Memory, e: Evidence) -> Clue | None:
    """Only score matrices make attention's own places hold most of what a pass keeps."""
    size, line = _share(m, _ATTENTION)
    wide = {g.largest for g in m.groups if _SOFTMAX.search(g.module)}
    scores = wide | {2 * s for s in wide} | {s // 2 for s in wide}  # in 16 bits and in 32
    like = (g for g in m.groups if g.largest in scores and _PRODUCTS.search(g.module))
    size += sum(g.now if m.turn >= 0 else g.bytes for g in like if not _ATTENTION.search(g.module))
    passing = sum(g.now for g in m.groups) if m.turn >= 0 else m.of("activations", "temporaries")
    if size < max(0.3 * (passing + m.asked), TELLS * (m.requested + m.asked)):
        return None
    if not any(_SOFTMAX.search(text) for text in (*(g.module for g in m.groups), m.asker)) or _LOSS.search(m.asker):
        return None
    return Clue("attention", SURE - 3, Proof("score matrices and what is computed from them", size), line or e.line)


def _untold(m: Memory, e: Evidence) -> Clue | None:
    """Most of a peak is older than the history, or has no stack. (Of an out-of-memory the rest may still tell the cause.)"""
    size = m.of("unknown")
    if size < 0.5 * m.requested or not size:
        return None
    older = any(g.role == "unknown" and g.turns == (-1,) and g.label.startswith("before") for g in m.groups)
    why = "were there before the recording began" if older else "were recorded without a stack"
    proof = Proof(f"{human(size)} of {human(m.requested)} {why}", size)
    return Clue("not-known", WEAK if m.asked else SURE + SHOWN, proof)


def _mirror(m: Memory, e: Evidence) -> Clue | None:
    """A list with a tensor for each weight: perturbations, an average, a copy."""
    weights = [(g.count, g.bytes) for g in m.groups if g.role == "parameters" and g.count >= 3]
    twin = next((g for g in m.groups if g.role == "temporaries" and (g.count, g.bytes) in weights), None)
    if twin is None:
        return None
    proof = Proof(f"{twin.count} tensors of {twin.module} are as many and as large as the parameters", twin.bytes)
    return Clue("temporaries", STRONG, proof, twin.line)


def _room(m: Memory, e: Evidence) -> Clue | None:
    """Nothing special: what lasts, or what the pass keeps, is too much."""
    if m.of("unknown") >= 0.5 * m.requested > 0:
        return None
    lasting = m.of("parameters", "gradients", "optimizer_states")
    model, rest = _root(e, "model"), max(m.groups, key=lambda g: g.bytes, default=None)
    if m.turn < 0 and rest and rest.count > 2 and model is not None and model.bytes < TELLS * m.requested:
        proof = Proof(f"{rest.count} tensors that are none of the model's, before the first forward pass", rest.bytes)
        return Clue("temporaries", STRONG, proof, rest.line)
    if m.phase == "load" and (m.of("parameters") or e.when == "load"):
        return Clue("capacity", WEAK + 10, Proof("the weights alone", m.requested + m.asked), e.line)
    if lasting >= 0.7 * m.limit:
        return Clue("capacity", STRONG, Proof("weights, gradients and optimizer states", lasting), e.line)
    working = [g for g in m.groups if g.role in ("activations", "temporaries")]
    size, kept = sum(g.bytes for g in working), m.of("activations")
    if m.asked >= ALONE * m.limit:
        return Clue("activations", WEAK, Proof("a single tensor is asked for", m.asked), e.line)
    if not working or size < TELLS * m.requested:
        return None
    line = e.line or max(working, key=lambda g: g.bytes).line
    if kept >= 0.5 * size:
        return Clue("activations", WEAK + 10, Proof("kept for the backward pass", kept), line)
    if m.asked:  # it failed before a backward pass could show what it keeps
        return Clue("activations", WEAK, Proof("made in this pass and still alive", size), line)
    what = "temporaries of the backward pass" if m.instant == "backward" else "no backward pass keeps them"
    return Clue("temporaries", WEAK + 10, Proof(what, size - kept), line)


RULES: Sequence[Callable[[Memory, Evidence], Clue | None]] = (
    _fragmented, _exception, _again, _leaking, _hoarded, _twice, _wide, _upcast, _stepping, _too_much, _grown, _evaluating, _logits,
    _attention, _untold, _mirror, _room,
)  # fmt: skip
