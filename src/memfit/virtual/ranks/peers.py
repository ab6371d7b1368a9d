"""What a traced rank asks of the other ranks of its job: values of collectives and messages, and a key-value store.

A rank that is not traced is represented by a traced one, the nearest of its group or the one of its class; without any
it is represented by the rank that asks.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from memfit.virtual.ranks.traced import Communicator, WorldFacts

Key = tuple[Any, ...]


@dataclass(slots=True)
class Group:
    """A process group that this rank is a member of. key: equal on all members. ranks: of the world, in order."""

    key: str
    ranks: tuple[int, ...]
    me: int  # position of this rank in `ranks`
    name: str = ""
    calls: Counter[Any] = field(default_factory=Counter)
    passed: dict[str, int] = field(default_factory=dict)  # operator -> how often it was called

    @property
    def size(self) -> int:
        return len(self.ranks)


class Peers:
    """The other ranks of a process that is traced alone: all of them would do what this one does.

    favoured: the rank whose experts may get more tokens than others, all over the job.
    """

    def __init__(
        self, rank: int = 0, traced: Sequence[int] = (), classes: Mapping[int, int] | None = None,
        favoured: int | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.traced = rank, frozenset(traced) | {rank}
        self.favoured = rank if favoured is None else favoured
        self.classes = classes or {}  # rank -> the traced rank of its class
        self.silent: set[int] = set()  # ranks whose messages nobody has sent
        self.messages: set[tuple[int, ...]] = set()  # pairs of ranks that send to each other, as far as this one sees
        self.described: list[tuple[str, tuple[int, ...]]] = []  # description and ranks of all groups of the job
        self.groups: dict[str, Group] = {}  # those of this rank, by their names in PyTorch
        self.shards: dict[tuple[int, ...], tuple[int, ...]] = {}  # see WorldFacts
        self._sent: dict[Any, Any] = {}  # what this rank sent last, by the form of the message
        self._store: dict[str, bytes] = {}
        self._stand_ins: dict[tuple[int, ...], list[int]] = {}  # ranks of a group -> see `_standing`
        self._asked = 0  # how often something was asked of all traced ranks

    def stands_for(self, group: Group, position: int) -> int:
        """Return the traced member whose values stand for those of the member at `position`."""
        return self._standing(group)[position]

    def _standing(self, group: Group) -> list[int]:
        """Return for each member the traced one that stands for it: the one of its class, else the nearest."""
        if (known := self._stand_ins.get(group.ranks)) is not None:
            return known
        at = [i for i, rank in enumerate(group.ranks) if rank in self.traced]
        members, found = set(group.ranks) & self.traced, []
        for position, rank in enumerate(group.ranks):
            same = rank if rank in self.traced else self.classes.get(rank, rank)
            after = bisect_left(at, position)
            near = min(at[max(after - 1, 0) : after + 1], key=lambda i: abs(i - position))
            found.append(same if same in members else group.ranks[near])
        self._stand_ins[group.ranks] = found
        return found

    def exchange(self, group: Group, mine: Any) -> list[Any]:
        """Give a value, and return those of all members in their order. Each member has to call this."""
        turn = group.calls["all"]
        group.calls["all"] += 1
        others = sorted((self.traced & set(group.ranks)) - {self.rank})
        found = {self.rank: mine} | self._exchanged((group.key, turn), others, mine)
        values = [found[rank] for rank in self._standing(group)]
        return [mine if value is GONE else value for value in values]

    def from_one(self, group: Group, root: int, mine: Any) -> Any:
        """Return the value of the member at position `root`; `mine` is what this rank has."""
        turn = group.calls["root"]
        group.calls["root"] += 1
        source = self.stands_for(group, root)
        if source == self.rank != group.ranks[root]:
            self._untraced(group, root)
        others = sorted((self.traced & set(group.ranks)) - {source})
        if source == self.rank:
            self._put((group.key, "root", turn, source), mine, len(others))
            return mine
        found = self._get([(group.key, "root", turn, source)])[0]
        return mine if found is GONE else found

    def send(self, group: Group, to: int, form: Any, value: Any) -> None:
        """Send a value to the member at position `to`; `form` describes it as its receiver does."""
        key = (group.key, group.ranks[to], self.rank)
        turn = group.calls[key]
        group.calls[key] += 1
        self._sent[form] = value
        self.messages.add(tuple(sorted((self.rank, group.ranks[to]))))
        if group.ranks[to] in self.traced:
            self._put(("message", group.key, group.ranks[to], turn, self.rank), value, 1)

    def receive(self, group: Group, source: int, form: Any) -> Any:
        """Return what the member at position `source` sends; without it, what this rank sent last in that form."""
        key = (group.key, self.rank, group.ranks[source])
        turn = group.calls[key]
        group.calls[key] += 1
        self.messages.add(tuple(sorted((self.rank, group.ranks[source]))))
        sent = ("message", group.key, self.rank, turn, group.ranks[source])
        found = self._get([sent])[0] if group.ranks[source] in self.traced else self._untraced(group, source)
        if found is GONE:
            self.silent.add(group.ranks[source])
            return self._sent.get(form)
        return found

    def anywhere(self, mine: bool) -> bool:
        """Return whether this is so on any traced rank. Each of them has to call this."""
        found = self._exchanged(("anywhere", self._asked), sorted(self.traced - {self.rank}), mine)
        self._asked += 1
        return mine or True in found.values()

    # --- the store ---

    def store_set(self, key: str, value: bytes) -> None:
        self._store[key] = value

    def store_get(self, key: str) -> bytes | None:
        """Return the value of a key once a rank has set it; None if no rank ever will."""
        return self._store.get(key)

    def store_add(self, key: str, amount: int) -> int:
        value = int(self._store.get(key, b"0")) + amount
        self._store[key] = str(value).encode()
        return value

    def store_has(self, keys: Sequence[str]) -> bool:
        return all(key in self._store for key in keys)

    def store_delete(self, key: str) -> bool:
        return self._store.pop(key, None) is not None

    @property
    def facts(self) -> WorldFacts:
        """Return what is known of the job's groups so far."""
        own = tuple(Communicator(g.name, g.size, dict(g.passed)) for g in self.groups.values() if g.passed)
        return WorldFacts(tuple(self.described), own, frozenset(self.messages), dict(self.shards))

    def before_step(self) -> None:
        """Note that the first optimizer step begins: by now all groups of the job are made."""

    def _untraced(self, group: Group, source: int) -> Any:
        """Return what stands for a message of a rank that is not traced."""
        return GONE

    # --- the way to the others ---

    def _exchanged(self, key: Key, others: Sequence[int], mine: Any) -> dict[int, Any]:
        if not others:
            return {}
        self._put((*key, self.rank), mine, len(others))
        return dict(zip(others, self._get([(*key, other) for other in others]), strict=True))

    def _put(self, key: Key, value: Any, readers: int) -> None: ...

    def _get(self, keys: Sequence[Key]) -> list[Any]:
        return [GONE] * len(keys)


class _Gone:
    """What stands for a value that no rank will give any more; one object, also after pickling."""

    def __reduce__(self) -> str:
        return "GONE"


GONE = _Gone()


class ConnectedPeers(Peers):
    """The other ranks of a process that is one of several, all connected to the process that started them.

    asking: whether other ranks are to be traced too is not settled, so it is told which ones this one needs.
    """

    def __init__(
        self, rank: int, traced: Sequence[int], connection: Connection, classes: Mapping[int, int] | None = None,
        asking: bool = False, favoured: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(rank, traced, classes, favoured)
        self._connection, self._lock, self._asking = connection, threading.Lock(), asking

    def before_step(self) -> None:
        if self._asking:
            self._tell("facts", self.facts)

    def _untraced(self, group: Group, source: int) -> Any:
        if self._asking:  # the rank may have to be traced: then this one waits until it is ended
            self._tell("needs", self.facts, group.ranks[source])
            self._connection.recv()
        return GONE

    def _put(self, key: Key, value: Any, readers: int) -> None:
        if readers:
            self._tell("put", key, value, readers)

    def _get(self, keys: Sequence[Key]) -> list[Any]:
        return list(self._ask("get", list(keys)))

    def store_set(self, key: str, value: bytes) -> None:
        self._tell("store_set", key, value)

    def store_get(self, key: str) -> bytes | None:
        found = self._ask("store_get", key)
        return None if found is GONE else found

    def store_add(self, key: str, amount: int) -> int:
        return int(self._ask("store_add", key, amount))

    def store_has(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("store_has", list(keys)))

    def store_delete(self, key: str) -> bool:
        return bool(self._ask("store_delete", key))

    def _tell(self, *words: Any) -> None:
        with self._lock:
            self._connection.send(words)

    def _ask(self, *words: Any) -> Any:
        with self._lock:
            self._connection.send(words)
            return self._connection.recv()
