"""Find the catalogue's entry for a typed name: exact names first, then names without variant words, then parts."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache

from memfit.catalogue import Entry, entries

_STORED = {"bnb", "4bit", "8bit", "gptq", "awq", "int4", "int8", "fp8"}  # how weights are stored in few bits
# words of a model's name that do not change its architecture
_VARIANTS = {"instruct", "chat", "it", "hf", "pt", "unsloth", "bf16"} | _STORED
# organisations that republish models under the original's name
_MIRRORS = frozenset({"unsloth", "nousresearch", "thebloke", "modelscope", "axolotl-ai-co"})


def plain(name: str) -> str:
    """Normalise a name: 'Llama 3.1 8B' -> 'llama-3.1-8b'."""
    return re.sub(r"[\s_]+", "-", name.strip().casefold())


def bare(name: str) -> str:
    """Return a plain name without organisation and variant words: 'Qwen/Qwen2.5-7B-Instruct' -> 'qwen2.5-7b'."""
    return "-".join(word for word in plain(name).rpartition("/")[2].split("-") if word not in _VARIANTS)


def stored_as(name: str) -> str:
    """Return the word of a name that says how its weights are stored, such as AWQ; "" for 16 or 32 bits."""
    return next((word for word in re.split(r"[-/]", name) if word.casefold() in _STORED), "")


@cache
def _index() -> tuple[dict[str, Entry], dict[str, Entry]]:
    """Return two maps to entries: full names and their last parts, and bare names that only one entry has."""
    exact: dict[str, Entry] = {}
    tails: dict[str, Entry] = {}
    meant: dict[str, set[Entry]] = defaultdict(set)
    for entry in entries():
        for name in map(plain, entry.names):
            exact[name] = entry
            tails.setdefault(name.rpartition("/")[2], entry)
            meant[bare(name)].add(entry)
    return {**tails, **exact}, {name: same.pop() for name, same in meant.items() if len(same) == 1}


def find(text: str) -> Entry | None:
    """Return the one entry with `text` as id, stem, alias or their last part, variant words aside; else None."""
    exact, by_bare = _index()
    name = plain(text)
    if name in exact:
        return exact[name]
    organisation, _, tail = name.rpartition("/")
    short = bare(tail)
    entry = exact.get(tail) or by_bare.get(short) or by_bare.get(short.removesuffix("-base"))
    if entry is None or not organisation or organisation in _MIRRORS:
        return entry
    publishers = {plain(known).rpartition("/")[0] for known in entry.names}
    return entry if organisation in publishers else None  # another organisation may use that name for anything


def parts(text: str) -> tuple[Entry, ...]:
    """Return the entries whose short name or id contains `text` at the beginning of a word.

    One that has it in the middle of its name is joined by those with other words in between: "llama-8b" is Llama-3.1-8B
    as well as DeepSeek-R1-Distill-Llama-8B.
    """
    name = plain(text)
    found = _with(r"(?<![^/-])" + re.escape(name))
    if len(found) != 1 or any(plain(known).rpartition("/")[2].startswith(name) for known in found[0].names):
        return found
    return _with(r"(?<![^/-])" + r"(?:-[^/]*)?-".join(map(re.escape, name.split("-"))))


def _with(pattern: str) -> tuple[Entry, ...]:
    name = re.compile(pattern)
    return tuple(e for e in entries() if name.search(plain(e.stem)) or name.search(plain(e.id)))


def known() -> list[str]:
    """Return all names of the catalogue, for suggestions."""
    return sorted(_index()[0])
