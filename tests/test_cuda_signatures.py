"""torch.cuda and torch.accelerator on a virtual card take what PyTorch's own functions take."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from memfit.virtual.device.memory import REFUSED  # noqa: E402
from memfit.virtual.virtual_gpu import virtual_gpu  # noqa: E402

MODULES = (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.accelerator)
# of no use to a script, or called with modules
NOT_CALLED = {"check_error", "classproperty", "cudart", "caching_allocator_delete", "make_graphed_callables"}


def public(module: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public functions and classes that PyTorch defines."""
    for name in sorted({*vars(module), *module.__all__}):
        made = getattr(module, name, None)
        if not name.startswith("_") and callable(made) and str(getattr(made, "__module__", "")).startswith("torch"):
            yield name, made


def signature(made: Callable[..., Any]) -> list[tuple[str, Any]] | None:
    try:
        return [(p.name, p.kind) for p in inspect.signature(made).parameters.values()]
    except (TypeError, ValueError):
        return None  # written in C


def arguments(parameters: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return arguments for the parameters of a function."""
    state = torch.cuda.get_rng_state()
    known: dict[str, Any] = {
        "device": "cuda:0", "peer_device": 0, "device_index": 0, "seed": 1, "fraction": 1.0, "new_state": state,
        "new_states": [state], "debug_mode": 0, "data_ptr": 0, "stream": torch.cuda.current_stream(),
    }  # fmt: skip
    return {name: known[name] for name, _ in parameters if name in known}


def test_every_public_function_takes_the_keywords_of_pytorch() -> None:
    before = {(module, name): signature(made) for module in MODULES for name, made in public(module)}
    assert len(before) > 120
    with virtual_gpu("l4"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for (module, name), wanted in before.items():
            made = getattr(module, name)
            if name in REFUSED or wanted is None:
                continue
            assert signature(made) == wanted, name
            if name in NOT_CALLED or inspect.isclass(made):
                continue
            given = arguments(wanted)
            if any(kind is inspect.Parameter.POSITIONAL_ONLY for _, kind in wanted):
                made(*given.values())
            else:
                made(**given)
            if all(p.default is not p.empty for p in inspect.signature(made).parameters.values()):
                made()


def test_the_accelerator_is_the_card() -> None:
    with virtual_gpu("l4") as card:
        held = torch.empty(1 << 20, device="cuda")
        assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated() == held.nbytes
        free, total = torch.accelerator.get_memory_info()
        assert (free, total) == torch.cuda.mem_get_info() and total == card.gpu.total_bytes
        side = torch.cuda.Stream(device=torch.device("cuda", 0), priority=-1)
        torch.cuda.set_stream(stream=side)
        assert torch.cuda.current_stream(device="cuda") == side == torch.accelerator.current_stream()
        assert torch.cuda.default_stream(device=0) != side
