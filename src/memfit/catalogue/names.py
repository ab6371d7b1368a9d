"""From what a user types to a catalogue entry: exact names first, then names without what says nothing, then parts."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache

from memfit.catalogue import Entry, entries

# Words of a model's name that do not change its architecture
_SILENT = frozenset(
    ("instruct", "chat", "it", "hf", "pt", "unsloth", "bnb", "4bit", "8bit", "gptq", "awq", "int4", "int8", "fp8", "bf16")
)
# Organisations that republish models under the original's name
_MIRRORS = frozenset(("unsloth", "nousresearch", "thebloke", "modelscope", "axolotl-ai-co"))


def plain(name: str) -> str:
    """'Llama 3.1 8B' -> 'llama-3.1-8b'."""
    return re.sub(r"[\s_]+", "-", name.strip().casefold())


def bare(name: str) -> str:
    """A plain name without organisation and silent words: 'Qwen/Qwen2.5-7B-Instruct' -> 'qwen2.5-7b'."""
    return "-".join(word for word in plain(name).rpartition("/")[2].split("-") if word not in _SILENT)


@cache
def _index() -> tuple[dict[str, Entry], dict[str, frozenset[str]]]:
    """(plain full names and their last parts -> entry, bare names -> stems)."""
    exact: dict[str, Entry] = {}
    stems: dict[str, set[str]] = defaultdict(set)
    for entry in entries():
        for name in map(plain, entry.names):
            exact[name] = entry
            stems[bare(name)].add(entry.stem)
    for entry in entries():
        for name in map(plain, entry.names):
            exact.setdefault(name.rpartition("/")[2], entry)
    return exact, {name: frozenset(found) for name, found in stems.items()}


def find(text: str) -> Entry | None:
    """The one entry that `text` names in full: its id, stem, alias, last part, or one of them less silent words."""
    exact, by_bare = _index()
    name = plain(text)
    if name in exact:
        return exact[name]
    organisation, _, tail = name.rpartition("/")
    if organisation and organisation not in _organisations(tail) | _MIRRORS:
        return None
    if tail in exact:
        return exact[tail]
    for candidate in (bare(tail), bare(tail).removesuffix("-base")):
        stems = by_bare.get(candidate, frozenset())
        if len(stems) == 1:
            return exact[plain(next(iter(stems)))]
    return None


def _organisations(tail: str) -> frozenset[str]:
    """Who publishes the model with this last part: other repositories of that name may hold anything."""
    stems = _index()[1].get(bare(tail), _index()[1].get(bare(tail).removesuffix("-base"), frozenset()))
    named = (plain(name) for entry in entries() if entry.stem in stems for name in entry.names)
    return frozenset(name.rpartition("/")[0] for name in named if "/" in name)


def parts(text: str) -> tuple[Entry, ...]:
    """Entries whose short name or id contains `text`."""
    name = plain(text)
    return tuple(e for e in entries() if name in plain(e.stem) or name in plain(e.id)) if name else ()


def known() -> list[str]:
    """All names there are, for suggestions."""
    return sorted(_index()[0])
