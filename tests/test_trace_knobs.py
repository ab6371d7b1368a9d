"""Every knob of a recipe either changes what a trace runs, or is refused with what to take instead."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")


from memfit import Recipe, find_gpu
from memfit.allocator.replay import replay
from memfit.cli.trace import beliefs
from memfit.closed_form.parallel.sharding import NCCL_BYTES
from memfit.errors import Unsupported
from memfit.nouns.tape import Phase
from memfit.virtual.jobs.recipe import Setup, setup_of
from memfit.virtual.tracing import trace_recipe

pytestmark = pytest.mark.filterwarnings("ignore")
A100 = find_gpu("a100-80gb")
TINY: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False, "max_position_embeddings": 4096,
}  # fmt: skip
TRAINERS = ("torch", "transformers", "trl")


def recipe(trainer: str = "trl", **knobs: Any) -> Recipe:
    return Recipe(
        **{"trainer": trainer, "loss": "fused" if trainer == "trl" else "full", "sequence_length": 512, **knobs}
    )


def fields(made: Setup) -> dict[str, Any]:
    return {name: getattr(made, name) for name in Setup.__dataclass_fields__}


@cache
def peaks(trained: Recipe) -> dict[Phase, int]:
    """Requested bytes of each phase."""
    tape, _ = trace_recipe(trained, TINY, A100)
    return {phase: levels.requested for phase, levels in replay(tape.events).by_phase().items()}


ADAPTERS: dict[str, Any] = {"method": "lora"}
KNOBS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (  # what is changed, beside what
    ({"method": "lora"}, {}),
    ({"precision": "bf16-mixed"}, {}),
    ({"precision": "fp16-mixed"}, {}),
    ({"precision": "fp32"}, {}),
    ({"method": "qlora", "quantization": "nf4"}, {}),
    ({"quantization": "nf4-double"}, {"method": "qlora", "quantization": "nf4"}),
    ({"quantization": "fp4"}, {"method": "qlora", "quantization": "nf4"}),
    ({"quantization": "int8"}, {"method": "qlora", "quantization": "nf4"}),
    ({"lora_rank": 64}, ADAPTERS),
    ({"lora_alpha": 64}, ADAPTERS),
    ({"lora_dropout": 0.1}, ADAPTERS),
    ({"lora_targets": ("attention",)}, ADAPTERS),
    ({"lora_targets": ("q_proj", "up_proj")}, ADAPTERS),
    ({"optimizer": "adamw-8bit"}, {}),
    ({"optimizer": "sgd-momentum"}, {}),
    ({"optimizer": "adafactor"}, {}),
    ({"optimizer": "galore"}, {}),
    ({"optimizer": "muon"}, {}),
    ({"optimizer": "adamw-in-backward"}, {}),
    ({"micro_batch": 2}, {}),
    ({"accumulation": 2}, {}),
    ({"sequence_length": 256}, {}),
    ({"padding": "packing"}, {}),
    ({"padding": "packing"}, {"micro_batch": 2}),
    ({"checkpointing": "full"}, {}),
    ({"checkpointing": "selective"}, {}),
    ({"checkpointing": "offload"}, {}),
    ({"attention": "eager"}, {}),
    ({"attention": "flash"}, {}),
    ({"compile": True}, {}),
    ({"loss": "full"}, {"loss": "chunked"}),
    ({"loss": "fused"}, {"loss": "full"}),
    ({"loss": "chunked"}, {"loss": "full"}),
    ({"offload": "optimizer"}, {}),
    ({"offload": "parameters"}, {}),
    ({"shard": "optimizer"}, {"num_gpus": 8}),
    ({"shard": "gradients"}, {"num_gpus": 8}),
    ({"shard": "parameters"}, {"num_gpus": 8}),
    ({"num_gpus": 8}, {}),
    ({"precision": "bf16-master"}, {}),
)  # fmt: skip
SAME = {("trl", "loss")}  # TRL 1.16 computes every loss in one way, and the command line says so


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(
    ("changed", "beside"), KNOBS, ids=lambda v: "-".join(f"{k}={x}" for k, x in v.items()) if v else "alone"
)
def test_a_knob_changes_what_is_run_or_is_refused(
    trainer: str, changed: dict[str, Any], beside: dict[str, Any]
) -> None:
    try:
        after = setup_of(recipe(trainer, **{**beside, **changed}), TINY)
    except Unsupported as refused:
        assert refused.hint
        return
    try:
        before = setup_of(recipe(trainer, **beside), TINY)
    except Unsupported:
        return  # refused without the change already
    assert fields(after) != fields(before) or any((trainer, name) in SAME for name in changed)


@pytest.mark.parametrize(
    ("knobs", "hint"),
    [
        ({"trainer": "axolotl-loss", "loss": "fused"}, "--trainer torch, transformers, trl"),
        ({"trainer": "trl==1.3"}, "--trainer trl for the installed one"),
        ({"trainer": "torch==2.1", "loss": "full"}, "--trainer torch for the installed one"),
        ({"trainer": "torch", "loss": "fused"}, "--trainer trl"),
        ({"trainer": "torch", "loss": "chunked"}, "--trainer trl"),
        ({"trainer": "transformers", "loss": "chunked"}, "--loss fused"),
        ({"trainer": "torch", "loss": "full", "padding": "packing"}, "--trainer trl"),
        ({"trainer": "transformers", "loss": "full", "padding": "packing"}, "--trainer trl"),
        ({"trainer": "transformers", "loss": "full", "checkpointing": "selective"}, "--trainer trl"),
        ({"trainer": "torch", "loss": "full", "optimizer": "galore"}, "galore-torch"),
        ({"offload": "optimizer"}, "memfit estimate"),
        ({"precision": "bf16-master"}, "memfit estimate"),
    ],
    ids=str,
)
def test_what_cannot_be_traced_is_refused_with_what_can(knobs: dict[str, Any], hint: str) -> None:
    with pytest.raises(Unsupported) as refused:
        setup_of(recipe(**knobs), TINY)
    assert hint in refused.value.hint


def test_the_installed_version_of_a_trainer_may_be_named() -> None:
    from importlib.metadata import version

    there = version("trl")
    for spec in (f"trl=={there}", f"trl=={there.rpartition('.')[0]}"):
        assert fields(setup_of(recipe(spec), TINY)) == fields(setup_of(recipe("trl"), TINY))


def test_packed_rows_are_one_sequence_whose_mask_is_as_wide_as_all_of_them() -> None:
    packed, padded = (peaks(recipe(micro_batch=4, padding=p))["step"] for p in ("packing", "longest"))
    wide = (4 * 512) ** 2 * 2 - 4 * 512 * 512 * 2  # bf16, made anew by the attention of each layer
    assert packed - padded == pytest.approx(TINY["num_hidden_layers"] * wide, rel=0.1)


LONG: dict[str, Any] = {"sequence_length": 2048, "optimizer": "sgd"}  # activations are what counts


@pytest.mark.parametrize("trainer", TRAINERS)
def test_checkpoints_on_the_host_leave_the_card(trainer: str) -> None:
    none, full, offload = (peaks(recipe(trainer, checkpointing=c, **LONG))["step"] for c in ("none", "full", "offload"))
    assert offload < full < none


SHALLOW = TINY | {"num_hidden_layers": 2}
# TRL compiles as its Trainer does
COMPILING = ("torch", *(pytest.param(trainer, marks=pytest.mark.nightly) for trainer in ("trl", "transformers")))


@pytest.mark.parametrize("trainer", COMPILING)
def test_a_compiled_model_keeps_less_and_the_tape_says_who_planned_it(trainer: str) -> None:
    plain, compiled = (trace_recipe(recipe(trainer, compile=c, **LONG), SHALLOW, A100)[0] for c in (False, True))
    need = {
        name: replay(tape.events).by_phase()["step"].requested
        for name, tape in (("plain", plain), ("compiled", compiled))
    }
    assert need["compiled"] < need["plain"]
    assert "assumed" not in plain.about and "Inductor" in compiled.about["assumed"]
    assert "torch.compile" in " ".join(beliefs(compiled, recipe(trainer, compile=True), {})[0])


@pytest.mark.parametrize("trainer", ["torch", "trl"])
def test_selective_checkpointing_keeps_what_attention_gave(trainer: str) -> None:
    none, full, selective = (
        peaks(recipe(trainer, checkpointing=c, **LONG))["step"] for c in ("none", "full", "selective")
    )
    assert full < selective < none


def test_adapters_under_a_loss_scaler_are_wide() -> None:
    knobs: dict[str, Any] = {"method": "qlora", "quantization": "nf4", "optimizer": "sgd-momentum"}
    half, scaled = (peaks(recipe(precision=p, **knobs))["load"] for p in ("bf16", "fp16-mixed"))
    assert setup_of(recipe(precision="fp16-mixed", **knobs), TINY).widen
    assert scaled >= half


@pytest.mark.parametrize("knobs", [{}, {"method": "lora"}, {"optimizer": "adamw-8bit"}], ids=str)
@pytest.mark.parametrize("trainer", ["transformers", "trl"])
def test_saving_needs_nothing_and_resuming_only_what_it_loads(trainer: str, knobs: dict[str, Any]) -> None:
    found = peaks(recipe(trainer, **knobs))
    assert found["load"] < found["save"] < found["step"]
    assert found["resume"] == pytest.approx(found["save"], rel=0.1)  # states come from the host, adapters pass through


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_sharding_more_needs_less(trainer: str, method: str) -> None:
    none, parameters = (
        peaks(recipe(trainer, method=method, shard=shard, num_gpus=8, sequence_length=64))["step"]
        for shard in ("none", "parameters")
    )
    assert parameters < none


def test_four_bit_weights_are_sharded() -> None:
    words: dict[str, Any] = {"method": "qlora", "quantization": "nf4-double", "num_gpus": 8, "sequence_length": 64}
    whole, sharded = (peaks(recipe("trl", shard=shard, **words)) for shard in ("none", "parameters"))
    assert sharded["save"] < whole["save"] < whole["step"]


def test_several_gpus_on_the_command_line(ran: Any, tmp_path: Path) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(TINY | {"architectures": ["LlamaForCausalLM"]}))
    words = ["trace", model, "--gpu", "2xl4", "--shard", "parameters", "--sequence-length", 64, "--loss", "fused"]
    code, out, _ = ran(*words)
    assert code == 0 and "NCCL buffers" in out and "rank 0 of 2" in out
    code, out, _ = ran(*words, "--json")
    document = json.loads(out)
    assert document["need"] - document["peak"]["reserved"] == NCCL_BYTES
    assert sum(line["bytes"] for line in document["phases"][0]["lines"]) == document["phases"][0]["levels"]["device"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "every sequence 40 tokens, the longest of train.jsonl"),
        (["--micro-batch", 2], "batches padded to 40 tokens, the longest of train.jsonl"),
        (["--sequence-length", 16], "every sequence 16 tokens, the longest of train.jsonl"),
        (["--sequence-length", 512, "--padding", "packing"], "packed rows, all of them full"),
    ],
    ids=str,
)
def test_the_longest_batch_of_the_data_is_traced(ran: Any, tmp_path: Path, words: list[Any], said: str) -> None:
    data, model = tmp_path / "train.jsonl", tmp_path / "config.json"
    data.write_text("".join(json.dumps({"input_ids": list(range(n))}) + "\n" for n in (3, 40, 7)))
    model.write_text(json.dumps(TINY | {"architectures": ["LlamaForCausalLM"]}))
    code, out, err = ran("trace", model, "--gpu", "l4", "--loss", "fused", "--data", data, *words)
    assert code == 0, err
    assert said in out
