"""Trace public training scripts as their users start them, and write what became of each into docs/scripts.md.

usage: python benchmarks/scripts.py --repositories DIR [--venvs DIR] [--only NAME] [--limit SECONDS] [--list] [--keep]

The rows stand in benchmarks/scripts.toml. DIR holds the repositories by the name `owner+name`, as clones, bare or with
a work tree: nothing of them is committed here. Each row runs in a temporary copy of its repository at the row's
commit, with the small data that benchmarks/script_data.py makes, in an interpreter that has the packages that it
names: this one, or that of the folder of --venvs with the row's name for it. The table keeps the last result of a row
that is not run.

Exits with 1 where a row that was run failed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memfit.documents.output_files import replace_file
from memfit.units import gib
from script_data import DATA

HERE = Path(__file__).resolve().parent
TABLE = HERE.parent / "docs" / "scripts.md"
LIMIT = 900  # seconds for one row
RUNS, REFUSED, FAILS = "runs", "refused", "FAILS"
_VERDICTS = {"fits": "fits", "tight": "tight", "misfit": "does not fit", "not_judged": "not judged"}
_ANSWERED = re.compile(r"answered by defaults \(--answer\): (.*)")
_ERROR = re.compile(r"(?:^|\])error: ", re.MULTILINE)  # at the start of a line, or behind a bar of progress
_ENDED = ("after its steps the script", "out of memory at", "the script caught")  # notes worth a cell
_LONGEST = 300  # characters of a cell
_TITLES = (
    "script",
    "command after `memfit trace --gpu`",
    "outcome",
    "peak GiB",
    "s",
    "answered by default",
    "notes",
    "run",
)
_HEAD = """# Public scripts

What `memfit trace` makes of training scripts as they are published, run by `benchmarks/scripts.py` on two CPU cores and
no GPU. A row names a repository and its commit; the data is made up and small, models are known by their names only.
"peak" is what the allocator reserves at most on the worst traced rank, without the CUDA context and NCCL; "s" is the
wall time of the whole command, beside whatever else the machine did (some rows ran among twenty other processes).
Scripts older than the installed libraries (PyTorch 2.13, transformers 5.23) are patched where the notes say so.
"refused": memfit names what it does not do, and a way that works. No peak here was measured on a card.

"""


@dataclass(frozen=True, slots=True)
class Row:
    """A script of scripts.toml, which explains the fields."""

    name: str
    repository: str
    commit: str
    gpu: str
    command: str
    folder: str = "."
    parts: Sequence[str] = ()
    flags: Sequence[str] = ()
    patches: Sequence[tuple[str, str, str]] = ()
    data: Sequence[str] = ()
    packages: Sequence[str] = ()
    venv: str = ""
    about: str = ""
    refused: str = ""
    wrong: str = ""


def rows(path: Path = HERE / "scripts.toml") -> list[Row]:
    """Read the scripts; without parts of their own they need the folder in which they are typed."""
    document = tomllib.loads(path.read_text())
    commits = document["commits"]
    found = [Row(**{"commit": commits[script["repository"]], **script}) for script in document["scripts"]]
    return [
        replace(row, command=" ".join(row.command.split()), parts=row.parts if "parts" in script else (row.folder,))
        for row, script in zip(found, document["scripts"], strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a row: the cells of the table that a run fills."""

    outcome: str
    peak: str = ""
    seconds: str = ""
    answered: str = ""
    said: str = ""
    day: str = ""

    @property
    def kind(self) -> str:
        """Return `runs`, `refused` or `FAILS`."""
        return self.outcome.partition(":")[0]


# --- one row ---


def checkout(row: Row, repositories: Path, folder: Path) -> None:
    """Lay the row's repository at its commit into a folder, with the row's patches and data."""
    clone = repositories / row.repository.replace("/", "+")
    git = ["git", "--git-dir", str(clone / ".git" if (clone / ".git").exists() else clone)]
    listed = _output([*git, "ls-tree", "-r", row.commit, *row.parts])
    blobs = dict(line.split("\t", 1)[::-1] for line in listed.splitlines())  # path -> mode, kind, number
    numbers = "\n".join(about.split()[2] for about in blobs.values())
    there = _output([*git, "cat-file", "--batch-check"], numbers).splitlines()
    without = [f":(exclude){path}" for path, found in zip(blobs, there, strict=True) if found.endswith("missing")]
    folder.mkdir()
    tar = folder / "of.tar"
    _output([*git, "archive", "--output", str(tar), row.commit, "--", *(row.parts or ["."]), *without])
    _output(["tar", "-x", "-f", str(tar), "-C", str(folder)])
    tar.unlink()
    for file, old, new in row.patches:
        text = (folder / file).read_text()
        if old not in text:
            raise ValueError(f"{row.name}: {file} has no {old!r}")
        (folder / file).write_text(text.replace(old, new))
    for name in row.data:
        for write in DATA[name]:
            write(folder / row.folder)


def _output(words: Sequence[str], given: str = "") -> str:
    return subprocess.run(words, input=given, check=True, capture_output=True, text=True).stdout


def interpreter(row: Row, venvs: Path | None) -> Path:
    """Return the Python that has the row's packages."""
    return venvs / row.venv / "bin" / "python" if row.venv and venvs else Path(sys.executable)


def environment(python: Path, home: Path) -> dict[str, str]:
    """Return the variables of a row's process: its Python first on the path, an empty cache of the Hub, no network."""
    path = [str(HERE.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(path),
        "HF_HOME": str(home / "hub"), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "COLUMNS": "120",
        "XDG_CACHE_HOME": str(home / "cache"),
    }  # fmt: skip


def run(row: Row, repositories: Path, venvs: Path | None, limit: int, keep: bool) -> Result:
    """Trace a row in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="scripts-") as temporary:
        home = Path(temporary)
        place = home / row.repository.partition("/")[2]
        try:
            checkout(row, repositories, place)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            return Result(f"{FAILS}: cannot be laid out", said=str(error), day=_today())
        python = interpreter(row, venvs)
        words = [str(python), "-m", "memfit", "trace", "--gpu", row.gpu, *row.flags, "--json", "--"]
        started = time.monotonic()
        process = subprocess.Popen(
            [*words, *shlex.split(row.command)], cwd=place / row.folder, env=environment(python, home),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            answer, log = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # as Ctrl-C: it ends the processes of its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=30)
            process.kill()
            return Result(f"{FAILS}: took longer than {limit} s", day=_today())
        seconds = time.monotonic() - started
        if keep:
            (Path.cwd() / f"{row.name}.log").write_text(f"{answer}\n{log}")
    return replace(read(row, answer, log), seconds=f"{seconds:.0f}", day=_today())


def read(row: Row, answer: str, log: str) -> Result:
    """Return the result that a trace's JSON, or the error in its log, makes."""
    if answer.lstrip().startswith("{"):
        return _traced(json.loads(answer))
    found = list(_ERROR.finditer(log))
    if not found:
        return Result(FAILS, said=next((line for line in reversed(log.splitlines()) if line.strip()), "said nothing"))
    message = " ".join(log[found[-1].end() :].split())
    refused = bool(row.refused) and row.refused in message and "hint: " in message
    return Result(REFUSED if refused else FAILS, said=message)


def _traced(document: Mapping[str, Any]) -> Result:
    """Return the result of a trace that has an answer."""
    verdict, notes = document["verdict"], document["notes"]
    asked = next((found[1] for note in notes if (found := _ANSWERED.search(note))), "")
    said = [note for note in notes if note.startswith(_ENDED)]
    return Result(
        f"{RUNS}: {_VERDICTS.get(verdict, verdict)}", gib(document["peak"]["reserved"], 2), answered=asked,
        said="; ".join(said),
    )  # fmt: skip


def _today() -> str:
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


# --- the table ---


def kept(text: str) -> dict[str, Result]:
    """Return the results that a table holds: name of the row -> result."""
    found: dict[str, Result] = {}
    for line in text.splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == len(_TITLES) and cells[-1][:2] == "20":
            name = re.sub(r"\*\*(.*?)\*\*.*", r"\1", cells[0])
            said = cells[6].rpartition("<br>")[2]
            found[name] = Result(cells[2], cells[3], cells[4], cells[5], said, cells[7])
    return found


def line_of(row: Row, result: Result | None) -> str:
    """Return a row's line of the table."""
    link = (
        f"**{row.name}**<br>[{row.repository}](https://github.com/{row.repository}/tree/{row.commit}) {row.commit[:8]}"
    )
    folder = f"in `{row.folder}`: " if row.folder != "." else ""
    about = "; ".join(filter(None, (row.about, f"WRONG: {row.wrong}" if row.wrong else "")))
    result = result or Result("not run yet")
    notes = f"{about}<br>{_cut(result.said)}" if about or result.said else ""
    cells = (
        link, f"{folder}`{' '.join([row.gpu, *row.flags, '--', row.command])}`", result.outcome, result.peak,
        result.seconds, result.answered, notes, result.day,
    )  # fmt: skip
    return "| " + " | ".join(re.sub(r"\s+", " ", cell).replace("|", "\\|") for cell in cells) + " |"


def _cut(text: str) -> str:
    text = re.sub(r"\S*/scripts-[^/\s]+/", "", text).replace("<br>", " ").strip()
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def table(rows: Sequence[Row], results: Mapping[str, Result]) -> str:
    """Return docs/scripts.md."""
    kinds = Counter(result.kind for row in rows if (result := results.get(row.name)))
    counts = f"Of {len(rows)} rows {kinds[RUNS]} run, {kinds[REFUSED]} are refused, {kinds[FAILS]} fail."
    lines = [line_of(row, results.get(row.name)) for row in rows]
    head = f"| {' | '.join(_TITLES)} |\n|---|---|---|---:|---:|---|---|---|\n"
    return _HEAD + f"{counts}\n\n{head}" + "\n".join(lines) + "\n"


def main() -> int:
    """Run the rows, and write the table after each; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repositories", type=Path, help="a folder of clones, named owner+name")
    parser.add_argument("--venvs", type=Path, help="a folder of virtual environments, by the rows' names for them")
    parser.add_argument("--only", action="append", default=[], help="rows whose name contains this; repeatable")
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds for one row")
    parser.add_argument("--list", action="store_true", help="print the rows and the packages they need")
    parser.add_argument("--keep", action="store_true", help="write what each row printed to NAME.log in this folder")
    options = parser.parse_args()
    every = rows()
    chosen = [row for row in every if not options.only or any(word in row.name for word in options.only)]
    if options.list:
        for row in chosen:
            print(f"{row.name}: {row.repository} {row.commit[:8]} needs {' '.join(row.packages) or 'nothing more'}")
        return 0
    if options.repositories is None or not chosen:
        parser.error("--repositories DIR is needed" if chosen else f"no row has a name with {options.only}")
    failed = False
    for row in chosen:
        result = run(row, options.repositories.resolve(), options.venvs, options.limit, options.keep)
        results = {**(kept(TABLE.read_text()) if TABLE.exists() else {}), row.name: result}
        replace_file(TABLE, table(every, results).encode())
        print(f"{row.name}: {result.outcome} {result.peak} {result.seconds} s {result.said}", flush=True)
        failed |= result.kind == FAILS
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
