"""Functions of torch.cuda and torch.accelerator with PyTorch's signatures, also where C++ has only real devices."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from memfit.errors import Unsupported
from memfit.virtual.device.storage import DTYPES

if TYPE_CHECKING:
    from memfit.virtual.device.card import Card


def like(real: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, which takes arguments by position, with the signature of `real`."""
    signature = inspect.signature(real)

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            args = signature.bind(*args, **kwargs).args
        return function(*args)

    return call


def signed(module: ModuleType, replacements: dict[str, Any]) -> dict[str, Any]:
    """Return replacements of a module's functions, public ones with the signatures of the functions they replace."""
    return {
        name: like(getattr(module, name), made) if _replaces(module, name, made) else made
        for name, made in replacements.items()
    }


def _replaces(module: ModuleType, name: str, made: Any) -> bool:
    real = getattr(module, name, None)
    return not name.startswith("_") and inspect.isfunction(real) and inspect.isfunction(made)


# of NVML: 0, as nothing is measured
_READINGS = ("utilization", "memory_usage", "temperature", "power_draw", "clock_rate")


def further_functions(card: Card) -> dict[str, Callable[..., Any]]:
    """Return replacements for functions of torch.cuda that would look for a driver, a library or a real device."""
    return {
        **dict.fromkeys(_READINGS, lambda *_: 0),
        "device_memory_used": lambda *_: card.gpu.context_bytes + card.settled().reserved,
        "current_blas_handle": lambda: 0, "current_solver_handle": lambda: 0,
        "get_stream_from_external": lambda pointer, *_: torch.cuda.Stream(),
        "check_error": lambda _: None, "set_sync_debug_mode": lambda _: None,
    }  # fmt: skip


def host_functions() -> dict[str, Callable[..., Any]]:
    """Return replacements for torch._C's functions of the allocator of pinned memory, and of the cache as a whole."""

    def caching(value: bool) -> None:
        if not value:
            raise Unsupported(
                "torch.cuda.caching_allocator_enable(False) is not modelled on a virtual card",
                hint="trace with the caching allocator, as training runs",
            )

    return {
        "_cuda_hostMemoryStats": dict, "_cuda_resetAccumulatedHostMemoryStats": lambda: None,
        "_cuda_resetPeakHostMemoryStats": lambda: None, "_cuda_cudaCachingAllocator_enable": caching,
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
    }  # fmt: skip


def accelerator_functions(card: Card) -> dict[str, Callable[..., Any]]:
    """Return replacements for torch._C's functions behind torch.accelerator, which C++ has for real devices only."""

    def memory_info(_: int) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info()
        return free, total

    nothing = lambda *_: None  # noqa: E731
    return {
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_emptyCache": card.empty_cache,
        "_accelerator_emptyHostCache": nothing,
        "_accelerator_getDeviceStats": lambda _: torch.cuda.memory_stats_as_nested_dict(),
        "_accelerator_resetAccumulatedStats": lambda _: torch.cuda.reset_accumulated_memory_stats(),
        "_accelerator_resetPeakStats": lambda _: torch.cuda.reset_peak_memory_stats(),
        "_accelerator_getMemoryInfo": memory_info,
        "_accelerator_getDeviceCapability": lambda _: {"supported_dtypes": set(DTYPES)},
        "_accelerator_getStream": lambda _: torch.cuda.current_stream(),
        "_accelerator_setStream": lambda stream: torch.cuda.set_stream(stream),
        "_accelerator_synchronizeDevice": nothing,
        "_accelerator_getAllocatorSettings": lambda: card.alloc_conf,
        "_accelerator_setAllocatorSettings": card.set_alloc_conf,
        "_cuda_cudaCachingAllocator_set_allocator_settings": card.set_alloc_conf,
    }
