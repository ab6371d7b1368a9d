"""The host during a trace: weights nobody reads take none of its memory, however large they are."""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch")

from memfit.virtual.device.host_copies import HostCopies, blank  # noqa: E402
from memfit.virtual.jobs.models import load  # noqa: E402
from memfit.virtual.jobs.recipe import Setup  # noqa: E402
from memfit.virtual.process.host import HUGE, hollow_host, room  # noqa: E402
from memfit.virtual.virtual_gpu import virtual_gpu  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="room without a reserve is Linux's")
MORE = 1 << 43  # bytes: 8 TiB, more than any host has that runs this


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_there_is_room_for_more_than_the_host_has(dtype: torch.dtype) -> None:
    one = room((MORE // dtype.itemsize // 1024, 1024), dtype)
    assert one.numel() * one.element_size() == MORE and one.dtype == dtype and one[-1, -1] == 0


@pytest.mark.parametrize("offset", [1, 64, 2048])
@pytest.mark.parametrize("size", [100, 4096, 8000, 1 << 20])
def test_a_blank_tensor_is_zero_to_its_end_and_no_further(offset: int, size: int) -> None:
    whole = torch.full((size + 3 * 4096,), 7, dtype=torch.uint8)
    start = -whole.data_ptr() % 4096 + offset
    blank(whole[start : start + size])
    assert whole.count_nonzero() == whole.numel() - size and not whole[start : start + size].any()


def test_copies_of_unknown_data_are_defined_in_every_order_of_dimensions() -> None:
    picture = torch.full((2, 3, 600, 600), float("nan")).to(memory_format=torch.channels_last)
    HostCopies().fill(picture, 1.0)
    assert picture.eq(1).all()
    blank(picture)
    assert not picture.any()


def test_large_tensors_are_joined_without_being_read() -> None:
    part = room((MORE // 4,), torch.float32)
    with hollow_host():
        joined = torch.cat([part, part[:1024]])
        assert joined.shape == (part.numel() + 1024,)
        assert torch.cat([torch.ones(2), torch.zeros(1)]).tolist() == [1, 1, 0]
        assert torch.cat([torch.tensor([1]), torch.tensor([2.5])]).tolist() == [1, 2.5]
        assert torch.cat([torch.ones(1, 2), torch.ones(1, 2)], dim=1).shape == (1, 4)


def test_a_model_larger_than_the_host_is_built_on_it() -> None:
    config = {
        "model_type": "llama4_text", "vocab_size": 1000, "hidden_size": 8192, "intermediate_size": 1 << 20,
        "num_hidden_layers": 1,
        "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 256,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 512,
    }  # fmt: skip
    model = load(Setup(config=config, sequence=8, dtype="bf16"))
    weights = [p for p in model.parameters() if p.numel() * p.element_size() > HUGE]
    assert sum(p.numel() * p.element_size() for p in weights) > 1 << 43 and {p.device.type for p in weights} == {"cpu"}


def test_host_copies_have_defined_values_and_take_no_memory() -> None:
    """Small ones hold the default number, large ones zeros, whatever the memory held before."""
    import resource

    with virtual_gpu("h100", capacity=None), hollow_host():
        junk = [torch.empty(1 << 18).numpy().fill(float("nan")) for _ in range(8)]  # heap of a real process
        for size, wanted in ((1000, 1), (262_144, 1), (1_179_648, 1), (1 << 26, 0)):
            copy = torch.randn(size, device="cuda").cpu().numpy()
            assert copy.min() == copy.max() == wanted, size
        assert not torch.empty(1 << 23, dtype=torch.bool, device="cuda").cpu().numpy().any()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        held = [torch.randn(1 << 26, device="cuda").cpu() for _ in range(40)]  # 10 GiB
        drawn = torch.empty(1 << 20).uniform_()
        assert len(held) == 40 and not drawn.numpy().any()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    assert junk
