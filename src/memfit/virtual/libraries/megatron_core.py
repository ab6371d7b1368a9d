"""Functions of Megatron-Core that change no memory and need what a trace lacks: every rank's values, a driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from memfit.virtual.patching import Change, patched

# module -> its function that does nothing here
_LEFT_OUT = {
    # compares the parts of a parameter on all ranks; Megatron-FSDP leaves it out with PyTorch's fake process group, too
    "megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor": "validate_uneven_dtensor",
    "megatron_fsdp.uneven_dtensor": "validate_uneven_dtensor",
    # binds the process to the processors beside its card, by cuda-python and NVML
    "megatron.core.pipeline_parallel.utils": "set_ideal_affinity_for_current_gpu",
}


@contextmanager
def _without(module: ModuleType) -> Iterator[None]:
    with patched(module, {_LEFT_OUT[module.__name__]: lambda *_, **__: None}):
        yield


LEFT_OUT: dict[str, Change] = dict.fromkeys(_LEFT_OUT, _without)
