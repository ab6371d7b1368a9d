"""How a traced script ended: at which line, with which error or exit code of its own, and whether it trained."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import torch

from memfit._package import FOLDER
from memfit.errors import SOME_CARD, BadInput, MemfitError
from memfit.virtual.observer import EnoughSteps

if TYPE_CHECKING:
    from memfit.virtual.scripts.loaders import ScriptObserver

_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun
_TORCHRUN = "--gpu 8xh100 runs the script as torchrun starts its rank 0, --num-gpus 1 as the only one"
_NO_NETWORK = "no network: give the script local files, or load them into the cache once"
_UNREACHABLE = ("OfflineModeIsEnabled", "ConnectionError", "LocalEntryNotFoundError", "URLError")
_DENSE = "sparse tensors hold no bytes on the virtual card: trace it with dense ones (sparse=False, Adam)"
# exception type or a base of it, part of its message -> hint; the first row that fits
_HINTS: tuple[tuple[str, str, str], ...] = (
    ("NameError", "", "plain 'python' stops there too: the script uses a name it never made"),
    ("SyntaxError", "", "plain 'python' stops there too"),
    ("DatasetNotFoundError", "", "no network: give the script a local file, load_dataset('json', data_files=...)"),
    *((kind, "", _NO_NETWORK) for kind in _UNREACHABLE),
    ("RuntimeError", "Couldn't load custom C++ ops", "install torchvision for the PyTorch that is there, both at once"),
    ("RuntimeError", "Error downloading", _NO_NETWORK),  # torchvision's data sets
    ("FileNotFoundError", "", "paths are looked up from the current folder, as 'python SCRIPT' does"),
    ("NotImplementedError", "Sparse", _DENSE),
    ("RuntimeError", "SparseAdam does not support dense", _DENSE),
    ("NotImplementedError", "no kernel", "torch.library.register_fake gives the operator a shape function"),
    ("NotImplementedError", "register", "torch.library.register_fake gives the operator a shape function"),
    ("AcceleratorError", "", "a trace needs no GPU, and takes one that is there for nothing"),
    ("ValueError", "existing deepspeed config",
     "its path is looked up from the current folder: cd there, as for accelerate launch"),
    ("RuntimeError", "NCCL", _TORCHRUN),
    ("ValueError", "rendezvous", _TORCHRUN),
    ("RuntimeError", "process group", _TORCHRUN),
    *(("KeyError", f"'{name}'", _TORCHRUN) for name in _LAUNCHED),
)  # fmt: skip
_ELSEWHERE = "plain 'python' may well stop there too; --debug shows the whole traceback"
_USAGE = f"what follows -- goes to the script: memfit trace SCRIPT {SOME_CARD} -- ARGUMENTS"
_INSTALLED = (FOLDER, *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_STARTED = re.compile(r"^from ([\w.]+) import \w+", re.MULTILINE)  # in what pip writes for an entry point
_COUNTED = re.compile(r"\d+ validation errors? for ")  # pydantic's first line; the key and the reason follow
_LONGEST = 300  # characters of a foreign message that are repeated


class Endings:
    """Describes how the script at `path` ended; what lies beside it counts as its own code."""

    def __init__(self, path: Path, observer: ScriptObserver, module: str = "") -> None:
        self.path, self._observer = path, observer
        self._package = _package(module, [str(Path.cwd()), *sys.path]) or _package(_started_by(path), sys.path)

    def own(self, filename: str) -> bool:
        """Return whether a file is the script, a module beside it, or of the package that the user started."""
        path = Path(filename)
        if self._package is not None and path.is_relative_to(self._package):
            return True
        return path.is_relative_to(self.path.parent) and "site-packages" not in path.parts

    def changed(self, filename: str) -> bool:
        """Return whether a file is its own or found by PYTHONPATH, such as a clone of a framework: not installed."""
        return self.own(filename) or not is_installed(filename)

    def place(self, error: BaseException | None) -> str:
        """Return `train.py:41`, the innermost line of the script or of a module beside it."""
        if error is None:
            return ""
        if isinstance(error, SyntaxError) and error.filename:
            return f"{Path(error.filename).name}:{error.lineno}"
        frames = [f for f in traceback.extract_tb(error.__traceback__) if self.own(f.filename)]
        return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else self.path.name

    def inside(self, error: BaseException | None) -> str:
        """Return ` (in trl/trainer/grpo_trainer.py:145)` where an error was raised inside a library; else ''."""
        if error is None or isinstance(error, SyntaxError):
            return ""
        frames = [f for f in traceback.extract_tb(error.__traceback__) if _real(f.filename)]
        if not frames or self.own(frames[-1].filename):
            return ""
        return f" (in {_within_library(frames[-1].filename)}:{frames[-1].lineno})"

    def failure(self, error: BaseException) -> BadInput:
        """Return the error to show for one that ended the script before its steps were done."""
        where = self.place(error)
        own = next((e for e in (error, *contexts(error)) if isinstance(e, MemfitError)), None)
        if own:  # perhaps wrapped: transformers turns all that goes wrong with a config into an OSError
            return BadInput(f"{where}: {own.message}", hint=own.hint)
        text = _first_line(error)
        return BadInput(f"{where}: {type(error).__name__}: {text}{self.inside(error)}", hint=self._hint(error))

    def exited(self, error: SystemExit) -> BadInput:
        """Return the error to show for a script that ended itself with an exit code other than 0."""
        usage = _usage_error(error)
        if usage:
            return BadInput(f"{self.path.name} does not accept its arguments: {usage}", hint=_USAGE)
        cause = next(contexts(error), None)
        because = f", because of {type(cause).__name__}: {_first_line(cause)} at {self.place(cause)}" if cause else ""
        steps = self._observer.done
        done = f"after {steps} optimizer step{'s' * (steps != 1)}"
        message = f"{self.path.name} ended {_with_code(error)} ({done}) at {self.place(error)}{because}"
        return BadInput(message, hint=self._hint(cause) if cause else "see what it printed")

    def after_steps(self, error: BaseException) -> str:
        """Describe an end that does not matter, because the steps were done."""
        where = self.place(error)
        if isinstance(error, SystemExit):
            return f"after its steps the script ended {_with_code(error)} at {where}"
        if isinstance(error, MemfitError):
            return f"after its steps the script was stopped at {where}: {error.message}"
        return f"after its steps the script failed at {where}: {type(error).__name__}{self.inside(error)}"

    def untrained(self, stopped: SystemExit | None) -> str:
        """Return why there can be no verdict on a run that ended by itself; '' if there can be one."""
        observer, name = self._observer, self.path.name
        end = f"{name} exited at {self.place(stopped)}" if stopped else f"{name} came to its end"
        if observer.done:
            steps = f"{observer.done} optimizer step{'s' * (observer.done != 1)}"
            return "" if observer.used_card() else f"{name} made {steps} on the CPU: its tensors stayed there"
        if not observer.card.ledger.blocks:
            return f"{end}: nothing was allocated on the card"
        if stopped:
            return f"{end} before its first training step"
        return f"{end}, but its optimizer made no step" if observer.any_made else ""

    def _hint(self, error: BaseException) -> str:
        kinds, text = {kind.__name__ for kind in type(error).__mro__}, str(error)
        if isinstance(error, ImportError):
            return _install_hint(error)
        found = next((h for kind, part, h in _HINTS if kind in kinds and part in text), "")
        reads = self._observer.card.answers.reads
        if found or not reads:
            return found or _ELSEWHERE
        asked = ", ".join(f"{name} {n}x" for name, n in reads.items())
        return f"values that a trace lacks were answered by defaults ({asked}), which --answer sets; --debug shows more"


def _started_by(script: Path) -> str:
    """Return the module that a console script imports and calls, such as bin/litgpt; '' for other files."""
    if script.suffix or not (script.parent / "python").exists():
        return ""
    found = _STARTED.search(script.read_text(errors="replace"))
    return found[1] if found else ""


def _package(module: str, path: Sequence[str]) -> Path | None:
    """Return the folder of a module's top-level package, without importing it."""
    spec = importlib.machinery.PathFinder.find_spec(module.partition(".")[0], path) if module else None
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))).resolve() if places else None


def contexts(error: BaseException) -> Iterator[Exception]:
    """Yield the exceptions that were handled when an error was raised, the latest first."""
    seen: set[int] = set()
    before = error.__cause__ or error.__context__
    while before is not None and id(before) not in seen:
        seen.add(id(before))
        if isinstance(before, Exception):
            yield before
        before = before.__cause__ or before.__context__


def enough_behind(error: BaseException) -> bool:
    """Return whether the script turned EnoughSteps into an exit of its own."""
    before = error.__context__
    while before is not None and not isinstance(before, EnoughSteps):
        before = before.__context__
    return before is not None


def out_of_memory_behind(error: BaseException) -> torch.OutOfMemoryError | None:
    """Return the out-of-memory error that made the script exit, such as one that hydra has printed."""
    return next((e for e in contexts(error) if isinstance(e, torch.OutOfMemoryError)), None)


def printed(error: BaseException | None) -> str:
    """Return the traceback as Python prints it, without frames of memfit."""
    if error is None:
        return ""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _real(f.filename)]
    message = "".join(traceback.format_exception_only(error))
    return f"Traceback (most recent call last):\n{''.join(traceback.format_list(frames))}{message}".rstrip()


def _with_code(error: SystemExit) -> str:
    """Describe an exit by its code, or by the message of `sys.exit("no data")`."""
    code = error.code
    message = str(code).strip().splitlines()
    return f"with exit code {code}" if isinstance(code, int) or not message else f"by itself: {message[0][:_LONGEST]}"


def is_installed(filename: str) -> bool:
    """Return whether a file belongs to Python, to memfit or to an installed library."""
    return filename.startswith(_INSTALLED) or "site-packages" in filename


def _real(filename: str) -> bool:
    path = Path(filename)
    return path.is_file() and not path.is_relative_to(FOLDER)


def _within_library(filename: str) -> str:
    """Return a file's path below the folder of its library."""
    path, standard = Path(filename), Path(sysconfig.get_path("stdlib"))
    if "site-packages" in path.parts:
        return str(Path(*path.parts[path.parts.index("site-packages") + 1 :]))
    return str(path.relative_to(standard)) if path.is_relative_to(standard) else path.name


def _usage_error(error: SystemExit) -> str:
    """Return the message with which argparse ended the script; '' for any other exit."""
    last: FrameType | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "error" and Path(frame.f_code.co_filename).name == "argparse.py":
            last = frame
    return str(last.f_locals.get("message", ""))[:_LONGEST] if last else ""


def _install_hint(error: ImportError) -> str:
    """Return what helps where an import fails: another version of what is installed, or the package itself."""
    top = (error.name or "").partition(".")[0]
    try:
        installed = bool(top) and importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        installed = False
    if installed and not isinstance(error, ModuleNotFoundError):
        return f"the installed {top} lacks it: is it the version that the script wants?"
    if installed and error.name != top:
        return f"{top} is installed, but without {error.name}: is it the version that the script wants?"
    return "install it where memfit is installed"


def _first_line(error: BaseException) -> str:
    lines = re.split(r"[\r\n]+\s*", str(error).strip())
    wanted = 3 if _COUNTED.match(lines[0]) else 1
    return ": ".join(lines[:wanted])[:_LONGEST]
