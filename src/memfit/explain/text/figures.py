"""Clues from arithmetic on the numbers of a text, and the recipe that it states.

The numbers are those of the run (model, cards, sharding), sizes in messages and nvidia-smi's list of processes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

from memfit.errors import UnknownName
from memfit.explain.evidence import FAINT, STRONG, SURE, WEAK, Clue, Evidence
from memfit.explain.frames import Frame
from memfit.explain.text.circumstances import ran_out
from memfit.explain.text.signs import DIFFUSION, FOUR_BIT, FSDP, MANY, OPTIMIZER, PASS, VISION, ZERO3
from memfit.nouns.finding import Cause, Part, Proof
from memfit.tables.optimizers import optimizer
from memfit.units import GB, GIB, MIB, human, several

SAME = 0.01  # of a request: it is printed with three digits
MOST_OF_CARD = 0.25  # share of the card from which one request of a language model is hardly anything but logits
MANY_TOKENS = 100_000  # tokens of a vocabulary from which it surely is
# tokens of a filled or padded batch are multiples of it; one in ten other requests is such a multiple by chance
ROUND = 1024
BY_CHANCE = 45  # weight of such a request without a stated batch
HEADS = (8, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96)  # of attention, in models that are trained
LEAST_SCORES = GIB  # smaller requests are such a product by chance
PRINTED = 0.006 * GIB  # rounding of a size that is printed in GiB
IDLE = 1.25  # reserved over allocated bytes from which the difference counts; a healthy run has up to 1.2 for a while
LARGE = 3e9  # weights from which a model in full training is too large for many cards
HALF = 2.6  # bytes per weight that no model in 16 bits takes while it is loaded
STATES = 16  # bytes per weight of full training with AdamW: weights, gradients, two states, and their fp32 copies
ALIKE = 0.75  # processes of one run hold about the same, at least this share of each other
OF_EXPERTS = 0.835  # of "8x7B": the experts share the rest. Source: Mixtral-8x7B has 46.7 B, 8x22B 140.6 B

# billions of weights: neither a part of a path nor bytes per second
_BILLIONS = re.compile(r"(?<![\w./])(\d{1,4}(?:\.\d{1,3})?) ?b\b(?!\s?/)")
_MODEL = re.compile(r"(?<![\w.])[a-z][\w.]{0,40}-(?:\w+-){0,3}?(\d{1,4}(?:\.\d{1,3})?)b\b")
_EXPERTS = re.compile(r"(?<![\w.])(\d{1,3}) ?x ?(\d{1,3}(?:\.\d{1,2})?) ?b\b")
_CARDS = re.compile(
    r"(?<![\w.])(\d{1,4}) ?(?:x\b(?! ?\d+(?:\.\d+)? ?b\b)|x(?=\d)(?!\d+(?:\.\d+)? ?b\b)|\*(?= ?\w)|(?=gpus|cards))"
)
_SIZE = r"(?<![\w.])(\d{1,3}(?:\.\d{1,2})?) ?gi?b\b"
_MEASURED = re.compile(r"(?<![\w.])(\d{1,3}(?:\.\d{1,2})?) ?(gi?b)\b")
# the size of a card, next to its name or the number of cards
_CARD = re.compile(
    rf"(?:\b\d{{1,4}} ?x|[*×]|\b[abhlvt]?\d{{1,4}}s?(?: ti| sxm\d?| pcie| nvl)?|gpus?|cards?)\W{{1,3}}{_SIZE}"
    rf"|{_SIZE} (?:of )?(?:v?ram|gpus?|cards?|hbm|a100|h100|v100|nvidia|rtx)"
)
SEVERAL = re.compile(rf"{MANY}|\b[2-9]\d* ?x\b|\bgpus\b|{FSDP}|zero[-_ ]?[123]")
_LANGUAGE = re.compile(
    r"causallm|language model|\bllms?\b|llama|qwen|mistral|mixtral|gemma|\bphi-?\d|\bgpt|deepseek|\bglm|falcon|"
    r"\bopt-|bloom|pythia|olmo|smollm|granite|\bsft|\btrl\b|tokenizer|transformers/trainer"
)
_PICTURES = re.compile(rf"{VISION}|{DIFFUSION}|image|\bvision|pixel")
# the run trains; else a sum of everything that training keeps would be a guess
_TRAINING = re.compile(rf"train|\bsft\b|fine-?tun|{OPTIMIZER}|{FSDP}|zero")
# steps were printed before the failure, so weights and optimizer states had room
_STEPPED = re.compile(r"\{['\"]loss['\"]|\b(?:step|epoch)\W{0,3}\d+\W{1,3}(?:\w+\W{1,3}){0,2}loss|loss\W{1,3}\d+\.\d+")
SHARD_OF = (
    ("parameters", re.compile(rf"{ZERO3}|{FSDP}")),
    ("gradients", re.compile(r"zero[-_ ]?2|stage.{0,3}2\b")),
)
_TOKENS = re.compile(
    r"(?:seq\w*|len\w*|ctx|context|block\w*|cutoff\w*|tokens|max_length|max_words)\W{1,3}(\d{2,6})(k?)\b|"
    r"(?<![\w.])~?(\d{2,6})(k?)[ -](?:tokens|context|ctx)"
)
_BATCH = re.compile(r"(?:batch\w*(?: size)?|bs|mbs)\W{1,3}(\d{1,4})\b")
# tokens of the vocabulary, by the name of a model. Source: their config.json, within 0.1 % (multimodal Gemma 3 has a
# few more)
VOCABULARIES = tuple(
    (tokens, re.compile(names))
    for tokens, names in (
        (248_320, r"qwen[- _]?3\.5"), (152_064, r"qwen(?:1\.5|2(?:\.5)?)?-(?:vl-)?(?:7|14|32|72)b"),
        (151_936, r"qwen(?!\S*-image)"),
        (128_256, r"llama[- _]?3(?!\d)"), (262_144, r"medgemma|gemma[- _]?[34]"), (256_000, r"gemma"), (201_088,
        r"gpt-?oss"),
        (129_280, r"deepseek-?v3|deepseek-?r1(?!-distill)"), (131_072, r"ministral|devstral|mistral-?nemo|"
                                                                       r"mistral-small-24b"),
        (32_768, r"mistral-7b-(?:instruct-)?v0\.3|mistral-large|mistral-small|mixtral-8x22b"), (32_000,
        r"llama[- _]?2|mistral|mixtral|vicuna"),
    )
)  # fmt: skip
# GiB of cards that are named without their size, the larger where one name has two. Source:
# src/memfit/catalogue/gpus.toml
CARDS = tuple(
    (size, re.compile(rf"\b(?:rtx ?|gtx ?|tesla ?|nvidia ?)?(?:{names})\b"))
    for size, names in (
        (11, r"[12]080 ?ti"), (12, r"k80|3060(?! ?ti)|4070(?! ?ti super)"), (16, r"t4|p100|4080|4060 ?ti|a4000"),
        (24, r"[34]090(?: ?ti)?|l4|a10g?|a5000|titan rtx"),
        (32, r"v100|5090"), (48, r"a6000|6000 ada|a40|l40s?"), (80, r"a100|a800|h100(?! nvl)|h800"), (94,
        r"h100 nvl"), (96, r"h20|gh200"), (141, r"h200"),
        (180, r"g?b200"), (192, r"mi300x?"),
    )
)  # fmt: skip
# bytes on a card per weight of a model that is not trained whole, at the least; the first row that matches counts
FROZEN = (
    (0.55, re.compile(FOUR_BIT)),
    (1.05, re.compile(r"8[- ]?bit|int8|fp8")),
    (2.0, re.compile(r"\blora\b|peft|adapter|prefix|grpo|dora|freeze|frozen")),
)


@dataclass(frozen=True, slots=True)
class StatedRun:
    """What a text states of a run: weights, cards, bytes of each card, and bytes per weight over all cards."""

    weights: float
    cards: int
    each: int
    per_weight: float
    of_all: float  # bytes of weights, gradients and states of the whole model
    on_each: float  # the part of them on one card
    frozen: bool


def run_of(evidence: Evidence) -> StatedRun | None:
    """Return the run of a text that names model and card; None where the number of several cards is not stated."""
    text = evidence.text
    weights = _weights(text)
    message = evidence.message
    each = message.total if message and message.total else card_of(text)
    if not weights or not each:
        return None
    found = _CARDS.search(text)
    if found is None and SEVERAL.search(text):
        return None
    cards = int(found[1]) if found else 1
    frozen = next((size for size, pattern in FROZEN if pattern.search(text)), None)
    per_weight = frozen or STATES
    sharded = next((name for name, pattern in SHARD_OF if pattern.search(text)), "")
    per_card = {"parameters": per_weight / cards, "gradients": 2 + (per_weight - 2) / cards, "": per_weight}
    mine = per_weight if frozen and sharded == "gradients" else per_card[sharded]
    return StatedRun(weights, cards, each, per_weight, weights * per_weight, weights * mine, frozen is not None)


def card_of(text: str) -> int:
    """Return the bytes of the card that is named first, 0 for none."""
    if found := _CARD.search(text):
        return int(float(next(filter(None, found.groups()))) * GIB)
    return next((size * GIB for size, pattern in CARDS if pattern.search(text)), 0)


def _weights(text: str) -> float:
    """Return the weights of the model that is named first, 0 for none."""
    if found := _EXPERTS.search(text):
        return float(found[1]) * float(found[2]) * OF_EXPERTS * 1e9
    found = _MODEL.search(text) or _BILLIONS.search(text)
    return float(found[1]) * 1e9 if found else 0.0


def _measured(evidence: Evidence) -> Clue | None:
    """Return a clue for weights in 32 bits: a size of four bytes per weight, or of more than two while loading."""
    weights, m = _weights(evidence.text), evidence.message
    if evidence.when not in ("", "load", "prepare") or not weights:
        return None
    cards = [size for size in (card_of(evidence.text), m.total if m else None) if size]
    for found in _MEASURED.finditer(evidence.text):
        number = float(found[1])
        near = any(abs(number * GIB - card) <= 0.05 * card for card in cards)
        units = (GIB,) if found[2] == "gib" else (GB, GIB)
        size = next((int(number * unit) for unit in units if abs(unit * number / weights - 4) < 0.2), None)
        if size and not near:
            unit = "GiB" if found[2] == "gib" else "GB"
            proof = Proof(f"{number:g} {unit} are 4 bytes for each of {weights / 1e9:g} B weights", size)
            return Clue("wrong-dtype", 78, proof)
    held = m.allocated if m and evidence.when == "load" and evidence.frames else None
    if held and HALF < held / weights < 4.2:
        sizes = f"{human(held)} are allocated, {held / weights:.1f} B for each of {weights / 1e9:g} B weights, not 2"
        return Clue("wrong-dtype", 78, Proof(sizes, held))
    return None


# a part of a block: its activations may be as large as some logits
_LAYER = re.compile(
    r"\b(?:mlp|ffn|feed_forward|self_attn|attn|attention|experts|act_fn|gate_proj|up_proj|down_proj|[qkvo]_proj)\("
)


# a function of attention, and code that calls its kernel
_ATTENDS = re.compile(r"attention|attn|sdpa", re.IGNORECASE)
# a part of a model that sees images
_SEES = re.compile(r"visual|vision|siglip|intern_?vit|image_encoder|(?<![a-z])vit(?![a-z])", re.IGNORECASE)
_CALLS_IT = re.compile(r"(?:visual|vision_?(?:tower|model|encoder)?|image_encoder|\bvit)\(", re.IGNORECASE)
SEEING_FRAMES = 8  # innermost frames outside of PyTorch that show whose attention it is


def _inner(evidence: Evidence) -> Frame | None:
    """Return the innermost frame outside of PyTorch."""
    return next((f for f in reversed(evidence.frames) if "/torch/" not in f.path.replace("\\", "/")), None)


def _in_a_layer(frame: Frame) -> bool:
    """Did a part of a block fail, rather than the head of the model?"""
    return bool(_LAYER.search(frame.code) or _ATTENDS.search(f"{frame.function} {frame.code}"))


def _patches(evidence: Evidence) -> Clue | None:
    """Return a clue where attention over the patches of images failed: they grow with the pixels, and it squares."""
    inner, m = _inner(evidence), evidence.message
    if inner is None or m is None or evidence.when not in (*PASS, "eval"):
        return None
    near = [f for f in evidence.frames if "/torch/" not in f.path.replace("\\", "/")][-SEEING_FRAMES:]
    attends = next((f for f in near[::-1] if _ATTENDS.search(f"{f.function} {f.code}")), None)
    if attends is None or not (attends is inner or _ATTENDS.search(inner.path)):
        return None
    sees = any(_SEES.search(f"{f.function} {f.path.rsplit('/', 1)[-1]}") or _CALLS_IT.search(f.code) for f in near)
    if not sees or re.search(DIFFUSION, evidence.failure):
        return None
    large = m.tried and m.total and m.tried >= MOST_OF_CARD * m.total
    proof = Proof(f"attention over the patches of images failed, {attends.function} at {attends.short}", m.tried)
    return Clue("image-tokens", SURE + 6 if large else STRONG, proof, evidence.line)


def _logits(evidence: Evidence) -> Clue | None:
    """Return a clue for a request of tokens x vocabulary x bytes, or of much of the card by a language model."""
    m, words = evidence.message, vocabulary(evidence)
    inner = _inner(evidence)
    if m is None or not m.tried or evidence.when not in PASS or (inner is not None and _in_a_layer(inner)):
        return None
    share = m.tried / m.total if m.total else 0.0
    large = share >= MOST_OF_CARD
    of = f", {share:.0%} of the card" if large else ""
    if tokens := tokens_of(evidence):
        named = tokens in _tokens(evidence.text)
        width = min((4, 2), key=lambda width: abs(tokens * words * width - (m.tried or 0)))
        sizes = f"{human(m.tried)} are {tokens:,} tokens x {words:,} tokens of the vocabulary x {width} B{of}"
        return Clue("logits", 84 if named else 80 if large else BY_CHANCE, Proof(sizes, m.tried), measured=named)
    many = words >= MANY_TOKENS
    if large and (many or (_LANGUAGE.search(evidence.text) and not _PICTURES.search(evidence.text))):
        why = f", and {words:,} tokens in the vocabulary" if words else ""
        why = why or ": few other tensors of a language model are so large"
        return Clue("logits", 58 if many else 54, Proof(f"one request of {share:.0%} of the card{why}", m.tried))
    return None


def tokens_of(evidence: Evidence) -> int:
    """Return the tokens, of a stated batch or a round number, whose logits are the failed request; 0 for none."""
    m, words = evidence.message, vocabulary(evidence)
    if m is None or not m.tried or not words:
        return 0
    for tokens, width in product(_tokens(evidence.text), (4, 2)):
        if abs(tokens * words * width - m.tried) <= SAME * m.tried:
            return tokens
    for width in (4, 2) if words >= MANY_TOKENS and m.tried > GIB else ():
        tokens = ROUND * round(m.tried / (words * width * ROUND))
        if abs(tokens * words * width - m.tried) <= PRINTED:
            return tokens
    return 0


def _scores(evidence: Evidence) -> Clue | None:
    """Return a clue for a request of batch x heads x tokens x tokens x bytes: the attention scores of one layer."""
    m = evidence.message
    if m is None or not m.tried or m.tried < LEAST_SCORES or evidence.when not in PASS:
        return None
    batches = {int(found[1]) for found in _BATCH.finditer(evidence.text)} | {1}
    for tokens, batch, heads, width in product(_lengths(evidence.text), sorted(batches), HEADS, (2, 4)):
        if abs(batch * heads * tokens * tokens * width - m.tried) <= PRINTED:
            sizes = f"{human(m.tried)} are {batch} x {heads} heads x {tokens:,} x {tokens:,} x {width} B"
            return Clue("attention", 84, Proof(sizes, m.tried), measured=False)  # the number of heads is assumed
    return None


def vocabulary(evidence: Evidence) -> int:
    """Return the tokens of the model's vocabulary, 0 where it is not known."""
    return evidence.vocabulary or next((size for size, pattern in VOCABULARIES if pattern.search(evidence.text)), 0)


def _lengths(text: str) -> set[int]:
    return {int(found[1] or found[3]) * (1024 if found[2] or found[4] else 1) for found in _TOKENS.finditer(text)}


def _tokens(text: str) -> list[int]:
    """Return the numbers of tokens that a batch may have, by the lengths and batch sizes that are stated."""
    batches = {int(found[1]) for found in _BATCH.finditer(text)} | {1}
    return [length * batch for length, batch in product(sorted(_lengths(text))[-4:], sorted(batches)[:3])]


def _sizing(evidence: Evidence) -> Clue | None:
    """Return a clue where weights, gradients and optimizer states of the stated run leave no room for activations."""
    run, text = run_of(evidence), evidence.text
    if run is None or evidence.when in ("save", "merge", "resume", "predict", "load", "eval") or _STEPPED.search(text):
        return None
    share = run.on_each / run.each
    if share < 0.6:
        return None
    weight = 76 if share >= 0.75 else 66
    m = evidence.message
    one = m is not None and m.tried and m.total and m.tried >= MOST_OF_CARD * m.total
    if evidence.when == "loss" or (one and evidence.when in PASS):  # a forward pass had room, and no weight is so large
        weight = min(weight, 66)
    if not ran_out(evidence) or not _TRAINING.search(text):
        weight = WEAK
    cards = several(run.cards, "card")
    proof = f"{run.weights / 1e9:g} B weights x {run.per_weight:g} B over {cards}: {share:.0%} of each"
    whole_on_each = run.frozen and run.on_each == run.of_all and run.cards > 1
    fits_sharded = run.of_all < 0.75 * run.cards * run.each
    cause: Cause = "replicated" if whole_on_each and fits_sharded and SEVERAL.search(text) else "capacity"
    return Clue(cause, weight, Proof(proof, int(run.on_each)), measured=False)  # how the model is trained is assumed


# nvidia-smi's rows: card, process (one that computes), size
_LISTED = re.compile(r"(?<![\w.])(\d{1,2}) (?:n/a n/a )?(\d{3,8}) c(?:\+g)? (?:\S+ ){1,4}?(\d{1,6}) ?mib")


def _listed(evidence: Evidence) -> Clue | None:
    """Judge nvidia-smi's list of processes: one on two cards, one of them shared, went to the wrong card."""
    cards: dict[str, dict[str, int]] = {}
    for found in _LISTED.finditer(evidence.text):
        cards.setdefault(found[1], {})[found[2]] = int(found[3]) * MIB
    on = Counter(process for processes in cards.values() for process in processes)
    stray = {process for processes in cards.values() if len(processes) > 1 for process in processes if on[process] > 1}
    if not stray:
        return _together(cards) if evidence.messages else None
    return Clue("ranks-on-one-gpu", SURE, Proof(f"nvidia-smi lists {len(stray)} processes on more than one card"))


def _together(cards: dict[str, dict[str, int]]) -> Clue | None:
    """Judge two or more processes on one card: they belong to one run where they hold about the same."""
    card, rows = max(cards.items(), key=lambda pair: len(pair[1]), default=("", {}))
    if len(rows) < 2:
        return None
    cause: Cause = "ranks-on-one-gpu" if min(rows.values()) >= ALIKE * max(rows.values()) else "other-process"
    named = ", ".join(f"{human(size)} of process {process}" for process, size in rows.items())
    return Clue(cause, 76, Proof(f"nvidia-smi lists on card {card}: {named}", sum(rows.values())))


_IDLE = tuple(re.compile(rf"{name}\W+(?:\w+\W+){{0,4}}?([\d.,]+) ?([mg])i?b") for name in ("allocated", "reserved"))


def _idle(evidence: Evidence) -> Clue | None:
    """Return a clue where two printed figures, reserved and allocated bytes, are far apart."""
    found = [pattern.search(evidence.text) for pattern in _IDLE]
    if evidence.memory or evidence.when == "resume" or evidence.messages or not all(found):
        return None
    held, taken = (float(m[1].replace(",", "").strip(".")) * (GIB if m[2] == "g" else MIB) for m in found if m)
    if taken < IDLE * held:
        return None
    proof = Proof(f"{human(int(taken))} are reserved, {human(int(held))} of them allocated", int(taken - held))
    return Clue("fragmentation", 88, proof, measured=False)  # the figures may be of different moments


_REDUCER = re.compile(r"_ddp_init_helper|dist\.reducer")
BUCKETS = 0.8  # of all that is allocated, from which DDP's buckets are of all weights: every one is trained


def _buckets(evidence: Evidence) -> Clue | None:
    """Return a clue where DDP allocates its buckets: all gradients before the first step, whole on every card."""
    message = evidence.message
    if message is None or not message.tried or not message.allocated:
        return None
    if message.tried < BUCKETS * message.allocated or not _REDUCER.search(evidence.failure or evidence.text):
        return None
    sizes = f"every card holds {human(message.allocated)} of weights, and DDP's reducer requests as much for gradients"
    return Clue("replicated", SURE, Proof(sizes, message.allocated + message.tried))


MORE = 1.25  # times the estimate of a run's file, from which its settings do not explain what the run held


def _not_in_effect(evidence: Evidence) -> Clue | None:
    """Return a clue where the run held more than its own file needs, with the settings that could make up for it."""
    estimate, held = evidence.estimate, evidence.held
    if estimate is None or held <= MORE * estimate.need:
        return None
    could = [(name, size) for name, size in estimate.without if size >= held / MORE] or estimate.without
    if not could:
        return None
    named = ", ".join(f"without {name} {human(size)}" for name, size in could)
    sizes = f"the run held {human(held)}, and its file needs {human(estimate.need)} by memfit's estimate ({named})"
    off = ", ".join(name for name, _ in could[:-1]) + " or " * (len(could) > 1) + could[-1][0]
    return Clue("not-in-effect", 82, Proof(f"{sizes}: {off} was not in effect", held), measured=False)


# the cause by the role that holds most in memfit's estimate
_BY_ROLE: dict[Part, Cause] = {
    "parameters": "capacity", "gradients": "capacity", "optimizer_states": "capacity", "activations": "activations",
}  # fmt: skip


def _by_estimate(evidence: Evidence) -> Clue | None:
    """Return a clue where the run's own file needs more than the card has, by the role that holds most of it."""
    estimate, total = evidence.estimate, evidence.message.total if evidence.message else None
    if total is None and evidence.memory is not None:
        total = evidence.memory.capacity
    if estimate is None or total is None or estimate.need <= total or estimate.largest[0] not in _BY_ROLE:
        return None
    role, size = estimate.largest
    needs = f"its file needs {human(estimate.need)} by memfit's estimate, {human(size)} of it {role.replace('_', ' ')}"
    proof = Proof(f"{needs} in the {estimate.instant}; the card has {human(total)}", estimate.need)
    return Clue(_BY_ROLE[role], 66, proof, measured=False)


# what keeps the result of each pass: a list that grows, a tensor that is joined with itself, a sum of losses
_KEEPING: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("puts the result of each pass into a list", re.compile(r"^[\w.]+(?:\[[^\]]*\])*\.(?:append|extend|add)\(")),
    ("joins a tensor with itself in each pass", re.compile(r"^([\w.]+) = torch\.\w*(?:cat|stack)\w*\([\[(]+\1\b")),
    ("sums losses with their graphs", re.compile(r"^([\w.]*(?:loss|total)[\w.]*) (?:\+= |= \1 \+ )", re.IGNORECASE)),
)  # fmt: skip
# what is kept has left the card, or its graph is freed
_NUMBERS = re.compile(r"\.item\(|\.cpu\(|\.tolist\(|\.numpy\(|\bfloat\(|\.backward\(")


def _growing(evidence: Evidence) -> Clue | None:
    """Return a clue where the user's own line keeps what each pass returns; the pass that failed was one of many."""
    if evidence.when not in (*PASS, "eval", "predict"):
        return None
    for frame in reversed(evidence.frames):
        if frame.library or frame.function == "forward" or _NUMBERS.search(frame.code):
            continue
        for what, pattern in _KEEPING:
            if pattern.search(frame.code):
                cause: Cause = "eval-logits" if evidence.when in ("eval", "predict") else "leak"
                return Clue(cause, STRONG + 2, Proof(f"{frame.short} {what}: {frame.code[:80]}"), frame.short)
    return None


def _by_phase(evidence: Evidence) -> Clue | None:
    """Return the usual cause of a failure in the phase that is known, where nothing else shows one."""
    run, text = run_of(evidence), evidence.text
    if evidence.when == "load":
        if run and run.cards > 1 and not any(pattern.search(text) for _, pattern in SHARD_OF):
            proof = Proof(f"{run.cards} cards and no setting that shards: every process loads all weights")
            return Clue("replicated", WEAK + 8, proof)
        weight = WEAK + 6 * bool(run and run.cards == 1)
        held = evidence.message.allocated if evidence.message else None
        return Clue("capacity", weight, Proof("it failed while the weights were loaded", held))
    if evidence.when in ("", "init", "forward", "backward") and _weights(text) >= LARGE and ran_out(evidence):
        return Clue("capacity", WEAK - 6, Proof(f"a model of {_weights(text) / 1e9:g} B weights"), measured=False)
    if evidence.when in ("forward", "backward") and evidence.messages:
        return Clue("activations", FAINT, Proof(f"it failed in the {evidence.when} pass"))
    return None


FIGURES: tuple[Callable[[Evidence], Clue | None], ...] = (
    _sizing, _patches, _logits, _scores, _measured, _idle, _listed, _buckets, _not_in_effect, _by_estimate,
    _growing, _by_phase,
)  # fmt: skip


# ---- the recipe of the run that failed ------------------------------------------------------------------------------

SEQUENCE = 2048  # tokens of a sequence where only those of a batch are known

_IS = r"['\"]?\s?(?:=|:|\s)\s?['\"]?"
_GENERATION = re.compile(r"generation_?config\W{0,3}\{[^}]*\}")  # its lengths are not those of training
_KERNELS = {"eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash", "flash_attention_3": "flash"}


def _optimizer(name: str) -> str | None:
    try:
        return optimizer(name.removeprefix("optimizernames.")).key
    except UnknownName:
        return None


# (field of a Recipe, its keys in logs and command lines, the form of a value, how it is read)
STATED: tuple[tuple[str, re.Pattern[str], Callable[[str], int | str | None]], ...] = tuple(
    (field, re.compile(rf"(?<![\w.])(?:{keys}){_IS}({value})(?![\w.])"), read)
    for field, keys, value, read in (
        ("micro_batch", r"per_device_train_batch_size|train_micro_batch_size_per_gpu|"
                        r"micro_batch_size", r"\d{1,5}", int),
        ("sequence_length", r"max_length|block_size", r"\d{3,6}", int),  # keys of other settings, too
        ("sequence_length", r"max_seq_length|max_seq_len|sequence_len|cutoff_len", r"\d{3,6}", int),
        ("num_gpus", r"world_size|num_processes|nproc_per_node", r"\d{1,4}", int),
        ("accumulation", r"gradient_accumulation_steps", r"\d{1,5}", int),
        ("checkpointing", r"gradient_checkpointing", r"true", lambda _: "full"),
        ("optimizer", r"optim(?:izer)?", r"(?:optimizernames\.)?[a-z][\w-]{2,40}", _optimizer),
        ("attention", r"attn_implementation|_attn_implementation", r"|".join(_KERNELS), _KERNELS.__getitem__),
    )
)  # fmt: skip


def stated(evidence: Evidence) -> dict[str, int | str]:
    """Return the fields of a Recipe that a text sets; of several values the last one with the surest name counts."""
    found: dict[str, int | str] = {}
    text = _GENERATION.sub(" ", evidence.text)
    for field, pattern, read in STATED:
        for hit in pattern.finditer(text):
            if value := read(hit[1]):
                found[field] = value
    return found


def batch_of(evidence: Evidence, known: Mapping[str, object]) -> dict[str, int]:
    """Return sequences and length of the batch that failed, as far as its tokens and the `known` fields give them."""
    tokens = tokens_of(evidence)
    if not tokens:
        return {}
    length, batch = known.get("sequence_length"), known.get("micro_batch")
    if isinstance(batch, int):
        return {} if tokens % batch else {"sequence_length": tokens // batch}
    if isinstance(length, int):
        return {} if tokens % length else {"micro_batch": tokens // length}
    batch = max(tokens // SEQUENCE, 1)
    return {"micro_batch": batch, "sequence_length": tokens // batch}
