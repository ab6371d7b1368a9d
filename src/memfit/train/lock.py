"""One run at a time in a folder: a lock that its processes hold together, and that ends with the last of them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memfit.errors import BadInput, Refused

FILE = ".lock"


@contextmanager
def held(folder: Path, keeps: tuple[str, ...] = ()) -> Iterator[None]:
    """Hold the folder (it is made) during the block. Raises Refused where a run holds it, or one that lost its supervisor still trains.

    Child processes that are started with `close_fds=False` hold it as well: a training process that outlives this one keeps
    others out until it has stopped. The lock's file stays only beside one of `keeps`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = (folder / FILE).open("a+")
    except OSError as error:
        raise BadInput(f"{folder} cannot be written: {error.strerror}", hint="name another folder: --out DIR") from None
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(20).strip()
            raise Refused(
                f"a run is going on in {folder}{f' (started by process {holder})' if holder else ''}",
                hint="wait for its end or stop it with Ctrl-C or SIGTERM; name another folder: --out DIR",
            ) from None
        except OSError:  # a file system without locks
            yield
            return
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        os.set_inheritable(file.fileno(), True)
        try:
            yield
        finally:
            if {path.name for path in folder.iterdir()}.isdisjoint(keeps):
                (folder / FILE).unlink(missing_ok=True)
