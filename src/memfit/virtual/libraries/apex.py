"""A stand-in for NVIDIA apex, as Megatron-LM's local layers use it: its buffers and states, no kernels.

Apex needs a CUDA compiler and cannot be installed where there is no GPU. Without it Megatron-LM takes other layers and
another optimizer than the clusters that it runs on. The stand-in returns, keeps and allocates what apex does at commit
6424da3b (2026-07-08, "0.1"; it makes no releases): apex/optimizers, apex/normalization/fused_layer_norm.py,
csrc/layer_norm_cuda.cpp, csrc/multi_tensor_*.cu and csrc/megatron/*.cu. It is found only once Megatron-LM was imported:
transformers and others ask whether apex is installed and would change their layers. apex.contrib, which is built by
options of its own, is not there; Megatron-LM does without it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memfit.errors import Unsupported
from memfit.virtual.device.dispatch import after_kernel, current
from memfit.virtual.patching import TableFinder, importable

ASSUMED = "apex stood in for: its layers, buffers and optimizer states, no kernels"
_CHUNK = 2048 * 32  # elements that a block of a multi-tensor kernel takes
_BLOCKS = 320  # partial norms of amp_C.multi_tensor_l2norm
_PARTS = 16  # part_size: rows of partial gradients of the layer norm's weight and bias
_HALF = (torch.float16, torch.bfloat16)


def _statistics_of(dtype: torch.dtype) -> torch.dtype:
    """Return the type of a layer norm's means: fp32 for half precision."""
    return torch.float32 if dtype in _HALF else dtype


# --- amp_C and apex.multi_tensor_apply ---


def multi_tensor_l2norm(
    chunk: int, noop: Tensor, lists: Sequence[Sequence[Tensor]], per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return the norm of all tensors [1] and, if asked, those of each [tensors]."""
    tensors = lists[0]
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": tensors[0].device}
    partial = [torch.zeros(_BLOCKS, **fp32)]
    if per_tensor:
        chunks = max(math.ceil(t.numel() / chunk) for t in tensors)
        partial.append(torch.zeros(len(tensors) * chunks, **fp32))
    each = torch.empty(len(tensors) if per_tensor else 0, **fp32)
    return torch.empty(1, **fp32), each


def _in_place(chunk: int, noop: Tensor, lists: Sequence[Sequence[Tensor]], *_: Any) -> None:
    """Scale, copy or step within the lists of tensors, which become unknown."""
    after_kernel(noop, lists)


class MultiTensorApply:
    """Calls a kernel of amp_C."""

    available = True

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], noop: Tensor, lists: Any, *args: Any) -> Any:
        return op(self.chunk_size, noop, lists, *args)


# --- apex.optimizers ---


class _Fused(torch.optim.Optimizer):
    """An optimizer whose step is one kernel: it makes the states at the first step, and nothing later."""

    def _overflow_flag(self) -> None:
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int, device="cuda")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as set_grad_none does, or set them to zero."""
        super().zero_grad(set_to_none and self.set_grad_none)

    set_grad_none = True

    @torch.no_grad()
    def step(self, closure: Any = None, *_: Any, **__: Any) -> Any:
        """Step."""
        loss = closure() if closure else None
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.state[parameter].update(self._states(parameter))
                after_kernel(parameter, *self.state[parameter].values())
        return loss

    def _states(self, parameter: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError


class FusedAdam(_Fused):
    """Adam with fp32 moments of every parameter; the step is a number of the group."""

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, adam_w_mode: bool = True, weight_decay: float = 0.0, amsgrad: bool = False,
        set_grad_none: bool = True, capturable: bool = False, master_weights: bool = False,
    ) -> None:  # fmt: skip
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        if capturable or master_weights:
            raise Unsupported(
                "apex's FusedAdam for CUDA graphs (capturable, master_weights) is not stood in for",
                hint="Megatron-LM keeps its own main parameters: leave both out",
            )
        words = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, words)
        self.adam_w_mode, self.set_grad_none = int(adam_w_mode), set_grad_none
        self._overflow_flag()

    def _states(self, parameter: Tensor) -> dict[str, Tensor]:
        return {name: torch.zeros_like(parameter).float() for name in ("exp_avg", "exp_avg_sq")}


class FusedSGD(_Fused):
    """SGD, which makes the buffers of momentum without momentum, too."""

    def __init__(
        self, params: Any, lr: float = 1e-3, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0,
        nesterov: bool = False, wd_after_momentum: bool = False, materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:  # fmt: skip
        words = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {**words, "nesterov": nesterov})
        self.set_grad_none = set_grad_none
        self._overflow_flag()

    def _states(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter)}


# --- apex.normalization ---


class FusedLayerNormAffineFunction(torch.autograd.Function):
    """The layer norm over the last dimensions, with weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Sequence[int], eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:  # fmt: skip
        """Keep the input, or the output in its place, with means [rows] and inverse deviations [rows]."""
        given = input.contiguous()
        rows = given.numel() // math.prod(normalized_shape)
        out = torch.empty_like(given)
        mean = torch.empty(rows, dtype=_statistics_of(given.dtype), device=given.device)
        deviation = torch.empty_like(mean)
        kept = (out, weight, bias, None) if memory_efficient else (given, weight, bias, mean)
        ctx.save_for_backward(*kept, deviation)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return gradients of the input, the weight and the bias; the last two are first summed in parts."""
        kept, weight, bias, *_ = ctx.saved_tensors
        incoming = gradients[0].contiguous()
        found = torch.empty_like(kept), torch.empty_like(weight), torch.empty_like(bias)
        words: dict[str, Any] = {"dtype": _statistics_of(kept.dtype), "device": kept.device}
        parts = [torch.empty(_PARTS, weight.numel(), **words) for _ in range(2)]
        del parts, incoming
        return *found, None, None, None


# --- csrc/megatron ---


def _softmax(scores: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(scores)


def _softmax_backward_in_place(gradient: Tensor, *_: Any) -> Tensor:
    return gradient


def _masked_softmax_backward(gradient: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(gradient)


def get_batch_per_block(queries: int, keys: int, batches: int, heads: int) -> int:
    """Return how many rows of the scores a block of scaled_masked_softmax.h takes."""
    power = 1 << (keys - 1).bit_length()
    return 128 // min(power, 32) * (2 if power <= 128 else 1)


def _add_weight_gradient(inputs: Tensor, gradient: Tensor, total: Tensor) -> None:
    """Multiply into the main gradient, by cuBLAS."""
    current().need_workspace()
    after_kernel(total)


# --- the package ---

_APPLY = {"MultiTensorApply": MultiTensorApply, "multi_tensor_applier": MultiTensorApply(_CHUNK)}
_IN_PLACE = dict.fromkeys(
    ("multi_tensor_scale", "multi_tensor_axpby", "multi_tensor_adam", "multi_tensor_sgd"), _in_place
)
_MODULES: dict[str, dict[str, Any]] = {
    "apex": {},
    "apex.multi_tensor_apply": _APPLY,
    "apex.optimizers": {"FusedAdam": FusedAdam, "FusedSGD": FusedSGD},
    "apex.normalization": {},
    "apex.normalization.fused_layer_norm": {"FusedLayerNormAffineFunction": FusedLayerNormAffineFunction},
    "amp_C": {"multi_tensor_l2norm": multi_tensor_l2norm, **_IN_PLACE},
    "scaled_upper_triang_masked_softmax_cuda": {"forward": _softmax, "backward": _softmax_backward_in_place},
    "scaled_softmax_cuda": {"forward": _softmax, "backward": _softmax_backward_in_place},
    "scaled_masked_softmax_cuda": {
        "forward": _softmax, "backward": _masked_softmax_backward, "get_batch_per_block": get_batch_per_block,
    },
    "fused_weight_gradient_mlp_cuda": {
        "wgrad_gemm_accum_fp32": _add_weight_gradient, "wgrad_gemm_accum_fp16": _add_weight_gradient,
    },
}  # fmt: skip


@contextmanager
def standing_in(note: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Make apex importable once Megatron-LM is imported, installed or not, and note it when it is."""
    finder = TableFinder(_MODULES, asked=lambda: "megatron.core" in sys.modules, found=lambda: note(ASSUMED))
    with importable(finder):
        yield
