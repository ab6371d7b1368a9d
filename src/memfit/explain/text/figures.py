"""Findings from the figures of a text: the run it names (model, cards, how it is sharded), sizes against it, nvidia-smi's list."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from memfit.explain.clue import FAINT, SURE, WEAK, Clue
from memfit.explain.concepts import DIFFUSION, FOUR_BIT, FSDP, IMAGES, MANY, ZERO3
from memfit.explain.evidence import Evidence
from memfit.explain.text.circumstances import ran_out
from memfit.explain.text.signs import PASS
from memfit.nouns.finding import Cause, Proof
from memfit.units import GB, GIB, MIB, human

SAME = 0.01  # of a request: it is printed with three digits
MOST_OF_CARD = 0.25  # a request of so much of the card, in training a language model, is hardly anything but logits
MANY_WORDS = 100_000  # surely where the words of its vocabulary are so many
ROUND = 1024  # tokens of a filled or padded batch come in such numbers; one in ten other requests does by chance
HEADS = (8, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96)  # of attention, in models that are trained
LEAST_SCORES = GIB  # smaller requests are such a product by chance
PRINTED = 0.006 * GIB  # how far a size that is printed in GiB is from itself
IDLE = 1.25  # reserved over allocated bytes from which the rest is told; a healthy run has up to 1.2 for a while
LARGE = 3e9  # weights from which a model is more than many a card has, when it is trained
FAR_TOO_MUCH = 2.0  # of the card: the states fail because of all the rest, not of themselves
HALF = 2.6  # bytes per weight that no model in 16 bits takes while it is loaded
STATES = 16  # bytes per weight of full training with AdamW: weights, gradients, two states, and their fp32 copies
ALIKE = 0.75  # processes of one run hold about the same, at least this share of each other
OF_EXPERTS = 0.835  # of "8x7B": what experts have in common is there once. Source: Mixtral-8x7B 46.7 B, 8x22B 140.6 B

_BILLIONS = re.compile(r"(?<![\w./])(\d{1,4}(?:\.\d{1,3})?) ?b\b(?!\s?/)")  # no part of a path, no bytes a second
_MODEL = re.compile(r"(?<![\w.])[a-z][\w.]{0,40}-(?:\w+-){0,3}?(\d{1,4}(?:\.\d{1,3})?)b\b")
_EXPERTS = re.compile(r"(?<![\w.])(\d{1,3}) ?x ?(\d{1,3}(?:\.\d{1,2})?) ?b\b")
_CARDS = re.compile(
    r"(?<![\w.])(\d{1,4}) ?(?:x\b(?! ?\d+(?:\.\d+)? ?b\b)|x(?=\d)(?!\d+(?:\.\d+)? ?b\b)|\*(?= ?\w)|(?=gpus|cards))"
)
_SIZE = r"(?<![\w.])(\d{1,3}(?:\.\d{1,2})?) ?gi?b\b"
_MEASURED = re.compile(r"(?<![\w.])(\d{1,3}(?:\.\d{1,2})?) ?(gi?b)\b")
_CARD = re.compile(  # beside a card's name or count, not a size that something takes
    rf"hardware: [^|]{{0,40}}?{_SIZE}|"
    rf"(?:\b\d{{1,4}} ?x|[*×]|\b[abhlvt]?\d{{1,4}}s?(?: ti| sxm\d?| pcie| nvl)?|gpus?|cards?|single|one|an?|on|per)\W{{1,3}}{_SIZE}"
    rf"|{_SIZE} (?:of )?(?:v?ram|gpus?|cards?|hbm|a100|h100|v100|nvidia|rtx)"
)
SEVERAL = re.compile(rf"{MANY}|\b[2-9]\d* ?x\b|\bgpus\b|{FSDP}|zero[-_ ]?[123]")
_FULL = re.compile(r"\bfull\b|\bfft\b|zero|fsdp|adamw?\b|pretrain")
_STARTED = re.compile(r"torchrun|\bddp\b|accelerate|distributed|process|\branks?\b|in total|horovod")
_ASKED = re.compile(
    r"readme|\bdocs?\b|documentation|claim|expected|should fit|how much|requirement|minimum|is it possible|can i\b|can't|cannot|"
    r"(?:even|still|already) (?:with|at|on)|(?:batch(?: size|_size)?|bs|mbs|micro_batch_size)\W{0,3}1\b|any batch|does not fit|lowest|smallest|table"
)
_LANGUAGE = re.compile(
    r"causallm|language model|\bllms?\b|llama|qwen|mistral|mixtral|gemma|\bphi-?\d|\bgpt|deepseek|\bglm|falcon|"
    r"\bopt-|bloom|pythia|olmo|smollm|granite|\bsft|\btrl\b|tokenizer|transformers/trainer"
)
_FUSED = re.compile(r"liger|fused[ _](?:linear|loss|ce\b|cross)|linear_cross|cut[ _-]?cross|chunked")  # no whole logits
_PICTURES = re.compile(f"{IMAGES}|{DIFFUSION}")
_LATE = re.compile(
    r"(?:at|after) (?:step )?\d{2,}\+?(?: steps|\b(?! ?%))|epoch|\bonly (?:when|if|with|after|once)\b"
)  # it ran, so weights and states have room
SHARD_OF = (
    ("parameters", re.compile(rf"{ZERO3}|{FSDP}")),
    ("gradients", re.compile(r"zero[-_ ]?2|stage.{0,3}2\b")),
)
# what the same card did at another time, which the sum of weights and states cannot have refused
_RAN = re.compile(
    r"trains? fine|(?:works?|fits?|runs|fine|ok) (?:with|on|at|in|without|under)\b|worked|used to|"
    r"same (?:code|run|config|script) (?:\w+ ){0,4}(?:fine|works|runs)|(?:only|shape,?|first|reduced to|cut to) \d+ layers\b"
)
_TOKENS = re.compile(
    r"(?:seq\w*|len\w*|ctx|context|block\w*|cutoff\w*|tokens|max_length|max_words)\W{1,3}(\d{2,6})(k?)\b|"
    r"(?<![\w.])~?(\d{2,6})(k?)[ -](?:tokens|context|ctx)"
)
_BATCH = re.compile(r"(?:batch\w*(?: size)?|bs|mbs)\W{1,3}(\d{1,4})\b")
# words of the vocabulary, by what a model is called. Source: their config.json, within 0.1 % (Gemma 3 with eyes has a few more)
VOCABULARIES = tuple(
    (words, re.compile(names))
    for words, names in (
        (248_320, r"qwen[- _]?3\.5"), (152_064, r"qwen(?:1\.5|2(?:\.5)?)?-(?:vl-)?(?:7|14|32|72)b"), (151_936, r"qwen"),
        (128_256, r"llama[- _]?3(?!\d)"), (262_144, r"medgemma|gemma[- _]?[34]"), (256_000, r"gemma"), (201_088, r"gpt-?oss"),
        (129_280, r"deepseek-?v3|deepseek-?r1(?!-distill)"), (131_072, r"ministral|devstral|mistral-?nemo|mistral-small-24b"),
        (32_768, r"mistral-7b-(?:instruct-)?v0\.3|mistral-large|mistral-small|mixtral-8x22b"), (32_000, r"llama[- _]?2|mistral|mixtral|vicuna"),
    )
)  # fmt: skip
# GiB of cards that are named without their size, the larger where one name has two. Source: src/memfit/catalogue/gpus.toml
CARDS = tuple(
    (size, re.compile(rf"\b(?:rtx ?|gtx ?|tesla ?|nvidia ?)?(?:{names})\b"))
    for size, names in (
        (11, r"[12]080 ?ti"), (12, r"k80|3060(?! ?ti)|4070(?! ?ti super)"), (16, r"t4|p100|4080|4060 ?ti|a4000"),
        (24, r"[34]090(?: ?ti)?|l4|a10g?|a5000|titan rtx"),
        (32, r"v100|5090"), (48, r"a6000|6000 ada|a40|l40s?"), (80, r"a100|a800|h100(?! nvl)|h800"), (94, r"h100 nvl"), (96, r"h20|gh200"), (141, r"h200"),
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
    of_all: float  # bytes of weights, gradients and states of the whole model
    states: float  # the same of one card
    frozen: bool


def run_of(evidence: Evidence) -> Run | None:
    """The run, where model size and card are named; None where there are several cards and nothing says how many."""
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
    how = next((name for name, pattern in SHARD_OF if pattern.search(text)), "")
    of_all = {"parameters": per_weight / cards, "gradients": 2 + (per_weight - 2) / cards, "": per_weight}
    mine = per_weight if frozen and how == "gradients" else of_all[how]
    return Run(weights, cards, each, per_weight, weights * per_weight, weights * mine, frozen is not None)


def card_of(text: str) -> int:
    """Bytes of the card that is named first, 0 for none."""
    if found := _CARD.search(text):
        return int(float(next(filter(None, found.groups()))) * GIB)
    return next((size * GIB for size, pattern in CARDS if pattern.search(text)), 0)


def _weights(text: str) -> float:
    """Weights of the model that is named first, 0 for none."""
    if found := _EXPERTS.search(text):
        return float(found[1]) * float(found[2]) * OF_EXPERTS * 1e9
    found = _MODEL.search(text) or _BILLIONS.search(text)
    return float(found[1]) * 1e9 if found else 0.0


def _measured(evidence: Evidence) -> Clue | None:
    """A size that is not the card's and four bytes for each weight, or more than two while loading: they were loaded in 32 bits."""
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
        said = f"{human(held)} are allocated, {held / weights:.1f} B for each of {weights / 1e9:g} B weights: in 16 bits 2 would do"
        return Clue("wrong-dtype", 78, Proof(said, held))
    return None


# a part of a block, whose activations can have the size of some logits
_LAYER = re.compile(
    r"\b(?:mlp|ffn|feed_forward|self_attn|attn|attention|experts|act_fn|gate_proj|up_proj|down_proj|[qkvo]_proj)\("
)


def _logits(evidence: Evidence) -> Clue | None:
    """A request that is tokens x words of the vocabulary x bytes; or a good part of the card, of a language model."""
    m, words = evidence.message, vocabulary(evidence)
    inner = next((f.code for f in reversed(evidence.frames) if "/torch/" not in f.path.replace("\\", "/")), "")
    if evidence.when not in PASS or _LAYER.search(inner):
        return None
    if m is None or not m.tried:
        return _logits_asked(evidence, words)
    share = m.tried / m.total if m.total else 0.0
    large = share >= MOST_OF_CARD
    of = f", {share:.0%} of the card" if large else ""
    if tokens := tokens_of(evidence):
        named = tokens in _tokens(evidence.text)
        width = min((4, 2), key=lambda width: abs(tokens * words * width - (m.tried or 0)))
        said = f"{human(m.tried)} are {tokens:,} tokens x {words:,} words x {width} B{of}"
        return Clue("logits", 84 if named else 80 if large else 54, Proof(said, m.tried), seen=named)
    if large and (words >= MANY_WORDS or (_LANGUAGE.search(evidence.text) and not _PICTURES.search(evidence.text))):
        said = f", and {words:,} words" if words else ": in a language model hardly another tensor is so large"
        return Clue(
            "logits", 58 if words >= MANY_WORDS else 54, Proof(f"one request of {share:.0%} of the card{said}", m.tried)
        )
    return None


def tokens_of(evidence: Evidence) -> int:
    """Tokens whose logits are the request that failed: of a batch that is named, or in a round number; 0 where they are none."""
    m, words = evidence.message, vocabulary(evidence)
    if m is None or not m.tried or not words:
        return 0
    for tokens, width in product(_tokens(evidence.text), (4, 2)):
        if abs(tokens * words * width - m.tried) <= SAME * m.tried:
            return tokens
    for width in (4, 2) if words >= MANY_WORDS and m.tried > GIB else ():
        tokens = ROUND * round(m.tried / (words * width * ROUND))
        if abs(tokens * words * width - m.tried) <= PRINTED:
            return tokens
    return 0


def _logits_asked(evidence: Evidence, words: int) -> Clue | None:
    """No size of a request is told: the logits that the named run makes at once, in fp32, against the card."""
    card, tokens = card_of(evidence.text), max(_lengths(evidence.text), default=0)  # of one sample, at the least
    size = tokens * words * 4
    if not card or size < MOST_OF_CARD * card or not evidence.when or _FUSED.search(evidence.text):
        return None
    said = f"{tokens:,} tokens x {words:,} words x 4 B are {size / card:.0%} of the card"
    return Clue("logits", 80, Proof(said, size), seen=False)


def _scores(evidence: Evidence) -> Clue | None:
    """A request that is batch x heads x tokens x tokens x bytes: the scores of one layer, written out."""
    m = evidence.message
    if m is None or not m.tried or m.tried < LEAST_SCORES or evidence.when not in PASS:
        return None
    batches = {int(found[1]) for found in _BATCH.finditer(evidence.text)} | {1}
    for tokens, batch, heads, width in product(_lengths(evidence.text), sorted(batches), HEADS, (2, 4)):
        if abs(batch * heads * tokens * tokens * width - m.tried) <= PRINTED:
            said = f"{human(m.tried)} are {batch} x {heads} heads x {tokens:,} x {tokens:,} x {width} B"
            return Clue("attention", 84, Proof(said, m.tried), seen=False)  # how many heads is an assumption
    return None


def vocabulary(evidence: Evidence) -> int:
    """Words of the model's vocabulary, 0 where it is not known."""
    return evidence.words or next((words for words, pattern in VOCABULARIES if pattern.search(evidence.text)), 0)


def _lengths(text: str) -> set[int]:
    return {int(found[1] or found[3]) * (1024 if found[2] or found[4] else 1) for found in _TOKENS.finditer(text)}


def _tokens(text: str) -> list[int]:
    """Tokens that a batch may have, by the lengths and batch sizes that are named."""
    batches = {int(found[1]) for found in _BATCH.finditer(text)} | {1}
    return [length * batch for length, batch in product(sorted(_lengths(text))[-4:], sorted(batches)[:3])]


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
    weight = 84 if sure else 76 if share >= 0.75 else 66
    if _RAN.search(text):
        weight = WEAK
    elif share >= FAR_TOO_MUCH and sure and evidence.when in ("init", "optimizer"):
        weight = SURE + 1
    if not ran_out(evidence) and not _ASKED.search(text):
        weight = WEAK
    m = evidence.message
    one = m is not None and m.tried and m.total and m.tried >= MOST_OF_CARD * m.total
    if evidence.when == "loss" or (one and evidence.when in PASS):  # a forward pass had room; no weight is so large
        weight = min(weight, 66)
    proof = f"{run.weights / 1e9:g} B weights x {run.per_weight:g} B over {run.cards} card{'s' * (run.cards > 1)}: {share:.0%} of each"
    spread = (
        run.frozen and run.states == run.of_all and run.of_all < 0.75 * run.cards * run.each
    )  # it would fit, sharded
    cause: Cause = "replicated" if spread and run.cards > 1 and _STARTED.search(text) else "capacity"
    return Clue(cause, weight, Proof(proof, int(run.states)), seen=False)  # how it trains is an assumption


# nvidia-smi's rows: card, process (one that computes), size
_LISTED = re.compile(r"(?<![\w.])(\d{1,2}) (?:n/a n/a )?(\d{3,8}) c(?:\+g)? (?:\S+ ){1,4}?(\d{1,6}) ?mib")


def _listed(evidence: Evidence) -> Clue | None:
    """nvidia-smi's list of processes: one that shares a card with others, and is on a second card, went to the wrong one."""
    cards: dict[str, dict[str, int]] = {}
    for found in _LISTED.finditer(evidence.text):
        cards.setdefault(found[1], {})[found[2]] = int(found[3]) * MIB
    on = Counter(process for processes in cards.values() for process in processes)
    stray = {process for processes in cards.values() if len(processes) > 1 for process in processes if on[process] > 1}
    if not stray:
        return _together(cards) if evidence.messages else None
    return Clue("ranks-on-one-gpu", SURE, Proof(f"nvidia-smi lists {len(stray)} processes on more than one card"))


def _together(cards: dict[str, dict[str, int]]) -> Clue | None:
    """Two processes and more on one card: of one run where they hold the same."""
    card, rows = max(cards.items(), key=lambda pair: len(pair[1]), default=("", {}))
    if len(rows) < 2:
        return None
    cause: Cause = "ranks-on-one-gpu" if min(rows.values()) >= ALIKE * max(rows.values()) else "other-process"
    named = ", ".join(f"{human(size)} of process {process}" for process, size in rows.items())
    return Clue(cause, 76, Proof(f"nvidia-smi lists on card {card}: {named}", sum(rows.values())))


_IDLE = tuple(re.compile(rf"{name}\W+(?:\w+\W+){{0,4}}?([\d.,]+) ?([mg])i?b") for name in ("allocated", "reserved"))


def _idle(evidence: Evidence) -> Clue | None:
    """Two figures of a report: what is reserved, and how much less of it is allocated."""
    found = [pattern.search(evidence.text) for pattern in _IDLE]
    if evidence.memory or evidence.when == "resume" or evidence.messages or not all(found):
        return None
    held, taken = (float(m[1].replace(",", "").strip(".")) * (GIB if m[2] == "g" else MIB) for m in found if m)
    if taken < IDLE * held:
        return None
    proof = Proof(f"{human(int(taken))} are reserved, {human(int(held))} of them allocated", int(taken - held))
    return Clue("fragmentation", 88, proof)


_REDUCER = re.compile(r"_ddp_init_helper|dist\.reducer")
BUCKETS = 0.8  # of all that is allocated, from which DDP's buckets are of all weights: every one is trained


def _buckets(evidence: Evidence) -> Clue | None:
    """DDP makes room for all gradients before the first step: a second time the weights, whole on every card."""
    message = evidence.message
    if message is None or not message.tried or not message.allocated:
        return None
    if message.tried < BUCKETS * message.allocated or not _REDUCER.search(evidence.traced or evidence.text):
        return None
    said = f"{human(message.allocated)} of weights on every card, and DDP's reducer asks for as much for gradients"
    return Clue("replicated", SURE, Proof(said, message.allocated + message.tried))


def _alone(evidence: Evidence) -> Clue | None:
    """Nothing else is known: what is told of model and cards, and where it failed, makes one cause the usual one."""
    run, text = run_of(evidence), evidence.text
    if evidence.when == "load":
        if run and run.cards > 1 and not any(pattern.search(text) for _, pattern in SHARD_OF):
            proof = Proof(f"{run.cards} cards, nothing that shards: every process loads all weights")
            return Clue("replicated", WEAK + 8, proof)
        weight = WEAK + 6 * bool(run and run.cards == 1)
        return Clue("capacity", weight, Proof("it failed while the weights were loaded"))
    if evidence.when in ("", "init", "forward", "backward") and _weights(text) >= LARGE and ran_out(evidence):
        asked = _ASKED.search(text)
        said = f"'{asked[0]}', " if asked else ""
        proof = Proof(f"{said}a model of {_weights(text) / 1e9:g} B weights")
        return Clue("capacity", 66 if asked else WEAK - 6, proof)
    if evidence.when in ("forward", "backward") and evidence.messages:
        return Clue("activations", FAINT, Proof(f"it failed in the {evidence.when} pass"))
    return None


FIGURES: tuple[Callable[[Evidence], Clue | None], ...] = (
    _sizing, _logits, _scores, _measured, _idle, _listed, _buckets, _alone,
)  # fmt: skip
