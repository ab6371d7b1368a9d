"""memfit check: judge a repository's jobs, and what a change makes of them."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from memfit._package import __version__
from memfit.catalogue import cards
from memfit.check import git
from memfit.check.causes import causes_of
from memfit.check.difference import difference
from memfit.check.git import Hunk
from memfit.check.judges import Case, Judged, judge
from memfit.cli import terminal
from memfit.cli.check_worker import CALL
from memfit.cli.flags import COMMON, Argument, Flag, takes
from memfit.documents import check_file
from memfit.documents.check_doc import check_doc
from memfit.documents.check_file import CheckFile
from memfit.documents.output_files import check_free, write_files
from memfit.errors import BadInput, MemfitError
from memfit.frameworks.reading import adopt
from memfit.nouns.check import CheckJob, CheckReport, JobAnswer, JobDifference, JobResult
from memfit.report.check import check_view
from memfit.report.check_formats import junit, markdown, sarif
from memfit.units import several

ENDINGS = {".md": "markdown", ".sarif": "sarif", ".xml": "junit", ".json": "json"}  # of --report
EXAMPLES = (
    "memfit check --init",
    "memfit check",
    "memfit check sft --base origin/main",
    "memfit check --base origin/main --report memfit.md --report memfit.sarif",
)
NAMES = Argument("names", "the jobs to judge, by their names in memfit.toml; all without one", "NAME", many=True)
FORMATS = ("terminal", "json", "markdown", "sarif", "junit")
ROWS = (
    Flag("base", str, "Judge them at this commit too, and show what the working tree adds.", "REF"),
    Flag("format", str, "How to print the answer. Default: terminal.", "|".join(FORMATS)),
    Flag("report", str, "Write it to a file too: .md, .sarif, .xml (JUnit) or .json; may be repeated.", "FILE",
         default=(), many=True),
    Flag("file", str, "The file of jobs. Default: memfit.toml, or [tool.memfit] of pyproject.toml.", "FILE"),
    Flag("jobs", int, "How many to judge at a time. Default: as cores and memory allow.", "N"),
    Flag("fresh", bool, "Judge all again, without the answers that are kept.", default=False),
    Flag("init", bool, "Write a first memfit.toml from the configurations of this folder.", default=False),
    Flag("gpu", str, "The card of the file that --init writes.", "NAME"),
    Flag("force", bool, "Overwrite the files of --init and --report.", default=False),
)  # fmt: skip


@takes(*ROWS, *COMMON, argument=NAMES)
def run(names: tuple[str, ...] = (), **flags: Any) -> int:
    """Keep a repository's jobs within their cards.

    memfit.toml names the jobs, each a command line or a framework's file with a card and, if wanted, a budget. Each is
    judged in a process of its own; an answer is kept until something changes that it depends on. With --base the
    same is done at another commit, and the difference is told with the line that makes it.

    Exit code: that of the worst job.
    """
    style = _format(flags)
    if flags["jobs"] is not None and flags["jobs"] < 1:
        raise BadInput(f"--jobs must be at least 1, not {flags['jobs']}", hint="--jobs 1 judges one after the other")
    if flags["init"]:
        return _init(flags)
    reports = {Path(name): _of_ending(name) for name in flags["report"]}
    check_free(reports, flags["force"])
    file, root = _file(flags["file"])
    jobs = file.named(names)
    with interruptible(), terminal.progress() as tell:
        report = _checked(file, root, jobs, flags, tell)
    if style == "terminal":
        terminal.show(check_view(report))
    else:
        sys.stdout.write(_text(report, style))
    write_files({path: _text(report, kind).encode() for path, kind in reports.items()}, flags["force"])
    return report.exit_code


def _format(flags: dict[str, Any]) -> str:
    style = flags["format"] or ("json" if flags["json"] else "terminal")
    if style not in FORMATS:
        raise BadInput(f"--format cannot be {style}", hint=f"choose one of {', '.join(FORMATS)}")
    if flags["json"] and style != "json":
        raise BadInput(f"--json and --format {style} contradict each other", hint="give one of them")
    return style


def _file(named: str | None) -> tuple[CheckFile, Path]:
    """Return the file of jobs and the root of its repository, or its folder outside of one."""
    path = Path(named) if named else check_file.find(Path.cwd())
    if path is None:
        raise BadInput("there is no memfit.toml here", hint="memfit check --init writes a first one")
    if not path.is_file():
        raise BadInput(f"there is no file {path}", hint="memfit check --init writes a first memfit.toml")
    folder = path.absolute().parent
    return check_file.read(path), git.repository(folder) or folder.resolve()


def _checked(
    file: CheckFile, root: Path, jobs: Sequence[CheckJob], flags: dict[str, Any], tell: Callable[[str, float], None]
) -> CheckReport:
    folder = file.path.absolute().parent.resolve()
    inside = os.path.relpath(folder, root.resolve())
    inside = "" if inside == "." else inside
    for job in jobs:
        if not (folder / job.folder).is_dir():
            raise BadInput(f"job '{job.name}': there is no folder {job.folder}", hint="folder is relative to the file")

    def judged(cases: Sequence[Case], fresh: bool = False) -> list[Judged]:
        return judge(cases, CALL, tell, jobs=flags["jobs"] or 0, fresh=fresh)

    heads = [Case(job, root, inside) for job in jobs]
    shown = str(Path(inside, file.path.name))
    if not flags["base"]:
        answers = judged(heads, flags["fresh"])
        return CheckReport(shown, tuple(_result(c.job, a) for c, a in zip(heads, answers, strict=True)))
    if git.repository(folder) is None:
        raise BadInput("--base needs a git repository", hint="run it inside the repository, where git is installed")
    commit = git.commit_of(root, flags["base"])
    with git.worktree(root, commit) as tree:
        bases = _at_base(tree / inside / file.path.name, jobs)
        olds = [Case(job, tree, inside) for job in bases]
        answers = judged([*heads, *olds], flags["fresh"])
        comparing = _Comparison(root, commit, git.changes(root, commit), judged)
        results = [
            comparing.result(*four)
            for four in zip(heads, answers[: len(heads)], olds, answers[len(heads) :], strict=True)
        ]
    return CheckReport(shown, tuple(results), flags["base"])


def _at_base(path: Path, jobs: Sequence[CheckJob]) -> list[CheckJob]:
    """Return the jobs as the other commit's file has them; one that it has not, or not in this way, as now."""
    try:
        known = {job.name: job for job in check_file.read(path).jobs} if path.is_file() else {}
    except MemfitError:
        known = {}
    return [known.get(job.name, job) for job in jobs]


def _result(job: CheckJob, judged: Judged) -> JobResult:
    answer = judged.answer
    if isinstance(answer, JobAnswer):
        return JobResult(job, answer, seconds=judged.seconds, kept=judged.kept)
    return JobResult(job, failure=answer, seconds=judged.seconds)


class _Comparison:
    """What the working tree changes of a commit, job by job."""

    def __init__(
        self, root: Path, commit: str, hunks: Sequence[Hunk], judge: Callable[[Sequence[Case]], list[Judged]]
    ) -> None:
        self.root, self.commit, self.hunks, self.judge = root, commit, hunks, judge
        self.moves = git.Moves(hunks, git.renamed(root, commit))

    def result(self, head: Case, new: Judged, base: Case, old: Judged) -> JobResult:
        """Return a job's result with its difference, or why there is none."""
        found = _result(head.job, new)
        if not isinstance(new.answer, JobAnswer):
            return found
        if not isinstance(old.answer, JobAnswer):
            return replace(found, since=f"not judged at the other commit: {old.answer.message}")
        return replace(found, difference=self._difference(head, new, base, old))

    def _difference(self, head: Case, new: Judged, base: Case, old: Judged) -> JobDifference:
        assert isinstance(new.answer, JobAnswer) and isinstance(old.answer, JobAnswer)
        reads = {*new.reads, *(self.moves.names.get(path, path) for path in old.reads)}
        hunks = [hunk for hunk in self.hunks if hunk.file in reads or hunk.base_file in old.reads]
        found = difference(head.job, old.answer, new.answer, self.moves, hunks, self.root)
        if found.same or found.causes:
            return found
        formula = new.answer.source == "formula"
        return replace(
            found, causes=causes_of(found, base, head, hunks, self.moves.names, self.commit, self.judge, formula)
        )


@contextmanager
def interruptible() -> Iterator[None]:
    """Make a request to end (SIGTERM) an interrupt, so that processes and folders are cleared away."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with ExitStack() as stack:
        try:
            before = signal.signal(signal.SIGTERM, interrupt)
            stack.callback(signal.signal, signal.SIGTERM, before)
        except ValueError:  # not in the main thread
            pass
        yield


def _of_ending(name: str) -> str:
    style = ENDINGS.get(Path(name).suffix)
    if style is None:
        raise BadInput(f"--report {name}: its ending names no format", hint=f"end it with {', '.join(ENDINGS)}")
    return style


def _text(report: CheckReport, style: str) -> str:
    """Return the answer in a format for files."""
    if style == "markdown":
        return markdown(report)
    if style == "junit":
        return junit(report)
    if style == "sarif":
        return terminal.json_text(sarif(report, __version__))

    return terminal.json_text(check_doc(report))


# --- a first file ---


def _init(flags: dict[str, Any]) -> int:
    """Write a first file from the configurations of this folder."""
    path = Path(flags["file"] or check_file.OWN)
    gpu = flags["gpu"] or "rtx-4090"
    if flags["gpu"]:
        cards.parse_gpu(gpu)
    jobs = _jobs_here(Path.cwd())
    if not jobs:
        raise BadInput(
            "no configuration or training script was found here",
            hint=f'write {path} by hand: [jobs.sft] with command = "python train.py" and gpu = "{gpu}"',
        )
    write_files({path: check_file.dumps(jobs, gpu).encode()}, flags["force"])
    terminal.note(f"wrote {path} with {several(len(jobs), 'job')}: check the card, then memfit check")
    return 0


_DEEPEST = 3  # folders below this one in which configurations are looked for
_LAUNCHES = r"\b(torchrun|accelerate launch|deepspeed|python3?)\b"
_TRAINS = r"\.backward\(|Trainer\(|\.train\(\)|\.fit\("


def _jobs_here(folder: Path) -> dict[str, dict[str, str]]:
    """Return a job for each configuration and each script that trains, by name."""
    found: dict[str, dict[str, str]] = {}
    for path in _files(folder):
        name = str(path.relative_to(folder))
        keys: dict[str, str] = {}
        if path.suffix in (".yaml", ".yml", ".json", ".toml"):
            keys = {"config": name} if _is_recipe(path) else {}
        elif path.suffix == ".py":
            text = path.read_text(errors="replace")
            keys = {"command": f"python {name}"} if "__main__" in text and re.search(_TRAINS, text) else {}
        elif re.search(_LAUNCHES, path.read_text(errors="replace")):
            keys = {"command": f"bash {name}"}
        if keys:
            title = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._") or "job"
            found[title if title not in found else re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")] = keys
    return found


def _files(folder: Path) -> Iterator[Path]:
    endings = (".yaml", ".yml", ".json", ".toml", ".py", ".sh")
    for place, folders, names in os.walk(folder):
        deep = len(Path(place).relative_to(folder).parts)
        hidden = ("node_modules", "tests", "test", "docs", "build", "dist", "site-packages")
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in hidden) if deep < _DEEPEST else []
        for name in sorted(names):
            path = Path(place, name)
            if path.suffix in endings and path.is_file() and path.stat().st_size < 1 << 18:
                yield path


def _is_recipe(path: Path) -> bool:
    """Return whether memfit reads a file as the recipe of a model."""
    try:
        return bool(adopt(path).model)
    except MemfitError:
        return False
