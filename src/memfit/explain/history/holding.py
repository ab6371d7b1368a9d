"""Clues from what keeps tensors alive: the program's variables, models, optimizers and errors, and earlier passes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from memfit.explain.evidence import FIRM, KEEPERS, OTHER_MODEL, REFERENCE, SHOWN, SURE, WEAK, Clue, Evidence, Root
from memfit.explain.memory import LASTING, Memory
from memfit.nouns.finding import Cause, Proof
from memfit.nouns.tape import GRADIENTS_ON
from memfit.units import human

LEAST_SHARE = 0.10  # share of what is alive from which a holder counts
HALF = 0.5  # share of what is kept from which a variable is its keeper
MOST_OF_IT = 0.60  # share of what is alive from which what is kept explains the failure
LAYER = 5  # tensors that a layer called by itself keeps for the backward pass, at most; whole models keep more
GROWS = 1.5  # largest over mean size of tensors that grow from one to the next

# begin the labels of what a library function made: read from a file, copied, cached while generating
FROM_FILE, COPIED, OF_CACHE = "torch.load", "deepcopy", "DynamicCache"
_CACHE = re.compile(r"past|key_value|\bkv|kv_?cache|dynamiccache", re.IGNORECASE)
_CHECKPOINT = re.compile(r"checkpoint|ckpt|state|saved|resume|loaded", re.IGNORECASE)
_MOMENTS = re.compile(r"moment|velocit|exp_avg|sq_avg|^[mv]s?$", re.IGNORECASE)


def _earlier_models(m: Memory, e: Evidence) -> Clue | None:
    """Return a clue for models or optimizers of earlier experiments or stages that are still alive."""
    size, line = m.repeated
    error = e.root("exception")
    if size < max(LEAST_SHARE * m.requested, m.asked) or (error is not None and error.bytes >= HALF * size):
        return None
    root = e.root("models")
    size = max(size, root.bytes if root else 0)
    kept = f"{human(size)} belong to earlier models and optimizers that are still kept"
    proof = Proof(f"{kept}, by '{root.name}'" if root else kept, size)
    return Clue("leak", SURE + 3 * SHOWN, proof, root.line if root else line)


def _leaking(m: Memory, e: Evidence) -> Clue | None:
    if m.steady:
        return None
    held, grown = sum(g.old for g in m.kept), _extra_demand(m)
    explains = held >= m.asked or held + grown >= MOST_OF_IT * m.requested
    if not m.kept or held < LEAST_SHARE * m.requested or not explains:
        return _growing(m)
    most = max(m.kept, key=lambda g: g.old)
    passes = len([t for t in most.turns if 0 <= t < m.turn])
    where = most.line or most.module
    proof = Proof(f"{human(held)} of {passes} earlier forward passes are still alive, allocated at {where}", held)
    root = e.root(*KEEPERS)
    if root is not None and root.bytes < HALF * held:
        root = None
    grows = most.module.endswith("cat") and most.largest * most.count > GROWS * most.bytes  # one token more each time
    grows |= bool(_CACHE.match(most.module))
    cause = "kv-cache" if grows and m.instant != GRADIENTS_ON else _kept_by(root, m)
    # before a backward has run, all of them may still wait for it, unless a variable shows who keeps them
    sure = root is not None or m.phase == "eval" or m.outlived
    if cause == "leak" and not (sure or m.losses or any(m.trained)):  # a loop over layers looks like this
        if sum(g.count for g in m.kept) > LAYER * m.turn:
            return Clue(cause, WEAK + 4, proof, most.line)
        proof = Proof(f"{human(held)} made at {where} wait for a backward, in a loop that makes no loss", held)
        return Clue("activations", WEAK + SHOWN, proof, most.line)
    return Clue(cause, SURE + SHOWN if sure else FIRM, proof, (root.line if root else "") or most.line)


def _growing(m: Memory) -> Clue | None:
    """Return a clue for a tensor that every pass recreates larger."""
    grown, most = m.growing
    if most is None or grown < LEAST_SHARE * m.requested:
        return None
    where = most.line or most.module
    proof = Proof(f"every pass begins with more than the one before: the tensor of {where} is recreated larger", grown)
    return Clue(_kept_by(None, m), SURE + SHOWN, proof, most.line)


def _extra_demand(m: Memory) -> int:
    """Return how much more this pass needs than the least of those like it: it may read what is kept."""
    needs = [m.peaks[t] - m.floors[t] for t in range(m.turn) if m.evals[t] == m.evals[m.turn]]
    return max(m.requested + m.asked - m.floors[m.turn] - min(needs), 0) if needs else 0


def _kept_by(root: Root | None, m: Memory) -> Cause:
    """Return the cause, by what a variable keeps."""
    if root is not None and _CACHE.search(f"{root.name} {root.of}"):
        return "kv-cache"
    if m.phase == "eval" and not m.older_than_training:
        graph = m.instant == GRADIENTS_ON or (root is not None and root.what == "graph")
        return "eval-graph" if graph else "eval-logits"
    if root is not None and root.what == "state" and not m.outlived:
        return "activations"  # all calls of one step wait for its backward
    return "leak"


def _large_variable(m: Memory, e: Evidence) -> Clue | None:
    """Return a clue for a variable that keeps much: a container of tensors, or a tensor with its whole graph."""
    root = e.root(*KEEPERS)
    if root is None or root.bytes < LEAST_SHARE * m.requested:
        return None
    proof = Proof(f"'{root.name}' keeps {root.count} tensors", root.bytes)
    if _loaded(root, m):
        return Clue("stale-checkpoint", SURE + SHOWN, proof, root.line)
    if root.copies:
        return _copied(root)
    earlier = any(0 <= t < m.turn for g in m.groups if g.role not in LASTING for t in g.turns)
    # a graph of the current pass alone: a recurrent net uses a weight often
    if root.what in ("graph", "state") and m.floors and not earlier:
        return None
    if root.count < 3 or root.bytes < (2 * LEAST_SHARE) * m.requested:
        return None
    before = sum(g.old for g in m.groups if g.role not in LASTING and any(0 <= t < m.turn for t in g.turns))
    fresh = root.what == "collection" and m.floors and before < HALF * root.bytes
    cause = _kept_by(root, m)
    if m.steady and cause == "leak":  # a full buffer, which was as large when there was room
        return Clue("temporaries", WEAK, proof, root.line)
    return Clue("temporaries" if fresh and cause == "leak" else cause, SURE, proof, root.line)


def _loaded(root: Root, m: Memory) -> bool:
    """Is this variable a checkpoint, by its name and by where its tensors come from?"""
    if root.what != "collection":
        return False
    read = sum(g.bytes for g in m.groups if g.module.startswith(FROM_FILE))
    if read >= HALF * root.bytes:
        return root.copies > 0 or _CHECKPOINT.search(root.name) is not None
    if not _CHECKPOINT.search(root.name):
        return False
    return m.turn < 0 or (root.copies > 0 and not m.kept and not m.from_training(root.bytes))


def _copied(root: Root) -> Clue:
    """Return a clue for a container with a tensor per weight: a copy, an average, hand-written optimizer states."""
    times = "" if root.copies == 1 else f" {root.copies} times over"
    proof = Proof(f"'{root.name}' has a tensor for each weight of the model{times}", root.bytes)
    cause: Cause = "two-copies" if root.copies == 1 else "leak"
    if _MOMENTS.search(root.name):
        cause = "optimizer-states"
    return Clue(cause, SURE + SHOWN, proof, root.line)


def _exception(m: Memory, e: Evidence) -> Clue | None:
    root = e.root("exception")
    if root is None or root.bytes < LEAST_SHARE * m.requested:
        return None
    proof = Proof(f"the traceback of '{root.name}' keeps {root.count} tensors", root.bytes)
    return Clue("exception", SURE + SHOWN + 5, proof, root.line)


def _of_a_failure(m: Memory, e: Evidence) -> Clue | None:
    """Return a clue for tensors that the kept traceback of a caught out-of-memory keeps alive."""
    caught = {turn for turn in m.caught if turn < m.turn}
    passing = (g for g in m.groups if g.role not in LASTING)
    size = sum(g.old for g in passing if set(g.turns) & caught and set(g.turns) <= {*caught, m.turn})
    if size < max(2 * LEAST_SHARE * m.requested, m.asked):
        return None
    return Clue("exception", FIRM, Proof("are left of earlier passes that ran out of memory and were caught", size))


def _copying(m: Memory, e: Evidence) -> Clue | None:
    """Return a clue where copying a model, or something as large, failed."""
    if not m.asker.startswith(COPIED):
        return None
    size = m.asked + sum(g.bytes for g in m.groups if g.module.startswith(COPIED) and g.line == m.line)
    if size < LEAST_SHARE * (m.requested + m.asked):
        return None
    return Clue("two-copies", SURE + SHOWN, Proof("belong to a copy that was being made (copy.deepcopy)", size), e.line)


def _two_models(m: Memory, e: Evidence) -> Clue | None:
    """Return a clue for two models of about one size, on the card or being moved there."""
    models = sorted(e.models, key=_all_weights, reverse=True)
    if len(models) < 2 or not _alike(models) or models[1].bytes < LEAST_SHARE * m.requested:
        return None
    second = next((root for root in models if OTHER_MODEL.search(root.name)), models[1])
    names = " and ".join(f"'{root.name}'" for root in models[:2])
    cause: Cause = "reference-model" if REFERENCE.search(second.name) else "two-copies"
    return Clue(cause, SURE + SHOWN - 1, Proof(f"{names} are both on the card", _all_weights(models[1])), second.line)


def _all_weights(model: Root) -> int:
    """Return the bytes of all weights of a model, on the card or still to be moved there."""
    return model.bytes + model.waiting


def _alike(models: Sequence[Root]) -> bool:
    return _all_weights(models[1]) >= HALF * _all_weights(models[0])


def _companions(m: Memory, e: Evidence) -> Clue | None:
    """Return a clue where frozen models hold most of the card, beside the one that is trained."""
    frozen = [root for root in e.models if not root.trained]
    size = sum(root.bytes for root in frozen)
    if not frozen or len(frozen) == len(e.models) or size < HALF * m.requested:
        return None
    reference = REFERENCE.search(frozen[0].name)
    two_alike = len(e.models) == 2 and _alike(sorted(e.models, key=_all_weights, reverse=True))
    if two_alike and not reference and m.phase == "load":
        return None  # which of two similar models will be trained is not known yet
    names = ", ".join(f"'{root.name}'" for root in frozen)
    cause: Cause = "reference-model" if reference else "companion-models"
    return Clue(cause, SURE + SHOWN, Proof(f"{names}: weights of models that are not trained", size), frozen[0].line)


def _wide(m: Memory, e: Evidence) -> Clue | None:
    """Return a clue for weights in 32 bits that would fit in 16, or in 64 that would fit in 32."""
    model = e.root("model")
    if model is None or m.capacity is None:
        return None
    if model.is_double and (m.requested + m.asked) // 2 <= m.capacity:
        sentence = f"{human(model.double)} of '{model.name}' are in 64 bits, and so is everything computed with it"
        proof = Proof(sentence, model.double)
        return Clue("wrong-dtype", SURE + SHOWN, proof, model.line)
    if model.wide < LEAST_SHARE * m.requested or m.phase != "load":
        return None
    wide = model.wide + (model.waiting if 2 * model.wide > model.bytes else 0)
    if m.requested + max(model.waiting, m.asked) - wide // 2 > m.capacity:
        return None
    proof = Proof(f"{human(wide)} of '{model.name}' are in 32 bits", wide)
    return Clue("wrong-dtype", SURE, proof, e.line, measured=not model.trained)  # training may need them in 32 bits


def _upcast(m: Memory, e: Evidence) -> Clue | None:
    """Return a clue for a model in 16 bits with an embedding or head in 32; trained adapters belong in 32 bits."""
    model = e.root("model")
    if model is None or model.wide > 0.9 * model.bytes:
        return None
    wide = max(model.wide - model.trained, 0) if model.trained < model.bytes else model.wide
    if wide < LEAST_SHARE * m.requested:
        return None
    proof = Proof(f"{human(wide)} of '{model.name}' are in 32 bits, the rest in fewer", wide)
    return Clue("kbit-upcast", SURE, proof, model.line)


HOLDING: Sequence[Callable[[Memory, Evidence], Clue | None]] = (
    _exception, _of_a_failure, _earlier_models, _leaking, _large_variable, _companions, _copying, _two_models, _wide,
    _upcast,
)  # fmt: skip
