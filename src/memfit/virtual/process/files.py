"""Files of a traced process: torch.load to the card, saves that keep only shapes, and a guard of the user's files."""

from __future__ import annotations

import functools
import io
import os
import pickle
import shutil
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.serialization import default_restore_location
from torch.utils._pytree import tree_map

from memfit.errors import Refused
from memfit.virtual.device.values import LARGEST
from memfit.virtual.patching import patched
from memfit.virtual.process import sparse_tensors as sparse
from memfit.virtual.process.host import room

# --- torch.load on the card ---

CPU = torch.device("cpu")
_REAL = torch.load  # PyTorch's own, also where cards are nested
_FEWER = (
    "Attempting to deserialize object on CUDA device {} but torch.cuda.device_count() is {}. Please use torch.load "
    "with map_location to map your storages to an existing device."
)


class StorageHandle:
    """The storage that a map_location function gets, which may move it to a card."""

    def __init__(self, storage: Any, device: torch.device = CPU) -> None:
        self._storage, self.device = storage, device

    def cuda(self, device: Any = None, non_blocking: bool = False) -> StorageHandle:
        """Return the storage on a card: the numbered one, or the current one."""
        number = torch.cuda.current_device() if device is None else device
        return self.to(torch.device("cuda", number) if isinstance(number, int) else number)

    def cpu(self) -> StorageHandle:
        return StorageHandle(self._storage)

    def to(self, device: Any, non_blocking: bool = False) -> StorageHandle:
        return StorageHandle(self._storage, torch.device(device))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


def device_of(map_location: Any, storage: Any, location: str) -> torch.device:
    """Return the device of a storage saved from `location` ("cuda:0"). Raises RuntimeError for a missing card."""
    if callable(map_location):
        moved = map_location(StorageHandle(storage), location)
        wanted = torch.device(location if moved is None else moved.device)
    elif isinstance(map_location, dict):
        wanted = torch.device(map_location.get(location, location))
    else:
        wanted = torch.device(location if map_location is None else map_location)
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise RuntimeError(_FEWER.format(wanted.index, torch.cuda.device_count()))
    return wanted


def bytes_of(storage: Any) -> Tensor:
    """Return a storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextmanager
def load_to_card() -> Iterator[None]:
    """Make torch.load allocate on the card what map_location puts there, which a build without CUDA cannot."""

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        def locate(storage: Any, location: str) -> Any:
            device = device_of(map_location, storage, location)
            if device.type != "cuda":
                return storage if device.type == "cpu" else default_restore_location(storage, str(device))
            return bytes_of(storage).to(device).untyped_storage()

        return _REAL(f, locate, *args, **kwargs)

    with patched(torch, {"load": load}), patched(torch.serialization, {"load": load}):
        yield


# --- files that a script writes ---

HINT = "a trace changes no file that was there: let the script write to another folder"


def _exempt() -> tuple[str, ...]:
    """Return folders of caches, installed code and devices, where a script may write."""
    caches = os.environ.get("XDG_CACHE_HOME", "~/.cache"), os.environ.get("HF_HOME", "~/.cache/huggingface")
    places = (tempfile.gettempdir(), *caches, *sysconfig.get_paths().values(), "/dev", "/proc")
    return tuple(os.path.realpath(os.path.expanduser(p)) for p in places)  # noqa: PTH111


class MadeByJob:
    """What several processes of one job made, each noted in a file of its own in a folder that they share."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank, self._folder = rank, folder
        self._own = (folder / str(rank)).open("a")

    def note(self, path: str) -> None:
        self._own.write(path + "\n")
        self._own.flush()

    def paths(self) -> list[str]:
        """Return the paths that any process has made, in the order in which each made its own."""
        return [line for file in sorted(self._folder.iterdir()) for line in file.read_text().splitlines()]


JOB: list[MadeByJob] = []  # of this process, if it is one of several that may write to each other's files


def remove_made(paths: Sequence[str]) -> None:
    """Remove files and folders that were made, the last one first."""
    for path in reversed(paths):
        if Path(path).is_dir() and not Path(path).is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            Path(path).unlink(missing_ok=True)


class Guard:
    """Refuses to overwrite or remove existing files, and removes those that the script made. `folder`: the script's.

    The script may write to caches and temporary folders, unless it lies in one or runs there.
    """

    def __init__(self, folder: Path) -> None:
        own = str(folder.resolve()), str(Path.cwd().resolve())
        self._exempt = tuple(p for p in _exempt() if not any(_within(o, p) for o in own))
        self._made: list[str] = []

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Check an event of sys.addaudithook. Raises Refused where a file would be lost."""
        if event == "open":
            path, mode, flags = args
            writes = any(c in mode for c in "wxa") if mode else bool((flags or 0) & (os.O_TRUNC | os.O_CREAT))
            # a folder that is "opened for writing" is passed to an opener, which makes a file in it (tempfile)
            if writes and isinstance(path, str | bytes | os.PathLike) and not Path(os.fsdecode(path)).is_dir():
                self._written(path, kept="a" in mode if mode else not (flags or 0) & os.O_TRUNC)
        elif event in ("os.remove", "os.rmdir", "shutil.rmtree", "os.truncate"):
            self._removed(args[0])
        elif event == "os.mkdir":
            self._written(args[0], kept=True)
        elif event in ("os.link", "os.symlink"):
            self._written(args[1], kept=True)
        elif event == "os.rename":
            self._removed(args[0])
            self._written(args[1], kept=False)

    def _mine(self, path: str) -> bool:
        return any(_within(path, made) for made in self._made) or any(
            _within(path, made) for job in JOB for made in job.paths()
        )

    def _written(self, path: Any, kept: bool) -> None:
        text = _real(path)
        if text is None or self._free(text) or self._mine(text):
            return
        if not os.path.lexists(text):
            self._made.append(text)
            for job in JOB:
                job.note(text)
        elif not kept:
            raise Refused(f"the script would overwrite {text}", hint=HINT)

    def _removed(self, path: Any) -> None:
        text = _real(path)
        if text is not None and os.path.lexists(text) and not self._free(text) and not self._mine(text):
            raise Refused(f"the script would remove {text}", hint=HINT)

    def _free(self, path: str) -> bool:
        return "__pycache__" in path or any(_within(path, place) for place in self._exempt)

    def clean(self) -> None:
        """Remove what the script made, unless other processes of its job may still read it."""
        if not JOB:
            remove_made(self._made)


def _within(path: str, place: str) -> bool:
    return path == place or path.startswith(place + os.sep)


def _real(path: Any) -> str | None:
    try:
        text = os.fsdecode(path)
        folder, name = os.path.split(text)
        return os.path.join(os.path.realpath(folder), name)  # noqa: PTH118
    except TypeError:
        return None  # a file descriptor


_HOOKED: list[bool] = []
_GUARDS: list[Guard] = []  # of the traces in progress


def _audit(event: str, args: tuple[Any, ...]) -> None:
    for guard in _GUARDS:
        guard.audit(event, args)


def _told(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that writes a file in C++ and says so first, as open() does."""

    @functools.wraps(real)
    def write(self: Any, path: Any, *args: Any, **words: Any) -> Any:
        if isinstance(path, str | os.PathLike):
            sys.audit("open", path, "wb", 0)
        return real(self, path, *args, **words)

    return write


_IN_CPP = ((torch.autograd.profiler.profile, "export_chrome_trace"), (torch.jit.ScriptModule, "save"))


@contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Guard files for the length of the block."""
    if not _HOOKED:
        sys.addaudithook(_audit)  # Python cannot remove an audit hook
        _HOOKED.append(True)
    guard = Guard(folder)
    _GUARDS.append(guard)
    try:
        with ExitStack() as stack:
            for owner, name in _IN_CPP:
                stack.enter_context(patched(owner, {name: _told(getattr(owner, name))}))
            yield
    finally:
        _GUARDS.remove(guard)
        guard.clean()


@dataclass(frozen=True, slots=True)
class _Saved:
    """A saved tensor without data, and its device. `part`: (offset, size, stride) in a shared `hollow`."""

    hollow: Tensor
    location: str
    dtype: torch.dtype
    part: tuple[int, Any, Any] | None = None


# what a file of torch.save begins with, before the rank that wrote it, its number there, and a line end
_MARK = b"memfit saved tensors "
_MARKED = len(_MARK) + 18
_SMALL = 1 << 20  # bytes of a saved storage whose values other ranks get: counters, states of random generators
Mark = tuple[int, int]  # rank, number


class Saves:
    """Files of tensors: what is saved is kept in memory as shapes, and its number is written, which copies keep.

    A file that was there before the run is not written; only its path is remembered. Where several ranks are traced,
    each in a process, the shapes are written too, because any rank may load what one of them saved.
    """

    def __init__(self, saving: Callable[[], None], loading: Callable[[], None]) -> None:
        self._saved: list[Any] = []
        self._at: dict[str, Mark] = {}  # path -> mark of what was saved there last
        self._saving, self._loading = saving, loading

    def save(self, what: Any, file: Any, *_: Any, **__: Any) -> None:
        """Replace torch.save."""
        self._saving()
        storages: dict[int, tuple[Any, Tensor]] = {}
        mark = JOB[0].rank if JOB else 0, len(self._saved)
        self._saved.append(tree_map(lambda x: _saved(x, storages), what))
        text = b"%s%08d %08d\n" % (_MARK, *mark) + (_packed(self._saved[-1]) if JOB else b"")
        if not isinstance(file, str | os.PathLike):
            file.write(text)
            return
        self._at[os.path.realpath(file)] = mark
        path = Path(file)
        if not path.exists() or not path.stat().st_size or _mark_in(path) is not None:
            path.write_bytes(text)

    def save_tensors(self, tensors: dict[str, Tensor], filename: Any, metadata: dict[str, str] | None = None) -> None:
        """Replace safetensors' save_file: write a file with the names and shapes, whose data is a hole."""
        self._saving()
        path = Path(filename)
        if not path.exists() or sparse.is_one(path):
            sparse.write(path, ((name, t.dtype, t.shape) for name, t in tensors.items()), metadata)

    def load(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a torch.load that returns what was saved before, and maps other files without reading their data."""

        def load(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._loading()
            path = os.path.realpath(file) if isinstance(file, str | os.PathLike) else ""
            mark = self._at.get(path)
            if mark is None or JOB:  # another rank may have written the file since
                mark = _mark_in(Path(path) if path else file) or mark
            if mark is not None and (saved := self._of(mark, path or file)):
                rooms: dict[int, Tensor] = {}
                return tree_map(lambda x: _loaded(x, map_location, rooms), saved[0])
            # files of PyTorch before 1.6 cannot be mapped
            mapped = {"mmap": True} if path and zipfile.is_zipfile(path) else {}
            return real(file, map_location, *args, **{**mapped, **kwargs})

        return load

    def _of(self, mark: Mark, file: Any) -> list[Any]:
        """Return what was saved under a mark, in a list; an empty one if nobody knows."""
        rank, number = mark
        if rank == (JOB[0].rank if JOB else 0):
            return self._saved[number : number + 1]
        return _unpacked(Path(file).read_bytes()[_MARKED:] if isinstance(file, str) else file.read()[_MARKED:])

    def load_tensors(self, filename: Any, device: Any = "cpu", **_: Any) -> dict[str, Tensor]:
        """Replace safetensors' load_file: large tensors hold nothing, and the card gets what goes there."""
        self._loading()
        return {name: t.to(device) for name, t in sparse.read(Path(filename))}


_ACTIVE: list[Saves] = []  # of the traces in progress
# where libraries have safetensors' functions under names of their own
TENSOR_FILES: dict[str, dict[str, str]] = {
    "safetensors.torch": {"save_file": "save_tensors", "load_file": "load_tensors"},
    "transformers.modeling_utils": {"safe_save_file": "save_tensors", "safe_load_file": "load_tensors"},
    "transformers.trainer_utils": {"safe_load_file": "load_tensors"},
    "peft.peft_model": {"safe_save_file": "save_tensors"},
    "peft.utils.save_and_load": {"safe_load_file": "load_tensors"},
}


@contextmanager
def tensor_files(module: ModuleType) -> Iterator[None]:
    """Make a library's functions for files of safetensors those of the active Saves.

    Other modules may import them by name and keep them: without an active Saves they are safetensors' own again.
    """

    def forwarded(real: Callable[..., Any], method: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return (getattr(_ACTIVE[-1], method) if _ACTIVE else real)(*args, **kwargs)

        return call

    names = {name: method for name, method in TENSOR_FILES[module.__name__].items() if hasattr(module, name)}
    with patched(module, {name: forwarded(getattr(module, name), method) for name, method in names.items()}):
        yield


@contextmanager
def keeping(saves: Saves) -> Iterator[None]:
    """Make `saves` the active one for the length of the block."""
    _ACTIVE.append(saves)
    try:
        yield
    finally:
        _ACTIVE.remove(saves)


def _mark_in(file: Any) -> Mark | None:
    """Return the mark of what was saved in a file or file object; None for any other file."""
    if isinstance(file, Path):
        if not file.is_file():
            return None
        with file.open("rb") as opened:
            start = opened.read(_MARKED)
    else:
        if not hasattr(file, "read") or not hasattr(file, "seek"):
            return None
        at = file.tell()
        start = file.read(_MARKED)
        file.seek(at)
    if not isinstance(start, bytes) or not start.startswith(_MARK):
        return None
    rank, number = start[len(_MARK) :].split()
    return int(rank), int(number)


class _Pickler(pickle.Pickler):
    """Writes tensors as their shapes, small ones with their values."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._seen: dict[int, int] = {}

    def persistent_id(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return None
        if type(item) is not Tensor or item.device != CPU:
            raise pickle.PicklingError(f"a {type(item).__name__} that has more than a shape")
        values = item.contiguous().reshape(-1).view(torch.uint8) if item.nbytes <= _SMALL else None
        written = None if values is None else values.numpy().tobytes()
        return self._seen.setdefault(id(item), len(self._seen)), item.dtype, tuple(item.shape), written


class _Unpickler(pickle.Unpickler):
    """Makes the tensors again, one for each that was written."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._made: dict[int, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        number, dtype, shape, values = pid
        if number not in self._made:
            made = room(shape, dtype) if values is None else torch.empty(shape, dtype=dtype)
            if values:
                made.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(values), dtype=torch.uint8))
            self._made[number] = made
        return self._made[number]


def _packed(saved: Any) -> bytes:
    """Return a record of what was saved for other processes; nothing if it cannot be pickled."""
    file = io.BytesIO()
    try:
        _Pickler(file).dump(saved)
    except Exception:  # whatever pickle meets in objects of a script
        return b""
    return file.getvalue()


def _unpacked(record: bytes) -> list[Any]:
    return [_Unpickler(io.BytesIO(record)).load()] if record else []


def _saved(x: Any, storages: dict[int, tuple[Any, Tensor]]) -> Any:
    """Return the record of a saved leaf. `storages`: address -> storage (keeps the address unique) and copy."""
    if not isinstance(x, Tensor):
        return x
    location = "cpu" if x.device.type == "cpu" else str(x.device)
    if type(x) not in (Tensor, Parameter) or x.layout != torch.strided:
        return _Saved(_hollow(x), location, x.dtype)
    storage = x.untyped_storage()
    if storage._cdata not in storages:
        storages[storage._cdata] = storage, _copied(bytes_of(storage))
    return _Saved(storages[storage._cdata][1], location, x.dtype, (int(x.storage_offset()), x.size(), x.stride()))


def _hollow(x: Tensor) -> Tensor:
    """Return a host stand-in of a tensor subclass, made of stand-ins of what it wraps (quantised states, say)."""
    if hasattr(x, "__tensor_flatten__") and not hasattr(x, "device_mesh"):
        names, context = x.__tensor_flatten__()
        held = {name: _hollow(getattr(x, name)) for name in names}
        return type(x).__tensor_unflatten__(held, context, x.shape, x.stride())  # type: ignore[attr-defined]
    return _copied(x)


def _copied(x: Tensor) -> Tensor:
    """Return a host tensor of equal size; small ones from the host keep values (a random generator's state, say)."""
    return x.clone() if x.device.type == "cpu" and x.numel() <= LARGEST else room(x.shape, x.dtype)


def _loaded(x: Any, map_location: Any, rooms: dict[int, Tensor]) -> Any:
    """Return a loaded leaf. `rooms`: id of a saved storage -> the one made for it on the target device."""
    if not isinstance(x, _Saved):
        return x
    if id(x.hollow) not in rooms:
        device = device_of(map_location, x.hollow, x.location)
        # what was saved from the card has no values, and a copy of it would take the host's memory
        empty = x.location != "cpu" and type(x.hollow) is Tensor
        if device.type != "cpu":
            rooms[id(x.hollow)] = x.hollow.to(device)
        else:
            rooms[id(x.hollow)] = room(x.hollow.shape, x.hollow.dtype) if empty else _hollow(x.hollow)
    made = rooms[id(x.hollow)]
    if x.part is None:
        return made
    return torch.empty(0, dtype=x.dtype, device=made.device).set_(made.untyped_storage(), *x.part)
