"""Unpickling without trust: plain data only, no class or function by any name, bounded memory, one kind of error."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NoReturn

import msgspec

from memfit.documents.snapshot.hooked import NotPlain, Stream, hooked
from memfit.errors import BadInput

# Objects take this many times the bytes of their pickle. Source: 3 to 5 for four recorded snapshots; an empty dict,
# one byte in the file, takes 64 bytes.
BYTES_PER_BYTE = 64
FLOOR = 256 << 20  # bytes any file may take
HINT = "a snapshot holds plain data only; record it again with torch.cuda.memory._dump_snapshot"


class PlainUnpickler(pickle.Unpickler):
    """Knows lists, tuples, dicts, text, numbers, None and nothing else."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Every class and function is refused."""
        raise BadInput(f"the pickle asks for {module}.{name}"[:200] + ", which memfit does not load", hint=HINT)

    def persistent_load(self, pid: Any) -> Any:
        """So are references to what lies outside."""
        raise BadInput("the pickle refers to objects outside of it", hint=HINT)


class HookedUnpickler(PlainUnpickler):
    """Hands every finished dict to `small`; see hooked.py."""

    small: Callable[[Any], Any]

    def persistent_load(self, pid: Any) -> Any:
        """The only persistent ids of such a stream are its dicts and lists: one of its own makes hooked.py give up."""
        return self.small(pid)


def loads(content: bytes, small: Callable[[Any], Any] | None = None) -> Any:
    """The plain data in a pickle that is in memory; see `load`."""
    return load(io.BytesIO(content), len(content), small)


def load(file: BinaryIO, size: int, small: Callable[[Any], Any] | None = None) -> Any:
    """The plain data in a pickle of `size` bytes, read piece by piece. Raises BadInput for a damaged one and for one that holds or does anything else.

    small: what to keep of each dict and list, asked as soon as it is complete; not asked where the pickle is not of the usual kind.
    """
    try:
        with _bounded(FLOOR + BYTES_PER_BYTE * size):
            return _hooked(file, small) if small else PlainUnpickler(file).load()
    except BadInput:
        raise
    except MemoryError:
        raise BadInput("the pickle would take far more memory than its size explains", hint=HINT) from None
    except Exception as error:  # a damaged pickle raises almost anything: EOFError, KeyError, UnicodeDecodeError ...
        what = f"{type(error).__name__}: {error}"[:200]
        raise BadInput(f"the pickle is damaged ({what})", hint="copy or record it again") from None


def _hooked(file: BinaryIO, small: Callable[[Any], Any]) -> Any:
    pieces = hooked(file)
    if pieces is not None:
        unpickler = HookedUnpickler(Stream(pieces))
        unpickler.small = small
        try:
            return unpickler.load()
        except (NotPlain, msgspec.ValidationError, pickle.UnpicklingError):
            pass  # the plain reading says what is wrong
    file.seek(0)
    return PlainUnpickler(file).load()


@contextmanager
def _bounded(extra: int) -> Iterator[None]:
    """No more than `extra` bytes of address space on top of today's, where the system can tell and limit it (Linux).

    A pickle of a few bytes can ask for a table of 2^32 entries, which the unpickler would fill.
    """
    try:
        import resource

        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123  (no Path for a file of one line)
            pages = int(file.read().split()[0])
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = pages * resource.getpagesize() + extra
        if soft != resource.RLIM_INFINITY:
            limit = min(limit, soft)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (ImportError, OSError, ValueError):
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
