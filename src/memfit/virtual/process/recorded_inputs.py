"""Record what a process reads and where it allocates, for `memfit check` and `memfit diff`.

An answer is kept as long as what its processes read stays the same.

The process that asks sets RECORD in the environment to a folder that holds the path of the repository. Every process
of the trace then writes one file there: the files it opened, the folders it listed, what it imported, and for each
allocation on the card the lines of the repository on the stack; in a backward pass first those of the forward that made
the node. With a file LIBRARIES in the folder the lines of installed libraries are recorded too, by absolute path, and
those that read a tensor. Without the variable nothing is recorded.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import invalidate_caches
from importlib.util import source_from_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from memfit._package import FOLDER
from memfit.virtual.device.ledger import ENGINE

RECORD = "MEMFIT_RECORD"  # the environment variable
ROOT = "root"  # the file in the folder that holds the repository's path
LIBRARIES = "libraries"  # the file in the folder that asks for lines of installed libraries
_DEEPEST = 400  # frames that are looked at
_LOADER = "<frozen importlib._bootstrap_external>"  # lists folders of sys.path; what matters there are the names
Chain = tuple[tuple[CodeType, int], ...]


class Recorder:
    """What one process reads, and the lines that allocate. root: the repository, without links.

    libraries: note lines of installed libraries too.
    """

    def __init__(self, root: str, libraries: bool = False) -> None:
        self.root = root
        self.libraries = libraries
        self.opened: dict[str, None] = {}
        self.listed: dict[str, None] = {}
        self.searched: dict[str, None] = {}  # folders in which modules were looked for
        self.lines: dict[int, int] = {}  # number of an allocation -> index in chains
        self.reads: dict[int, dict[int, None]] = {}  # number -> indices in chains of what reads it before the backward
        self.chains: dict[str, int] = {}
        self._forward: dict[int, Chain] = {}  # number of an autograd node -> the lines that made it
        self._place_of: dict[CodeType, str] = {}
        self._known: dict[Chain, int] = {}
        self._main = threading.main_thread().ident or 0

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Note an event of sys.addaudithook."""
        if event == "open":
            path, mode, flags = args
            writes = any(c in mode for c in "wax+") if mode else bool((flags or 0) & (os.O_WRONLY | os.O_RDWR))
            if not writes and isinstance(path, str | bytes):
                self.opened.setdefault(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100
        elif event in ("os.listdir", "os.scandir"):
            frame, path = _caller(), args[0]
            if frame is not None and (path is None or isinstance(path, str | bytes)):
                seen = self.searched if frame.f_code.co_filename == _LOADER else self.listed
                seen.setdefault(os.path.abspath(os.fsdecode(path or ".")))  # noqa: PTH100

    def allocated(self, number: int) -> None:
        """Note the lines of the repository, and of libraries where they are asked for, on an allocation's stack."""
        node = sys.modules["torch"]._C._current_autograd_node()
        self.lines[number] = self._index(self._stack(node))

    def read(self, numbers: list[int]) -> None:
        """Note the lines of an operator by the allocations that it reads, and by the autograd node that is its own."""
        native = sys.modules["torch"]._C
        node, made = native._current_autograd_node(), native._autograd._get_sequence_nr() - 1
        is_new = made not in self._forward  # PyTorch makes the node, then runs the kernel
        if not is_new and not (self.libraries and node is None):
            return
        found = self._stack(node)
        if is_new:
            self._forward[made] = found
        if self.libraries and node is None:
            for number in numbers:
                self.reads.setdefault(number, {}).setdefault(self._index(found))

    def _stack(self, node: Any) -> Chain:
        made = self._forward.get(node._sequence_nr(), ()) if node is not None else ()
        found = tuple(self._own(sys._getframe(2), made))
        if not found and threading.get_ident() != self._main:  # another thread's: what called it waits
            found = tuple(self._own(sys._current_frames().get(self._main), made))
        return found

    def _index(self, found: Chain) -> int:
        index = self._known.get(found)
        if index is None:
            text = "\n".join(f"{self._place_of[code]}:{line}" for code, line in found)
            index = self._known[found] = self.chains.setdefault(text, len(self.chains))
        return index

    def _own(self, frame: FrameType | None, made: Chain) -> Iterator[tuple[CodeType, int]]:
        """Yield the lines of a stack, the innermost first. made: those that made the node which the backward runs."""
        for _ in range(_DEEPEST):
            if frame is None:
                return
            code = frame.f_code
            if code.co_name == ENGINE:
                yield from made
                made = ()
            place = self._place_of.get(code)
            if place is None:
                place = self._place_of[code] = self._relative(code.co_filename)
            if place:
                yield code, frame.f_lineno
            frame = frame.f_back

    def _relative(self, path: str) -> str:
        """Return a path below the repository as it is there, a library's as it is; "" for any other."""
        if not path or path.startswith("<"):  # code without a file
            return ""
        real = os.path.realpath(path)
        if _within(real, self.root) and not _installed(real) and not self._overlaid(real):
            return os.path.relpath(real, self.root)
        return real if self.libraries and not _standard(real) else ""

    @staticmethod
    def _overlaid(path: str) -> bool:
        return any(_within(path, place) for place in _overlays())

    def document(self) -> dict[str, Any]:
        """Return what was recorded. Files and folders of installed code are left out, whose versions are told."""
        modules = list(sys.modules.items())
        imported = [path for _, module in modules if isinstance(path := getattr(module, "__file__", None), str)]
        opened = {os.path.realpath(_source(path)) for path in (*self.opened, *imported)}
        kept = sorted(path for path in opened if self._counts(path))
        folders = {os.path.realpath(path) for path in self.listed}
        names = sorted({n.partition(".")[0] for n, m in modules if not self._relative(str(getattr(m, "__file__", "")))})
        searched = {os.path.realpath(path) for path in self.searched}
        installed = {
            os.path.realpath(entry) for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))
        } | set(_overlays())
        return {
            "files": [path for path in kept if os.path.isfile(path)],  # noqa: PTH113
            "missing": [path for path in kept if not os.path.lexists(path) and _within(path, self.root)],
            "folders": sorted(f for f in folders if self._counts(f) and f != self.root),
            "searched": sorted(p for p in searched if _within(p, self.root) and not _installed(p)),
            "names": names,
            "installed": sorted(installed),
            "chains": list(self.chains),
            "lines": self.lines,
            "reads": {number: list(indices) for number, indices in self.reads.items()},
        }

    def _counts(self, path: str) -> bool:
        if _installed(path) or self._overlaid(path) or "__pycache__" in path or path.endswith((".pyc", ".so")):
            return False
        if _within(path, self.root):
            return f"{os.sep}.git{os.sep}" not in path
        return not any(_within(path, place) for place in (_TEMPORARY, "/proc", "/sys", "/dev", "/etc", "/usr"))


_TEMPORARY = os.path.realpath(tempfile.gettempdir())
_CODE = ("stdlib", "platstdlib", "purelib", "platlib")
_INSTALLED = tuple({os.path.realpath(p) for n, p in sysconfig.get_paths().items() if n in _CODE})
_OWN = os.path.realpath(FOLDER)
_STANDARD = tuple({os.path.realpath(p) for n, p in sysconfig.get_paths().items() if n in ("stdlib", "platstdlib")})


@cache
def _overlays() -> tuple[str, ...]:
    """Return the folders of libraries, as `pip install --target` makes them, that PYTHONPATH puts first."""
    entries = (os.path.realpath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry)
    return tuple(entry for entry in entries if any(Path(entry).glob("*.dist-info")))


def _standard(path: str) -> bool:
    """Return whether a file is Python's own or memfit's."""
    return _within(path, _OWN) or ("site-packages" not in path and any(_within(path, p) for p in _STANDARD))


def _installed(path: str) -> bool:
    return any(_within(path, place) for place in (*_INSTALLED, _OWN)) or "site-packages" in path


def _within(path: str, place: str) -> bool:
    return path == place or path.startswith(place.rstrip(os.sep) + os.sep)


def _source(path: str) -> str:
    """Return the source of a compiled file; another path as it is."""
    if path.endswith(".pyc"):
        try:
            return source_from_cache(path)
        except (ValueError, NotImplementedError):
            return path
    return path


def _caller() -> FrameType | None:
    """Return the frame that raised the event that is audited."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame


_ACTIVE: list[Recorder] = []
_HOOKED: list[bool] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    for recorder in _ACTIVE:
        recorder.audit(event, args)


@contextmanager
def recording(ledger: Any = None, name: str = "process") -> Iterator[None]:
    """Record this process for the length of the block, where the environment asks for it.

    ledger: that of the card, whose allocations are noted with their lines. name: of the file that is written.
    """
    folder = os.environ.get(RECORD, "")
    if not folder:
        yield
        return
    recorder = Recorder(os.path.realpath(Path(folder, ROOT).read_text()), Path(folder, LIBRARIES).is_file())
    if not _HOOKED:
        sys.addaudithook(_audit)  # Python cannot remove an audit hook
        _HOOKED.append(True)
    _ACTIVE.append(recorder)
    invalidate_caches()  # so that folders which were searched before are listed again, and noted
    if ledger is not None:
        ledger.noted, ledger.read = recorder.allocated, recorder.read
    try:
        yield
    finally:
        _ACTIVE.remove(recorder)
        if ledger is not None:
            ledger.noted = ledger.read = None
        made = Path(folder, f"{name}.part")
        made.write_text(json.dumps(recorder.document()))
        made.replace(made.with_suffix(".json"))
