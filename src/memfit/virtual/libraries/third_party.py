"""Libraries on the card without kernels or threads: bitsandbytes, DeepSpeed, Liger, transformers, extensions."""

from __future__ import annotations

import ctypes
import importlib
import importlib.abc
import importlib.machinery
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from memfit.errors import Unsupported
from memfit.virtual.device.dispatch import after_kernel, current
from memfit.virtual.patching import Change, ImportHook, finding, no_log_warnings, patched, when_imported

# --- bitsandbytes ---


class Kernels:
    """A native library whose functions can be declared and called, and do nothing while there is a virtual card."""

    closed = False

    def __getattr__(self, name: str) -> Callable[..., int]:
        def function(*arguments: Any) -> int:
            if self.closed:
                raise RuntimeError(f"{name} was loaded on a virtual GPU: import its library in a process of its own")
            after_kernel(*arguments)
            return 0

        self.__dict__[name] = function
        return function


def _on_card() -> AbstractContextManager[None]:
    """Load bitsandbytes' CUDA backend with kernels that do nothing; paged optimizer states lie in host memory."""
    if _BACKENDS in sys.modules:
        with patched(importlib.import_module("bitsandbytes.cextension"), {"lib": Kernels()}):
            importlib.import_module(f"{_BACKENDS}.cuda.ops")

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        out = torch.empty(shape, dtype=dtype)
        current().paged += out.nbytes
        out.is_paged, out.page_deviceid = True, 0  # type: ignore[attr-defined]
        return out

    functions = {"lib": Kernels(), "get_paged": get_paged, "prefetch_tensor": lambda *_, **__: None}
    return patched(importlib.import_module("bitsandbytes.functional"), functions)


_NAME = "bitsandbytes"
_BACKENDS = "bitsandbytes.backends"  # since 0.46; before, functions of the one native library are bound while it loads


@contextmanager
def _loading(kernels: Kernels) -> Iterator[None]:
    """Load the stand-in for bitsandbytes' native library, whichever build of it is asked for."""
    load = ctypes.cdll.LoadLibrary

    def loaded(name: Any) -> Any:
        return kernels if Path(name).name.startswith(f"lib{_NAME}") else load(name)

    with patched(ctypes.cdll, {"LoadLibrary": loaded}):
        yield


def _close(kernels: Kernels) -> None:
    kernels.closed = True


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports bitsandbytes as on a machine without a GPU, then makes it run on the card until `stack` is closed."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._done = stack, False

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name != _NAME or self._done:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None:
            return None
        own = importlib.machinery.ModuleSpec(name, self)
        own.submodule_search_locations = spec.submodule_search_locations
        return own

    def create_module(self, spec: Any) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self._done = True
        del sys.modules[_NAME]
        with ExitStack() as importing:
            importing.enter_context(patched(torch.cuda, {"is_available": lambda: False, "device_count": lambda: 1}))
            importing.enter_context(no_log_warnings())  # it would warn of a machine without a GPU
            if importlib.machinery.PathFinder.find_spec(_BACKENDS, module.__path__) is None:
                kernels = Kernels()
                importing.enter_context(_loading(kernels))
                self._stack.callback(_close, kernels)
            real = importlib.import_module(_NAME)
        self._stack.enter_context(_on_card())
        sys.modules[_NAME] = real


@contextmanager
def bitsandbytes_on_card() -> Iterator[None]:
    """Make bitsandbytes run on the card, imported already or later."""
    with ExitStack() as stack:
        stack.callback(_forget)
        if sys.modules.get(_NAME) is not None:
            stack.enter_context(_on_card())
        with finding(_Finder(stack)):
            yield


def _forget() -> None:
    """Clear bitsandbytes' global state: the ids of parameters with 32-bit states, and quantisation maps on the card."""
    if "bitsandbytes.optim" in sys.modules:
        sys.modules["bitsandbytes.optim"].GlobalOptimManager._instance = None
        sys.modules["bitsandbytes.functional"].name2qmap.clear()


# --- what libraries remember of a device ---

_STATES = ("PartialState", "AcceleratorState", "GradientState")  # of accelerate, one each per process
_OF_DEVICES = re.compile("cuda|gpu|bf16|fp16|tf32|triton|device")  # functions of theirs that ask a device, and cache it
_ASKING = ("transformers.utils.import_utils", "accelerate.utils.imports", "peft.import_utils")


@contextmanager
def _own_states(module: ModuleType) -> Iterator[None]:
    """Let accelerate begin without a state, and give it back the one that it had."""
    states: list[dict[str, Any]] = [getattr(module, name)._shared_state for name in _STATES]
    before = [dict(state) for state in states]
    for state in states:
        state.clear()
    try:
        yield
    finally:
        for state, values in zip(states, before, strict=True):
            state.clear()
            state.update(values)


@contextmanager
def _asking_again(module: ModuleType) -> Iterator[None]:
    cached = [f for name, f in vars(module).items() if hasattr(f, "cache_clear") and _OF_DEVICES.search(name)]

    def forget() -> None:
        for function in cached:
            function.cache_clear()

    forget()
    try:
        yield
    finally:
        forget()


def remembering_no_device() -> AbstractContextManager[None]:
    """Let libraries ask which device there is, within the block and after it, whatever they have found before."""
    return when_imported({"accelerate.state": _own_states, **dict.fromkeys(_ASKING, _asking_again)})


# --- transformers' loader ---


class _AtOnce(Executor):
    """Runs what is submitted at once, in the thread that submits it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done


def reading_in_order() -> AbstractContextManager[None]:
    """Read a checkpoint's tensors in the order of their names, all before the first is converted.

    transformers 5 reads them in four threads, and how far these run ahead of what joins experts and casts is chance.
    """
    at_once = {"ThreadPoolExecutor": lambda max_workers: _AtOnce()}
    return when_imported({"transformers.core_model_loading": lambda module: patched(module, at_once)})


# --- DeepSpeed ---

# module -> globals that DeepSpeed sets once per process; they are reset for another card or world
_GLOBALS = {
    "deepspeed.accelerator.real_accelerator": ("ds_accelerator",),
    "deepspeed.comm.comm": ("cdb",),
    "deepspeed.utils.groups": ("_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "mesh_device"),
    "transformers.integrations.deepspeed": ("_hf_deepspeed_config_weak_ref",),
}


def _cleared(names: tuple[str, ...]) -> Change:
    return lambda module: patched(module, dict.fromkeys(names))


def _computing_nothing(module: ModuleType) -> AbstractContextManager[Any]:
    """Replace operators that are compiled at their first use, such as the AdamW step on the host."""
    return patched(module.OpBuilder, {"load": lambda self, verbose=False: Kernels()})


@contextmanager
def deepspeed_on_card() -> Iterator[None]:
    """Make DeepSpeed find the active card and no earlier one."""
    changes = {name: _cleared(names) for name, names in _GLOBALS.items()}
    with when_imported(changes | {"deepspeed.ops.op_builder.builder": _computing_nothing}):
        yield


# --- Liger ---

LIBRARY = "liger_kernel"
_MODELS = "transformers.models."
_SHARED = ("torch.nn", "torch.nn.functional")  # Liger replaces LayerNorm and cross_entropy here


@contextmanager
def liger_undone() -> Iterator[None]:
    """Undo, when the card closes, what Liger replaced in PyTorch and transformers."""
    with when_imported({f"{LIBRARY}.transformers.monkey_patch": _all_restored}):
        yield


@contextmanager
def _all_restored(_: ModuleType) -> Iterator[None]:
    """Restore all modules that Liger changes, those already imported and those imported later."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name in _SHARED or name.startswith(_MODELS):
                stack.enter_context(_restored(module))
        with finding(ImportHook(lambda name: _restored if name.startswith(_MODELS) else None, stack)):
            yield


@contextmanager
def _restored(module: ModuleType) -> Iterator[None]:
    """Restore a module and its classes after the block, where Liger replaced something."""
    classes = [v for v in list(vars(module).values()) if isinstance(v, type) and v.__module__ == module.__name__]
    spaces: list[ModuleType | type] = [module, *classes]
    before = [(space, dict(vars(space))) for space in spaces]
    try:
        yield
    finally:
        for space, names in before:
            for name, value in list(vars(space).items()):
                if value is not names.get(name, value) and str(getattr(value, "__module__", "")).startswith(LIBRARY):
                    setattr(space, name, names[name])


# --- extensions that a script builds when it runs: known ones are stood in for, others refused by name ---

_HINT = (
    "a trace launches no kernels: take the path in plain PyTorch, or declare its operators in Python "
    "(torch.library.custom_op with register_fake), which gives their shapes"
)


def _share_storage(dst: Tensor, src: Tensor) -> None:
    """Give the bytes of a recomputed output to the tensor whose own were freed, as Megatron-LM's extension does."""
    into, given = dst.untyped_storage(), src.untyped_storage()
    size = given.nbytes()
    given.resize_(0)
    into.resize_(size)


_KNOWN_EXTENSIONS = {
    "share_storage_ext": SimpleNamespace(share_storage=_share_storage)
}  # Megatron-LM's CheckpointWithoutOutput


@contextmanager
def extensions_refused(module: ModuleType) -> Iterator[None]:
    """Refuse what `torch.utils.cpp_extension` would compile: load, load_inline, and builds of setuptools."""

    def refused(function: str) -> Callable[..., Any]:
        def refuse(name: Any = "", *_: Any, **__: Any) -> Any:
            if isinstance(name, str) and name in _KNOWN_EXTENSIONS:
                return _KNOWN_EXTENSIONS[name]
            which = f" {name}" if isinstance(name, str) and name else ""
            raise Unsupported(f"the extension{which} is compiled at run time ({function}), for a real card", hint=_HINT)

        return refuse

    with (
        patched(module, {name: refused(name) for name in ("load", "load_inline")}),
        patched(module.BuildExtension, {"build_extensions": lambda self: refused("BuildExtension")()}),
    ):
        yield
