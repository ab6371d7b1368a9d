"""Clues from a recorded history: the tensors alive when memory ran out, their age, and what the current pass needs.

The current pass is compared with the passes before it. What it starts with beyond them was kept (a leak, optimizer
states); what it needs beyond them is its own (a longer sample, another batch).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from memfit.explain.evidence import FIRM, SAVED, SHOWN, STRONG, SURE, WEAK, Clue, Evidence
from memfit.explain.history.holding import COPIED, FROM_FILE, HOLDING, LEAST_SHARE, OF_CACHE
from memfit.explain.memory import LASTING, Group, Memory
from memfit.nouns.finding import Part, Proof
from memfit.nouns.tape import GRADIENTS_ON, LARGE_SEGMENT, WRITTEN
from memfit.units import human

MORE = 1.15  # a pass may need so many times what those before it needed and still be like them
LARGER = 1.25  # times as large as before, from which the tensors of an unfinished pass show that it needs more
ORDINARY = 0.05  # share of a full card that is in pieces in any run
# share of reserved memory that no healthy run leaves unused. Source: recorded runs, up to 0.2
CACHED = 0.25
ROUNDS = 0.1  # largest distance of the ratio of states to gradients from a whole number
ALONE = 0.5  # share of a card from which one request explains more than what is alive
SOME, MANY = 0.5, 4.5  # times the weights that a checkpoint has: from weights alone to states and master weights
# tensors of one line from which they are collected; a pass without gradients keeps those of two or three layers
COLLECTED = 5

_LOSS = re.compile(r"log_?softmax|cross_?entropy|nll_loss|logits|lm_head|convert_to_fp32", re.IGNORECASE)
_ATTENTION = re.compile(r"att(?:entio)?n|(?<!log_)(?<!log)softmax|scaled_dot_product", re.IGNORECASE)
_SOFTMAX = re.compile(r"(?<!log_)(?<!log)softmax", re.IGNORECASE)  # not that of a loss
# operators on score matrices, where the sizes match
_PRODUCTS = re.compile(r"\b(?:bmm|baddbmm|native_dropout)\b|Backward")
# a gradient that is surely one: without nodes and names, a history cannot tell it from the workspace of a backward
_NODE = re.compile(r"Backward\d")
_GRADIENT = re.compile(r"Backward\d|^gradient of ")
_STATES = re.compile(r"zero|full|exp_avg|momentum|_init_group", re.IGNORECASE)


def memory_clues(evidence: Evidence) -> list[Clue]:
    """Return everything that the history and the variables of the process point at."""
    memory = evidence.memory
    assert memory is not None
    found = (rule(memory, evidence) for rule in RULES)
    return [clue for clue in found if clue and clue.proof.bytes != 0]  # nothing alive proves nothing


def _fragmented(m: Memory, e: Evidence) -> Clue | None:
    if m.asked and m.capacity is not None:  # the rest of one or two segments is always unused
        free = m.capacity - m.allocated
        if free < m.asked + max(ORDINARY * m.capacity, 2 * LARGE_SEGMENT):
            return None
        kept = (0 if m.steady else sum(g.old for g in m.kept)) + m.repeated[0] + m.growing[0]
        if m.turn < 0 and free < m.asked + sum(root.waiting for root in e.models):
            return None
        proof = Proof(f"{human(free)} are free, but not in one piece of {human(m.asked)}", free)
        _, growing = m.growing
        remade = growing is not None and growing.line == m.line and m.asked > growing.largest
        if remade or free <= max(kept, _excess(m)):
            return Clue("fragmentation", WEAK + 10, proof)
        if (m.turn >= 0 and not m.passed) or m.asker.startswith(OF_CACHE):  # how much more was to come is not known
            return Clue("fragmentation", WEAK + 10, proof)
        if m.phase == "load" and not e.roots:  # nor does a file show it while loading
            return Clue("fragmentation", WEAK, proof)
        much = m.passed or free >= CACHED * m.capacity
        return Clue("fragmentation", SURE + SHOWN + 5 if much else FIRM, proof)
    idle = m.reserved - m.allocated
    if idle < max(CACHED * m.reserved, 2 * LARGE_SEGMENT):
        return None
    proof = Proof(f"{human(idle)} are reserved without a tensor, {idle / m.reserved:.0%}", idle)
    return Clue("fragmentation", WEAK, proof)


def _stepping(m: Memory, e: Evidence) -> Clue | None:
    if not m.instant.startswith("optimizer step") or m.asker.startswith((FROM_FILE, COPIED, OF_CACHE)):
        return None
    fresh = [g for g in m.groups if g.fresh]
    states = sum(g.fresh for g in fresh if g.role == "optimizer_states" or _STATES.search(g.module))
    passing = sum(g.fresh for g in fresh) - states
    inner = " ".join(f"{frame.function} {frame.code}" for frame in e.frames[-6:])
    making = bool(_STATES.search(inner + m.asker)) if inner or m.asker else states >= passing
    so_far = Proof(_states_so_far(m, states), states + m.asked)
    if making:
        return Clue("optimizer-states", SURE + SHOWN, so_far, e.line)
    times = None if inner else _times(m, states)
    if times is not None and times > 1 and abs(times - round(times)) > ROUNDS:
        return Clue("optimizer-states", FIRM, so_far, e.line)
    proof = Proof("temporaries of the optimizer step, beside existing states", passing + m.asked)
    return Clue("optimizer-step", FIRM if not inner and states and times is None else SURE + SHOWN, proof, e.line)


def _times(m: Memory, states: int) -> float | None:
    """Return the ratio of states to gradients, None if unknown. It is whole once every weight has its states."""
    gradients = sum(g.bytes for g in m.groups if g.role == "gradients" and _NODE.search(g.module))
    return states / gradients if gradients else None


def _states_so_far(m: Memory, made: int) -> str:
    """Describe the states that the first step has made, and how much they will be for all weights."""
    needed = _all_states(m)
    of = f" of {human(needed)} so far" if needed > made + m.asked else ""
    return f"the first step allocates the states: {human(made + m.asked)}{of}"


def _all_states(m: Memory) -> int:
    """Return the bytes of the states once every weight with a gradient has them, by those that do; 0 if unknown."""
    weights = {g.module: g for g in _joined(m, "parameters")}
    trained = {g.module.removeprefix("gradient of ") for g in m.groups if g.role == "gradients"} & weights.keys()
    # weight -> bytes of states per byte, by the largest tensors: some of a group may not have their states yet
    times: dict[str, float] = {}
    for g in _joined(m, "optimizer_states"):
        name = g.module.partition(" of ")[2]
        if name in trained:
            times[name] = times.get(name, 0) + g.largest / weights[name].largest
    stated = sum(weights[name].bytes for name in times)
    needed = sum(weights[name].bytes * many for name, many in times.items())
    return round(needed / stated * sum(weights[name].bytes for name in trained)) if stated else 0


def _joined(m: Memory, role: Part) -> list[Group]:
    """Return the groups of a role, merging those of one module that were allocated at several lines."""
    joined: dict[str, Group] = {}
    for g in (g for g in m.groups if g.role == role):
        one = joined.get(g.module, replace(g, bytes=0))
        joined[g.module] = replace(one, bytes=one.bytes + g.bytes, largest=max(one.largest, g.largest))
    return list(joined.values())


def _too_much(m: Memory, e: Evidence) -> Clue | None:
    """Return a clue where the first step shows that weights, gradients and all states are more than the card has."""
    states = _all_states(m) if m.instant.startswith("optimizer step") else 0
    need = m.of("parameters", "gradients") + states
    if not states or m.capacity is None or need <= m.capacity:
        return None
    needed = f"weights, gradients and {human(states)} of states need {human(need)}"
    proof = Proof(f"{needed}, the card has room for {human(m.capacity)}", need)
    return Clue("capacity", SURE - 5, proof, e.line)


def _demand(m: Memory) -> tuple[int, int]:
    """Return the bytes that the current pass needs, and the most that a pass before it needed."""
    return m.demand, max((m.peaks[t] - m.floors[t] for t in m.passed), default=m.demand)


def _excess(m: Memory) -> int:
    """Return by how many bytes the current pass exceeds every one before it, 0 where it is like them."""
    demand, before = _demand(m) if m.floors else (0, 0)
    demand = max(demand, round(m.scale * before))  # extrapolated from the tensors made so far
    return demand - before if demand > MORE * before else 0


def _saved_modules(m: Memory, e: Evidence) -> Clue | None:
    """Return a clue for modules that PEFT trains whole: copies with their own gradients and states."""
    part = e.root("part")
    size = max(sum(g.bytes for g in m.groups if SAVED in g.module), part.bytes if part else 0)
    if size < ALONE * m.requested:
        return None
    proof = Proof("weights, gradients and states of modules_to_save", size)
    return Clue("modules-to-save", SURE + SHOWN + 5, proof, part.line if part else e.line)


def _grown(m: Memory, e: Evidence) -> Clue | None:
    """Compare what this pass starts with, and what it needs, with earlier passes of its kind."""
    alike = [t for t in range(m.turn) if m.evals[t] == m.evals[m.turn]]
    if not alike or m.instant.startswith("optimizer") or m.phase == "load" or m.asker.startswith((FROM_FILE, COPIED)):
        return None
    demand, before = _demand(m)
    stepped = sum(m.trained[: m.turn]) > 1  # then a step had room beside the states
    floor = m.floors[m.turn] - m.batch - min(m.floors[t] for t in (alike[1:] if stepped else ()) or alike)
    if demand > MORE * before and demand - before > floor - m.of("optimizer_states") * (len(alike) == 1):
        proof = Proof(f"this pass needs {human(demand)}, none before it more than {human(before)}", demand - before)
        return Clue("eval-batch" if m.phase == "eval" else "long-sample", SURE + 2, proof, e.line)
    if m.passed and m.scale > LARGER:
        more = round((m.scale - 1) * before)
        sentence = f"its tensors are {m.scale:.1f} times as large as those of any pass before it, which needed less"
        proof = Proof(sentence, more)
        return Clue("eval-batch" if m.phase == "eval" else "long-sample", SURE, proof, e.line)
    states = m.of("optimizer_states")
    frozen = sum(root.bytes for root in e.models if not root.trained)
    if states < (frozen if e.models else m.of("parameters") - states):  # a file does not show which weights are trained
        return None
    if m.asked and states >= LEAST_SHARE * m.requested and floor >= 0.7 * states and len(alike) <= 2 and not stepped:
        proof = Proof(f"the first step had room; since its end there are {human(states)} of optimizer states", states)
        return Clue("optimizer-states", SURE + 3, proof, e.line)
    return None


def _resuming(m: Memory, e: Evidence) -> Clue | None:
    """Return a clue for a checkpoint that is read onto the card, beside a model and its optimizer."""
    if not m.asker.startswith(FROM_FILE):
        return None
    read = sum(g.bytes for g in m.groups if g.module.startswith(FROM_FILE)) + m.asked
    if not m.of("optimizer_states") or read < LEAST_SHARE * m.requested:
        return None
    proof = Proof("are being read from a file onto the card, beside the model and its states", read)
    return Clue("resume-states", SURE + SHOWN, proof, e.line)


def _read(m: Memory, e: Evidence) -> Clue | None:
    """Return a clue for tensors read from a file before the first pass that are about as large as the model."""
    held = [g for g in m.groups if g.module.startswith(FROM_FILE) and g.turns == (-1,)]
    size, weights = sum(g.bytes for g in held), m.of("parameters")
    if m.turn < 0 or size < 2 * LEAST_SHARE * m.requested or not SOME * weights <= size <= MANY * weights:
        return None
    proof = Proof("were read from a file and are still alive", size)
    return Clue("stale-checkpoint", SURE + SHOWN + 1, proof, held[0].line, measured=False)  # or data of that size


def _evaluating(m: Memory, e: Evidence) -> Clue | None:
    if m.phase != "eval":
        return None
    if m.instant == GRADIENTS_ON:
        return Clue("eval-graph", SURE, Proof("the evaluation runs with gradients on"), e.line)
    gradients = m.of("gradients")
    if gradients >= LEAST_SHARE * m.requested and gradients >= m.asked:
        known = any(_GRADIENT.search(g.module) for g in m.groups if g.role == "gradients")
        proof = Proof("gradients of training are still alive", gradients)
        return Clue("eval-leftovers", SURE if known else FIRM, proof, e.line)
    if m.scale > LARGER and any(m.trained) and not any(m.evals[: m.turn]):
        proof = Proof(f"its tensors are {m.scale:.1f} times as large as those of any training pass", m.demand)
        return Clue("eval-batch", SURE + SHOWN + 1, proof, e.line)
    cached = [g for g in m.groups if g.module.startswith(OF_CACHE)]  # each token is one pass
    size = sum(g.bytes for g in cached) + m.asked * m.asker.startswith(OF_CACHE)
    if size >= max(2 * LEAST_SHARE * m.requested, ALONE * m.demand):
        proof = Proof("keys and values of the cache, while the evaluation generates", size)
        return Clue("eval-generate", SURE, proof, e.line or (cached[0].line if cached else ""))
    alike = max(m.groups, key=lambda g: g.now, default=None)
    if alike and alike.recent >= COLLECTED and alike.now > 0.5 * m.demand:
        sentence = f"{alike.recent} tensors of {alike.line or alike.module} are kept, though no backward follows"
        proof = Proof(sentence, alike.now)
        return Clue("eval-logits", SURE - 5, proof, alike.line)
    trained = [m.peaks[t] - m.floors[t] for t in range(m.turn) if not m.evals[t]]
    if not trained:
        return None
    if m.demand > MORE * max(trained) and not m.kept:
        proof = Proof(f"this pass needs {human(m.demand)}, no training pass more than {human(max(trained))}", m.demand)
        return Clue("eval-batch", SURE, proof, e.line)
    proof = Proof("the evaluation's own batch does not fit beside the model", m.asked)
    return Clue("eval-batch", STRONG, proof, e.line)


def _share(m: Memory, pattern: re.Pattern[str]) -> tuple[int, str]:
    """Return the bytes of the current pass, with the failed request, where the pattern matches; and their main line."""
    working = [g for g in m.groups if (g.now or m.turn < 0) and g.role in ("activations", "temporaries")]
    found = [g for g in working if pattern.search(g.module)]
    asked = m.asked if pattern.search(m.asker) else 0
    lines: dict[str, int] = {}
    for g in [g for g in found if g.role == "activations"] or found:
        lines[g.line] = lines.get(g.line, 0) + g.bytes
    line = max(lines, key=lines.__getitem__, default="")
    return sum(g.now if m.turn >= 0 else g.bytes for g in found) + asked, line


def _logits(m: Memory, e: Evidence) -> Clue | None:
    size, line = _share(m, _LOSS)
    if size < 2 * LEAST_SHARE * (m.requested + m.asked):
        return None
    proof = Proof("logits and their copies in the loss", size)
    return Clue("logits", SURE, proof, e.line if e.when == "loss" else line)


def _attention(m: Memory, e: Evidence) -> Clue | None:
    """Return a clue for score matrices: without them attention does not hold most of what a pass keeps."""
    size, line = _share(m, _ATTENTION)
    wide = {g.largest for g in m.groups if _SOFTMAX.search(g.module)}
    scores = wide | {2 * s for s in wide} | {s // 2 for s in wide}  # in 16 bits and in 32
    like = (g for g in m.groups if g.largest in scores and _PRODUCTS.search(g.module))
    size += sum(g.now if m.turn >= 0 else g.bytes for g in like if not _ATTENTION.search(g.module))
    passing = sum(g.now for g in m.groups) if m.turn >= 0 else m.of("activations", "temporaries")
    if size < max(0.3 * (passing + m.asked), LEAST_SHARE * (m.requested + m.asked)):
        return None
    if not any(_SOFTMAX.search(text) for text in (*(g.module for g in m.groups), m.asker)) or _LOSS.search(m.asker):
        return None
    return Clue("attention", SURE - 3, Proof("score matrices and what is computed from them", size), line or e.line)


def _unrecorded(m: Memory, e: Evidence) -> Clue | None:
    """Return a clue where most of a peak is older than the history or has no stack; failures may show more."""
    if m.instant == WRITTEN:
        proof = Proof("no history was recorded: neither what came before nor whether this was the peak is known")
        return Clue("not-known", SURE + SHOWN, proof)
    size = m.of("unknown")
    if size < 0.5 * m.requested or not size:
        return None
    older = any(g.role == "unknown" and g.turns == (-1,) and g.label.startswith("before") for g in m.groups)
    why = "were allocated before the recording began" if older else "were recorded without a stack"
    proof = Proof(f"{human(size)} of {human(m.requested)} {why}", size)
    return Clue("not-known", WEAK if m.asked else SURE + SHOWN, proof)


def _mirror(m: Memory, e: Evidence) -> Clue | None:
    """Return a clue for a list with one tensor per weight: perturbations, an average, a copy."""
    weights = [(g.count, g.bytes) for g in m.groups if g.role == "parameters" and g.count >= 3]
    twin = next((g for g in m.groups if g.role == "temporaries" and (g.count, g.bytes) in weights), None)
    if twin is None or twin.bytes < LEAST_SHARE * m.requested:
        return None
    proof = Proof(f"{twin.count} tensors of {twin.module} are as many and as large as the parameters", twin.bytes)
    return Clue("two-copies" if twin.module.startswith("deepcopy") else "temporaries", STRONG, proof, twin.line)


def _data(m: Memory, e: Evidence) -> Clue | None:
    """Return a clue for what the program made before the first pass and still holds, usually its data."""
    born = (g for g in m.groups if g.role not in LASTING and g.role != "unknown" and g.turns == (-1,))
    most = max(born, key=lambda g: g.bytes, default=None)
    if most is None or most.bytes < ALONE * (m.requested + m.asked):
        return None
    model = e.root("model")
    if m.turn < 0 and (model is None or model.bytes >= LEAST_SHARE * m.requested):  # perhaps the model itself
        return None
    what = f"{most.count} tensors" if most.count > 1 else "one tensor"
    proof = Proof(f"{what} that the program made before the first forward pass", most.bytes)
    return Clue("temporaries", SURE + SHOWN - 2 if m.turn >= 0 else STRONG, proof, most.line)


def _room(m: Memory, e: Evidence) -> Clue | None:
    """Return the ordinary cause: too much stays between steps, or the pass keeps too much."""
    if m.of("unknown") >= 0.5 * m.requested > 0:
        return None
    lasting = m.of("parameters", "gradients", "optimizer_states")
    if m.phase == "load" and (m.of("parameters") or e.when == "load"):
        waiting = sum(root.waiting for root in e.models)
        need = (m.of("parameters") or m.requested) + max(waiting, m.asked)
        several = len(e.models) > 1 and max(root.bytes + root.waiting for root in e.models) <= m.limit  # each would fit
        sure = waiting and need > m.limit and not several
        return Clue("capacity", SURE - 2 if sure else WEAK + 10, Proof("the weights alone", need), e.line)
    if lasting >= 0.7 * m.limit:
        return Clue("capacity", STRONG, Proof("weights, gradients and optimizer states", lasting), e.line)
    working = [g for g in m.groups if g.role in ("activations", "temporaries") and (g.now or m.turn < 0)]
    size = sum(g.now if m.turn >= 0 else g.bytes for g in working)
    kept = sum(g.now if m.turn >= 0 else g.bytes for g in working if g.role == "activations")
    if m.asked >= ALONE * m.limit:
        return Clue("activations", WEAK, Proof("a single tensor is requested", m.asked), e.line)
    if not working or size < LEAST_SHARE * m.requested:
        mostly = lasting >= ALONE * m.limit
        proof = Proof("weights, gradients and optimizer states", lasting)
        return Clue("capacity", WEAK, proof, e.line) if mostly else None
    line = e.line or max(working, key=lambda g: g.bytes).line
    if kept >= 0.5 * size:
        return Clue("activations", WEAK + 10, Proof("kept for the backward pass", kept), line)
    if m.asked:  # it failed before a backward pass could show what is kept
        return Clue("activations", WEAK, Proof("made in this pass and still alive", size), line)
    what = "temporaries of the backward pass" if m.instant == "backward" else "not kept for a backward pass"
    return Clue("temporaries", WEAK + 10, Proof(what, size - kept), line)


RULES: Sequence[Callable[[Memory, Evidence], Clue | None]] = (
    _fragmented, *HOLDING, _stepping, _saved_modules, _too_much, _grown, _resuming, _read, _evaluating, _logits,
    _attention, _unrecorded, _mirror, _data, _room,
)  # fmt: skip
