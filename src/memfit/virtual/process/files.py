"""Files of a traced process: torch.load to the card, saves that keep only shapes, and a guard of the user's files."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.serialization import default_restore_location
from torch.utils._pytree import tree_map

from memfit.errors import Refused
from memfit.virtual.device.values import LARGEST
from memfit.virtual.patching import patched
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
            writes = any(c in mode for c in "wx") if mode else bool((flags or 0) & (os.O_TRUNC | os.O_CREAT))
            if writes and isinstance(path, str | bytes | os.PathLike):
                self._written(path, kept=not mode and not (flags or 0) & os.O_TRUNC)
        elif event in ("os.remove", "os.rmdir", "shutil.rmtree", "os.truncate"):
            self._removed(args[0])
        elif event == "os.mkdir":
            self._written(args[0], kept=True)
        elif event == "os.rename":
            self._removed(args[0])
            self._written(args[1], kept=False)

    def _mine(self, path: str) -> bool:
        return any(_within(path, made) for made in self._made)

    def _written(self, path: Any, kept: bool) -> None:
        text = _real(path)
        if text is None or self._free(text) or self._mine(text):
            return
        if not os.path.lexists(text):
            self._made.append(text)
        elif not kept:
            raise Refused(f"the script would overwrite {text}", hint=HINT)

    def _removed(self, path: Any) -> None:
        text = _real(path)
        if text is not None and os.path.lexists(text) and not self._free(text) and not self._mine(text):
            raise Refused(f"the script would remove {text}", hint=HINT)

    def _free(self, path: str) -> bool:
        return "__pycache__" in path or any(_within(path, place) for place in self._exempt)

    def clean(self) -> None:
        """Remove what the script made."""
        for path in reversed(self._made):
            if Path(path).is_dir() and not Path(path).is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                Path(path).unlink(missing_ok=True)


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


@contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Guard files for the length of the block."""
    if not _HOOKED:
        sys.addaudithook(_audit)  # Python cannot remove an audit hook
        _HOOKED.append(True)
    guard = Guard(folder)
    _GUARDS.append(guard)
    try:
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


class Saves:
    """Files of tensors: their shapes are kept in memory, and an empty file is written."""

    def __init__(self, saving: Callable[[], None], loading: Callable[[], None]) -> None:
        self._saved: dict[str, Any] = {}
        self._saving, self._loading = saving, loading

    def save(self, what: Any, file: Any, *_: Any, **__: Any) -> None:
        """Replace torch.save and safetensors' save_file."""
        self._saving()
        if isinstance(file, str | os.PathLike):
            Path(file).touch()
            storages: dict[int, tuple[Any, Tensor]] = {}
            self._saved[os.path.realpath(file)] = tree_map(lambda x: _saved(x, storages), what)

    def load(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a torch.load that returns what was saved before, and maps other files without reading their data."""

        def load(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._loading()
            path = os.path.realpath(file) if isinstance(file, str | os.PathLike) else ""
            if path in self._saved:
                rooms: dict[int, Tensor] = {}
                return tree_map(lambda x: _loaded(x, map_location, rooms), self._saved[path])
            # files of PyTorch before 1.6 cannot be mapped
            mapped = {"mmap": True} if path and zipfile.is_zipfile(path) else {}
            return real(file, map_location, *args, **{**mapped, **kwargs})

        return load


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
        rooms[id(x.hollow)] = _hollow(x.hollow) if device.type == "cpu" else x.hollow.to(device)
    made = rooms[id(x.hollow)]
    if x.part is None:
        return made
    return torch.empty(0, dtype=x.dtype, device=made.device).set_(made.untyped_storage(), *x.part)
