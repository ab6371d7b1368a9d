"""Trace several ranks of a job: one process each, forked after the imports, with their values carried between them.

A fresh process imports PyTorch once and forks the ranks, because a process in which autograd's engine has run cannot be
forked. It has rounds: the first one traces rank 0 and the last rank. What they tell of the groups of the job decides
which ranks are distinct; where those are others, they are traced together in another round.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from memfit.catalogue.cards import available_host_memory
from memfit.errors import BadInput, MemfitError
from memfit.virtual.libraries.megatron_core import read_batches_of
from memfit.virtual.process.end_with_parent import end_with_parent
from memfit.virtual.process.files import JOB, MadeByJob, remove_made
from memfit.virtual.ranks.distinct import classes
from memfit.virtual.ranks.exchange import Exchange
from memfit.virtual.ranks.peers import GONE, ConnectedPeers
from memfit.virtual.ranks.place import Place
from memfit.virtual.ranks.traced import RankClass, RanksTask, RanksTrace, TracedRank, WorldFacts, same_tapes
from memfit.virtual.scripts.command_trace import process_of, this_process
from memfit.virtual.scripts.imported_ahead import imported_ahead

Tell = Callable[[str, float], None]
MOST_ROUNDS = 16  # how often ranks are started anew because they need others
ALL_OF = 8  # ranks of a job that is traced whole where two ranks differ that should not: their shards are cut elsewhere
LEAST_FREE = 1 << 30  # bytes of host memory that have to be free before another rank starts
TAIL = 20  # lines of a failed rank's output that are shown


def trace_ranks(task: RanksTask, tell: Tell = lambda text, share: None) -> RanksTrace:
    """Trace a script on the ranks of a task, in the interpreter of its command line if it has one.

    Raises BadInput that names the rank for a script that cannot be run.
    """
    with tempfile.TemporaryDirectory(prefix="memfit-ranks-") as folder:
        asked, found = Path(folder) / "task", Path(folder) / "found"
        asked.write_bytes(pickle.dumps(task))
        run = task.words.get("command") or this_process()
        started = process_of(run, f"{__name__}:main", folder)
        with subprocess.Popen(**started, stdout=subprocess.PIPE, start_new_session=True) as process:
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    tell(*json.loads(line))
                process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if not found.exists():
            raise BadInput(f"the process that traces the ranks ended with code {process.returncode}", hint="--ranks 0")
        answer = pickle.loads(found.read_bytes())
    if isinstance(answer, MemfitError):
        raise answer
    assert isinstance(answer, RanksTrace)
    return answer


def main() -> None:
    """Trace the task in the folder that sys.argv names, and write there what was found."""
    end_with_parent()
    folder = Path(sys.argv[1])
    task: RanksTask = pickle.loads((folder / "task").read_bytes())
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what scripts print goes to stderr

    def tell(text: str, share: float) -> None:
        print(json.dumps([text, share]), file=out, flush=True)

    answer: object
    try:
        answer = _Job(task, folder, tell).traced()
    except MemfitError as error:
        answer = error
    made = folder / "found.part"
    made.write_bytes(pickle.dumps(answer))
    made.rename(folder / "found")
    for stream in (out, sys.stderr):
        stream.flush()
    os._exit(0)  # to take down thousands of modules takes a second


@dataclass(slots=True)
class _Round:
    """Ranks that are traced together.

    scouting: they may turn out to be others than the job needs. adding: ranks that they need are to be traced too.
    """

    ranks: tuple[int, ...]
    classes: tuple[RankClass, ...] = ()
    scouting: bool = False
    adding: bool = False
    needed: set[int] = field(default_factory=set)
    found: dict[int, TracedRank] = field(default_factory=dict)
    failed: dict[int, MemfitError] = field(default_factory=dict)
    facts: list[WorldFacts] = field(default_factory=list)


class _Job:
    """All rounds of one task."""

    def __init__(self, task: RanksTask, folder: Path, tell: Tell) -> None:
        self.task, self.folder, self.tell = task, folder, tell
        self.made = folder / "made"  # lists of the files that the ranks make
        self.made.mkdir()

    def traced(self) -> RanksTrace:
        """Return the traces. Raises the error of the first rank that failed."""
        self.tell("importing PyTorch", 0.0)
        words = self.task.words
        with imported_ahead(Path(words["path"]), words["args"], words["gpu"], words.get("command")):
            return self._rounds()

    def _rounds(self) -> RanksTrace:
        """Trace the ranks that are asked for, or those that turn out to be distinct."""
        if self.task.ranks:
            made = self._with_needed(self.task.ranks)
            return RanksTrace(
                tuple(made.found[rank] for rank in self.task.ranks), _merged(made.facts, self.task.world_size)
            )
        scouts = tuple(dict.fromkeys((0, self.task.world_size - 1)))
        made = self._run(_Round(scouts, scouting=True))
        while True:
            found = _merged(made.facts, self.task.world_size)
            pair = twins(found, made.facts)
            wanted = tuple(sorted({c.rank for c in found} | set(pair)))
            if set(wanted) <= set(made.found):
                break
            if not made.scouting and set(wanted) <= set(made.ranks):
                raise next(iter(made.failed.values()))
            made = self._run(_Round(wanted, found))
        traces = {c.rank: made.found[c.rank] for c in found}
        checked: tuple[tuple[int, int, bool], ...] = ()
        if pair:
            one, other = (made.found[rank] for rank in pair)
            equal = same_tapes(one.tape, other.tape)
            checked = ((one.rank, other.rank, equal),)
            if not equal and self.task.world_size <= ALL_OF:
                made = self._run(_Round(tuple(range(self.task.world_size)), found))
                traces = made.found
            elif not equal:
                traces[other.rank] = other
        return RanksTrace(tuple(traces[rank] for rank in sorted(traces)), found, checked)

    def _with_needed(self, ranks: tuple[int, ...]) -> _Round:
        """Trace these ranks, and beside them those whose broadcasts and messages they wait for: rank 0, mostly."""
        args = self.task.words["args"]
        ranks = tuple(sorted({0, *ranks, *(read_batches_of(rank, args) for rank in ranks)}))
        for _ in range(MOST_ROUNDS):
            made = self._run(_Round(ranks, adding=True))
            if not made.needed:
                return made
            ranks = tuple(sorted({*ranks, *made.needed}))
        return self._run(_Round(ranks))

    # --- one round ---

    def _run(self, made: _Round) -> _Round:
        """Trace the ranks of a round; a scouting round ends as soon as it is seen that others are needed."""
        exchange, pending = Exchange(made.ranks), list(made.ranks)
        running: dict[Connection, tuple[int, int]] = {}  # connection -> rank, process
        with self._ended(running):
            while running or pending:
                stuck = bool(running) and exchange.waiting == len(running)
                if pending and (not running or ((stuck or self._idle(running, exchange)) and self._room(stuck))):
                    rank = pending.pop(0)
                    connection, process = self._start(rank, made, running)
                    running[connection] = rank, process
                    continue
                if stuck:
                    self._reply(exchange.stuck(), running)
                ready = wait(list(running), 1.0)
                for connection in [c for c in running if c in ready]:
                    self._told(connection, made, exchange, running)
                if made.needed or (made.scouting and made.facts and self._needs_others(made)):
                    return made
                if made.failed and not made.scouting:
                    raise next(iter(made.failed.values()))
        if made.failed and made.scouting and not self._needs_others(made):
            raise next(iter(made.failed.values()))
        return made

    def _needs_others(self, made: _Round) -> bool:
        found = _merged(made.facts, self.task.world_size)
        return not {c.rank for c in found} <= set(made.ranks)

    def _told(self, connection: Connection, made: _Round, exchange: Exchange, running: dict[Any, Any]) -> None:
        rank, process = running[connection]
        try:
            words = connection.recv()
        except (EOFError, OSError):
            words = ("ended",)
        if words[0] == "ended":
            del running[connection]
            _, status = os.waitpid(process, 0)
            self._collect(rank, made, status)
            self._reply(exchange.ended(rank), running)
            shown = f"{len(made.found)} of {len(made.ranks)} ranks traced"
            self.tell(shown, 0.1 + 0.9 * len(made.found) / len(made.ranks))
        elif words[0] in ("facts", "needs"):
            made.facts.append(words[1])
            if words[0] == "needs":
                if made.adding:
                    made.needed.add(words[2])
                elif not self._needs_others(made):
                    connection.send(GONE)
        else:
            self._reply(exchange.told(rank, words), running)

    def _reply(self, answers: Iterator[tuple[int, Any]], running: dict[Connection, tuple[int, int]]) -> None:
        for rank, value in answers:
            connection = next((c for c, (r, _) in running.items() if r == rank), None)
            if connection is not None:
                with contextlib.suppress(BrokenPipeError):
                    connection.send(value)

    def _idle(self, running: dict[Any, Any], exchange: Exchange) -> bool:
        """Return whether a processor has nothing to do."""
        return len(running) - exchange.waiting < (os.cpu_count() or 1)

    def _room(self, stuck: bool) -> bool:
        return available_host_memory() > (LEAST_FREE // 4 if stuck else LEAST_FREE)

    def _collect(self, rank: int, made: _Round, status: int) -> None:
        """Read what a process has left: its trace, or why it failed."""
        path = self.folder / f"rank-{rank}"
        if path.exists():
            answer = pickle.loads(path.read_bytes())
            path.unlink()
        else:
            answer = BadInput(
                f"its process ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "its process ended",
                hint="the machine may have run out of memory: trace fewer ranks at once, --ranks 0",
            )
        if isinstance(answer, TracedRank):
            made.found[rank] = answer
            made.facts.append(answer.facts)
            return
        log = self.folder / f"output-{rank}"
        if log.exists() and not made.scouting:
            print(*log.read_text(errors="replace").splitlines()[-TAIL:], sep="\n", file=sys.stderr)
        made.failed[rank] = type(answer)(f"rank {rank}: {answer.message}", hint=answer.hint)

    @contextlib.contextmanager
    def _ended(self, running: dict[Connection, tuple[int, int]]) -> Iterator[None]:
        """End processes that are left after the block, and remove the files that the ranks made."""
        try:
            yield
        finally:
            for connection, (_, process) in running.items():
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                connection.close()
            for path in self.folder.glob("rank-*"):
                path.unlink()
            for list_of_one in self.made.iterdir():
                remove_made(list_of_one.read_text().splitlines())
                list_of_one.unlink()

    def _start(self, rank: int, made: _Round, running: dict[Connection, Any]) -> tuple[Connection, int]:
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if process:
            theirs.close()
            return ours, process
        status = 1
        try:
            end_with_parent()
            for connection in (ours, *running):
                connection.close()
            representative = {member: c.rank for c in made.classes for member in c.members}
            favoured = (self.task.ranks or made.ranks)[0]
            peers = ConnectedPeers(rank, made.ranks, theirs, representative, made.scouting or made.adding, favoured)
            if rank != made.ranks[0]:
                _print_to(self.folder / f"output-{rank}")
            JOB.append(MadeByJob(self.made, rank))
            answer = _trace(self.task, rank, peers)
            part = self.folder / f"part-{rank}"
            part.write_bytes(pickle.dumps(answer))
            part.rename(self.folder / f"rank-{rank}")
            theirs.send(("ended",))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)


def _trace(task: RanksTask, rank: int, peers: ConnectedPeers) -> TracedRank | MemfitError:
    """Trace one rank in this process, which was made for it."""
    from memfit.virtual.device.values import Answers
    from memfit.virtual.scripts.script import trace_script

    place = Place(rank, task.world_size, task.per_node)
    try:
        answers = Answers.of(task.answers)
        tape, outcome = trace_script(**task.words, answers=answers, place=place, peers=peers)
    except MemfitError as error:
        return error
    silent = tuple(sorted(peers.silent))
    return TracedRank(rank, tape, outcome, peers.facts, silent)


def _merged(facts: Sequence[WorldFacts], world_size: int) -> tuple[RankClass, ...]:
    """Return the classes of ranks from what all traced ones know."""
    if not facts:
        return (RankClass(0, tuple(range(world_size))),)
    groups = max((f.groups for f in facts), key=len)
    messages = frozenset().union(*(f.messages for f in facts))
    shards = {ranks: held for f in facts for ranks, held in f.shards.items()}
    return classes(WorldFacts(groups, (), messages, shards), world_size)


def twins(found: Sequence[RankClass], facts: Sequence[WorldFacts]) -> tuple[int, ...]:
    """Return two ranks of the largest class, which are taken to be equal; () where each rank is a class of its own.

    A rank that gets values from another, such as the stage of a pipeline, has a twin that gets them from a third, which
    would have to be traced too: such classes are not checked.
    """
    talking = {rank for known in facts for pair in known.messages for rank in pair}
    alone = [c for c in found if len(c.members) > 1 and c.rank not in talking]
    largest = max(alone, key=lambda c: len(c.members), default=None)
    return (largest.rank, largest.members[-1]) if largest else ()


def _print_to(path: Path) -> None:
    """Let this process print to a file."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
