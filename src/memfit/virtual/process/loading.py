"""torch.load on a virtual card: every storage of a file lands where map_location says, once, whatever it is shared by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.serialization import default_restore_location

from memfit.virtual.patching import patched

CPU = torch.device("cpu")
_REAL = torch.load  # of PyTorch itself, also for a card within a card
_FEWER = (
    "Attempting to deserialize object on CUDA device {} but torch.cuda.device_count() is {}. Please use torch.load with "
    "map_location to map your storages to an existing device."
)


class Asked:
    """A storage as the function given as map_location sees it, which may ask for a card."""

    def __init__(self, storage: Any, device: torch.device = CPU) -> None:
        self._storage, self.device = storage, device

    def cuda(self, device: Any = None, non_blocking: bool = False) -> Asked:
        """On a card: its number, or the present one's."""
        number = torch.cuda.current_device() if device is None else device
        return Asked(self._storage, torch.device("cuda", number) if isinstance(number, int) else torch.device(number))

    def cpu(self) -> Asked:
        """On the host."""
        return Asked(self._storage)

    def to(self, device: Any, non_blocking: bool = False) -> Asked:
        """On any device."""
        return Asked(self._storage, torch.device(device))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


def device_of(map_location: Any, storage: Any, location: str) -> torch.device:
    """Where a storage goes that was saved from `location` ("cuda:0"). Raises RuntimeError for a card there is not."""
    if callable(map_location):
        asked = map_location(Asked(storage), location)
        wanted = torch.device(location) if asked is None else torch.device(asked.device)
    elif isinstance(map_location, dict):
        wanted = torch.device(map_location.get(location, location))
    else:
        wanted = torch.device(location if map_location is None else map_location)
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise RuntimeError(_FEWER.format(wanted.index, torch.cuda.device_count()))
    return wanted


def bytes_of(storage: Any) -> Tensor:
    """All of a storage, whatever is in it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextmanager
def placed() -> Iterator[None]:
    """While the block runs torch.load makes room on the card for what belongs there: a build without CUDA makes no
    storage of a card by itself."""

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        def locate(storage: Any, location: str) -> Any:
            device = device_of(map_location, storage, location)
            if device.type != "cuda":
                return storage if device.type == "cpu" else default_restore_location(storage, str(device))
            return bytes_of(storage).to(device).untyped_storage()

        return _REAL(f, locate, *args, **kwargs)

    with patched(torch, {"load": load}), patched(torch.serialization, {"load": load}):
        yield
