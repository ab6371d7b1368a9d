"""Ways to count tokens: the model's own tokenizer.json, one token per byte, or a labelled estimate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import BadInput
from memfit.extras import MissingExtra
from memfit.units import GIB, human

BYTES_PER_TOKEN = 4  # UTF-8 bytes; current tokenizers reach it on English, and on Chinese at 3 bytes a character
PIECE = 1 << 18  # characters; a longer text is tokenised in pieces, which may add one token per piece
GROUP = 1 << 20  # characters encoded at once
TOKENIZER_LIMIT = 1 * GIB


@dataclass(frozen=True, slots=True)
class Tokens:
    """One way to count tokens."""

    label: str  # as shown to the user
    estimate: bool  # True: not counted by the model's tokenizer
    count: Callable[[list[str]], list[int]]  # texts -> tokens of each, without special tokens
    special: int = 0  # tokens the tokenizer adds around a sequence: <bos>, [CLS] and [SEP]


def find_tokenizer(named: str | Path | None) -> Tokens:
    """Return a way to count: None estimates, "bytes" counts UTF-8 bytes, a path is a tokenizer.json or its folder."""
    if named is None:
        label = f"estimate of {BYTES_PER_TOKEN} bytes per token (--tokenizer PATH counts exactly)"
        return Tokens(label, True, lambda texts: [-(-len(t.encode()) // BYTES_PER_TOKEN) for t in texts])
    if str(named) == "bytes":
        return Tokens("bytes", False, lambda texts: [len(t.encode()) for t in texts])
    return _from_file(Path(named))


def _from_file(path: Path) -> Tokens:
    hint = "give a tokenizer.json, the folder of a downloaded model, or 'bytes'"
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        size = file.stat().st_size
    except OSError:
        missing = "holds no tokenizer.json" if path.is_dir() else "does not exist"
        raise BadInput(f"the tokenizer {path} {missing}", hint=hint) from None
    if not file.is_file() or size > TOKENIZER_LIMIT:
        raise BadInput(f"{file} is not a tokenizer file ({human(size)})", hint=hint)
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtra("counting with a tokenizer.json", "data") from None
    try:
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.no_truncation()  # a tokenizer.json often holds limits from when it was saved
        tokenizer.no_padding()
    except Exception as error:  # the library raises nothing narrower
        raise BadInput(f"{file} is not a tokenizer.json: {str(error)[:100]}", hint=hint) from None
    special = tokenizer.num_special_tokens_to_add(False)

    def count(texts: list[str]) -> list[int]:
        try:
            return _count(tokenizer, texts)
        except Exception as error:
            raise BadInput(f"the tokenizer {path} fails on this text: {str(error)[:100]}", hint=hint) from None

    return Tokens(str(path), False, count, special)


def _count(tokenizer: Any, texts: list[str]) -> list[int]:
    """Count the tokens of each text, a group at a time, because the library keeps over 100 bytes per token."""
    counts = [0] * len(texts)
    for group in _groups(texts):
        encoded = tokenizer.encode_batch_fast([piece for _, piece in group], add_special_tokens=False)
        for (owner, _), tokens in zip(group, encoded, strict=True):
            counts[owner] += len(tokens)
    return counts


def _groups(texts: list[str]) -> Iterator[list[tuple[int, str]]]:
    """Yield lists of (index of the text, piece of it) with about GROUP characters."""
    group: list[tuple[int, str]] = []
    chars = 0
    for index, text in enumerate(texts):
        for piece in _pieces(text):
            group.append((index, piece))
            chars += len(piece)
            if chars >= GROUP:
                yield group
                group, chars = [], 0
    if group:
        yield group


def _pieces(text: str) -> Iterator[str]:
    """Split a text into parts of at most PIECE characters, before a space if there is one."""
    at = 0
    while len(text) - at > PIECE:
        space = text.rfind(" ", at + 1, at + PIECE)
        end = space if space > at else at + PIECE
        yield text[at:end]
        at = end
    yield text[at:]
