"""A stand-in for the flash-attn package on a card without data, whose kernels have shapes and temporaries but no code.

The package needs a CUDA compiler and cannot be installed where there is no GPU. The stand-in's operators return, keep
and allocate what flash_attn_interface.py and csrc/flash_attn/flash_api.cpp of version 2.8 do; their temporaries are in
memfit.virtual.device.temporaries. The kernels of kernels-community/flash-attn2 are built from the same source.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from memfit.errors import Unsupported
from memfit.virtual.device.dispatch import current
from memfit.virtual.patching import TableFinder, importable

VERSION = "2.8.3"
ASSUMED = "flash-attn 2.8 stood in for: its buffers, no kernels"
_OPS: list[torch.library.Library] = []  # registered once per process
_SCHEMAS = (
    "forward(Tensor q, Tensor k, Tensor v, float dropout) -> (Tensor, Tensor, Tensor)",
    "varlen_forward(Tensor q, Tensor k, Tensor v, Tensor starts, float dropout) -> (Tensor, Tensor, Tensor)",
    "backward(Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor q, Tensor k, bool deterministic) -> ()",
    "varlen_backward(Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor q, Tensor k, Tensor starts, "
    "bool deterministic) -> ()",
)


def _register() -> Any:
    """Register torch.ops.flash_attn_2."""
    if not _OPS:
        library = torch.library.Library("flash_attn_2", "DEF")
        for schema in _SCHEMAS:
            library.define(schema)
        library.impl("forward", _shapes, "Meta")
        library.impl("varlen_forward", lambda q, k, v, starts, dropout: _shapes(q, k, v, dropout), "Meta")
        _OPS.append(library)
    return torch.ops.flash_attn_2


def _shapes(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, strided as the queries, the fp32 log-sum-exp [B, N, S] or [N, T], and the random state [2]."""
    rows = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return (
        torch.empty_like(q),
        torch.empty(rows, dtype=torch.float32, device=q.device),
        torch.empty(2, dtype=torch.int64, device=q.device),
    )


def _checked(q: Tensor) -> None:
    """Raise the same errors as flash_api.cpp."""
    if current().capability < (8, 0):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if q.shape[-1] > 256:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")


def _whole_heads(*tensors: Tensor) -> list[Tensor]:
    """Pad heads to a multiple of 8 elements."""
    return [pad(t, [0, -t.shape[-1] % 8]) if t.shape[-1] % 8 else t for t in tensors]


class FlashAttnFunc(torch.autograd.Function):
    """q: [B, S, N, H]; k, v: [B, S, K, H], N a multiple of K."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, dropout: float, deterministic: bool) -> Tensor:
        width = q.shape[-1]
        q, k, v = _whole_heads(q, k, v)
        out, logsumexp, state = _register().forward(q, k, v, dropout)
        ctx.save_for_backward(q, k, v, out, logsumexp, state)
        ctx.deterministic = deterministic
        return out[..., :width]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v = ctx.saved_tensors[:3]
        return *_gradients(ctx, _register().backward, gradients[0], q, k, v), None, None


class FlashAttnVarlenFunc(torch.autograd.Function):
    """q: [T, N, H]; k, v: [T, K, H]; starts: [sequences + 1] int32, where each sequence begins in T."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, dropout: float,
        deterministic: bool,
    ) -> Tensor:  # fmt: skip
        width = q.shape[-1]
        q, k, v = _whole_heads(q, k, v)
        out, logsumexp, state = _register().varlen_forward(q, k, v, starts, dropout)
        ctx.save_for_backward(q, k, v, out, logsumexp, starts, key_starts, state)
        ctx.deterministic = deterministic
        return out[..., :width]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v, *_, starts, _, _ = ctx.saved_tensors
        return *_gradients(ctx, _register().varlen_backward, gradients[0], q, k, v, starts), None, None, None, None


def _gradients(
    ctx: Any, backward: Any, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *starts: Tensor
) -> tuple[Tensor, ...]:
    made = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _whole_heads(gradient)
    backward(*made, q, k, *starts, ctx.deterministic)
    return tuple(t[..., : gradient.shape[-1]] for t in made)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attend with [B, S, N, H] queries to [B, S, K, H] keys and values."""
    _checked(q)
    return FlashAttnFunc.apply(*_side_by_side(q, k, v), dropout_p, deterministic)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Any:  # fmt: skip
    """Attend within sequences laid end to end: [T, N, H] queries to [T, K, H] keys and values."""
    _checked(q)
    words = (cu_seqlens_q, cu_seqlens_k, dropout_p, deterministic)
    return FlashAttnVarlenFunc.apply(*_side_by_side(q, k, v), *words)


def flash_attn_with_kvcache(*_: Any, **__: Any) -> Any:
    """Refuse decoding, which training does not do."""
    raise Unsupported(
        "flash_attn_with_kvcache decodes with a cache of keys, which the virtual card's flash-attn does not replace",
        hint="trace the training step alone, or generate with attn_implementation='sdpa'",
    )


# --- the kernels without autograd, which Transformer Engine calls under context parallelism ---


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the output, the log-sum-exp, an empty mask of dropout, and the random state."""
    _checked(q)
    return _with_no_mask(*_register().forward(*_side_by_side(q, k, v), dropout_p))


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the same of sequences laid end to end."""
    _checked(q)
    return _with_no_mask(*_register().varlen_forward(*_side_by_side(q, k, v), cu_seqlens_q, dropout_p))


def _with_no_mask(out: Tensor, logsumexp: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return out, logsumexp, torch.empty(0, dtype=out.dtype, device=out.device), state


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    deterministic: bool = False, **_: Any,
) -> None:  # fmt: skip
    """Write the gradients; the sums of rows that the package returns are of no use to its callers."""
    given = _side_by_side(dout, q, k, v, out)
    _register().backward(dq, dk, dv, given[1], given[2], deterministic)


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, deterministic: bool = False,
    **_: Any,
) -> None:  # fmt: skip
    """Write the gradients of sequences laid end to end."""
    given = _side_by_side(dout, q, k, v, out)
    _register().varlen_backward(dq, dk, dv, given[1], given[2], cu_seqlens_q, deterministic)


def varlen_bwd(*_: Any, **__: Any) -> Any:
    """Refuse the C++ function that Transformer Engine calls for padded sequences."""
    raise Unsupported(
        "flash_attn_2_cuda.varlen_bwd is not stood in for", hint="use cuDNN's attention (--attention-backend fused)"
    )


def _side_by_side(*tensors: Tensor) -> list[Tensor]:
    """maybe_contiguous: make the last dimension contiguous."""
    return [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]


class _PutRows(torch.autograd.Function):
    """IndexPutFirstAxis of bert_padding.py."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, rows: int) -> Tensor:
        """Put values [T, ...] at their rows of zeros [rows, ...]."""
        ctx.save_for_backward(indices)
        out = torch.zeros(rows, *values.shape[1:], device=values.device, dtype=values.dtype)
        out[indices] = values
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the rows' gradients."""
        (indices,) = ctx.saved_tensors
        return gradients[0][indices], None, None


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put rows [T, ...] of tokens back to [B, S, ...]."""
    rows: Tensor = _PutRows.apply(hidden_states, indices, batch * seqlen)
    return rows.unflatten(0, (batch, seqlen))


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> Any:
    """Return the rows of [B, S, ...] that the mask keeps, with the arguments of varlen attention."""
    from transformers.modeling_flash_attention_utils import _unpad_input

    return _unpad_input(hidden_states, attention_mask, unused_mask)


# --- the package ---

_ATTENTION = (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)
_KERNELS = (_flash_attn_forward, _flash_attn_backward, _flash_attn_varlen_forward, _flash_attn_varlen_backward)
_MODULES: dict[str, dict[str, Any]] = {
    "flash_attn": {"__version__": VERSION, **{f.__name__: f for f in _ATTENTION}},
    "flash_attn.flash_attn_interface": {
        f.__name__: f for f in (*_ATTENTION, FlashAttnFunc, FlashAttnVarlenFunc, *_KERNELS)
    },
    "flash_attn_2_cuda": {"varlen_bwd": varlen_bwd},
    "flash_attn.bert_padding": {f.__name__: f for f in (pad_input, unpad_input)},
}
_ABOUT = {  # files of the .dist-info folder
    "METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n",
    "top_level.txt": "flash_attn\n",
}


class _Distribution(importlib.metadata.Distribution):
    """The package's metadata, as importlib.metadata finds it."""

    def read_text(self, filename: str) -> str | None:
        return _ABOUT.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(path)


class _Finder(TableFinder):
    """Finds the stand-in; other modules of an installed package, whose Triton kernels launch nothing, are its own."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        spec = super().find_spec(name, path, target)
        own = installed() if name == "flash_attn" else None
        if own is not None:
            spec.submodule_search_locations += own.submodule_search_locations or []
        return spec

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        if context is None or context.name is None or context.name.replace("_", "-") == "flash-attn":
            yield _Distribution()


_NAMES = ("flash_attn", "flash_attention_2", "--use-flash-attn", "--attention-backend flash")  # the last: Megatron-LM's


def named_in(*texts: str) -> bool:
    """Return whether code or a command line names flash-attn."""
    return any(word in text for text in texts for word in _NAMES)


_FILES = (".yaml", ".yml", ".json", ".toml")
# in a file of settings, whose `flash_attn: auto` names it too and does not ask for it
_ASKED = re.compile(r"flash_attention_2|\bflash_attention: *true|\bflash_attn: *fa2|\buse_flash_attn\w*: *true", re.I)


def installed() -> ModuleSpec | None:
    """Return where the package is installed; its C++ module cannot be loaded without CUDA's libraries."""
    return PathFinder.find_spec("flash_attn")


def asked_in(args: Iterable[str]) -> bool:
    """Return whether a file of settings among a script's arguments asks for flash-attn."""
    files = (Path(arg.rpartition("=")[2]) for arg in args if arg.endswith(_FILES))
    return any(_ASKED.search(path.read_text(errors="replace")) for path in files if path.is_file())


@contextmanager
def standing_in() -> Iterator[None]:
    """Make `flash_attn` importable, installed or not, and let transformers look for it again."""
    try:
        with importable(_Finder(_MODULES)):
            _clear_caches()
            yield
    finally:
        _clear_caches()


def _clear_caches() -> None:
    """Clear what transformers caches: which packages are installed, and which attention it loaded."""
    utils = sys.modules.get("transformers.utils.import_utils")
    for name, function in vars(utils).items() if utils else ():
        if "flash_attn" in name or name == "_package_distribution_mapping":
            getattr(function, "cache_clear", lambda: None)()
    loaded: Any = sys.modules.get("transformers.modeling_flash_attention_utils")
    if loaded is not None:
        loaded._loaded_implementation = None
