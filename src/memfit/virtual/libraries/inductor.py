"""torch.compile on a card without data: Inductor fuses and plans its buffers as on a real one; the kernels it writes launch nothing.

What a compiled program allocates is decided by its Python wrapper (`empty_strided_cuda`, `del buf0`), by the partitioner that says
what the backward pass keeps, and by ATen's kernels for products. All of that is PyTorch's own and runs here; only Triton does not.
"""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from memfit._package import FOLDER
from memfit.virtual.device.dispatch import current, register_by_name
from memfit.virtual.device.shapes import conv_layout
from memfit.virtual.device.values import base, tensors
from memfit.virtual.imports import Change, when_imported
from memfit.virtual.patching import patched

if TYPE_CHECKING:
    from memfit.virtual.device.card import Card

# a cache of an earlier compilation may be of a real card; what is timed or recorded needs one
SETTINGS: dict[str, Any] = {
    "fx_graph_cache": False, "fx_graph_remote_cache": False, "compile_threads": 1, "max_autotune": False, "max_autotune_gemm": False,
    "max_autotune_pointwise": False, "coordinate_descent_tuning": False, "triton.cudagraphs": False, "triton.multi_kernel": 0,
}  # fmt: skip
PLANNED = f"torch.compile: buffers as Inductor of PyTorch {torch.__version__.partition('+')[0]} plans them, which others plan otherwise"
LEFT_OUT = {  # asked for by modes of torch.compile
    "max_autotune": "torch.compile: products as without autotuning, which needs a card",
    "triton.cudagraphs": "torch.compile: without CUDA graphs, whose pools keep what one replay needs",
}
CACHES = {  # what keeps it -> its function that forgets
    "torch._dynamo.trace_rules": "clear_lru_cache",
    "torch._dynamo.variables.torch:TorchInGraphFunctionVariable._get_handlers": "cache_clear",
    "torch._inductor.utils": "clear_caches",
    "torch._inductor.runtime.hints:DeviceProperties.create": "cache_clear",
}
LONGEST = 48  # letters of a kernel's name that are shown
HOOKS = ("observer.py",)  # its hooks are called from compiled code, and do nothing there


class Kernel:
    """A kernel that Inductor wrote, `triton_poi_fused_mul_silu_3`: what it writes to is not known any more."""

    def __init__(self, name: str, source: str) -> None:
        self.name = _short(name)
        signature = re.search(rf"def {re.escape(name)}\(([^)]*)\)", source)
        mutated = re.search(r"'mutated_arg_names': \[([^\]]*)\]", source)
        names = re.findall(r"\w+", signature[1]) if signature else []
        changed = set(re.findall(r"\w+", mutated[1])) if mutated else set()
        # of its arguments, by position; None where the source does not tell
        self.written = [n.startswith(("out_ptr", "in_out_ptr")) or n in changed for n in names] if mutated else None

    def run(self, *args: Any, **_: Any) -> None:
        """Launch nothing."""
        card = current()
        for t in tensors(args if self.written is None else list(itertools.compress(args, self.written))):
            if t.is_cuda:
                card.values.unknown(t)
                card.ledger.rename(base(t), self.name)


def _short(name: str) -> str:
    """A kernel bears the names of all operators it fused: the first of them, and its number."""
    head, _, number = name.rpartition("_")
    return f"{head[:LONGEST]}..._{number}" if len(head) > LONGEST else name


def _kernels(module: ModuleType) -> AbstractContextManager[None]:
    """torch._inductor.async_compile: nothing is compiled."""
    return patched(module.AsyncCompile, {"triton": lambda self, name, source, device_str="cuda": Kernel(name, source)})


def _forced(settings: dict[str, Any]) -> Change:
    """Settings in every thread (backward passes compile in the engine's), whatever a script or a mode sets."""

    @contextmanager
    def change(module: ModuleType) -> Iterator[None]:
        entries = vars(module)["_config"]
        with ExitStack() as stack:
            for name, value in settings.items():
                if hasattr(entries.get(name), "env_value_force"):
                    stack.enter_context(patched(entries[name], {"env_value_force": value}))
            yield

    return change


def _compiler(card: Card) -> Change:
    """torch._inductor.compile_fx, its entry: what it cannot compile runs as it was traced."""

    def change(module: ModuleType) -> AbstractContextManager[None]:
        from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

        register_by_name()
        real = module.compile_fx

        def compile_fx(model: Any, *args: Any, config_patches: dict[str, Any] | None = None, **kwargs: Any) -> Any:
            card.assumed.setdefault(PLANNED)
            for name, said in LEFT_OUT.items():
                if name in (config_patches or {}) or _set_by_hand(name):
                    card.assumed.setdefault(said)
            try:
                return real(model, *args, config_patches=config_patches, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if isinstance(error, TorchDynamoException) and not isinstance(error, BackendCompilerFailed):
                    raise  # it is to be traced once more, in another way
                card.assumed.setdefault(
                    f"torch.compile: a graph ran as it was traced, not compiled: {_first_line(error)}"
                )
                return model

        return patched(module, {"compile_fx": compile_fx})

    return change


def _set_by_hand(name: str) -> bool:
    """Did the script turn a setting of Inductor's on?"""
    override: Any = getattr(vars(sys.modules["torch._inductor.config"])["_config"].get(name), "user_override", None)
    return (override.get() if hasattr(override, "get") else override) is True


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"


def _padding(module: ModuleType) -> AbstractContextManager[None]:
    """Products of odd shapes are padded where that is faster, which is timed on a card; here they are."""
    return patched(module, {"_skip_do_bench_times": True})


def _timing(module: ModuleType) -> AbstractContextManager[None]:
    """What is timed runs once: it allocates as on a card."""

    def once(function: Callable[..., Any], *_: Any, **__: Any) -> float:
        function()
        return 1.0

    return patched(module.benchmarker, {"benchmark_gpu": once})


_KEY = {"triton_hash_with_backend": lambda: "virtual"}  # of a driver's libraries


@contextmanager
def _triton(module: ModuleType) -> Iterator[None]:
    """torch.utils._triton: there is one; what was found out before the card, or on it, is forgotten."""
    cached = [f for f in vars(module).values() if hasattr(f, "cache_clear")]
    for function in cached:
        function.cache_clear()
    try:
        with patched(module, _KEY):
            yield
    finally:
        for function in cached:
            function.cache_clear()


@contextmanager
def _device(module: ModuleType) -> Iterator[None]:
    """torch._dynamo.device_interface keeps functions of torch.cuda by value: those of the card that was there when it was imported."""
    cuda = module.CudaInterface
    names = [n for n, value in vars(cuda).items() if isinstance(value, staticmethod) and hasattr(torch.cuda, n)]
    module.caching_worker_device_properties.clear()
    try:
        with patched(cuda, {name: staticmethod(getattr(torch.cuda, name)) for name in names}):
            yield
    finally:
        module.caching_worker_device_properties.clear()


def _metrics(module: ModuleType) -> AbstractContextManager[None]:
    """torch._dynamo.utils logs Triton's version, and may have been imported where there was none."""
    return patched(module, {"triton": importlib.import_module("triton")})


@contextmanager
def _unseen(module: ModuleType) -> Iterator[None]:
    """torch._dynamo.trace_rules: the card's own Python code is no part of the program."""
    own = FOLDER / "virtual"
    files = [str(p) for p in own.rglob("*.py") if p.name not in HOOKS and own / "jobs" not in p.parents]
    module.SKIP_DIRS.extend(files)
    module._recompile_re()
    try:
        yield
    finally:
        for file in files:
            module.SKIP_DIRS.remove(file)
        module._recompile_re()


def _forget() -> None:
    """What was compiled, and what the compiler found out of a card or of there being none."""
    if "torch._inductor.compile_fx" in sys.modules:
        torch._dynamo.reset()
    for name, forget in CACHES.items():
        module, _, path = name.partition(":")
        if module in sys.modules:
            attrgetter(f"{path}.{forget}" if path else forget)(sys.modules[module])()


@contextmanager
def planned(card: Card) -> Iterator[None]:
    """While the card is active."""
    changes: dict[str, Change] = {
        "torch._inductor.config": _forced(SETTINGS),
        "torch._functorch.config": _forced({"enable_autograd_cache": False, "graphsafe_rng_functionalization": False}),
        "torch._inductor.async_compile": _kernels,
        "torch._inductor.compile_fx": _compiler(card),
        "torch._inductor.fx_passes.pad_mm": _padding,
        "torch._inductor.runtime.benchmarking": _timing,
        "torch._inductor.codegen.triton": lambda module: patched(module, _KEY),
        "torch._dynamo.device_interface": _device,
        "torch._dynamo.utils": _metrics,
        "torch._dynamo.trace_rules": _unseen,
        "torch.utils._triton": _triton,
    }
    words = {
        "_empty_strided_cuda": lambda *shape: torch.empty_strided(shape[0], shape[1], dtype=shape[2], device="cuda")
    }
    layout = {"_conv_determine_backend_memory_format": lambda x, weight, _: conv_layout(x, weight)}
    _forget()
    try:
        with when_imported(changes), patched(torch._C._dynamo.guards, words), patched(torch._C, layout):
            yield
    finally:
        _forget()
