"""A run's folder: its files, its lock, its whole checkpoints, and writing that never leaves half a file."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from msgspec import convert

from memfit.catalogue.cards import CUSTOM, custom_gpu, find_gpu
from memfit.documents import recipe_file, watch_log
from memfit.errors import BadInput, Refused
from memfit.frameworks import process_layout
from memfit.frameworks.recipe_toml import plan_of
from memfit.frameworks.targets import export
from memfit.frameworks.targets import write as write_files
from memfit.nouns.gpu import Gpu
from memfit.nouns.plan import Plan
from memfit.nouns.sample import Watched
from memfit.reading import bounds
from memfit.tables.trainers import script_of
from memfit.train import checkpoints, run_file
from memfit.train.checkpoints import Checkpoint
from memfit.train.outcome import Fall, Outcome, Settings, Shortage
from memfit.train.run_file import RUN_COPY, RUN_FILE, write_json, write_text

OUTCOME_FILE, SAMPLES_FILE, LOG_FILE = "outcome.json", "samples.jsonl", "log.txt"
MEMORY_FILE = "memory.jsonl"  # of memfit.watch
ASIDE, MARK = ".before", ".whole"  # holds the earlier run until the new one exists; marks that all of it was moved
GONE = ".gone"  # the earlier run while it is removed
LOCK = ".lock"
TASKS_TRAINED = ("sft", "dpo", "classification", "seq2seq", "embedding")  # what `memfit train` runs
DAMAGED = "damaged"  # checkpoints that are not what was written
DECIDE = ("recipe.toml", "train.py", process_layout.ACCELERATE_FILE, process_layout.DEEPSPEED_FILE)  # what is trained
WRITTEN = (
    "output", DAMAGED, "falls", "merged", ".merged", ".merged-before", "assets", RUN_FILE, RUN_COPY, OUTCOME_FILE,
    LOG_FILE, *DECIDE, "requirements.txt",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """One run's folder. `train.py` and `recipe.toml` are those of the present attempt."""

    path: Path

    @property
    def output(self) -> Path:
        """Return the folder the trainer writes to: checkpoints and the model."""
        return self.path / "output"

    @property
    def settings(self) -> Settings:
        """Return the settings of `memfit train`."""
        return run_file.read(self.path).settings

    @property
    def falls(self) -> tuple[Fall, ...]:
        """Return the times that memory ran out so far, in order."""
        return run_file.read(self.path).falls

    @property
    def outcome(self) -> Outcome | None:
        """Return the outcome of the last attempt, None before its end or if it cannot be read."""
        try:
            return convert(bounds.json_of(self.path / OUTCOME_FILE), Outcome)
        except (OSError, ValueError, RecursionError):  # msgspec's error is a ValueError
            return None

    def finished(self) -> Outcome | None:
        """Return the outcome of a run that is done and whose saved model is still there."""
        found = self.outcome
        if found is None or found.status != "done" or not found.saved:
            return None
        return found if all(map(_holds_a_model, found.saved)) else None

    @property
    def plan(self) -> Plan:
        """Return the plan of the present attempt."""
        file = recipe_file.read(self.path / "recipe.toml")
        return plan_of(file, card_of(self.settings))

    def watched(self) -> tuple[Watched | None, int]:
        """Return the watch of all attempts under the present plan together, and how many of its lines are damaged."""
        path, damaged = self.path / MEMORY_FILE, list[int]()
        content = path.read_bytes() if path.is_file() else b""
        runs = [r for r in watch_log.runs_of(content, damaged) if r.samples]
        same = [r for r in runs if r.header.predicted == runs[-1].header.predicted]
        whole = replace(same[-1], samples=tuple(s for r in same for s in r.samples)) if same else None
        return whole, len(damaged)

    def lost_model(self, finished: Outcome) -> str:
        """Set the saved weights of a finished run aside if they are not as they were written; return why, or ""."""
        why = checkpoints.difference(self.output, finished.files)
        for name in finished.files if why else ():
            if (self.output / name).is_file():
                checkpoints.set_aside(self.output / name, self.path / DAMAGED)
        return why

    def keep(self, settings: Settings, falls: Iterable[Fall], plan: Plan | None = None) -> None:
        """Write run.json. plan: a new one, whose files (those of `memfit export`) are written too."""
        if plan is None:
            run_file.write(self.path, settings, falls, run_file.read(self.path).files)
            return
        files = export(plan, target_of(plan))
        run_file.write(self.path, settings, falls, files, written=False)  # if killed here, `opened` writes the files
        write_files(files, self.path, force=True)
        run_file.write(self.path, settings, falls, files)

    def edited(self) -> list[Path]:
        """Return the files that decide what is trained and are not as the run wrote them."""
        files = run_file.read(self.path).files
        paths = [self.path / name for name in DECIDE if name in files]
        return [path for path in paths if path.is_file() and path.read_bytes() != files[path.name].encode()]

    def write_outcome(self, outcome: Outcome) -> None:
        """Write outcome.json."""
        write_json(self.path / OUTCOME_FILE, asdict(outcome))

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints that are whole by their marks and the sizes of their files, oldest first."""
        found = [c for c in map(checkpoints.read, checkpoints.folders(self.output)) if isinstance(c, Checkpoint)]
        return sorted((c for c in found if not checkpoints.damage(c, thorough=False)), key=lambda c: c.step)

    def last_good(self) -> Checkpoint | None:
        """Return the newest whole checkpoint."""
        return max(self.checkpoints(), key=lambda c: c.step, default=None)

    def drop_broken(self) -> list[Path]:
        """Remove unfinished checkpoints and return their paths."""
        broken = [p for p in checkpoints.folders(self.output) if not (p / checkpoints.COMPLETE).exists()]
        for path in broken:
            shutil.rmtree(path)
        return broken

    def verified(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest checkpoint whose every byte is as it was written, and a line for each one passed over.

        Those are set aside: nothing of them is lost, and the trainer can write theirs again.
        """
        passed: list[str] = []
        newest = sorted(checkpoints.folders(self.output), key=lambda p: -int(p.name.rpartition("-")[2]))
        for path in newest:
            found = checkpoints.read(path)
            why = found if isinstance(found, str) else checkpoints.damage(found)
            if isinstance(found, Checkpoint) and not why:
                return found, passed
            place = checkpoints.set_aside(path, self.path / DAMAGED)
            passed.append(f"{path.name} was passed over: {why}; it lies in {place}")
        return None, passed


@contextmanager
def held(folder: Path, keeps: tuple[str, ...] = ()) -> Iterator[None]:
    """Create the folder and lock it during the block. Raises Refused if another run holds the lock.

    Child processes started with `close_fds=False` inherit the lock, so that a training process that outlives its
    supervisor keeps it. At the end the lock's file is removed unless the folder has a file named in `keeps`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = (folder / LOCK).open("a+")
    except OSError as error:
        raise BadInput(f"{folder} cannot be written: {error.strerror}", hint="name another folder: --out DIR") from None
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(20).strip()
            raise Refused(
                f"a run is going on in {folder}{f' (started by process {holder})' if holder else ''}",
                hint="wait for its end or stop it with Ctrl-C or SIGTERM; name another folder: --out DIR",
            ) from None
        except OSError:  # a file system without locks
            yield
            return
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        os.set_inheritable(file.fileno(), True)
        try:
            yield
        finally:
            if {path.name for path in folder.iterdir()}.isdisjoint(keeps):
                (folder / LOCK).unlink(missing_ok=True)


@contextmanager
def fresh(folder: Path, force: bool) -> Iterator[None]:
    """Make room for a new run, which the block creates. `force` moves an earlier run aside, and back on failure.

    Raises Refused if the folder holds a run and `force` is not set, or holds other files.
    """
    _recover(folder)
    existing = [p for p in folder.iterdir() if p.name != LOCK] if folder.is_dir() else []
    if existing or (folder.exists() and not folder.is_dir()):
        if not run_file.there(folder):
            raise Refused(f"{folder} exists and holds no run", hint="name another folder: --out DIR")
        if not force:
            raise Refused(f"{folder} holds a run already", hint="--resume continues it, --out DIR starts another")
    aside = folder / ASIDE
    aside.mkdir(parents=True, exist_ok=True)
    try:
        _move(folder, aside)
        (aside / MARK).touch()
        yield
    except BaseException:
        if (aside / MARK).exists():
            (folder / RUN_FILE).unlink(missing_ok=True)
        _recover(folder)
        raise
    _drop(aside)


def create(folder: Path, plan: Plan, settings: Settings) -> Run:
    """Create a new run in a folder prepared by `fresh`."""
    run = Run(folder)
    gpu = plan.job.gpu
    short = "" if gpu.short == CUSTOM else gpu.short
    run.keep(replace(settings, gpu=short, gpu_memory=gpu.total_bytes), (), plan)
    return run


def opened(folder: Path) -> Run:
    """Return the run in a folder, its missing files written again. Raises BadInput if there is none."""
    _recover(folder)
    if not run_file.there(folder):
        raise BadInput(f"there is no run in {folder}", hint=f"start one: memfit train recipe.toml --out {folder}")
    run, stored = Run(folder), run_file.read(folder)
    for name, text in stored.files.items():
        if not (stored.written and (folder / name).is_file()):
            write_text(folder / name, text)
    if not stored.written or run_file.damaged(folder):
        run.keep(stored.settings, stored.falls)
    return run


def _recover(folder: Path) -> None:
    """Restore the earlier run if a process was killed in `fresh` before the new run existed. Interruptible."""
    shutil.rmtree(folder / GONE, ignore_errors=True)
    aside = folder / ASIDE
    if not aside.exists():
        return
    if (aside / MARK).exists():  # all of the earlier run was moved: the folder holds the new one
        if (folder / RUN_FILE).exists():  # it is written last
            _drop(aside)
            return
        _remove(folder)
        (aside / MARK).unlink()
    _move(aside, folder)
    aside.rmdir()


def _drop(aside: Path) -> None:
    """Rename the earlier run, then remove it, so that an interrupted removal does not leave half a run."""
    shutil.rmtree(aside.replace(aside.with_name(GONE)))


def _holds_a_model(folder: str) -> bool:
    """Return whether a folder holds weights of save_model."""
    return any(next(Path(folder).glob(kind), None) for kind in checkpoints.WEIGHTS)


def writes(name: str) -> bool:
    """Return whether a run writes a file or folder of this name."""
    return name in WRITTEN or any(fnmatch(name, f"{Path(part).stem}.*jsonl") for part in (SAMPLES_FILE, MEMORY_FILE))


def _written(folder: Path) -> list[Path]:
    """Return what a run wrote into the folder."""
    return [path for path in folder.iterdir() if writes(path.name)]


def _move(source: Path, target: Path) -> None:
    for path in _written(source):
        path.replace(target / path.name)


def _remove(folder: Path) -> None:
    for path in _written(folder):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def saved_so_far(run: Run, outcome: Outcome) -> Outcome:
    """Return the outcome with the steps and samples of the last whole checkpoint."""
    last = run.last_good()
    return replace(outcome, step=last.step, samples=last.samples) if last else outcome


def card_of(settings: Settings) -> Gpu:
    """Return the card of the plan: a row of the table, or a custom one with its memory."""
    row = find_gpu(settings.gpu) if settings.gpu else None
    return row if row and row.total_bytes == settings.gpu_memory else custom_gpu(settings.gpu_memory, row)


def target_of(plan: Plan) -> str:
    """Return the export target whose script runs the plan's trainer."""
    return script_of(plan.recipe.trainer)


def evidence(run: Run, shortage: Shortage) -> Path:
    """Keep the error and the files of an attempt that ran out of memory; return the folder."""
    aside = run.path / "falls" / str(len(run.falls) + 1)
    aside.mkdir(parents=True, exist_ok=True)
    for name in ("recipe.toml", "train.py"):
        shutil.copy2(run.path / name, aside / name)
    write_text(aside / "error.txt", shortage.trace or shortage.text + "\n")
    return aside


def fallen(run: Run, fall: Fall, plan: Plan, settings: Settings) -> None:
    """Record that memory ran out, keep the attempt's files aside, and write those of the next."""
    evidence(run, fall.shortage)
    run.keep(settings, (*run.falls, fall), plan)
