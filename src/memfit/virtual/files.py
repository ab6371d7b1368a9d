"""A traced script changes no file that was there before it, saves no weights, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from memfit.errors import Refused
from memfit.virtual.host import room
from memfit.virtual.values import LARGEST

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
            self._saved[os.path.realpath(file)] = tree_map(_hollow, what)

    def load(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """torch.load: what was saved before, else the file itself, whose data is only mapped."""

        def load(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._loading()
            where = map_location if isinstance(map_location, str | torch.device) else None
            path = os.path.realpath(file) if isinstance(file, str | os.PathLike) else ""
            if path in self._saved:
                found = self._saved[path]
            elif path:
                found = real(file, "cpu", *args, **{"mmap": True, **kwargs})
            else:
                return real(file, map_location, *args, **kwargs)
            return found if where is None else tree_map(lambda x: x.to(where) if isinstance(x, Tensor) else x, found)

        return load


def _hollow(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    if hasattr(x, "__tensor_flatten__") and not hasattr(x, "device_mesh"):  # made of others: quantised states, say
        names, context = x.__tensor_flatten__()
        held = {name: _hollow(getattr(x, name)) for name in names}
        return type(x).__tensor_unflatten__(held, context, x.shape, x.stride())  # type: ignore[attr-defined]
    small = x.device.type == "cpu" and x.numel() <= LARGEST  # the state of a random generator, say
    return x.clone() if small else room(x.shape, x.dtype)
