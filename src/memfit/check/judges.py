"""Judge jobs in parallel, each in a process of its own, and keep the answers as long as nothing they read changes."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec

from memfit.catalogue.cards import available_host_memory, local_gpu
from memfit.check.inputs import Inputs, gathered, same
from memfit.documents import traced_answers
from memfit.nouns.check import CheckJob, JobAnswer, JobFailure
from memfit.virtual.process.recorded_inputs import LIBRARIES, RECORD, ROOT
from memfit.virtual.supported import versions

Tell = Callable[[str, float], None]
OF_ONE = 5 << 29  # bytes of host memory that a judged job takes: PyTorch, its libraries and a tape of a million events
KEPT = 8  # answers that are kept of one job, for as many states of the repository
_LOOK = 0.05  # seconds between two looks at the processes
_GRACE = 2.0  # seconds that an interrupted process has to clear away
_TAIL = 20  # lines of a failed job's output that are told
_LOST = JobFailure(
    "the process that judged it ended without an answer",
    "most likely for its memory: close other programs, --jobs 1",
    2,
)


@dataclass(frozen=True, slots=True)
class Case:
    """A job in one tree of the repository. inside: the folder of its file, relative to the root.

    libraries: name the lines of installed libraries that allocate too.
    """

    job: CheckJob
    root: Path
    inside: str = ""
    libraries: bool = False

    @property
    def folder(self) -> Path:
        """Return the folder in which the job is started."""
        return self.root / self.inside / self.job.folder

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.job.env}


@dataclass(frozen=True, slots=True)
class Judged:
    """The answer to a case. reads: files of the repository that it depends on."""

    answer: JobAnswer | JobFailure
    reads: tuple[str, ...] = ()
    seconds: float = 0.0
    kept: bool = False


class _Entry(msgspec.Struct, frozen=True):
    inputs: Inputs
    answer: JobAnswer


class _Entries(msgspec.Struct, frozen=True):
    of: tuple[_Entry, ...]


@dataclass(slots=True)
class _Running:
    number: int
    process: subprocess.Popen[bytes]
    folder: tempfile.TemporaryDirectory[str]
    began: float = field(default_factory=time.monotonic)


def judge(
    cases: Sequence[Case], call: str, tell: Tell = lambda text, share: None, *, jobs: int = 0, fresh: bool = False
) -> list[Judged]:
    """Return the answer to each case, from the cache where nothing it depends on has changed.

    call: Python code of the process that judges one. jobs: processes at a time; 0: as cores and memory allow. fresh:
    judge all again.
    """
    answers: dict[int, Judged] = {}
    keys = [_key(case) for case in cases]
    for number, case in enumerate(cases):
        if not fresh and (known := found(case, keys[number])):
            answers[number] = known
    pending = [number for number in range(len(cases)) if number not in answers]
    if pending:
        with tempfile.TemporaryDirectory(prefix="memfit-check-") as name, _ended() as running:
            while pending or running:
                busy = {keys[one.number] for one in running}
                # of two trees in which a job may read the same, one is judged first
                ready = next((number for number in pending if keys[number] not in busy), None)
                if ready is not None and len(running) < (jobs or _room(len(running))):
                    pending.remove(ready)
                    running.append(_start(ready, cases[ready], call, Path(name)))
                    continue
                _tell(tell, cases, answers, running)
                time.sleep(_LOOK)
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    answers[one.number] = _collected(one, cases[one.number], keys[one.number])
                    for number in [number for number in pending if keys[number] == keys[one.number]]:
                        if known := found(cases[number], keys[number]):
                            pending.remove(number)
                            answers[number] = known
    return [answers[number] for number in range(len(cases))]


def _room(running: int) -> int:
    """Return how many processes may run: one a core, and each with memory of its own."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, running + available_host_memory() // OF_ONE))


def _tell(tell: Tell, cases: Sequence[Case], answers: dict[int, Judged], running: Sequence[_Running]) -> None:
    names = ", ".join(cases[one.number].job.name for one in running)
    tell(f"judging {names}", len(answers) / len(cases))


@contextlib.contextmanager
def _ended() -> Iterator[list[_Running]]:
    """End all processes that are left after the block, with those that they started.

    They are interrupted first, so that a traced script's files are removed.
    """
    running: list[_Running] = []
    try:
        yield running
    finally:
        for number, patience in ((signal.SIGINT, _GRACE), (signal.SIGKILL, None)):
            for one in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one.process.pid, number)
            for one in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.process.wait(patience)
        for one in running:
            one.folder.cleanup()


def _start(number: int, case: Case, call: str, parent: Path) -> _Running:
    folder = tempfile.TemporaryDirectory(dir=parent)
    place = Path(folder.name)
    records = place / "records"
    records.mkdir()
    (records / ROOT).write_text(str(case.root))
    if case.libraries:
        (records / LIBRARIES).touch()
    (place / "job").write_bytes(pickle.dumps((case.job, str(case.folder), str(records))))
    environment = {**case.environment, RECORD: str(records)}
    with (place / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", call, str(place)], env=environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, start_new_session=True,
        )  # fmt: skip
    return _Running(number, process, folder)


def _collected(one: _Running, case: Case, key: str) -> Judged:
    """Read what a process has left, and keep its answer."""
    place, seconds = Path(one.folder.name), time.monotonic() - one.began
    try:
        file = place / "answer"
        answer: JobAnswer | JobFailure = pickle.loads(file.read_bytes()) if file.is_file() else _LOST
        if isinstance(answer, JobFailure):
            printed = (place / "output").read_text(errors="replace").splitlines()
            for line in printed[-_TAIL:]:
                print(f"{case.job.name}: {line}", file=sys.stderr)
            return Judged(answer, (), seconds)
        inputs = gathered(place / "records", case.job, case.root, case.folder, case.environment)
        _keep(key, _Entry(inputs, answer))
        return Judged(answer, inputs.own, seconds)
    finally:
        one.folder.cleanup()


# --- the cache ---


def _key(case: Case) -> str:
    """Return the digest of what a job says, of the program that starts it, and of memfit's own libraries."""
    told = asdict(replace(case.job, name="", line=0, budgets=(), phases=()))
    program = ""
    if case.job.command:
        where = case.environment.get("PATH", os.defpath)
        program = shutil.which(case.job.command[0], path=where) or case.job.command[0]
    card = local_gpu().name if case.job.gpu == "local" else ""
    folder = str(Path(case.inside, case.job.folder))
    return traced_answers.key(
        kind="diff" if case.libraries else "check",
        job=told,
        program=program,
        card=card,
        folder=folder,
        python=sys.version,
        versions=versions(),
    )


def found(case: Case, key: str = "") -> Judged | None:
    """Return the kept answer whose inputs are those of the tree. key: the digest of the case, if it is known."""
    for entry in _entries(key or _key(case)):
        if same(entry.inputs, case.root, case.environment):
            return Judged(entry.answer, entry.inputs.own, 0.0, kept=True)
    return None


def _entries(key: str) -> tuple[_Entry, ...]:
    kept = traced_answers.read(key, _Entries)
    return kept.of if kept else ()


def _keep(key: str, entry: _Entry) -> None:
    others = tuple(one for one in _entries(key) if one.inputs != entry.inputs)
    traced_answers.write(key, _Entries((entry, *others[: KEPT - 1])))
