"""DeepSpeed on the card: its own engine, unmodified, above operators that compute nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

from memfit.virtual.imports import Change, when_imported
from memfit.virtual.libraries.cuda_libraries import Kernels
from memfit.virtual.patching import patched

# What DeepSpeed finds out once and keeps for the life of the process, by module: another card or world is another life.
_REMEMBERED = {
    "deepspeed.accelerator.real_accelerator": ("ds_accelerator",),
    "deepspeed.comm.comm": ("cdb",),
    "deepspeed.utils.groups": ("_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "mesh_device"),
    "transformers.integrations.deepspeed": ("_hf_deepspeed_config_weak_ref",),
}


def _forgetting(names: tuple[str, ...]) -> Change:
    return lambda module: patched(module, dict.fromkeys(names))


def _computing_nothing(module: ModuleType) -> AbstractContextManager[Any]:
    """Operators are compiled when they are first used (the AdamW step on the host, for one)."""
    return patched(module.OpBuilder, {"load": lambda self, verbose=False: Kernels()})


@contextmanager
def hosted() -> Iterator[None]:
    """While the card is active, DeepSpeed finds it and no other."""
    changes = {name: _forgetting(names) for name, names in _REMEMBERED.items()}
    with when_imported(changes | {"deepspeed.ops.op_builder.builder": _computing_nothing}):
        yield
