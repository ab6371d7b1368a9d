"""apex's stand-in on the virtual card: found by Megatron-LM alone, and to the byte what apex allocates."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from memfit import virtual_gpu  # noqa: E402
from memfit.errors import Unsupported  # noqa: E402
from memfit.virtual.libraries.apex import standing_in  # noqa: E402

ROWS, WIDTH = 1000, 512


def requested(kind: str = "current") -> int:
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{kind}"])


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A card with apex, in a process that imported Megatron-LM; the notes of the stand-in."""
    notes: list[str] = []
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    with virtual_gpu("a100-80gb"), standing_in(notes.append):
        yield notes


def test_who_has_no_megatron_does_not_find_it() -> None:
    there = importlib.util.find_spec("apex") is not None
    with virtual_gpu("a100-80gb"), standing_in():
        assert there or importlib.util.find_spec("apex") is None


def test_it_is_gone_after_the_card_and_said_once_used(megatron: list[str]) -> None:
    assert not megatron
    import apex  # type: ignore[import-not-found,unused-ignore]

    assert "apex" in sys.modules and apex.__name__ == "apex"
    assert any("apex" in note for note in megatron)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layer_norm_keeps_its_statistics_and_sums_gradients_in_parts(megatron: list[str], dtype: Any) -> None:
    from apex.normalization.fused_layer_norm import (  # type: ignore[import-not-found,unused-ignore]
        FusedLayerNormAffineFunction,
    )

    words = {"device": "cuda", "dtype": dtype, "requires_grad": True}
    inputs, weight, bias = (torch.empty(*shape, **words) for shape in ((ROWS, WIDTH), (WIDTH,), (WIDTH,)))
    before = requested()
    out = FusedLayerNormAffineFunction.apply(inputs, weight, bias, (WIDTH,), 1e-5)
    assert requested() - before == out.nbytes + 2 * 4 * ROWS
    gradient = torch.empty_like(out)
    torch.cuda.reset_peak_memory_stats()
    before = requested()
    torch.autograd.grad(out, (inputs, weight, bias), gradient)
    grown = inputs.nbytes + weight.nbytes + bias.nbytes + 2 * 4 * 16 * WIDTH  # part_size is 16
    assert requested("peak") - before == grown


def test_optimizers_make_fp32_moments_and_a_number_of_steps(megatron: list[str]) -> None:
    from apex.optimizers import FusedAdam, FusedSGD  # type: ignore[import-not-found,unused-ignore]

    for kind, wanted in ((FusedAdam, 2 * 4), (FusedSGD, 2)):
        parameter = torch.nn.Parameter(torch.empty(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16))
        optimizer = kind([parameter], lr=0.1)
        parameter.grad = torch.empty_like(parameter)
        before = requested()
        for _ in range(2):
            optimizer.step()
        assert requested() - before == wanted * parameter.numel()
        assert optimizer.param_groups[0]["step"] == 2
    with pytest.raises(Unsupported) as refused:
        FusedAdam([parameter], capturable=True)
    assert refused.value.hint


def test_kernels_return_what_apex_returns(megatron: list[str]) -> None:
    import amp_C  # type: ignore[import-not-found,unused-ignore]
    import fused_weight_gradient_mlp_cuda as weights  # type: ignore[import-not-found,unused-ignore]
    import scaled_masked_softmax_cuda as masked  # type: ignore[import-not-found,unused-ignore]
    import scaled_upper_triang_masked_softmax_cuda as causal  # type: ignore[import-not-found,unused-ignore]

    tensors = [torch.empty(ROWS, WIDTH, device="cuda") for _ in range(3)]
    whole, each = amp_C.multi_tensor_l2norm(65536, None, [tensors], True)
    assert (whole.shape, each.shape) == ((1,), (3,))
    assert causal.backward(tensors[0], tensors[1], 1.0) is tensors[0]  # in place
    assert masked.backward(tensors[0], tensors[1], 1.0) is not tensors[0]
    assert masked.get_batch_per_block(1024, 1024, 4, 8) == 4
    before = requested()
    weights.wgrad_gemm_accum_fp32(tensors[0], tensors[1], torch.empty(WIDTH, WIDTH, device="cuda"))
    assert requested() > before  # cuBLAS's workspace
