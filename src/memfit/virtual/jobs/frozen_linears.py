"""Linear layers whose frozen weights are quantised, as diffusion trainers run them beside adapters.

bitsandbytes has its own. torchao's and SDNQ's are written here after their source, operation by operation, so that what
they allocate and autograd keeps is the same: torchao 0.17 (float8_tensor.py, quant_primitives.py) with the backward
pass that SimpleTuner 4 gives it (quantisation/torchao_workarounds.py), and SDNQ 0.2.8 (training/layers/linear,
quant_utils.py) with the kernels that it compiles, whose intermediate values lie in no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memfit.virtual.process.host import room

if TYPE_CHECKING:
    from memfit.virtual.jobs.recipe import Setup

_LARGEST = 448.0  # of float8_e4m3fn
_GROUP = 256  # channels that SDNQ rotates together by a Hadamard matrix (`sdnq_hadamard_group_size`)
_FEW = 32  # rows of an input below which SDNQ multiplies in 16 bits


class Stored(nn.Linear):
    """A frozen linear layer whose weight is one byte an element, with fp32 scales: of each row, or of all."""

    def __init__(self, of: nn.Linear, payload: torch.dtype, scales: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self._dtype = of.in_features, of.out_features, of.weight.dtype
        self.payload = nn.Parameter(of.weight.new_empty(of.weight.shape, dtype=payload), requires_grad=False)
        self.scale = nn.Parameter(of.weight.new_empty((scales, 1), dtype=torch.float32), requires_grad=False)
        self.bias = of.bias

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Return where the weight lies and what dtype it stands for: what PEFT asks a layer for."""
        return self.payload.new_empty(0, dtype=self._dtype)

    def dequantised(self) -> Tensor:
        """Return the weight by way of fp32. [out, in]"""
        return (self.payload.to(torch.float32) * self.scale).to(self._dtype)


# --- torchao ---


class _Rounded(torch.autograd.Function):
    """Round to fp8; the gradient goes straight through (torchao's _RoundToFloat8)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.to(torch.float8_e4m3fn)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class _Scaled(torch.autograd.Function):
    """torch._scaled_mm of an fp8 input and an fp8 weight; SimpleTuner's _ScaledMmInputGrad."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, layer: Stored, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.layer = layer
        return x.new_empty((x.shape[0], layer.out_features), dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (scale,) = ctx.saved_tensors
        weight = (ctx.layer.payload.to(torch.float32) * ctx.layer.scale).to(grads[0].dtype)
        return grads[0].matmul(weight) * scale.to(grads[0].dtype), None, None, None


class Fp8(Stored):
    """Float8DynamicActivationFloat8WeightConfig(): weight and input in fp8, one scale each."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__(of, torch.float8_e4m3fn, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b. [..., in] -> [..., out]"""
        scale = (x.abs().amax(dim=tuple(range(x.dim())), keepdim=True) / _LARGEST).to(torch.float32)
        small = _Rounded.apply((x.to(torch.float32) / scale).clamp(min=-_LARGEST, max=_LARGEST))
        out = _Scaled.apply(small.reshape(-1, self.in_features), scale.reshape(1, 1), self, x.dtype)
        if x.dtype == torch.float32 and self.bias is not None:  # which the kernel adds to 16-bit outputs alone
            out = out + self.bias
        return out.reshape(*x.shape[:-1], self.out_features)


class Fp8WeightOnly(Stored):
    """Float8WeightOnlyConfig(): an fp8 weight with a scale of each row, which autograd keeps in 16 bits."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__(of, torch.float8_e4m3fn, of.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b. [..., in] -> [..., out]"""
        out = torch.matmul(x, self.dequantised().t())
        return out if self.bias is None else out + self.bias


# --- SDNQ ---


def _rotated(x: Tensor, group: int) -> Tensor:
    """Return x times a Hadamard matrix, group by group of its last dimension."""
    matrix = x.new_empty(group, group)
    return torch.matmul(x.contiguous().unflatten(-1, (-1, group)), matrix).flatten(-2, -1)


def _in_int8(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return what the compiled quantize_int_mm makes of a matrix: 8-bit integers, and scales along `dim`."""
    scale = x.new_empty((len(x), 1) if dim else (1, x.shape[1]), dtype=torch.float32)
    return torch.empty_like(x, dtype=torch.int8), scale


class _Int8Product(torch.autograd.Function):
    """Both passes in 8-bit integers, the input rotated before it is rounded: SDNQ's INT8MatmulBackward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Int8) -> Tensor:
        ctx.layer = layer
        whole = _in_int8(_rotated(x.flatten(0, -2), layer.group), -1)
        out = x.new_empty((*x.shape[:-1], layer.out_features))
        del whole
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        layer, grad = ctx.layer, grads[0].flatten(0, -2)
        weight = layer.payload.to(layer.scale.dtype)  # scaled in the same kernel
        whole = _in_int8(weight, 0), _in_int8(grad, -1)
        del weight
        found = grad.new_empty((len(grad), layer.in_features))
        del whole
        found = _rotated(found, layer.group)
        return found.view(*grads[0].shape[:-1], layer.in_features), None


class _SixteenBit(torch.autograd.Function):
    """A product with the dequantised weight, which it keeps: SDNQ's QuantizedLinearBackward, of few rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Int8) -> Tensor:
        weight = layer.payload.to(layer.scale.dtype)
        weight = _rotated(weight, layer.group).to(layer.weight.dtype)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(weight)
        return nn.functional.linear(x, weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (weight,) = ctx.saved_tensors
        return torch.mm(grads[0].flatten(0, -2), weight).view(*grads[0].shape[:-1], -1), None


class Int8(Stored):
    """SDNQ's int8 with a scale of each row, 8-bit products and Hadamard rotation."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__(of, torch.int8, of.out_features)
        self.group = min(_GROUP, self.in_features & -self.in_features)  # the largest power of two that divides it
        self._products = self.in_features % 16 == 0 == self.out_features % 16

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b. [..., in] -> [..., out]"""
        few = x.numel() // self.in_features < _FEW
        return (_SixteenBit if few or not self._products else _Int8Product).apply(x, self)


# modules that SDNQ leaves in 16 bits (sdnq/common.py): of a class, and of those that it does not name; a name that
# begins with a dot stands for modules of the root, one with a star for any name that matches, another for a module
_KEPT: dict[str, tuple[str, ...]] = {
    "FluxTransformer2DModel": ("single_transformer_blocks.0.norm.linear", "time_text_embed", "time_embed",
                               "context_embedder", "x_embedder", ".proj_out", "norm_out"),
    "Flux2Transformer2DModel": ("double_stream_modulation_img", "double_stream_modulation_txt",
                                "single_stream_modulation", "time_guidance_embed", "context_embedder", "x_embedder",
                                ".proj_out", "norm_out"),
    "ChromaTransformer2DModel": ("distilled_guidance_layer", "time_text_embed", "context_embedder", "x_embedder",
                                 ".proj_out", "norm_out"),
    "QwenImageTransformer2DModel": ("transformer_blocks.0.img_mod.1", "time_text_embed", "txt_in", "img_in",
                                    "proj_out", "norm_out"),
    "Lumina2Transformer2DModel": ("layers.0.norm1.linear", "time_caption_embed", "x_embedder", "norm_out"),
    "ZImageTransformer2DModel": ("layers.0.adaLN_modulation.0", "t_embedder", "cap_embedder", "siglip_embedder",
                                 "all_x_embedder", "all_final_layer"),
    "WanTransformer3DModel": ("scale_shift_table", "patch_embedding", "condition_embedder", "proj_out", "norm_out"),
    "CosmosTransformer3DModel": ("transformer_blocks.0.norm*", "patch_embed", "time_embed", "norm_out", "proj_out",
                                 "crossattn_proj"),
}  # fmt: skip
_USUALLY_KEPT = (
    ".time_embed", ".context_embedder", ".condition_embedder", ".x_embedder", ".t_embedder", ".y_embedder",
    ".proj_in", ".emb_in", ".txt_in", ".img_in", ".vid_in", ".proj_out", ".norm_out", ".emb_out", ".txt_out",
    ".img_out", ".vid_out", ".final_layer", "multi_modal_projector", "time_text_embed", "patch_embedding",
    "patch_embed", "patch_emb", "lm_head", "wte",
)  # fmt: skip


def _kept(name: str, listed: tuple[str, ...]) -> bool:
    """Return whether SDNQ leaves a module alone (its check_param_name_in)."""
    parts = f"{name}.weight".split(".")
    return any(
        f"{name}.weight".startswith(one[1:]) if one.startswith(".")
        else one == name or one in parts or ("*" in one and re.match(one.replace("*", ".*"), name))
        for one in listed
    )  # fmt: skip


def _by_sdnq(model: Any, name: str, layer: nn.Linear) -> bool:
    listed = _KEPT.get(type(model).__name__)
    if listed is None:
        listed = (*_USUALLY_KEPT, *(getattr(model, "_skip_layerwise_casting_patterns", None) or ()))
    listed = (*listed, *(getattr(model, "_keep_in_fp32_modules", None) or ()))
    return layer.in_features >= 32 and layer.weight.numel() >= 1 << 14 and not _kept(name, listed)


def _by_torchao(model: Any, name: str, layer: nn.Linear) -> bool:
    return layer.in_features % 16 == 0 == layer.out_features % 16


KINDS: dict[str, tuple[Callable[[nn.Linear], Stored], Callable[[Any, str, nn.Linear], bool]]] = {
    "fp8-torchao": (Fp8, _by_torchao), "fp8w-torchao": (Fp8WeightOnly, _by_torchao), "int8-sdnq": (Int8, _by_sdnq),
}  # fmt: skip


def on_card(model: Any, setup: Setup) -> Any:
    """Return a model without memory on the card, its linear layers quantised as the job says.

    torchao's and SDNQ's were quantised on the host (SimpleTuner's `quantize_via`); bitsandbytes quantises one after
    the other on the card, as diffusers loads them.
    """
    linears = [(name, layer) for name, layer in model.named_modules() if type(layer) is nn.Linear]
    if setup.stored:
        made, chosen = KINDS[setup.stored]
        for name, layer in linears:
            if chosen(model, name, layer):
                _put(model, name, made(layer))
        return model.to_empty(device="cuda")
    for name, _ in linears:
        _put(model, name, nn.Identity())
    model = model.to_empty(device="cuda")
    for name, layer in linears:
        _put(model, name, _by_bitsandbytes(layer, setup.quantization))
    return model


def _put(model: Any, name: str, layer: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)


def _by_bitsandbytes(of: nn.Linear, words: dict[str, Any]) -> Any:
    """Return a 4-bit layer of bitsandbytes on the card. words: of BitsAndBytesConfig."""
    bnb: Any = import_module("bitsandbytes.nn")
    dtype, weight = of.weight.dtype, room(of.weight.shape, of.weight.dtype)
    with torch.device("meta"):
        layer = bnb.Linear4bit(of.in_features, of.out_features, of.bias is not None, compute_dtype=dtype)
    kind, double = words["bnb_4bit_quant_type"], bool(words.get("bnb_4bit_use_double_quant"))
    packed = bnb.Params4bit(weight, requires_grad=False, compress_statistics=double, quant_type=kind)
    layer.weight = packed.to("cuda")
    if of.bias is not None:
        layer.bias = nn.Parameter(torch.empty(of.bias.shape, dtype=dtype, device="cuda"), requires_grad=False)
    return layer
