"""torch.cuda as the card answers it: the C functions a build without CUDA lacks, and its devices' facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memfit.virtual.device.memory import REFUSED, memory_functions
from memfit.virtual.device.streams import record_stream, stream_functions
from memfit.virtual.patching import patched

if TYPE_CHECKING:
    from memfit.virtual.device.card import Card


def _functions(card: Card) -> dict[str, Callable[..., Any]]:
    """Names in torch._C -> answers."""
    gpu = card.gpu
    free = lambda: max(gpu.total_bytes - gpu.context_bytes - card.settled().reserved, 0)  # noqa: E731
    nothing = lambda *_: None  # noqa: E731
    return {
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_getDevice": lambda: 0,
        "_cuda_getCurrentRawStream": lambda _: card.ledger.stream,
        "_cuda_setDevice": nothing,
        "_cuda_exchangeDevice": lambda _: 0,
        "_cuda_maybeExchangeDevice": lambda _: 0,
        "_cuda_init": nothing,
        "_cuda_synchronize": nothing,
        "_cuda_emptyCache": lambda *_: card.empty_cache(),
        **memory_functions(card),
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_ipc_collect": nothing,
        "_cuda_get_sync_debug_mode": lambda: 0,
        "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_canDeviceAccessPeer": lambda *_: False,
        "_cuda_cudaHostAllocator": lambda: 0,
        # nn.DataParallel splits what it is given over its only card
        "_scatter": lambda t, devices, sizes, dim, streams: tuple(x.to("cuda") for x in t.chunk(1, dim)),
        "_gather": lambda tensors, dim, to: torch.cat(tensors, dim),
        "_cuda_clearCublasWorkspaces": lambda: card.clear_workspaces(),
        "_memfit_free": free,
    }


class _Ranges:
    """NVTX: ranges are named for nobody."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_, **__: 0


class _AnyGenerator(type(torch._C.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch._C.Generator)


class Generator(torch._C.Generator, metaclass=_AnyGenerator):
    """torch.Generator, whose random numbers for the card come from the host: nobody sees them."""

    made_for: torch.device
    philox: torch.Tensor

    def __new__(cls, device: Any = "cpu") -> Generator:
        made = super().__new__(cls, "cpu" if torch.device(device).type == "cuda" else device)  # type: ignore[call-arg]
        made.made_for = torch.device(device)
        made.philox = torch.zeros(16, dtype=torch.uint8, device="cpu")
        return made

    def get_state(self) -> torch.Tensor:
        """Of a card's: seed and offset, 8 bytes each, which sharded tensors look into; never a fake of the compiler's."""
        if self.made_for.type != "cuda":
            return super().get_state()
        with _disable_current_modes():
            return self.philox.clone()

    def set_state(self, state: torch.Tensor) -> Generator:
        """Take over what `get_state` gave."""
        if self.made_for.type == "cuda":
            with _disable_current_modes():
                self.philox.copy_(state)
        else:
            super().set_state(state)
        return self

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device it was made for."""
        return self.made_for


def _properties(card: Card) -> SimpleNamespace:
    major, minor = card.capability
    return SimpleNamespace(
        name=f"{card.gpu.vendor} {card.gpu.name}", major=major, minor=minor, total_memory=card.gpu.total_bytes,
        multi_processor_count=card.multiprocessors, max_threads_per_multi_processor=card.threads, warp_size=32,
        regs_per_multiprocessor=65536, shared_memory_per_block_optin=101376, gcnArchName="", is_integrated=False,
        is_multi_gpu_board=False, uuid="virtual", L2_cache_size=50 << 20, shared_memory_per_multiprocessor=102400,
    )  # fmt: skip


def _resize(card: Card) -> Callable[[torch.UntypedStorage, int], torch.UntypedStorage]:
    """UntypedStorage.resize_, which this build has for the host alone."""
    real = torch.UntypedStorage.resize_

    def resize(self: torch.UntypedStorage, size: int) -> Any:
        if self.device.type != "cuda":
            return real(self, size)
        card.resize(self, size)
        return self

    return resize


_clone_on_host = torch.UntypedStorage.clone


def _clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
    """UntypedStorage.clone, which this build has for the host alone; copy.deepcopy comes here for all but parameters."""
    if self.device.type != "cuda":
        return _clone_on_host(self)
    return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self).clone().untyped_storage()


_profile = torch.autograd.profiler.profile.__init__


def _profile_host(self: Any, enabled: bool = True, **words: Any) -> None:
    """torch.profiler records the host alone: no kernel runs, and this build complains of each one it cannot time."""
    _profile(self, enabled, **(words | {"use_cpu": True, "use_cuda": False, "use_device": None}))


def _is_all_true(card: Card) -> Callable[[torch.Tensor], torch.Tensor]:
    """The checks of torch.distributions: values nobody has are taken for valid."""
    real = torch._is_all_true

    def check(t: torch.Tensor) -> torch.Tensor:
        found = real(t)
        if t.is_cuda and card.values.of(t) is None:
            card.values.set(found, torch.ones((), dtype=torch.bool, device="cpu"))
        return found

    return check


def _clear_autocast_cache(card: Card) -> Callable[[], None]:
    """The cache lets go of its casts in an order of addresses, which differs from run to run; here in that of their birth."""
    real = torch.clear_autocast_cache

    def clear() -> None:
        card.settle()
        real()
        card.settle(sorted)

    return clear


@contextmanager
def answered(card: Card) -> Iterator[None]:
    """While the card is active, torch.cuda describes it."""
    functions = _functions(card)
    free = functions.pop("_memfit_free")
    cuda = {
        "_lazy_init": lambda: None, "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1,
        **REFUSED, "_is_compiled": lambda: True, "_lazy_call": lambda function, **_: function(),
        "_exchange_device": lambda _: 0, "_maybe_exchange_device": lambda _: 0, "set_device": lambda _: None,
        "current_device": lambda: 0, "get_device_capability": lambda *_: card.capability,
        "get_device_properties": lambda *_: _properties(card),
        "_get_device_properties": lambda *_: _properties(card), "get_device_name": lambda *_: _properties(card).name,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or card.capability >= (8, 0),
        "mem_get_info": lambda *_: (free(), card.gpu.total_bytes), 
        "default_generators": (Generator("cuda"),), "_initialized": True, "synchronize": lambda *_: None,
        "is_current_stream_capturing": lambda: False,
        "get_arch_list": lambda: [f"sm_{card.capability[0]}{card.capability[1]}"], **stream_functions(card),
    }  # fmt: skip
    tensor: dict[str, Any] = {
        "pin_memory": lambda self, device=None: self, "is_pinned": lambda self, device=None: False,
        "record_stream": record_stream(card),
    }  # fmt: skip
    with (
        patched(torch._C, functions),
        patched(torch.Tensor, tensor),
        patched(torch.UntypedStorage, {"resize_": _resize(card), "clone": _clone}),
        patched(torch.cuda, cuda),
        patched(
            torch.accelerator, {"current_stream": lambda *args: cuda["current_stream"](*args)}
        ),  # the compiler tells them apart
        patched(torch, {"Generator": Generator, "clear_autocast_cache": _clear_autocast_cache(card)}),
        patched(torch, {"_is_all_true": _is_all_true(card)}),
        patched(torch.version, {"cuda": "13.0"}),
        patched(
            torch.backends.cudnn, {"is_acceptable": lambda _: False}
        ),  # recurrent layers run without it: it is not built in
        patched(torch.autograd.profiler.profile, {"__init__": _profile_host}),
        # these modules took some names by value
        patched(torch.cuda.memory, {"_lazy_init": lambda: None, "is_initialized": lambda: True, **REFUSED}),
        patched(torch.cuda.graphs, REFUSED),
        patched(torch.cuda.nvtx, {"_nvtx": _Ranges()}),
        patched(torch.cuda.random, {"_lazy_init": lambda: None, "_lazy_call": lambda f, **_: f()}),
    ):
        yield
