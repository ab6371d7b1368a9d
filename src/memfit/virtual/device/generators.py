"""Random generators of the card, which draw its known values and leave the host's generator alone."""

from __future__ import annotations

import secrets
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_STATE = struct.Struct("<QQ")  # seed and offset of Philox, as a generator on a real card has them
_STEP = 4  # by how much one operator moves the offset
_SPREAD = 0x9E37_79B9_7F4A_7C15  # 2^64 over the golden ratio: far apart for every offset
_DEFAULT_SEED = 67280421310721  # c10::default_rng_seed_val


class _AnyGenerator(type(torch._C.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch._C.Generator)


class Generator(torch._C.Generator, metaclass=_AnyGenerator):
    """A torch.Generator: one of the host, or one that stands for the card's, which is a seed and an offset."""

    made_for: torch.device
    philox: list[int]  # seed and offset, which generators may share

    def __new__(cls, device: Any = "cpu") -> Generator:
        made = super().__new__(cls, "cpu" if torch.device(device).type == "cuda" else device)  # type: ignore[call-arg]
        made.made_for, made.philox = torch.device(device), [_DEFAULT_SEED, 0]
        _BY_IMPL[_address(made)] = made
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.made_for

    @property
    def _on_card(self) -> bool:
        return self.made_for.type == "cuda"

    def manual_seed(self, seed: int) -> Generator:
        """Begin the random numbers of a seed."""
        super().manual_seed(seed)
        self.philox[:] = super().initial_seed(), 0
        return self

    def seed(self) -> int:
        """Begin with a seed from the system, and return it."""
        if not self._on_card:
            return super().seed()
        seed = secrets.randbits(53)
        self.manual_seed(seed)
        return seed

    def initial_seed(self) -> int:
        """Return the seed."""
        return self.philox[0] if self._on_card else super().initial_seed()

    def get_offset(self) -> int:
        """Return how far the random numbers were drawn, a multiple of 4."""
        return self.philox[1]

    def set_offset(self, offset: int) -> Generator:
        """Continue at an offset."""
        self.philox[1] = offset
        return self

    def get_state(self) -> torch.Tensor:
        """Return the state; a card's is its seed and offset, 8 bytes each, which DTensor reads: never a FakeTensor."""
        if not self._on_card:
            return super().get_state()
        seed, offset = self.philox
        with _disable_current_modes():
            return torch.frombuffer(bytearray(_STATE.pack(seed, offset)), dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> Generator:
        """Restore a state that `get_state` returned."""
        if self._on_card:
            with _disable_current_modes():
                self.philox[:] = _STATE.unpack(bytes(state.tolist()))
        else:
            super().set_state(state)
        return self

    def clone_state(self) -> Generator:
        """Return a generator with a copy of the state."""
        made = Generator(self.made_for)
        return made.set_state(self.get_state())

    def graphsafe_get_state(self) -> Generator:
        """Return a generator that shares this one's state."""
        return Generator(self.made_for).graphsafe_set_state(self)

    def graphsafe_set_state(self, state: Any) -> Generator:
        """Share the state of another generator."""
        self.philox = state.philox
        return self


_BY_IMPL: weakref.WeakValueDictionary[int, Generator] = weakref.WeakValueDictionary()


def _address(generator: Any) -> int:
    """Return the address of the C++ object, for which a kernel gets another Python object than its caller has."""
    return int(generator._cdata)


@contextmanager
def drawing(given: Any = None) -> Iterator[None]:
    """Let the host's generator draw for the card's, and continue as before afterwards.

    given: the generator that a kernel was called with, as C++ wraps it; without one, the default generator is drawn.
    """
    known = _BY_IMPL.get(_address(given)) if given is not None else None
    philox = (known or torch.cuda.default_generators[0]).philox  # type: ignore[attr-defined]
    seed, offset = philox
    philox[1] += _STEP
    host = torch.default_generator
    with _disable_current_modes():
        before = host.get_state()
        host.manual_seed((seed + offset * _SPREAD) % (1 << 63))
        try:
            yield
        finally:
            host.set_state(before)
