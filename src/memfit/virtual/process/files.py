"""A traced script changes no file that was there before it, saves no weights, and leaves nothing behind."""

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
from torch.utils._pytree import tree_map

from memfit.errors import Refused
from memfit.virtual.device.values import LARGEST
from memfit.virtual.process.host import room
from memfit.virtual.process.loading import bytes_of, device_of

HINT = "a trace changes no file that was there: let the script write to another folder"


def _exempt() -> tuple[str, ...]:
    """Folders of caches and installed code, and of devices."""
    caches = os.environ.get("XDG_CACHE_HOME", "~/.cache"), os.environ.get("HF_HOME", "~/.cache/huggingface")
    places = (tempfile.gettempdir(), *caches, *sysconfig.get_paths().values(), "/dev", "/proc")
    return tuple(os.path.realpath(os.path.expanduser(p)) for p in places)  # noqa: PTH111


class Guard:
    """Refuses to overwrite or remove what was there, and removes what was made. `folder`: the script's own.

    Caches and temporary folders are left to the script, unless it lies in one or runs there.
    """

    def __init__(self, folder: Path) -> None:
        own = str(folder.resolve()), str(Path.cwd().resolve())
        self._exempt = tuple(p for p in _exempt() if not any(_within(o, p) for o in own))
        self._made: list[str] = []

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Something happens (sys.addaudithook). Raises Refused where a file would be lost."""
        if event == "open":
            path, mode, flags = args
            cuts = any(c in mode for c in "wx") if mode else bool((flags or 0) & (os.O_TRUNC | os.O_CREAT))
            if cuts and isinstance(path, str | bytes | os.PathLike):
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
        return os.path.join(os.path.realpath(os.path.dirname(text)), os.path.basename(text))  # noqa: PTH118, PTH119, PTH120
    except TypeError:
        return None  # a file descriptor


_HOOKED: list[bool] = []
_GUARDS: list[Guard] = []  # of the traces under way


def _audit(event: str, args: tuple[Any, ...]) -> None:
    for guard in _GUARDS:
        guard.audit(event, args)


@contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """While the block runs."""
    if not _HOOKED:
        sys.addaudithook(_audit)  # stays until the process ends: Python removes none
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
    """A tensor of a file: without its data, and where it lay. `part`: (offset, size, stride) of `hollow`, whose bytes others share."""

    hollow: Tensor
    location: str
    dtype: torch.dtype
    part: tuple[int, Any, Any] | None = None


class Saves:
    """Files of tensors that were saved are remembered by the shapes in them, and lie empty where they were written."""

    def __init__(self, saving: Callable[[], None], loading: Callable[[], None]) -> None:
        self._saved: dict[str, Any] = {}
        self._saving, self._loading = saving, loading

    def save(self, what: Any, file: Any, *_: Any, **__: Any) -> None:
        """torch.save, safetensors' save_file."""
        self._saving()
        if isinstance(file, str | os.PathLike):
            Path(file).touch()
            storages: dict[int, tuple[Any, Tensor]] = {}
            self._saved[os.path.realpath(file)] = tree_map(lambda x: _saved(x, storages), what)

    def load(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """torch.load: what was saved before, else the file itself, whose data is only mapped."""

        def load(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._loading()
            path = os.path.realpath(file) if isinstance(file, str | os.PathLike) else ""
            if path in self._saved:
                rooms: dict[int, Tensor] = {}
                return tree_map(lambda x: _loaded(x, map_location, rooms), self._saved[path])
            mapped = {"mmap": True} if path and zipfile.is_zipfile(path) else {}  # what torch saved before 1.6 is read
            return real(file, map_location, *args, **{**mapped, **kwargs})

        return load


def _saved(x: Any, storages: dict[int, tuple[Any, Tensor]]) -> Any:
    """A leaf of what is saved. `storages`: what stands for each, with the storage itself, which so stays what it is."""
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
    """A tensor made of others (quantised states, say), or that is no plain one."""
    if hasattr(x, "__tensor_flatten__") and not hasattr(x, "device_mesh"):
        names, context = x.__tensor_flatten__()
        held = {name: _hollow(getattr(x, name)) for name in names}
        return type(x).__tensor_unflatten__(held, context, x.shape, x.stride())  # type: ignore[attr-defined]
    return _copied(x)


def _copied(x: Tensor) -> Tensor:
    """As large on the host; what is small has its values, the state of a random generator, say."""
    return x.clone() if x.device.type == "cpu" and x.numel() <= LARGEST else room(x.shape, x.dtype)


def _loaded(x: Any, map_location: Any, rooms: dict[int, Tensor]) -> Any:
    """A leaf of what is loaded; `rooms` are the bytes, by those of the file, on the device they were mapped to."""
    if not isinstance(x, _Saved):
        return x
    if id(x.hollow) not in rooms:
        device = device_of(map_location, x.hollow, x.location)
        rooms[id(x.hollow)] = _copied(x.hollow) if device.type == "cpu" else x.hollow.to(device)
    whole = rooms[id(x.hollow)]
    if x.part is None:
        return whole
    return torch.empty(0, dtype=x.dtype, device=whole.device).set_(whole.untyped_storage(), *x.part)
