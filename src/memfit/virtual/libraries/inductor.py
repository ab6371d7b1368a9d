"""torch.compile on a card without data: Inductor fuses and plans buffers as on a real one; its kernels launch nothing.

What a compiled program allocates is decided by its Python wrapper (`empty_strided_cuda`, `del buf0`), the partitioner
that chooses what backward keeps, and by ATen's kernels for products. All of that is PyTorch's own and runs here; only
Triton does not.
"""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from memfit._package import FOLDER
from memfit.virtual.device.dispatch import current, register_by_name
from memfit.virtual.device.shapes import conv_layout
from memfit.virtual.device.values import base, tensors
from memfit.virtual.patching import Change, patched, when_imported

if TYPE_CHECKING:
    from memfit.virtual.device.card import Card

# cached graphs may come from a real card; autotuning needs one
SETTINGS: dict[str, Any] = {
    "fx_graph_cache": False, "fx_graph_remote_cache": False, "compile_threads": 1, "max_autotune": False,
    "max_autotune_gemm": False, "max_autotune_pointwise": False, "coordinate_descent_tuning": False,
    "triton.multi_kernel": 0,
}  # fmt: skip
_VERSION = torch.__version__.partition("+")[0]
PLANNED = f"torch.compile: buffers as Inductor of PyTorch {_VERSION} plans them, which others plan otherwise"
LEFT_OUT = {  # options of torch.compile's modes -> what is assumed instead
    "max_autotune": "torch.compile: products as without autotuning, which needs a card",
}
CACHES = {  # module or class that caches facts of a device -> its function that clears them
    "torch._dynamo.trace_rules": "clear_lru_cache",
    "torch._dynamo.variables.torch:TorchInGraphFunctionVariable._get_handlers": "cache_clear",
    "torch._inductor.utils": "clear_caches",
    "torch._inductor.runtime.hints:DeviceProperties.create": "cache_clear",
}
LONGEST = 48  # characters of a kernel's name that are shown
HOOKS = ("observer.py",)  # Dynamo must trace these files' hooks, which return at once in compiled code


class InductorKernel:
    """A kernel that Inductor wrote, `triton_poi_fused_mul_silu_3`; what it writes becomes unknown."""

    def __init__(self, name: str, source: str) -> None:
        self.name = _short(name)
        signature = re.search(rf"def {re.escape(name)}\(([^)]*)\)", source)
        mutated = re.search(r"'mutated_arg_names': \[([^\]]*)\]", source)
        names = re.findall(r"\w+", signature[1]) if signature else []
        changed = set(re.findall(r"\w+", mutated[1])) if mutated else set()
        # whether each argument is written, by position; None where the source does not show it
        self.written = [n.startswith(("out_ptr", "in_out_ptr")) or n in changed for n in names] if mutated else None

    def run(self, *args: Any, **_: Any) -> None:
        """Launch nothing."""
        card = current()
        for t in tensors(args if self.written is None else list(itertools.compress(args, self.written))):
            if t.is_cuda:
                card.values.unknown(t)
                card.ledger.rename(base(t), self.name)


def _short(name: str) -> str:
    """Shorten a kernel's name, which lists all fused operators, to the first of them and its number."""
    head, _, number = name.rpartition("_")
    return f"{head[:LONGEST]}..._{number}" if len(head) > LONGEST else name


def _kernels(module: ModuleType) -> AbstractContextManager[None]:
    """Make torch._inductor.async_compile compile nothing."""
    return patched(
        module.AsyncCompile, {"triton": lambda self, name, source, device_str="cuda": InductorKernel(name, source)}
    )


def _forced(settings: dict[str, Any]) -> Change:
    """Force settings in every thread, whatever a script or a mode sets; backward compiles in the engine's thread."""

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
    """Wrap torch._inductor.compile_fx so that a graph that it cannot compile runs as it was traced."""

    def change(module: ModuleType) -> AbstractContextManager[None]:
        from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

        register_by_name()
        real = module.compile_fx

        def compile_fx(model: Any, *args: Any, config_patches: dict[str, Any] | None = None, **kwargs: Any) -> Any:
            card.assumed.setdefault(PLANNED)
            for name, assumption in LEFT_OUT.items():
                if name in (config_patches or {}) or _set_by_hand(name):
                    card.assumed.setdefault(assumption)
            try:
                return real(model, *args, config_patches=config_patches, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if isinstance(error, TorchDynamoException) and not isinstance(error, BackendCompilerFailed):
                    raise  # Dynamo then traces the frame again in another way
                why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
                card.assumed.setdefault(f"torch.compile: a graph ran as it was traced, not compiled: {why}")
                return model

        return patched(module, {"compile_fx": compile_fx})

    return change


def warming() -> bool:
    """Return whether the compiled function that ran last warmed up; its CUDA graph is recorded the next time."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    manager = trees.get_manager(current().index, create_if_none_exists=False) if trees is not None else None
    return manager is not None and bool(manager.in_warmup)


def _set_by_hand(name: str) -> bool:
    """Return whether the script turned a setting of Inductor on."""
    override: Any = getattr(vars(sys.modules["torch._inductor.config"])["_config"].get(name), "user_override", None)
    return (override.get() if hasattr(override, "get") else override) is True


def _padding(module: ModuleType) -> AbstractContextManager[None]:
    """Always pad matrix products of odd shapes: on a card Inductor times whether that is faster."""
    return patched(module, {"_skip_do_bench_times": True})


def _timing(module: ModuleType) -> AbstractContextManager[None]:
    """Run a function once instead of timing it: it allocates as on a card."""

    def once(function: Callable[..., Any], *_: Any, **__: Any) -> float:
        function()
        return 1.0

    return patched(module.benchmarker, {"benchmark_gpu": once})


_KEY = {"triton_hash_with_backend": lambda: "virtual"}  # would hash the driver's libraries


@contextmanager
def _triton(module: ModuleType) -> Iterator[None]:
    """Make torch.utils._triton find Triton; clear its caches before and after the card."""
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
    """Update torch._dynamo.device_interface, which imported functions of torch.cuda by value, to the active card."""
    cuda = module.CudaInterface
    names = [n for n, value in vars(cuda).items() if isinstance(value, staticmethod) and hasattr(torch.cuda, n)]
    module.caching_worker_device_properties.clear()
    try:
        with patched(cuda, {name: staticmethod(getattr(torch.cuda, name)) for name in names}):
            yield
    finally:
        module.caching_worker_device_properties.clear()


def _metrics(module: ModuleType) -> AbstractContextManager[None]:
    """Give torch._dynamo.utils, which logs Triton's version, the module that it may not have found."""
    return patched(module, {"triton": importlib.import_module("triton")})


@contextmanager
def _unseen(module: ModuleType) -> Iterator[None]:
    """Make Dynamo skip the virtual card's Python files, except the jobs and HOOKS."""
    own = Path(FOLDER, "virtual")
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
    """Clear compiled code and what the compiler cached about devices."""
    if "torch._inductor.compile_fx" in sys.modules:
        torch._dynamo.reset()
    for name, forget in CACHES.items():
        module, _, path = name.partition(":")
        if module in sys.modules:
            attrgetter(f"{path}.{forget}" if path else forget)(sys.modules[module])()


@contextmanager
def compiling(card: Card) -> Iterator[None]:
    """Make torch.compile run on the card for the length of the block."""
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
    empty = {
        "_empty_strided_cuda": lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="cuda")
    }
    layout = {"_conv_determine_backend_memory_format": lambda x, weight, _: conv_layout(x, weight)}
    _forget()
    try:
        with when_imported(changes), patched(torch._C._dynamo.guards, empty), patched(torch._C, layout):
            yield
    finally:
        _forget()
