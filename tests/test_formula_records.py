"""The byte account against recorded runs of PyTorch's CUDA build: requested bytes of the second step, by phase."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memfit import Recipe
from memfit.closed_form.numerics import numerics
from memfit.closed_form.run.micro_step import PlacedSegment, SizeMeter
from memfit.closed_form.run.setup import Situation, micro_step_of
from memfit.closed_form.size import Dims
from memfit.closed_form.static import static_of
from memfit.models.families import architecture
from memfit.nouns.architecture import Architecture
from memfit.tables.optimizers import optimizer
from memfit.tables.trainers import trainer

DATA = json.loads((Path(__file__).parent / "data" / "recorded_runs.json").read_text())
TOLERANCE = {"before": 0.005, "forward": 0.002, "after_forward": 0.002, "backward": 0.002}
RUNS = DATA["runs"]
OPTIMIZERS = {
    "adamw_torch_fused": "adamw", "adamw_torch": "adamw-foreach", "adamw_forloop": "adamw-forloop",
    "adamw_bnb_8bit": "adamw-8bit", "paged_adamw_8bit": "paged-adamw-8bit", "paged_adamw_32bit": "paged-adamw-32bit",
    "sgd_momentum": "sgd-momentum",
}  # fmt: skip
PRECISIONS = {("bf16", False): "bf16", ("bf16", True): "bf16", ("fp32", True): "bf16-mixed", ("fp32", False): "fp32"}
CHECKPOINTING = {"none": "none", "selective": "selective", "offload": "offload"}
MULTIPROCESSORS = {80: (108, 2048), 89: (128, 1536), 90: (132, 2048)}


def model_of(name: str) -> Architecture:
    """The model as it was recorded: its config then, whatever the catalogue says now."""
    config = DATA["configs"][name]
    if config["model_type"].startswith("deepseek"):
        config = {"q_lora_rank": 1536, **config}  # the class default the recorded model was built with
    return architecture(config, name)


def recipe_of(case: dict[str, Any], model: Architecture) -> Recipe:
    lora, qlora = case["tune"] != "full", case["tune"].startswith("qlora")
    default = {"gpt2": ("c_attn",), "gpt_neox": ("query_key_value",)}.get(model.model_type, ("q_proj", "v_proj"))
    prepared = case["kbit_prepare"] or case["method"] != "torch" or not qlora  # else checkpointing was not switched on
    return Recipe(
        method="qlora" if qlora else "lora" if lora else "full",
        precision=PRECISIONS[case["weights"], case["autocast"]],  # type: ignore[arg-type]
        quantization="nf4-double" if qlora else "none",
        lora_rank=int(case["tune"].split("_")[0].removeprefix("q").removeprefix("lora")) if lora else 16,
        lora_targets=("all-linear",) if "all" in case["tune"] else default,
        lora_dropout=case["lora_dropout"], optimizer=OPTIMIZERS.get(case["optim"], case["optim"]),
        micro_batch=case["mb"],
        accumulation=case["accum"], sequence_length=case["seq"],
        checkpointing=CHECKPOINTING.get(case["ckpt"], "full") if prepared else "none", attention=case["attn"],
        loss="fused" if case["method"] == "sft" else "full",
        trainer={"sft": "trl", "trainer": "transformers"}.get(case["method"], "torch"),
    )  # fmt: skip


def predicted(case: dict[str, Any]) -> dict[str, int]:
    """Requested bytes before the step, at the forward's and backward's worst instants, and between them."""
    model = model_of(case["model"])
    recipe = recipe_of(case, model)
    row = replace(
        trainer(recipe.trainer), autocast=case["autocast"], holds_logits=case["hold"] == "outputs",
        kbit_prepare=case["kbit_prepare"] and case["method"] != "sft",
    )  # fmt: skip
    n, o = numerics(recipe, row), optimizer(recipe.optimizer)
    meter = SizeMeter(Dims(case["mb"], case["seq"], *MULTIPROCESSORS[case["cc"]], case["label_frac"]))
    static = static_of(model, recipe, n, o, row)
    situation = Situation(
        padded=case["mask"] == "pad", mask_given=case["mask"] != "none" and case["method"] != "sft",
        use_cache=case["method"] == "torch" and case["ckpt"] == "none" and model.task == "causal-lm",
    )  # fmt: skip
    micro = micro_step_of(model, recipe, n, row, divmod(case["cc"], 10), situation)
    workspace = 33_554_432 if case["cc"] >= 90 else 8_519_680
    lingering = meter.bytes(micro.lingering) if case["method"] == "torch" else 0
    before = static.weights + static.states + 2 * workspace + 24 * case["mb"] * case["seq"] + lingering
    forward, level = walked(micro.forward, meter, before)
    returning, level = walked(micro.exits, meter, level)  # what accelerate makes of the model's output
    forward = max(forward, returning)
    backward, _ = walked(micro.backward, meter, level - lingering)
    return {"before": before, "forward": forward, "after_forward": level - lingering, "backward": backward}


def walked(steps: list[PlacedSegment], meter: SizeMeter, level: int) -> tuple[int, int]:
    best = level
    for step in steps:
        best = max(best, level + max((meter.bytes(size) for size, _ in step.segment.peaks), default=0))
        level += meter.bytes(step.segment.left)
    return best, level


@pytest.mark.parametrize("run", RUNS, ids=lambda r: r["id"])
def test_requested_bytes_of_a_recorded_step(run: dict[str, Any]) -> None:
    found = predicted(run["case"])
    for moment, value in found.items():
        assert value == pytest.approx(run[moment], rel=TOLERANCE[moment]), moment


def test_most_runs_agree_to_a_hundredth_of_a_percent() -> None:
    close = 0
    for run in RUNS:
        found = predicted(run["case"])
        close += all(abs(found[k] / run[k] - 1) < 1e-4 for k in ("forward", "backward"))
    assert close >= 0.85 * len(RUNS)
