"""Transformer Engine's C++ module on the virtual card: a checkout's Python loads it; its buffers to the byte."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from memfit import virtual_gpu  # noqa: E402
from memfit.errors import Unsupported  # noqa: E402
from memfit.virtual.libraries.transformer_engine import standing_in  # noqa: E402
from memfit.virtual.scripts import script  # noqa: E402

ROWS, WIDTH, OUT = 1024, 512, 1536
BF16 = 6  # of DType
_CHECKOUT = {  # as much of Transformer Engine's Python as loads the module, and its classes of quantised tensors
    "build_tools/VERSION.txt": "2.17.9\n",
    "transformer_engine/__init__.py": "from importlib import metadata\nfrom . import common, pytorch\n"
    "__version__ = metadata.version('transformer_engine')\n",
    "transformer_engine/common/__init__.py": "import os\nassert 'NVTE_PROJECT_BUILDING' in os.environ\n"
    "def load_framework_extension(name): raise FileNotFoundError('Could not find shared object file')\n",
    "transformer_engine/pytorch/__init__.py": "from ..common import load_framework_extension\n"
    "load_framework_extension('torch')\n",
    "transformer_engine/pytorch/tensor/__init__.py": "",
    "transformer_engine/pytorch/tensor/float8_tensor.py": "class Float8Tensor(dict):\n    pass\n",
    "transformer_engine/pytorch/tensor/mxfp8_tensor.py": "class MXFP8Tensor(dict):\n    pass\n",
    "transformer_engine/pytorch/tensor/float8_blockwise_tensor.py": "class Float8BlockwiseQTensor(dict):\n    pass\n",
}


def requested(kind: str = "current") -> int:
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{kind}"])


def empty(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.empty(shape, dtype=dtype, device="cuda")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of Transformer Engine on sys.path."""
    for name, text in _CHECKOUT.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def tex(checkout: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The module, as the checkout loads it, on an H100 or the card asked for."""
    notes: list[str] = []
    with virtual_gpu(getattr(request, "param", "h100")), standing_in(notes.append):
        engine = importlib.import_module("transformer_engine")
        assert engine.__version__ == importlib.metadata.version("transformer-engine") == "2.17.9"
        assert any("Transformer Engine" in note for note in notes)
        yield sys.modules["transformer_engine_torch"]
    assert "transformer_engine_torch" not in sys.modules and "transformer_engine.pytorch" not in sys.modules


def test_what_is_not_stood_in_for_is_refused_by_its_name(tex: Any) -> None:
    with pytest.raises(Unsupported, match="nvshmem_finalize") as refused:
        tex.nvshmem_finalize()
    assert refused.value.hint
    with pytest.raises(Unsupported, match="CommOverlap"):
        tex.CommOverlap([1], torch.bfloat16)
    assert (int(tex.DType.kBFloat16), int(tex.NVTE_QKV_Layout.NVTE_THD_THD_THD)) == (BF16, 14)


def test_an_older_release_is_refused(checkout: Path) -> None:
    (checkout / "build_tools" / "VERSION.txt").write_text("2.8.0")
    with virtual_gpu("h100"), standing_in(), pytest.raises(Unsupported, match=r"2\.8\.0") as refused:
        importlib.import_module("transformer_engine")
    assert refused.value.hint


@pytest.mark.parametrize("named", [False, True])
def test_a_checkout_finds_flash_attn_as_on_a_cluster(tmp_path: Path, request: Any, named: bool) -> None:
    if named:
        request.getfixturevalue("checkout")
    (tmp_path / "train.py").touch()
    with script.standing_in(tmp_path / "train.py", []):
        found = {d.metadata["Name"] for d in importlib.metadata.distributions(name="flash-attn")}
    assert found == ({"flash-attn"} if named else set())


def gemm(tex: Any, a: Any, b: Any, layout: str, out: Any = None, **words: Any) -> Any:
    given = {"bias": None, "gelu": False, "grad": False} | words
    flags = (given["bias"], BF16, given["gelu"], None, given["grad"], empty(1), 1, out is not None, False)
    return tex.generic_gemm(a, layout[0] == "T", b, layout[1] == "T", out, None, BF16, *flags)


def test_products_have_the_shapes_of_a_linear_layer_and_its_gradients(tex: Any) -> None:
    inputs, weight, gradient = empty(4, ROWS, WIDTH), empty(OUT, WIDTH), empty(4, ROWS, OUT)
    out, _, activation, _ = gemm(tex, weight, inputs, "TN", bias=empty(OUT), gelu=True)
    assert out.shape == activation.shape == gradient.shape
    assert gemm(tex, weight, gradient, "NN", grad=True)[0].shape == inputs.shape
    total = empty(OUT, WIDTH, dtype=torch.float32)
    before = requested()
    found, of_bias, *_ = gemm(tex, inputs, gradient, "NT", out=total, bias=empty(OUT), grad=True)
    assert found is total and of_bias.shape == (OUT,) and requested() - before == of_bias.nbytes


def test_a_quantised_operand_of_which_only_the_transpose_is_there_keeps_its_shape(tex: Any) -> None:
    given = SimpleNamespace(_data=None, _transpose=empty(OUT, 4, ROWS, dtype=torch.uint8), _fp8_dtype=7)
    assert gemm(tex, empty(OUT, WIDTH), given, "NN")[0].shape == (4, ROWS, WIDTH)


def test_norms_keep_statistics_and_sum_gradients_in_a_workspace(tex: Any) -> None:
    inputs, weight = empty(ROWS, WIDTH), empty(WIDTH)
    before = requested()
    out, mean, deviation = tex.layernorm_fwd(inputs, weight, weight, 1e-5, None, None, BF16, 0, False)
    assert requested() - before == out.nbytes + 2 * 4 * ROWS
    assert tex.rmsnorm_fwd(inputs, weight, 1e-5, None, None, BF16, 0, False)[1] is None
    torch.cuda.reset_peak_memory_stats()
    before = requested()
    made = tex.layernorm_bwd(out, inputs, mean, deviation, weight, 0, False)
    assert requested() - before == sum(t.nbytes for t in made)
    assert requested("peak") > requested()


@pytest.mark.parametrize(("layout", "packed"), [("NVTE_SBHD_SBHD_SBHD", 3), ("NVTE_SBH3D", 1), ("NVTE_SBHD_SB2HD", 2)])
def test_attention_keeps_statistics_and_packs_gradients(tex: Any, layout: str, packed: int) -> None:
    q, k, v = (empty(ROWS, 2, 8, 64) for _ in range(3))
    layout, starts = tex.NVTE_QKV_Layout[layout], empty(3, dtype=torch.int32)
    before = requested()
    head = (ROWS, ROWS, True, 0.125, 0.1, True, layout, 0, 0, 0, 2, 0, (-1, -1), False, starts, starts)
    out, statistics, state = tex.fused_attn_fwd(
        *head, q, k, v, torch.bfloat16, *[None] * 9, 16, False, False
    )  # fmt: skip
    assert statistics.shape == (2, 8, ROWS, 1) and out.shape == q.shape
    assert requested() - before == out.nbytes + statistics.nbytes + state.nbytes
    torch.cuda.reset_peak_memory_stats()
    before = requested()
    gradients = tex.fused_attn_bwd(
        ROWS, ROWS, 0.125, 0.1, True, layout, 0, 0, layout, 0, 0, 0, 2, 0, (-1, -1), False, False, starts, starts,
        q, k, v, out, out, torch.bfloat16, [statistics, state], *[None] * 5, False,
    )[:3]  # fmt: skip
    assert len({t.untyped_storage().data_ptr() for t in gradients}) == packed
    assert requested() - before == 3 * q.nbytes
    assert requested("peak") - requested() == 4 * q.numel() // 64 * 65 + 256  # which cuDNN adds


@pytest.mark.parametrize(("layout", "shape", "wanted"), [
    ("NVTE_BSHD_BSHD_BSHD", (2, 1000, 8, 64), 2 * 2 * 8 * 1024 * 1024 + 4 * 2 * 1000 * 8),
    ("NVTE_THD_THD_THD", (1100, 8, 64), 2 * 32 * 8 * 2048 * 2048 + 4 * 2048 * 8),  # for up to 32 sequences
])  # fmt: skip
def test_a_reproducible_backward_on_hopper_keeps_what_every_pair_of_tokens_adds(
    tex: Any, layout: str, shape: tuple[int, ...], wanted: int
) -> None:
    q, k, v = (empty(*shape) for _ in range(3))
    kind, starts = tex.NVTE_QKV_Layout[layout], empty(3, dtype=torch.int32)
    torch.cuda.reset_peak_memory_stats()
    gradients = tex.fused_attn_bwd(
        1000, 1000, 0.125, 0.0, True, kind, 0, 0, kind, 0, 0, 0, 2, 0, (-1, -1), False, True, starts, starts,
        q, k, v, q, q, torch.bfloat16, [starts, starts], *[None] * 5, False,
    )  # fmt: skip
    assert gradients[0].shape == shape and requested("peak") - requested() == wanted + 256


@pytest.mark.parametrize(("release", "diagonal"), [("2.11.0", ()), ("2.14.0", (False,))])
def test_an_earlier_release_attends_with_fewer_arguments(
    checkout: Path, release: str, diagonal: tuple[bool, ...]
) -> None:
    (checkout / "build_tools" / "VERSION.txt").write_text(release)
    with virtual_gpu("b200"), standing_in():
        importlib.import_module("transformer_engine")
        tex = sys.modules["transformer_engine_torch"]
        q, k = empty(ROWS, 2, 8, 192), empty(ROWS, 2, 8, 128)
        starts, layout = empty(3, dtype=torch.int32), tex.NVTE_QKV_Layout.NVTE_SBHD_SBHD_SBHD
        call = (0, 2, 0, (-1, 0), *diagonal)
        out, statistics, state = tex.fused_attn_fwd(
            ROWS, ROWS, True, 0.1, 0.0, True, layout, *call, starts, starts, q, q, k, torch.bfloat16, *[None] * 9, 16,
            False, False,
        )  # fmt: skip
        assert out.shape == k.shape and statistics.shape == (2, 8, ROWS, 1)
        gradients = tex.fused_attn_bwd(
            ROWS, ROWS, 0.1, 0.0, True, layout, *call, False, starts, starts, q, q, k, out, out, torch.bfloat16,
            tex.DType.kBFloat16, [statistics, state], *[None] * 5, False,
        )  # fmt: skip
        assert [g.shape for g in gradients[:3]] == [q.shape, q.shape, k.shape]
        asked = (True, BF16, BF16, layout, 0, 2, 0, 0.0, 8, 8, ROWS, ROWS, 192, 128, -1, 0, False, False)
        assert tex.get_fused_attn_backend(*asked, *diagonal).name == "NVTE_F16_arbitrary_seqlen"
        with pytest.raises(Unsupported, match="quantize"):
            tex.quantize(q, quantizer("Float8Quantizer"))


def backend(tex: Any, **words: Any) -> str:
    layouts, masks = tex.NVTE_QKV_Layout, tex.NVTE_Mask_Type
    given = {
        "training": True, "dtype": BF16, "layout": layouts.NVTE_SBHD_SBHD_SBHD, "bias": 0,
        "mask": masks.NVTE_CAUSAL_MASK, "dropout": 0.0, "widths": (64, 64), "deterministic": False,
    } | words  # fmt: skip
    return str(tex.get_fused_attn_backend(
        given["training"], given["dtype"], given["dtype"], given["layout"], given["bias"], given["mask"], 0,
        given["dropout"], 8, 8, ROWS, ROWS, *given["widths"], -1, 0, False, False, given["deterministic"],
    ).name)  # fmt: skip


@pytest.mark.parametrize("tex", ["h100"], indirect=True)
def test_cudnn_takes_the_calls_that_it_takes(tex: Any) -> None:
    taken, none = "NVTE_F16_arbitrary_seqlen", "NVTE_No_Backend"
    masks, layouts = tex.NVTE_Mask_Type, tex.NVTE_QKV_Layout
    for words, wanted in (
        ({}, taken), ({"widths": (192, 128)}, taken), ({"widths": (256, 256)}, taken), ({"widths": (256, 128)}, none),
        ({"widths": (60, 60)}, none), ({"layout": layouts.NVTE_THD_THD_THD}, taken),
        ({"mask": masks.NVTE_PADDING_MASK, "dropout": 0.1}, none), ({"dtype": 7, "widths": (128, 128)}, "NVTE_FP8"),
        ({"dtype": 7}, none),
    ):  # fmt: skip
        assert backend(tex, **words) == wanted, words


def quantizer(kind: str, **words: Any) -> Any:
    given = {"rowwise_usage": True, "columnwise_usage": True, "internal": False, "optimize_for_gemm": False, "dtype": 7}
    return type(kind, (SimpleNamespace,), {})(**(given | words))


@pytest.mark.parametrize("tex", ["h100", "b200"], indirect=True)
def test_quantised_tensors_have_the_buffers_of_their_recipe(tex: Any) -> None:
    inputs, n = empty(ROWS, WIDTH), ROWS * WIDTH
    copies = 1 if torch.cuda.get_device_capability() >= (10, 0) else 2  # the transposed one
    both = 2
    for made, wanted in (
        (quantizer("Float8Quantizer"), copies * n + 4),
        (quantizer("Float8CurrentScalingQuantizer", columnwise_usage=False), n + 4),
        (quantizer("MXFP8Quantizer"), both * (n + n // 32)),
        (quantizer("Float8BlockQuantizer", block_scaling_dim=1), both * (n + 4 * n // 128)),
        (quantizer("Float8BlockQuantizer", block_scaling_dim=2), both * n + 4 * (8 * 4 + 4 * 8)),
    ):
        before = requested()
        found = tex.quantize(inputs, made)
        assert requested() - before == wanted and found["dtype"] == torch.bfloat16, made
        del found
    with pytest.raises(Unsupported, match="NVFP4Quantizer"):
        tex.quantize(inputs, quantizer("NVFP4Quantizer"))
