"""Run bitsandbytes before 0.43 on the card: its Python code calls the native library, not registered operators."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch

from memfit.virtual.libraries import third_party


def prepare() -> None:
    """Import it above kernels that do nothing, where it is that old."""
    if tuple(map(int, version("bitsandbytes").split(".")[:2])) >= (0, 43) or "bitsandbytes" in sys.modules:
        return
    extension: Any = ModuleType("bitsandbytes.cextension")
    extension.lib, extension.COMPILED_WITH_CUDA = third_party.Kernels(), True
    sys.modules["bitsandbytes.cextension"] = extension
    third_party._DONE.add("bitsandbytes")
    functional: Any = importlib.import_module("bitsandbytes").functional

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        """States lie in memory that is the host's."""
        out: Any = torch.empty(shape, dtype=dtype)
        out.is_paged, out.page_deviceid = True, 0
        return out

    functional.get_paged, functional.prefetch_tensor = get_paged, lambda *_, **__: None
