"""The middle of several traced ranks: keeps the values that they send until they are read, and knows who waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from memfit.virtual.ranks.peers import GONE, Key

Reply = tuple[int, Any]  # a rank, and the answer to what it asked


class Exchange:
    """The values on their way between ranks, and their key-value store. alive: ranks that may still send."""

    def __init__(self, traced: Sequence[int]) -> None:
        self.alive = set(traced)
        self._values: dict[Key, list[Any]] = {}  # key -> value, readers that it waits for
        self._store: dict[str, bytes] = {}
        self._waiting: dict[int, tuple[str, Any]] = {}  # rank -> what it asked

    @property
    def waiting(self) -> int:
        """Return how many ranks wait for others."""
        return len(self._waiting)

    def told(self, rank: int, words: Sequence[Any]) -> Iterator[Reply]:
        """Take what a rank tells or asks, and yield the answers that can be given now."""
        what, *rest = words
        if what == "put":
            key, value, readers = rest
            self._values[key] = [value, readers]
        elif what == "store_set":
            self._store[rest[0]] = rest[1]
        elif what == "store_add":
            value = int(self._store.get(rest[0], b"0")) + rest[1]
            self._store[rest[0]] = str(value).encode()
            yield rank, value
        elif what == "store_has":
            yield rank, all(key in self._store for key in rest[0])
        elif what == "store_delete":
            yield rank, self._store.pop(rest[0], None) is not None
        else:
            self._waiting[rank] = what, rest[0]
        yield from self._served()

    def ended(self, rank: int) -> Iterator[Reply]:
        """Take that a rank sends nothing more."""
        self.alive.discard(rank)
        self._waiting.pop(rank, None)
        yield from self._served()

    def stuck(self) -> Iterator[Reply]:
        """Answer all that wait, for nobody is left to give what they wait for."""
        for rank, (what, wanted) in list(self._waiting.items()):
            del self._waiting[rank]
            yield rank, self._taken(wanted) if what == "get" else GONE

    def _served(self) -> Iterator[Reply]:
        for rank, (what, wanted) in list(self._waiting.items()):
            if what == "store_get":
                if wanted in self._store:
                    del self._waiting[rank]
                    yield rank, self._store[wanted]
            elif all(key in self._values or key[-1] not in self.alive for key in wanted):
                del self._waiting[rank]
                yield rank, self._taken(wanted)

    def _taken(self, keys: Sequence[Key]) -> list[Any]:
        found = []
        for key in keys:
            entry = self._values.get(key)
            if entry is None:
                found.append(GONE)
                continue
            found.append(entry[0])
            entry[1] -= 1
            if not entry[1]:
                del self._values[key]
        return found
