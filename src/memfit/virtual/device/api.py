"""Replacements in torch.cuda while a card is active: streams and events, missing C functions, device properties."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memfit.virtual.device.device_guard import CURRENT, on_card
from memfit.virtual.device.generators import Generator
from memfit.virtual.device.graphs import graph_functions, pool_functions
from memfit.virtual.device.memory import REFUSED, memory_functions
from memfit.virtual.device.signatures import accelerator_functions, further_functions, host_functions, like, signed
from memfit.virtual.device.tensor_types import old_types
from memfit.virtual.device.values import base
from memfit.virtual.patching import patched

if TYPE_CHECKING:
    from memfit.virtual.device.card import Card


# --- streams and events ---


class Stream:
    """A CUDA stream. Its work is always done already; allocations on it come from a pool of its own."""

    _count = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        Stream._count += 1
        self.stream_id = self.cuda_stream = Stream._count
        self.device_index, self.priority, self.device_type = CURRENT[0], priority, 1
        self.device = torch.device("cuda", self.device_index)

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return self.stream_id


class Event:
    """A CUDA event that has already happened, whatever torch.cuda.Event's arguments; no time passes between two."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class _Default(Stream):
    def __init__(self) -> None:
        super().__init__()
        self.stream_id = self.cuda_stream = 0


def stream_functions(card: Card) -> dict[str, Any]:
    """Return replacements, by name, for what torch.cuda has for making, choosing and reading streams."""
    Stream._count = 0  # the same program has the same streams on every card
    default = _Default()
    current = [default]

    def set_stream(stream: Any) -> None:
        current[0] = stream
        card.ledger.stream = stream.stream_id

    class Using:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            self.before = current[0]
            if self.stream is not None:
                set_stream(self.stream)

        def __exit__(self, *_: Any) -> None:
            set_stream(self.before)

    return {
        "Stream": Stream, "Event": Event, "stream": Using, "StreamContext": Using, "set_stream": set_stream,
        "current_stream": lambda *_: current[0], "default_stream": lambda *_: default,
    }  # fmt: skip


def record_stream(card: Card) -> Callable[[Tensor, Any], None]:
    """Return Tensor.record_stream, after which a freed block is reused only once that stream has caught up."""

    def recorded(self: Tensor, stream: Any) -> None:
        if self.is_cuda:
            card.ledger.record_stream(base(self), stream.stream_id)

    return recorded


# --- functions of torch.cuda and torch._C ---


def _exchange(card: Card) -> Callable[[int], int]:
    """Return a function that makes a device the current one and returns the one before; a negative index changes none.

    Each name gets a function of its own, as the compiler has handlers for them.
    """

    def exchange(index: int) -> int:
        before = card.index
        if index >= 0:
            card.use(index)
        return before

    return exchange


def _set_device(card: Card) -> Callable[[Any], None]:
    """Return torch.cuda.set_device."""

    def set_device(device: Any) -> None:
        index = torch.cuda._utils._get_device_index(device)
        if index >= 0:
            card.use(index)

    return set_device


def _accelerator(card: Card, current_stream: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Return the functions of torch.accelerator; each is one of its own, since Dynamo asks for a function's name."""

    def index() -> Callable[[], int]:
        return lambda: card.index

    def setter() -> Callable[[Any], None]:
        use = _set_device(card)

        def set_device_index(device: Any, /) -> None:
            use(device)

        return set_device_index

    return {
        "current_stream": current_stream, "device_count": lambda: card.count, "current_device_index": index(),
        "current_device_idx": index(), "set_device_index": setter(), "set_device_idx": setter(),
    }  # fmt: skip


def _functions(card: Card) -> dict[str, Callable[..., Any]]:
    """Return replacements, by name, for functions of torch._C."""
    nothing = lambda *_: None  # noqa: E731
    return {
        "_cuda_getDeviceCount": lambda: card.count,
        "_cuda_getDevice": lambda: card.index,
        "_cuda_getCurrentRawStream": lambda _: card.ledger.stream,
        "_cuda_setDevice": card.use,
        "_cuda_exchangeDevice": _exchange(card),
        "_cuda_maybeExchangeDevice": _exchange(card),
        "_cuda_init": nothing,
        "_cuda_synchronize": nothing,
        "_cuda_emptyCache": lambda *_: card.empty_cache(),
        **memory_functions(card),
        **pool_functions(card),
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_ipc_collect": nothing,
        "_cuda_get_sync_debug_mode": lambda: 0,
        "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_canDeviceAccessPeer": lambda *_: False,
        "_cuda_cudaHostAllocator": lambda: 0,
        # nn.DataParallel scatters its inputs over its only card
        "_scatter": lambda t, devices, sizes, dim, streams: tuple(x.to("cuda") for x in t.chunk(1, dim)),
        "_gather": lambda tensors, dim, to: torch.cat(tensors, dim),
        "_cuda_clearCublasWorkspaces": lambda: card.clear_workspaces(),
        **accelerator_functions(card),
        **host_functions(),
    }


class _Ranges:
    """NVTX, whose ranges are not recorded."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_, **__: 0


def _properties(card: Card) -> SimpleNamespace:
    major, minor = card.capability
    return SimpleNamespace(
        name=f"{card.gpu.vendor} {card.gpu.name}", major=major, minor=minor, total_memory=card.gpu.total_bytes,
        multi_processor_count=card.multiprocessors, max_threads_per_multi_processor=card.threads, warp_size=32,
        regs_per_multiprocessor=65536, shared_memory_per_block_optin=101376, gcnArchName="", is_integrated=False,
        is_multi_gpu_board=False, uuid="virtual", L2_cache_size=50 << 20, shared_memory_per_multiprocessor=102400,
    )  # fmt: skip


def _resize(card: Card) -> Callable[[torch.UntypedStorage, int], torch.UntypedStorage]:
    """Return UntypedStorage.resize_, which builds without CUDA have for the host only."""
    real = torch.UntypedStorage.resize_

    def resize(self: torch.UntypedStorage, size: int) -> Any:
        if self.device.type != "cuda":
            return real(self, size)
        card.resize(self, size)
        return self

    return resize


_clone_on_host = torch.UntypedStorage.clone


def _clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
    """Replace UntypedStorage.clone, which copy.deepcopy calls and builds without CUDA have for the host only."""
    if self.device.type != "cuda":
        return _clone_on_host(self)
    return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self).clone().untyped_storage()


_profile = torch.autograd.profiler.profile.__init__


def _profile_host(self: Any, enabled: bool = True, **words: Any) -> None:
    """Let torch.profiler record the host only: no kernel runs, and builds without CUDA warn about each of them."""
    _profile(self, enabled, **(words | {"use_cpu": True, "use_cuda": False, "use_device": None}))


def _is_all_true(card: Card) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return torch._is_all_true, with which torch.distributions validates: unknown values count as valid."""
    real = torch._is_all_true

    def check(t: torch.Tensor) -> torch.Tensor:
        found = real(t)
        if t.is_cuda and card.values.of(t) is None:
            card.values.set(found, torch.ones((), dtype=torch.bool, device="cpu"))
        return found

    return check


def _clear_autocast_cache(card: Card) -> Callable[[], None]:
    """Return torch.clear_autocast_cache with casts freed in the order of their birth.

    PyTorch frees them in the order of a hash table of addresses, which differs from run to run.
    """
    real = torch.clear_autocast_cache

    def clear() -> None:
        card.settle()
        real()
        card.settle(sorted)

    return clear


def _current_stream(of_cuda: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch.accelerator.current_stream, a function of its own, for the compiler."""
    return like(torch.accelerator.current_stream, lambda *args: of_cuda(*args))


@contextmanager
def _nccl() -> Iterator[None]:
    """Make NCCL look built in, as in every wheel of PyTorch for CUDA."""
    from torch.distributed import distributed_c10d as c10d

    available = {"is_nccl_available": lambda: True}
    options = {} if hasattr(c10d, "ProcessGroupNCCL") else {"ProcessGroupNCCL": _ProcessGroupNCCL}
    with (
        patched(torch.distributed, available | options),
        patched(c10d, available | options),
        patched(torch.cuda.nccl, {"version": lambda: NCCL_VERSION, "is_available": lambda _: True}),
    ):
        yield


NCCL_VERSION = (2, 29, 7)  # the NCCL that PyTorch 2.13 was built with; DDP asks for 2.10 before it sends bfloat16


class _Options:
    """ProcessGroupNCCL.Options: settings of a communicator, which change no memory of PyTorch's."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream, self.config = is_high_priority_stream, SimpleNamespace()
        self._timeout: Any = None


class _ProcessGroupNCCL:
    """The name that builds without CUDA lack; groups on the card are made by `memfit.virtual.ranks`."""

    Options, NCCLConfig = _Options, SimpleNamespace


@contextmanager
def torch_cuda_of(card: Card) -> Iterator[None]:
    """Make torch.cuda describe the card for the length of the block."""
    graphs = graph_functions(card)
    cuda = {
        "_lazy_init": lambda: None, "is_available": lambda: True, "is_initialized": lambda: True,
        "device_count": lambda: card.count,
        **REFUSED, "_is_compiled": lambda: True, "_lazy_call": lambda function, **_: function(),
        "_exchange_device": _exchange(card), "_maybe_exchange_device": _exchange(card), "set_device": _set_device(card),
        "current_device": lambda: card.index, "get_device_capability": lambda *_: card.capability,
        "get_device_properties": lambda *_: _properties(card),
        "_get_device_properties": lambda *_: _properties(card), "get_device_name": lambda *_: _properties(card).name,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or card.capability >= (8, 0),
        "mem_get_info": lambda *_: (card.free, card.gpu.total_bytes),
        "default_generators": tuple(Generator("cuda") for _ in range(card.count)), "_cached_device_count": card.count,
        "_initialized": True, "synchronize": lambda *_: None,
        **graphs,
        "get_arch_list": lambda: [f"sm_{card.capability[0]}{card.capability[1]}"], **stream_functions(card),
        **further_functions(card),
    }  # fmt: skip
    cuda = signed(torch.cuda, cuda)
    tensor: dict[str, Any] = {
        "pin_memory": lambda self, device=None: self, "is_pinned": lambda self, device=None: False,
        "record_stream": record_stream(card),
    }  # fmt: skip
    with (
        on_card(card.count),
        patched(torch._C, _functions(card)),
        patched(torch._C, {"_graph_pool_handle": graphs["graph_pool_handle"], "_host_emptyCache": lambda: None}),
        patched(torch.Tensor, tensor),
        patched(torch.UntypedStorage, {"resize_": _resize(card), "clone": _clone}),
        patched(torch.cuda, cuda),
        patched(torch.accelerator, _accelerator(card, _current_stream(cuda["current_stream"]))),
        _nccl(),
        patched(torch, {"Generator": Generator, "clear_autocast_cache": _clear_autocast_cache(card)}),
        patched(torch, {"_is_all_true": _is_all_true(card)}),
        patched(torch.version, {"cuda": "13.0"}),
        # cuDNN is not built in, so recurrent layers run without it
        patched(torch.backends.cudnn, {"is_acceptable": lambda _: False}),
        patched(torch.autograd.profiler.profile, {"__init__": _profile_host}),
        # these modules imported some names by value
        patched(torch.cuda.memory, {n: cuda[n] for n in ("_lazy_init", "is_initialized", "mem_get_info")} | REFUSED),
        patched(torch.cuda.graphs, graphs),
        patched(torch.cuda.graphs.graph, {"default_capture_stream": None}),
        patched(torch.cuda.nvtx, {"_nvtx": _Ranges()}),
        patched(torch.cuda.random, {"_lazy_init": lambda: None, "_lazy_call": lambda f, **_: f()}),
        ExitStack() as stack,
    ):
        for owner, values in old_types():
            stack.enter_context(patched(owner, values))
        yield
