"""A stand-in for `transformer_engine_torch`, the C++ module of Transformer Engine: its buffers, no kernels.

The module needs a CUDA compiler, and its kernels a real card. Transformer Engine's own Python, which decides what is
kept and when, runs as the user has it: installed, or a checkout on PYTHONPATH. Its loader of shared objects finds the
stand-in, whose functions return, keep and allocate what transformer_engine/pytorch/csrc does at version 2.17. Earlier
releases call some of them with fewer arguments (`releases`). Whatever else is called is refused by its name.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from memfit.errors import Unsupported
from memfit.virtual.libraries.apex import multi_tensor_l2norm
from memfit.virtual.libraries.transformer_engine import attention, experts, layers, matrices, quantizers, releases
from memfit.virtual.libraries.transformer_engine.enums import ENUMS
from memfit.virtual.libraries.transformer_engine.quantizers import no_output
from memfit.virtual.patching import TableFinder, environment, importable

VERSION = "2.17"
ASSUMED = f"Transformer Engine's kernels stood in for: the buffers of version {VERSION}"
_MODULE, _PACKAGE, _LOADER = "transformer_engine_torch", "transformer_engine", "transformer_engine.common"
_CUBLAS = 130400  # cuBLASLt of CUDA 13; newer than all that Transformer Engine asks for
_PRIORITIES = (0, -5)  # lowest and highest of CUDA's streams


class _Refused:
    """A class of the module that cannot be made."""

    def __init__(self, *_: Any, **__: Any) -> None:
        _refuse(type(self).__name__)


class FP8TensorMeta:
    """Scales and the history of largest magnitudes, as attributes."""

    scale: Any = None
    scale_inv: Any = None
    amax_history: Any = None


def _refuse(name: str) -> NoReturn:
    raise Unsupported(
        f"{_MODULE}.{name} is not stood in for: a kernel of Transformer Engine whose buffers memfit does not know",
        hint="train without the feature that calls it, or with layers of PyTorch (--transformer-impl local)",
    )


def _unknown(name: str) -> Any:
    """Return a function for a name that the table does not have; it says so when it is called."""
    if name.startswith("__"):
        raise AttributeError(f"module {_MODULE!r} has no attribute {name!r}")
    return _refused(name)


def _refused(name: str) -> Callable[..., NoReturn]:
    """Return a function that refuses every call."""

    def function(*_: Any, **__: Any) -> NoReturn:
        _refuse(name)

    return function


# --- optimizers: everything is written in place ---


def multi_tensor_unscale_l2norm(
    chunk: int, noop: Any, lists: Sequence[Sequence[Any]], inv_scale: Any, per_tensor: bool | None = None
) -> Any:
    """Return the norms of scaled tensors."""
    return multi_tensor_l2norm(chunk, noop, lists, per_tensor)


_IN_PLACE = (
    "multi_tensor_scale", "multi_tensor_scale_tensor", "multi_tensor_adam", "multi_tensor_adam_param_remainder",
    "multi_tensor_adam_fp8", "multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master", "multi_tensor_sgd",
    "multi_tensor_compute_scale_and_scale_inv", "multi_tensor_compute_scale_inv_e8m0", "compute_amax",
    "fused_amax_and_scale_update_after_reduction", "fused_multi_row_padding", "fused_multi_row_unpadding",
    "fused_topk_with_score_function_bwd", "fused_score_for_moe_aux_loss_bwd", "thd_second_half_lse_correction",
    "thd_out_correction", "thd_grad_correction", "fp8_block_scaling_compute_partial_amax",
    "fp8_block_scaling_partial_cast", "mxfp8_scaling_compute_partial_amax", "mxfp8_scaling_partial_cast",
)  # fmt: skip
_MADE = {
    attention: (
        "get_cudnn_version", "get_fused_attn_backend", "fused_attn_fwd", "fused_attn_bwd", "thd_read_half_tensor",
        "thd_read_second_half_lse", "thd_get_partitioned_indices", "convert_thd_to_bshd", "convert_bshd_to_thd",
        "fa_prepare_fwd", "fa_prepare_bwd",
    ),
    experts: (
        "fused_topk_with_score_function_fwd", "fused_score_for_moe_aux_loss_fwd", "fused_moe_aux_loss_fwd",
        "fused_moe_aux_loss_bwd", "moe_permute_fwd", "moe_unpermute_fwd", "moe_unpermute_bwd", "splits_to_offsets",
        "splits_to_offsets_multi",
    ),
    layers: (
        "layernorm_fwd", "layernorm_bwd", "rmsnorm_fwd", "rmsnorm_bwd", "rmsnorm_bwd_add", "dropout_fwd", "dropout_bwd",
        "fused_qkv_rope_forward", "fused_qkv_rope_backward", "swap_first_dims",
    ),
    matrices: ("generic_gemm", "te_general_grouped_gemm", "get_num_cublas_streams"),
    quantizers: (
        "quantize", "dequantize", "multi_tensor_quantize", "split_quantize", "bulk_allocate", "fp8_transpose",
        "bgrad_quantize",
    ),
}  # fmt: skip
_TABLE: dict[str, Any] = {
    **ENUMS,
    **{name: getattr(module, name) for module, names in _MADE.items() for name in names},
    **layers.ACTIVATIONS, **layers.SOFTMAXES, **dict.fromkeys(_IN_PLACE, no_output),
    "create_empty_quantized_tensor": quantizers.create,
    "fused_rope_forward": layers.rotated, "fused_rope_backward": layers.rotated,
    "moe_permute_bwd": experts.moe_unpermute_fwd,
    "multi_tensor_l2norm": multi_tensor_l2norm, "multi_tensor_unscale_l2norm": multi_tensor_unscale_l2norm,
    "FP8TensorMeta": FP8TensorMeta,
    "get_cublasLt_version": lambda: _CUBLAS, "get_stream_priority_range": lambda *_: _PRIORITIES,
    "device_supports_multicast": lambda *_: False, "ubuf_built_with_mpi": lambda: False,
    "nvte_built_with_cublasmp": lambda: False,
    **{name: type(name, (_Refused,), {}) for name in ("CommOverlapHelper", "CommOverlap", "CommOverlapP2P")},
    "__getattr__": _unknown,
}  # fmt: skip


# --- the loader ---


def _version() -> str:
    """Return the version of the Transformer Engine that is imported: as a checkout says, else the stand-in's."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder).parent / "build_tools" / "VERSION.txt"
        if file.is_file():
            return file.read_text().strip()
    return VERSION


def _table(version: str) -> dict[str, Any]:
    """Return the module as a release's Python calls it. Raises Unsupported for one that is too old."""
    release = tuple(int(part) for part in version.split(".")[:2])
    if release < releases.OLDEST:
        raise Unsupported(
            f"Transformer Engine {version} is too old: its Python calls a C++ module that is not stood in for",
            hint=f"trace with {VERSION} or later, installed or as a checkout on PYTHONPATH, which need not be built",
        )
    return _TABLE | releases.earlier(release, _refused)


class _Distribution(importlib.metadata.Distribution):
    """The metadata of a checkout."""

    def read_text(self, filename: str) -> str | None:
        about = {"METADATA": f"Metadata-Version: 2.1\nName: {_PACKAGE}\nVersion: {_version()}\n"}
        return about.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(path)


class _Finder(TableFinder):
    """Finds the C++ module, and lets Transformer Engine's Python load it in place of shared objects."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name != _LOADER:
            return super().find_spec(name, path, target)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            self.modules = {_MODULE: _table(importlib.metadata.version(_PACKAGE))}
            with environment({"NVTE_PROJECT_BUILDING": "1", "NVTE_RELEASE_BUILD": "0"}):  # loads no libraries of CUDA
                execute(module)
            module.load_framework_extension = lambda framework: importlib.import_module(  # type: ignore[attr-defined]
                f"{_PACKAGE}_{framework}"
            )

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        name = getattr(context, "name", None)
        if name and name.replace("-", "_") == _PACKAGE and is_checkout():
            yield _Distribution()


def is_checkout() -> bool:
    """Return whether Transformer Engine can be imported without being installed."""
    context = importlib.metadata.DistributionFinder.Context(name=_PACKAGE)
    real = importlib.metadata.MetadataPathFinder.find_distributions(context)
    return next(iter(real), None) is None and importlib.util.find_spec(_PACKAGE) is not None


@contextmanager
def standing_in(note: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Let Transformer Engine's Python, where it can be imported, find its C++ module, and note it when it does."""
    finder = _Finder({_MODULE: _TABLE}, found=lambda: note(ASSUMED))
    try:
        with importable(finder):
            yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
            del sys.modules[name]
