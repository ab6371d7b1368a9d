"""The words that views share: names and colours of roles, recipes, cards and verdicts."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass

from memfit.nouns.architecture import LANGUAGE, Architecture
from memfit.nouns.finding import Part
from memfit.nouns.footprint import Footprint, OnCard, PhasePeak
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Recipe, Samples
from memfit.nouns.plan import RETRY_TIME, HostJudgement, HostPhase, Judgement, Verdict
from memfit.nouns.tape import Role
from memfit.tables.adapters import method_title
from memfit.tables.optimizers import optimizer
from memfit.tables.tasks import TASKS
from memfit.units import GB, GIB, billions, cell, gib, rough, several, share_of_samples, shared_unit

DOT = " · "
NCCL_BUFFERS = "NCCL buffers"  # the label of their line in a footprint of several GPUs
NO_PRICE = "no rental price in the table"


@dataclass(frozen=True, slots=True)
class Word:
    """How a role is shown in tables and in a narrow bar, and its colour in terminal, page and notebook."""

    title: str
    short: str
    colour: str


# told apart under any colour blindness, and light enough for dark text: found by a search among colours like these
ROLE_WORDS: dict[Role, Word] = {
    "parameters": Word("parameters", "params", "#6d92f3"),
    "gradients": Word("gradients", "grads", "#ce8738"),
    "optimizer_states": Word("optimizer states", "states", "#d09fd5"),
    "activations": Word("activations", "activ", "#d9ba41"),
    "temporaries": Word("temporaries", "temp", "#1a9979"),
    "workspace": Word("workspace", "work", "#a6a9ab"),
    "context": Word("context", "ctx", "#778194"),
    "fragmentation": Word("fragmentation", "frag", "#f42d5f"),
}
UNKNOWN = Word("not recorded", "?", "#d6dce1")
# teal, amber and vermilion: told apart by people who see no difference between red and green
VERDICT_COLOURS: dict[Verdict, str] = {
    "fits": "#2b8c7e", "tight": "#e0a82e", "misfit": "#c2413b", "not_judged": "#8a7fb5"
}  # fmt: skip
VERDICT_WORDS: dict[Verdict, tuple[str, str]] = {  # (words, style)
    "fits": ("FITS", "bold green"),
    "tight": ("TOO TIGHT TO PROMISE", "bold yellow"),
    "misfit": ("DOES NOT FIT", "bold red"),
    "not_judged": ("NOT JUDGED", "bold yellow"),
}


def model_words(architecture: Architecture) -> str:
    """Return '7.62 B parameters', and the task where it is another than a language model's own."""
    task = "" if architecture.trained_for == LANGUAGE else f"{DOT}{TASKS[architecture.trained_for].title}"
    return f"{billions(architecture.parameters)} parameters{task}"


def part_word(part: Part) -> Word:
    """Return the word of a role; "unknown" has one as well."""
    return UNKNOWN if part == "unknown" else ROLE_WORDS[part]


def visible(text: str) -> str:
    """Replace control characters in `text`, because names come from files and from the Hub."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def batch_title(recipe: Recipe) -> str:
    """Return 'micro-batch 4 x 4', with the number of GPUs if there are several."""
    cards = f" on {tokens(recipe.num_gpus)} GPUs" if recipe.num_gpus > 1 else ""
    return f"micro-batch {tokens(recipe.micro_batch)} x {tokens(recipe.accumulation)}{cards}"


def recipe_facts(recipe: Recipe, texts: bool = True) -> tuple[str, ...]:
    """List everything in a recipe that changes memory, the most important first.

    `texts`: the samples are texts, which have a length and a loss over a vocabulary.
    """
    facts = [method_title(recipe), batch_title(recipe)]
    facts += [f"sequence {tokens(recipe.sequence_length)}"] if texts else []
    if recipe.quantization != "none":
        facts.append(f"base in {recipe.quantization}")
    facts += [recipe.precision, optimizer(recipe.optimizer).title]
    facts.append("no checkpointing" if recipe.checkpointing == "none" else f"checkpointing {recipe.checkpointing}")
    facts += [f"{recipe.loss} loss"] if texts else []
    facts.append(f"{recipe.attention} attention")
    facts += ["torch.compile"] if recipe.compile else []
    facts += [
        f"{word} {value}" for word, value in (("offload", recipe.offload), ("shard", recipe.shard)) if value != "none"
    ]
    facts += [LOADING_WORDS[recipe.loading]] if recipe.loading in LOADING_WORDS else []
    facts += ["whole model on each GPU (DDP)"] if recipe.num_gpus > 1 and recipe.shard == "none" else []
    facts += [f"sequences over {recipe.context_parallel} GPUs"] if recipe.context_parallel > 1 else []
    facts += ["packing"] if recipe.padding == "packing" else []
    return (*facts, f"trainer {recipe.trainer}")


LOADING_WORDS = {
    "whole": "weights loaded whole onto each GPU", "host": "weights loaded to host RAM, then sharded",
    "sharded": "weights sharded one by one as they are loaded",
}  # fmt: skip


# the words of a changed field; fields with the same words are shown once
_CHANGED: dict[str, Callable[[Recipe], str]] = {
    "method": method_title, "adapter": method_title, "micro_batch": batch_title, "accumulation": batch_title,
    "optimizer": lambda r: optimizer(r.optimizer).title,
    "checkpointing": lambda r: "no checkpointing" if r.checkpointing == "none" else f"checkpointing {r.checkpointing}",
    "sequence_length": lambda r: f"sequence {tokens(r.sequence_length)}",
    "compile": lambda r: "torch.compile" if r.compile else "no torch.compile",
    "loss": lambda r: f"{r.loss} loss", "precision": lambda r: r.precision,
    "loading": lambda r: LOADING_WORDS.get(r.loading, "weights loaded as usual"),
    "quantization": lambda r: f"base in {r.quantization}" if r.quantization != "none" else "base not quantised",
}  # fmt: skip


def changes(before: Recipe, after: Recipe) -> tuple[str, ...]:
    """List in words what `after` changes of `before`; () when the two are equal."""
    names = [f for f in before.__dataclass_fields__ if getattr(before, f) != getattr(after, f)]
    words = (_CHANGED[f](after) if f in _CHANGED else f"{f.replace('_', ' ')} {getattr(after, f)}" for f in names)
    return tuple(dict.fromkeys(words))


def card_title(gpu: Gpu, count: int) -> str:
    """Return 'one GeForce RTX 4090' or '8 x H100 SXM'."""
    return f"one {gpu.name}" if count == 1 else f"{tokens(count)} x {gpu.name}"


def card_room(gpu: Gpu, usable: int, count: int) -> str:
    """Return '23.2 GiB usable of 24 GB', or 'of 24.0 GiB' for --gpu-memory, with 'each' if there are several cards."""
    sold = rough(gpu.total_bytes) if gpu.sold_bytes == gpu.total_bytes else f"{gpu.sold_bytes / GB:.0f} GB"
    return f"{gib(usable)} GiB usable of {sold}{' each' if count > 1 else ''}"


def room(judgement: Judgement) -> str:
    """Return '8.5 GiB headroom' or '3.2 GiB over', and what of the host RAM is missing; 'usable' without a verdict.

    Of a run that fits a full card: '95 MiB headroom, runs on 3.9 GiB less'.
    """
    band, headroom = judgement.band, judgement.headroom
    if judgement.verdict == "not_judged":
        return f"{rough(judgement.usable)} usable"
    room = f"{rough(headroom)} headroom" if headroom >= 0 else f"{rough(-headroom)} over"
    if judgement.on_less:
        room = f"{room}, runs on {rough(band)} less"
    elif judgement.verdict == "tight" and abs(headroom) <= band:
        room = f"{room}, within the error of ±{rough(band)}"
    host = judgement.host
    return f"{room}{DOT}{host_over_words(host)}" if host is not None and host.over else room


def host_over_words(host: HostJudgement) -> str:
    """Return 'needs 160 GiB of host RAM on 64.0 GiB'."""
    return f"needs {rough(host.need)} of {POOL[host.shared]} on {rough(host.given)}"


POOL = {False: "host RAM", True: "the memory that CPU and GPU share"}  # shared -> what the second verdict is about
HOST_PHASES: dict[HostPhase, str] = {
    "load": "while weights are loaded", "train": "in training", "save": "while a checkpoint is written",
}  # fmt: skip
SHOWN_HOST_LINES = 3


def host_words(host: HostJudgement) -> str:
    """Return '160 GiB a node while a checkpoint is written, of 64.0 GiB: 59.8 GiB optimizer states, ...'."""
    where = "" if host.shared else " a node"
    of = f"of {rough(host.given)}" if host.given else "--host-memory 64GiB judges it"
    lines = sorted(host.lines, key=lambda line: -line.bytes)
    parts = [f"{rough(line.bytes)} {line.label}" for line in lines[:SHOWN_HOST_LINES]]
    if rest := sum(line.bytes for line in lines[SHOWN_HOST_LINES:]):
        parts.append(f"{rough(rest)} more")
    return f"{rough(host.need)}{where} {HOST_PHASES[host.phase]} ({of}): {', '.join(parts)}"


SMALL_HOST = 8 * GIB  # less is not mentioned unless it is judged: machines with a card for training have more


def host_rows(judgement: Judgement) -> list[tuple[str, str]]:
    """Return the labelled line on host RAM, or on the memory that CPU and GPU share; none where it cannot matter."""
    host = judgement.host
    small = host is not None and not host.given and host.need < SMALL_HOST
    return [] if host is None or small else [("one pool:" if host.shared else "host RAM:", host_words(host))]


def host_condition(judgement: Judgement) -> str:
    """Return 'with 2044 GiB of host RAM a node, ...' where a verdict on the card leaves that open, else ''."""
    host = judgement.host
    if host is None or host.given or host.need < SMALL_HOST or judgement.verdict == "misfit":
        return ""
    return f"with {rough(host.need)} of {POOL[host.shared]}{'' if host.shared else ' a node'}, which is not judged"


SHOWN_REASONS = 4


def withheld_words(judgement: Judgement, instead: str = "memfit trace SCRIPT.py --gpu NAME") -> list[str]:
    """Return a line for each reason for which a verdict is withheld, with its keys, and one on what to do.

    instead: the command that answers in any case; '' where that is the one that was typed.
    """
    by_why: dict[str, list[str]] = {}
    for found in judgement.not_understood:
        by_why.setdefault(found.why, []).append(f"{found.key}={found.value}" if found.value else found.key)
    if not by_why:
        return []
    lines = [f"{', '.join(keys)}: {why}" for why, keys in by_why.items()]
    more = [f"and {len(lines) - SHOWN_REASONS} more reasons"] if len(lines) > SHOWN_REASONS else []
    keys = [found.key for found in judgement.not_understood]
    ignored = " ".join(f"--ignore {shlex.quote(key)}" for key in keys[:SHOWN_REASONS])
    way = f"{instead} runs your own script; " if instead else ""
    rest = " ..." if len(keys) > SHOWN_REASONS else ""
    return [
        *lines[:SHOWN_REASONS], *more,
        f"{way}{ignored}{rest} judges without" + (" it" if len(keys) == 1 else " them"),
        "what was understood needs this much:",
    ]  # fmt: skip


def peak_words(footprint: Footprint, judgement: Judgement) -> str:
    """Return what a run needs on the card, and what it would take where nothing limits it, if that is more.

    'peak 18.6 GiB reserved'; with several GPUs 'peak 18.6 GiB: 18.1 reserved + 0.5 NCCL buffers'; 'needs 72.8 GiB,
    would take 84.3 if it were there'.
    """
    peak, card = footprint.peak, footprint.on_card
    nccl = sum(line.bytes for line in peak.lines if line.label == NCCL_BUFFERS)
    return need_words(judgement.need, card.unlimited + nccl if card else judgement.need, nccl)


def need_words(need: int, unlimited: int, nccl: int = 0) -> str:
    """Return the need of a run in bytes, NCCL's buffers included, and what it takes on a card without a limit."""
    unit = shared_unit(need)
    parts = f": {cell(need - nccl, unit)} reserved + {cell(nccl, unit)} NCCL buffers" if nccl else ""
    if unlimited > need:
        return f"needs {cell(need, unit)} {unit}{parts}, would take {cell(unlimited, unit)} if it were there"
    return f"peak {cell(need, unit)} {unit}{parts or ' reserved'}"


def retry_words(card: OnCard | None, judgement: Judgement) -> str:
    """Return how often a run that fills the card gives cached blocks back, and the price; '' for one that does not.

    A run that needs more than the card has does so on a card that has just that.
    """
    if card is None or card.verdict == "misfit" or card.unlimited <= max(card.capacity, judgement.need):
        return ""
    if not card.retries:
        stops = judgement.verdict == "tight" and judgement.headroom > judgement.band
        more = f"; on {rough(judgement.band)} less it runs out of memory" if stops else ""
        return f"gives cached blocks back when the card is full, but not in every step{more}"
    often = {1: "once", 2: "twice"}.get(card.retries, f"{card.retries} times")
    each = ", each" if card.retries > 1 else ""
    return f"gives cached blocks back {often} a step{each} for about {RETRY_TIME:.0%} of its time"


def short_recipe(recipe: Recipe) -> str:
    """Return a recipe in one line, without its defaults: 'LoRA r16, micro-batch 4 x 4, checkpointing full'."""
    plain = Recipe(method=recipe.method, quantization=recipe.quantization, lora_rank=recipe.lora_rank,
                   micro_batch=recipe.micro_batch, accumulation=recipe.accumulation, num_gpus=recipe.num_gpus,
                   sequence_length=recipe.sequence_length, trainer=recipe.trainer)  # fmt: skip
    return ", ".join((method_title(recipe), batch_title(recipe), *changes(plain, recipe)))


def instant(peak: PhasePeak) -> str:
    """Return the worst instant of a run: 'backward of block 32 (step)'."""
    return f"{peak.instant} ({phase_title(peak.phase)})"


def phase_title(phase: str) -> str:
    """Return 'first step' for first_step."""
    return phase.replace("_", " ")


def tokens(count: int) -> str:
    """Return a count with thousands separators."""
    return f"{count:,}"


def cut_words(samples: Samples) -> str:
    """Return '20 of 2,000 samples (1.0%) and 21,333 of 598,211 tokens (3.6%) are cut'."""
    if not samples.cut:
        return f"none of {several(samples.count, 'sample')} ({several(samples.tokens, 'token')}) is cut"
    return " and ".join(
        f"{tokens(part)} of {several(whole, name)} ({share_of_samples(part / whole)})"
        for part, whole, name in (
            (samples.cut, samples.count, "sample"), (samples.lost, samples.tokens, "token"),
        )
    ) + " are cut"  # fmt: skip


def clock(seconds: float) -> str:
    """Return a time with about two figures: '0.35 s', '19 s', '4.2 min', '3.1 h'."""
    for limit, divisor, unit in ((1, 1, "s"), (90, 1, "s"), (5400, 60, "min")):
        if seconds < limit:
            value = seconds / divisor
            return (
                f"{value:.2f} {unit}" if value < 1 else f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
            )
    return f"{seconds / 3600:.1f} h"
