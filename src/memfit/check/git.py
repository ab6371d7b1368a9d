"""What `memfit check --base` asks of git: another commit in a temporary worktree, and the lines that differ from it."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from memfit.errors import BadInput

_HEADER = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
SOURCES = (".py", ".sh", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".json")
MOST_LOOKED_AT = 1000  # files of a folder
_PATIENCE = 600  # seconds that git has to check out a commit


@dataclass(frozen=True, slots=True)
class Hunk:
    """Neighbouring lines that were replaced. Files are relative to the repository, lines count from 1.

    `base_count` lines from `base_start` on became `added`, which begin at `start`. With a count of 0 the start is that
    of the line before, as in git's own output. base_file: "" where the file is new.
    """

    base_file: str
    file: str
    base_start: int
    base_count: int
    start: int
    added: tuple[str, ...]

    @property
    def lines(self) -> tuple[int, int]:
        """Return the first and the last line of the new file that show the change, without comments at its ends."""
        told = [n for n, text in enumerate(self.added) if text.strip() and not text.lstrip().startswith("#")]
        first, last = (told[0], told[-1]) if told else (0, max(len(self.added) - 1, 0))
        return max(self.start + first, 1), max(self.start + last, 1)

    def covers(self, file: str, line: int) -> bool:
        """Return whether a line of the new file is a changed one."""
        return file == self.file and self.start <= line < self.start + len(self.added)


def repository(folder: Path) -> Path | None:
    """Return the top folder of the repository that a folder lies in; None without git or outside of one."""
    try:
        done = _git(folder, "rev-parse", "--show-toplevel")
    except OSError:
        return None
    return Path(done.stdout.strip()) if done.returncode == 0 and done.stdout.strip() else None


def commit_of(root: Path, ref: str) -> str:
    """Return the commit that a name means. Raises BadInput."""
    hint = "git fetch origin main; then --base origin/main"
    if ref.startswith("-"):
        raise BadInput(f"--base {ref} is no commit", hint=hint)
    done = _git(root, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    if done.returncode:
        raise BadInput(f"--base {ref}: git knows no such commit", hint=hint)
    return done.stdout.strip()


@contextmanager
def worktree(root: Path, commit: str) -> Iterator[Path]:
    """Check out a commit in a temporary folder for the length of the block.

    What git ignores (an environment, data) and what it does not know and is no source is linked, so that commands find
    it. A source that git does not know is a part of the change.
    """
    with tempfile.TemporaryDirectory(prefix="memfit-base-") as name:
        folder = Path(name, "tree")
        done = _git(root, "worktree", "add", "--detach", "--quiet", str(folder), commit)
        try:
            if done.returncode:
                problem = done.stderr.strip().splitlines() or ["it failed"]
                raise BadInput(f"git worktree add: {problem[-1]}", hint="git worktree list; git worktree prune")
            _link_others(root, folder)
            yield folder
        finally:
            _git(root, "worktree", "remove", "--force", "--force", str(folder))
            _git(root, "worktree", "prune")


def _link_others(root: Path, folder: Path) -> None:
    others = ("ls-files", "--others", "--directory", "--exclude-standard", "-z")
    ignored = _git(root, *others, "--ignored").stdout.split("\0")
    unknown = [name for name in _git(root, *others).stdout.split("\0") if name and not _has_source(root / name)]
    for line in (*ignored, *unknown):
        inside = folder / line.rstrip("/")
        if line and not os.path.lexists(inside) and inside.parent.is_dir():
            inside.symlink_to(root / line.rstrip("/"))


def _has_source(path: Path) -> bool:
    """Return whether a path is a source or a configuration, or a folder with one among its first files."""
    if not path.is_dir():
        return path.suffix in SOURCES
    return any(one.suffix in SOURCES for one in islice(path.rglob("*"), MOST_LOOKED_AT))


def changes(root: Path, commit: str) -> tuple[Hunk, ...]:
    """Return what the working tree changes of a commit; files that git does not know are new."""
    plain = ("-c", "core.quotepath=off", "-c", "diff.noprefix=false", "-c", "diff.mnemonicPrefix=false")
    text = _git(root, *plain, "diff", "-U0", "-M", "--no-color", "--no-ext-diff", "--no-textconv", commit).stdout
    found = list(_hunks(text.split("\n")))
    for name in _git(root, "ls-files", "--others", "--exclude-standard", "-z").stdout.split("\0"):
        if name and (lines := _lines(root / name)):
            found.append(Hunk("", name, 0, 0, 1, lines))
    return tuple(found)


def _lines(path: Path) -> tuple[str, ...]:
    try:
        return tuple(path.read_text().splitlines()) if path.stat().st_size < 1 << 20 else ()
    except (OSError, UnicodeDecodeError):
        return ()


def _hunks(lines: Sequence[str]) -> Iterator[Hunk]:
    base = file = ""
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if line.startswith("--- "):
            base, after = _name(line), lines[number]
            file = _name(after) or base
            number += 1
        elif header := _HEADER.match(line):
            start, count, new, added = (int(header[i] or 1) for i in range(1, 5))
            body = lines[number : number + count + added + 2]
            number += count + added
            yield Hunk(base, file, start, count, new, tuple(one[1:] for one in body if one.startswith("+"))[:added])


def _name(line: str) -> str:
    """Return the file of a line '--- a/name' or '+++ b/name'; '' for /dev/null."""
    name = line[4:].rstrip("\t").strip('"')
    return "" if name == "/dev/null" else name[2:]


def renamed(root: Path, commit: str) -> dict[str, str]:
    """Return the new names of files that were renamed since a commit."""
    fields = _git(root, "diff", "-M", "--name-status", "--diff-filter=R", "-z", commit).stdout.split("\0")
    return dict(zip(fields[1::3], fields[2::3], strict=False))


class Moves:
    """Where lines of a commit stand now."""

    def __init__(self, hunks: Sequence[Hunk], names: dict[str, str]) -> None:
        self.hunks, self.names = hunks, names
        self._of: dict[str, list[Hunk]] = {}
        for hunk in sorted(hunks, key=lambda h: h.base_start):
            self._of.setdefault(hunk.base_file, []).append(hunk)

    def __call__(self, place: str) -> str:
        """Return 'file.py:12' of the commit as it is now; a line that was replaced is where its replacement begins."""
        file, _, number = place.rpartition(":")
        line, shift = int(number), 0
        for hunk in self._of.get(file, ()):
            last = hunk.base_start + hunk.base_count - 1 if hunk.base_count else hunk.base_start
            if line <= last and (not hunk.base_count or line < hunk.base_start):
                break
            if hunk.base_count and line <= last:
                within = min(line - hunk.base_start, max(len(hunk.added) - 1, 0))
                return f"{hunk.file}:{max(hunk.start + within, 1)}"
            shift += len(hunk.added) - hunk.base_count
        return f"{self.names.get(file, file)}:{line + shift}"


def _git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")}
    environment |= {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
    return subprocess.run(
        ["git", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=_PATIENCE,
        errors="surrogateescape", stdin=subprocess.DEVNULL,
    )  # fmt: skip
