"""What convolutions allocate on the card beside their results: copies that PyTorch makes, and cuDNN's workspaces.

Which kernels run is PyTorch's choice (Convolution.cpp, ConvUtils.h): its own for most depthwise convolutions of NCHW
tensors, cuDNN's otherwise. The sizes of cuDNN's workspaces are in memfit.tables.cudnn_convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memfit.tables.cuda_kernels import reduction
from memfit.tables.cudnn_convolutions import Convolution, Dtype, Part, workspace
from memfit.virtual.device.shapes import conv_layout

if TYPE_CHECKING:
    from memfit.virtual.device.card import Card

ASSUMED = "convolutions: cuDNN's workspaces were not measured with {}, those of an H100 are taken"
UNKNOWN = "convolutions: without workspaces, which were not measured {}"
_DTYPES: dict[torch.dtype, Dtype] = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_MEASURED = (9, 0)  # compute capability of the card that was measured
Script = list[int | tuple[int, ...]]
Sizes = tuple[int, ...]


def forward(card: Card, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Script:
    """cudnn_convolution, cudnn_convolution_transpose: the result comes before the workspace."""
    x, weight, _, *how = args
    transposed = how[3]
    copies = _laid_out(x, weight, x, weight)
    if _native(x, weight, *how):
        return [*copies, ~0]
    y = _result(x, weight, *how)
    source, result = (y, tuple(x.shape)) if transposed else (tuple(x.shape), y)
    described = _described(card, source, result, x, weight, how)
    return [*copies, ~0, _workspace(card, described, "input" if transposed else "forward")]


def backward(card: Card, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Script:
    """cudnn_convolution_backward: every gradient is followed by its pass; the bias's gradient, a sum, comes last."""
    grad, x, weight, _, *how, mask = args
    copies = _laid_out(x, weight, *((x, grad) if mask[1] else (grad,)))
    bias: Script = [~2, *_bias(card, grad)] if mask[2] else []
    if _native(x, weight, *how):
        return [*copies, *(~i for i in (1, 0) if mask[i]), *bias]
    transposed = how[3]
    source, result = (grad, x) if transposed else (x, grad)
    described = _described(card, tuple(source.shape), tuple(result.shape), x, weight, how)
    script: Script = list(copies)
    if mask[0]:
        part: Part = "forward" if transposed else "input"
        script += [~0, (*_laid_out(x, weight, weight), *_workspace(card, described, part))]
    if mask[1]:
        script += [~1, _workspace(card, described, "weight")]
    return script + bias


def _laid_out(x: Tensor, weight: Tensor, *operands: Tensor) -> list[int]:
    """Return the sizes of copies of operands that lie in another layout than the kernel's."""
    layout = conv_layout(x, weight)
    return [t.numel() * t.element_size() for t in operands if not t.is_contiguous(memory_format=layout)]


def _native(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool, _: Sequence[int], groups: int,
) -> bool:  # fmt: skip
    """ConvParams.use_cudnn_depthwise: whether PyTorch's own depthwise kernel runs, which needs nothing beside results.

    cuDNN's runs for channels_last, and in fp16 for the shapes where it was found to be faster.
    """
    depthwise = not transposed and groups == x.shape[1] > 1 and weight.shape[0] % groups == 0
    if not depthwise or conv_layout(x, weight) != torch.contiguous_format:
        return False
    if x.dtype != torch.float16 or x.dim() > 4 or x.shape[1] < 32 or any(d != 1 for d in dilation):
        return True
    step, taps, width = stride[-1], weight.shape[-1], x.shape[-1]
    if x.dim() == 3:
        return step != 1
    if stride[0] != step or weight.shape[2] != taps or taps not in (1, 3, 5) or width < 7 or step > 2:
        return True
    if step == 1:
        return False
    batch, channels = x.shape[:2]
    if batch == 1:
        return taps == 1 and width > 28
    if taps == 1:
        return not (batch <= 16 and channels >= 128 and width <= 7)
    return not (channels >= 512 or (channels >= 256 and width >= 28))


def _result(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool, output_padding: Sequence[int], groups: int,
) -> Sizes:  # fmt: skip
    """Return the shape of a convolution's result."""
    dims = range(x.dim() - 2)
    stride, padding, dilation, more = (
        list(v) * (len(dims) if len(v) == 1 else 1) for v in (stride, padding, dilation, output_padding)
    )
    spans = [dilation[i] * (weight.shape[i + 2] - 1) + 1 for i in dims]
    if transposed:
        sizes = [(x.shape[i + 2] - 1) * stride[i] - 2 * padding[i] + spans[i] + more[i] for i in dims]
        return (x.shape[0], weight.shape[1] * groups, *sizes)
    sizes = [(x.shape[i + 2] + 2 * padding[i] - spans[i]) // stride[i] + 1 for i in dims]
    return (x.shape[0], weight.shape[0], *sizes)


def _described(card: Card, x: Sizes, y: Sizes, operand: Tensor, weight: Tensor, how: list[Any]) -> Convolution | None:
    """Return the convolution from `x` to `y` as cuDNN gets it; None where no workspace is known."""
    cudnn, dtype = torch.backends.cudnn, _DTYPES.get(operand.dtype)
    if dtype is None or not cudnn.enabled:
        card.assumed.setdefault(UNKNOWN.format("with cuDNN off" if dtype else f"in {operand.dtype}"))
        return None
    unmeasured = {
        f"compute capability {card.capability[0]}.{card.capability[1]}": card.capability != _MEASURED,
        "cudnn.benchmark": cudnn.benchmark, "cudnn.deterministic": cudnn.deterministic,
        "fp32 without TF32": dtype == "fp32" and not cudnn.allow_tf32,
    }  # fmt: skip
    if any(unmeasured.values()):
        card.assumed.setdefault(ASSUMED.format(", ".join(name for name, found in unmeasured.items() if found)))
    flat = (1,) if len(x) == 3 else ()  # one dimension is viewed as two
    stride = tuple(how[0]) * (len(x) - 2 if len(how[0]) == 1 else 1)
    return Convolution(
        batch=x[0], inside=x[1], outside=y[1], groups=how[5], kernel=(*flat, *weight.shape[2:]),
        stride=(*flat, *stride), size=(*flat, *x[2:]), out=(*flat, *y[2:]), dtype=dtype,
        last=conv_layout(operand, weight) != torch.contiguous_format,
    )  # fmt: skip


def _workspace(card: Card, described: Convolution | None, part: Part) -> tuple[int, ...]:
    """Return the size of a pass's workspace, which is freed as the pass ends; nothing for results without elements."""
    if described is None or not prod(described.out) * described.batch:
        return ()
    return (workspace(described, part, card.multiprocessors),)


def _bias(card: Card, grad: Tensor) -> tuple[int, ...]:
    """Return the staging buffers of the bias's gradient, a sum over all dimensions but the channels."""
    channels, first = grad.shape[1], grad.is_contiguous()
    words = {"multiprocessors": card.multiprocessors, "threads": card.threads}
    return reduction(grad.numel() // max(channels, 1), channels, fastest=first, **words)
