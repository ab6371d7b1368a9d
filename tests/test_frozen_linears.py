"""Quantised linear layers of frozen denoisers: what is stored, and what autograd keeps of each."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import Ran
from memfit import Recipe, find_gpu
from memfit.allocator.replay import replay
from memfit.models.hub import resolve_config
from memfit.nouns.task import Shape
from memfit.tables.quantization import QUANTIZATIONS

torch = pytest.importorskip("torch")

from memfit.virtual.jobs import frozen_linears  # noqa: E402

WIDE, TALL, ROWS = 512, 256, 64


def stored(kind: str) -> Any:
    """Return a layer on the CPU, in bf16 before it is quantised."""
    return frozen_linears.KINDS[kind][0](torch.nn.Linear(WIDE, TALL, dtype=torch.bfloat16))


def kept(layer: Any, rows: int = ROWS) -> int:
    """Return the bytes that autograd keeps of one forward pass beside the layer's weights and its input."""
    x = torch.zeros(rows, WIDE, dtype=torch.bfloat16, requires_grad=True)
    known = {p.untyped_storage().data_ptr() for p in (*layer.parameters(), x)}
    found: dict[int, int] = {}

    def pack(t: Any) -> Any:
        if t.untyped_storage().data_ptr() not in known:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = layer(x)
    assert out.shape == (rows, TALL) and out.dtype == torch.bfloat16
    out.sum().backward()
    assert x.grad.shape == x.shape
    return sum(found.values())


@pytest.mark.parametrize("kind", frozen_linears.KINDS)
def test_a_weight_takes_the_bytes_of_the_table(kind: str) -> None:
    layer, row = stored(kind), QUANTIZATIONS[kind]
    sizes = [p.numel() * p.element_size() for p in (layer.payload, layer.scale)]
    assert sum(sizes) == row.bytes(WIDE * TALL, TALL) and layer.bias.dtype == torch.bfloat16


def test_fp8_keeps_magnitudes_and_two_fp32_copies_of_its_input() -> None:
    assert kept(stored("fp8-torchao")) == pytest.approx(ROWS * WIDE * (2 + 4 + 4), abs=64)


def test_fp8_weights_are_kept_in_16_bits() -> None:
    assert kept(stored("fp8w-torchao")) == WIDE * TALL * 2


def test_sdnq_keeps_nothing_of_many_rows_and_the_weight_of_few() -> None:
    assert kept(stored("int8-sdnq")) == 0
    assert kept(stored("int8-sdnq"), 1) == WIDE * TALL * 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*frozen_linears.KINDS, "nf4-double"])
def test_a_quantised_denoiser_is_loaded_in_less_and_trains(kind: str) -> None:
    pytest.importorskip("diffusers")
    from memfit.virtual.tracing import trace_recipe

    config = resolve_config("z-image-turbo")
    config["transformer"] |= {"n_layers": 2, "n_refiner_layers": 1}
    shape = Shape(image=(64, 64), cached=True)
    plain = Recipe(method="lora", lora_rank=4, trainer="torch", loss="full", lora_targets=("to_q",))
    loads = []
    for recipe in (plain, plain.but(method="qlora", quantization=kind)):
        tape, _ = trace_recipe(recipe, config, find_gpu("l40s"), task="text-to-image", shape=shape)
        loads.append(replay(tape.events).peak_of("load")[0].peak.allocated)
    assert 0.25 < loads[1] / loads[0] < 0.75


def test_such_a_base_of_a_language_model_is_refused(ran: Ran) -> None:
    words = ("llama-3.2-1b", "--gpu", "h100", "--method", "qlora", "--quantization", "fp8-torchao")
    code, out, err = ran("estimate", *words)
    assert (code, out) == (2, "") and "nf4-double" in err
