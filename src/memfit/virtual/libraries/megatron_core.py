"""What a trace changes of Megatron-Core and Megatron-LM's training: what needs every rank's values or a driver, how
often it evaluates, and which routers balance their experts."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from memfit.virtual.device.dispatch import current
from memfit.virtual.patching import Change, patched

EVALUATIONS = 2  # iterations of an evaluation; the second and all later ones begin with the same memory

# module -> its function that does nothing here
_LEFT_OUT = {
    # compares the parts of a parameter on all ranks; Megatron-FSDP leaves it out with PyTorch's fake process group, too
    **{
        f"{package}megatron_fsdp.{module}": "validate_uneven_dtensor"
        for package in ("megatron.core.distributed.fsdp.src.", "")
        for module in ("uneven_dtensor", "param_and_grad_buffer")  # the second imports it by value
    },
    # binds the process to the processors beside its card, by cuda-python and NVML
    "megatron.core.pipeline_parallel.utils": "set_ideal_affinity_for_current_gpu",
}


_TENSOR = "--tensor-model-parallel-size"


def read_batches_of(rank: int, args: Sequence[str]) -> int:
    """Return the rank that reads the batches of a rank of Megatron-LM: the first of its tensor group, or itself."""
    given = next((arg for arg in args if arg.partition("=")[0] == _TENSOR), "")
    text = given.partition("=")[2] or (args[args.index(given) + 1] if given and given != args[-1] else "")
    return rank - rank % max(int(text), 1) if text.isdigit() else rank


@contextmanager
def _without(module: ModuleType) -> Iterator[None]:
    with patched(module, {_LEFT_OUT[module.__name__]: lambda *_, **__: None}):
        yield


@contextmanager
def _shorter_evaluations(module: ModuleType) -> Iterator[None]:
    """End evaluations after EVALUATIONS of `--eval-iters`: all ranks count those, while few of them read a loader."""
    real = getattr(module, "evaluate", None)
    if real is None:
        yield
        return

    @functools.wraps(real)
    def evaluate(*args: Any, eval_iters: int | None = None, **kwargs: Any) -> Any:
        settings = module.get_args()
        wanted = settings.eval_iters if eval_iters is None else eval_iters
        if not isinstance(wanted, int):
            return real(*args, **kwargs)
        given = {} if eval_iters is None else {"eval_iters": min(wanted, EVALUATIONS)}
        with patched(settings, {} if given else {"eval_iters": min(wanted, EVALUATIONS)}):
            return real(*args, **given, **kwargs)

    with patched(module, {"evaluate": evaluate}):
        yield


@contextmanager
def _balanced(module: ModuleType) -> Iterator[None]:
    """Take the choices of routers that run Sinkhorn's iterations as balanced: that is while they train."""
    router = getattr(module, "TopKRouter", None)
    real = getattr(router, "sinkhorn_load_balancing", None)
    if real is None:
        yield
        return

    @functools.wraps(real)
    def balancing(self: Any, logits: Any) -> Any:
        with patched(current().answers.routing, {"balanced": self.training}):
            return real(self, logits)

    with patched(router, {"sinkhorn_load_balancing": balancing}):
        yield


CHANGES: dict[str, Change] = {
    **dict.fromkeys(_LEFT_OUT, _without), "megatron.training.training": _shorter_evaluations,
    "megatron.core.transformer.moe.router": _balanced,
}  # fmt: skip
