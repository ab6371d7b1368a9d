"""What a failed run shows of its own recipe: settings that its log states, and the tokens of a batch that its request proves."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from memfit.errors import UnknownName
from memfit.explain.evidence import Evidence
from memfit.explain.text.figures import tokens_of
from memfit.tables.optimizers import optimizer

SEQUENCE = 2048  # tokens of a sequence where only those of a batch are known

_IS = r"['\"]?\s?(?:=|:|\s)\s?['\"]?"
_GENERATION = re.compile(r"generation_?config\W{0,3}\{[^}]*\}")  # its lengths are not those of training
_KERNELS = {"eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash", "flash_attention_3": "flash"}


def _optimizer(name: str) -> str | None:
    try:
        return optimizer(name.removeprefix("optimizernames.")).key
    except UnknownName:
        return None


# (field of a Recipe, how logs and command lines state it, what the words are as its value)
STATED: tuple[tuple[str, re.Pattern[str], Callable[[str], int | str | None]], ...] = tuple(
    (field, re.compile(rf"(?<![\w.])(?:{names}){_IS}({value})(?![\w.])"), read)
    for field, names, value, read in (
        ("micro_batch", r"per_device_train_batch_size|train_micro_batch_size_per_gpu|micro_batch_size", r"\d{1,5}", int),
        ("sequence_length", r"max_length|block_size", r"\d{3,6}", int),  # other things have these names, too
        ("sequence_length", r"max_seq_length|max_seq_len|sequence_len|cutoff_len", r"\d{3,6}", int),
        ("accumulation", r"gradient_accumulation_steps", r"\d{1,5}", int),
        ("checkpointing", r"gradient_checkpointing", r"true", lambda _: "full"),
        ("optimizer", r"optim(?:izer)?", r"(?:optimizernames\.)?[a-z][\w-]{2,40}", _optimizer),
        ("attention", r"attn_implementation|_attn_implementation", r"|".join(_KERNELS), _KERNELS.__getitem__),
    )
)  # fmt: skip


def stated(evidence: Evidence) -> dict[str, int | str]:
    """Fields of a Recipe with the values that the text gives them; one that it gives twice has the last, by its surest name."""
    found: dict[str, int | str] = {}
    text = _GENERATION.sub(" ", evidence.text)
    for field, pattern, read in STATED:
        for hit in pattern.finditer(text):
            if value := read(hit[1]):
                found[field] = value
    return found


def batch_of(evidence: Evidence, known: Mapping[str, object]) -> dict[str, int]:
    """Sequences and their length that make the tokens of the batch that failed; `known` are fields that stand. {}: not told."""
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
