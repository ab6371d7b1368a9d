"""How a traced script ended: at which line, with which error or exit code of its own, and whether it trained."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from memfit._package import FOLDER
from memfit.errors import SOME_CARD, BadInput, MemfitError
from memfit.extras import installer
from memfit.units import several
from memfit.virtual.observer import EnoughSteps

if TYPE_CHECKING:
    from memfit.virtual.scripts.loaders import ScriptObserver

_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun
_TORCHRUN = "--gpu 8xh100 runs the script as torchrun starts its rank 0, --num-gpus 1 as the only one"
_NO_NETWORK = "no network: give the script local files, or load them into the cache once"
_UNREACHABLE = ("OfflineModeIsEnabled", "ConnectionError", "LocalEntryNotFoundError", "URLError")
_VISION = "install torchvision for the PyTorch that is there, both at once"
_DENSE = "sparse tensors hold no bytes on the virtual card: trace it with dense ones (sparse=False, Adam)"
_ELSEWHERE = "plain 'python' may well stop there too; --debug shows the whole traceback"
_MIXED = "a card says so too: DTensors take no plain mask, and attention adds one where no fused kernel fits (fp32)"
_SELECTIVE = "PyTorch 2.13 says so of real tensors too: checkpoint layers of several FSDP groups whole, or not at all"
# exception type or a base of it, part of its message -> hint; the first row that fits
_HINTS: tuple[tuple[str, str, str], ...] = (
    ("NameError", "", "plain 'python' stops there too: the script uses a name it never made"),
    ("SyntaxError", "", "plain 'python' stops there too"),
    ("DatasetNotFoundError", "", "no network: give the script a local file, load_dataset('json', data_files=...)"),
    *((kind, "", _NO_NETWORK) for kind in _UNREACHABLE),
    *(("RuntimeError", part, _VISION) for part in ("Couldn't load custom C++ ops", "operator torchvision::")),
    ("RuntimeError", "Error downloading", _NO_NETWORK),  # torchvision's data sets
    ("FileNotFoundError", "", "paths are looked up from the current folder, as 'python SCRIPT' does"),
    ("NotImplementedError", "Sparse", _DENSE),
    ("RuntimeError", "SparseAdam does not support dense", _DENSE),
    ("NotImplementedError", "no kernel", "torch.library.register_fake gives the operator a shape function"),
    ("NotImplementedError", "register", "torch.library.register_fake gives the operator a shape function"),
    ("AcceleratorError", "", "a trace needs no GPU, and takes one that is there for nothing"),
    ("ValueError", "existing deepspeed config",
     "its path is looked up from the current folder: cd there, as for accelerate launch"),
    ("RuntimeError", "mixed torch.Tensor and DTensor", _MIXED),
    ("RuntimeError", "profiler._record_function_enter_new", _SELECTIVE),
    ("AttributeError", "", _ELSEWHERE),  # whatever a value was answered by, it has the attributes of its type
    ("RuntimeError", "NCCL", _TORCHRUN),
    ("ValueError", "rendezvous", _TORCHRUN),
    ("RuntimeError", "process group", _TORCHRUN),
    *(("KeyError", f"'{name}'", _TORCHRUN) for name in _LAUNCHED),
)  # fmt: skip
_USAGE = f"what follows -- goes to the script: memfit trace SCRIPT {SOME_CARD} -- ARGUMENTS"
_INSTALLED = (FOLDER, *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_STARTED = re.compile(r"^from ([\w.]+) import \w+", re.MULTILINE)  # in what pip writes for an entry point
_COUNTED = re.compile(r"\d+ validation errors? for ")  # pydantic's first line; the key and the reason follow
_PACKAGES = {  # module -> the package of the index that has it, where that has another name
    "Crypto": "pycryptodome", "OpenSSL": "pyopenssl", "PIL": "pillow", "absl": "absl-py", "attr": "attrs",
    "bs4": "beautifulsoup4", "cv2": "opencv-python-headless", "dateutil": "python-dateutil", "docx": "python-docx",
    "dotenv": "python-dotenv", "git": "gitpython", "google": "protobuf", "google.protobuf": "protobuf",
    "hydra": "hydra-core", "open_clip": "open-clip-torch", "pkg_resources": "setuptools",
    "rouge_score": "rouge-score", "skimage": "scikit-image", "sklearn": "scikit-learn", "yaml": "pyyaml",
}  # fmt: skip
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
        frame = _innermost(error)
        library = frame is not None and not isinstance(error, SyntaxError) and not self.own(frame.filename)
        return _within(frame) if library else ""

    def failure(self, error: BaseException) -> BadInput:
        """Return the error to show for one that ended the script before its steps were done."""
        where = self.place(error)
        own = next((e for e in (error, *contexts(error)) if isinstance(e, MemfitError)), None)
        if own:  # perhaps wrapped: transformers turns all that goes wrong with a config into an OSError
            return BadInput(f"{where}: {own.message}", hint=own.hint)
        lacking = _passed_over(error)
        told = f"{where}: {type(error).__name__}: {_first_line(error)}{self.inside(error)}"
        if lacking:
            told += f", because of {type(lacking).__name__}: {_first_line(lacking)}{_within(_innermost(lacking))}"
        return BadInput(told, hint=self._hint(lacking or error))

    def exited(self, error: SystemExit) -> BadInput:
        """Return the error to show for a script that ended itself with an exit code other than 0."""
        usage = _usage_error(error)
        if usage:
            return BadInput(f"{self.path.name} does not accept its arguments: {usage}", hint=_USAGE)
        cause = next(contexts(error), None)
        because = f", because of {type(cause).__name__}: {_first_line(cause)} at {self.place(cause)}" if cause else ""
        steps = self._observer.done
        done = f"after {several(steps, 'optimizer step')}"
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
            steps = several(observer.done, "optimizer step")
            return "" if observer.used_card() else f"{name} made {steps} on the CPU: its tensors stayed there"
        if not observer.card.ledger.blocks:
            return f"{end}: nothing was allocated on the card"
        if stopped:
            return f"{end} before its first training step"
        return f"{end}, but its optimizer made no step" if observer.any_made else ""

    def _hint(self, error: BaseException) -> str:
        kinds, text = {kind.__name__ for kind in type(error).__mro__}, str(error)
        if isinstance(error, ImportError):
            return _install_hint(error, self.inside(error) != "")
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


def _innermost(error: BaseException | None) -> traceback.FrameSummary | None:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _real(f.filename)] if error else []
    return frames[-1] if frames else None


def _within(frame: traceback.FrameSummary | None) -> str:
    """Return a line by its file's path below the folder from which that was imported; '' for none."""
    if frame is None:
        return ""
    path = Path(frame.filename)
    folders = [folder for folder in sys.path if folder and path.is_relative_to(folder)]
    return f" (in {path.relative_to(max(folders, key=len)) if folders else path.name}:{frame.lineno})"


def _usage_error(error: SystemExit) -> str:
    """Return the message with which argparse ended the script; '' for any other exit."""
    last: FrameType | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "error" and Path(frame.f_code.co_filename).name == "argparse.py":
            last = frame
    return str(last.f_locals.get("message", ""))[:_LONGEST] if last else ""


def _passed_over(error: BaseException) -> Exception | None:
    """Return why an import fails whose failure was passed over, and for want of which an error was raised.

    Transformer Engine, which serves JAX, too, comes without its part for PyTorch where that cannot be imported; scripts
    pass over what is optional. The import is made once more.
    """
    for module, names, level, space in _lacked(error):
        try:
            __import__(module, space, {}, names, level)
        except Exception as reason:
            return reason
    return None


def _lacked(error: BaseException) -> Iterator[tuple[str, tuple[str, ...], int, dict[str, Any]]]:
    """Yield the imports that may bring the attribute of a package, or the name in a file, that an error lacks."""
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        yield error.obj.__name__, (error.name or "",), 0, {}
    if not isinstance(error, NameError):
        return
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    try:
        tree = ast.parse(Path(frame.f_code.co_filename).read_text(errors="replace"))
    except (OSError, SyntaxError):
        return
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
            if (alias.asname or alias.name.partition(".")[0]) != error.name:
                continue
            if isinstance(node, ast.Import):
                yield alias.name, (), 0, {}
            elif isinstance(node, ast.ImportFrom):
                yield node.module or "", (alias.name,), node.level, frame.f_globals


def _install_hint(error: ImportError, in_library: bool) -> str:
    """Return what helps where an import fails: another version of what is installed, or the package itself."""
    missing = error.name or ""
    top = missing.partition(".")[0]
    try:
        installed = bool(top) and importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        installed = False
    package = _PACKAGES.get(missing) or _PACKAGES.get(top) or top
    if installed and not isinstance(error, ModuleNotFoundError):
        return f"the installed {top} lacks it: is it the version that the script wants?"
    if installed and missing != top and missing not in _PACKAGES:
        return f"{top} is installed, but without {missing}: is it the version that the script wants?"
    if not package:
        return "install what it lacks where the script runs"
    command = f"{installer()} {package}"
    own = "a module of your own has to lie beside the script or on PYTHONPATH"
    return command if in_library else f"if it is a library, {command}; {own}"


def _first_line(error: BaseException) -> str:
    lines = re.split(r"[\r\n]+\s*", str(error).strip())
    wanted = 3 if _COUNTED.match(lines[0]) else 1
    return ": ".join(lines[:wanted])[:_LONGEST]
