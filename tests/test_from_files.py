"""A file is one thing to every command: `plan --from` starts at what `estimate --from` judges, and only climbs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from memfit import Recipe, cli
from memfit.documents.recipe_file import dumps
from memfit.frameworks.reading import FORMATS
from memfit.nouns.job import RecipeFile
from memfit.planner.rungs import ORDER

MODEL = "qwen2.5-7b"
AXOLOTL = {
    "base_model": MODEL,
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": "adamw_torch_fused",
    "bf16": True,
}
FACTORY = {"model_name_or_path": MODEL, "stage": "sft", "finetuning_type": "full", "per_device_train_batch_size": 2,
           "gradient_accumulation_steps": 8, "bf16": True, "cutoff_len": 1024}  # fmt: skip
TRAINER = {"output_dir": "out", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "bf16": True}
ZERO = {"stage": 2}
# (format, name of the file, what it says, flags that go with it, effective batch)
FILES: list[tuple[str, str, Any, tuple[str, ...], int]] = [
    ("recipe", "recipe.toml", Recipe(micro_batch=4, accumulation=3, precision="bf16-mixed"), (), 12),
    ("recipe", "recipe.toml", Recipe(method="qlora", quantization="nf4", checkpointing="offload", micro_batch=8),
     (), 8),
    ("axolotl", "axolotl.yaml", AXOLOTL, (), 8),
    ("axolotl", "axolotl.yaml", AXOLOTL, ("--gpu", "4xrtx-4090"), 32),
    ("axolotl", "axolotl.yaml", AXOLOTL | {"adapter": "qlora", "load_in_4bit": True, "optimizer": "paged_adamw_8bit",
                                 "lora_modules_to_save": ["embed_tokens", "lm_head"]}, (), 8),
    ("axolotl", "axolotl.yaml",
     AXOLOTL | {"micro_batch_size": 2, "optimizer": "lion_32bit", "gradient_checkpointing": "offload"}, (), 4),
    ("llamafactory", "sft.yaml", FACTORY, (), 16),
    ("llamafactory", "sft.yaml", FACTORY | {"finetuning_type": "lora", "fp16": True, "bf16": False,
                                            "additional_target": "embed_tokens"}, (), 16),
    ("transformers", "args.json", TRAINER, (), 16),
    ("transformers", "args.json", TRAINER | {"max_length": 512, "use_peft": True, "load_in_4bit": True},
     ("--micro-batch", "2"), 8),
    ("transformers", "args.json", {"output_dir": "out"}, (), 8),
    ("accelerate", "accelerate.yaml",
     {"distributed_type": "FSDP", "num_processes": 4, "mixed_precision": "bf16", "fsdp_config": {}}, (), 16),
    ("accelerate", "accelerate.yaml", {"distributed_type": "NO", "mixed_precision": "no"}, (), 16),
    ("deepspeed", "ds_config.json",
     {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "zero_optimization": ZERO},
     ("--gpu", "4xrtx-4090"), 64),
    ("deepspeed", "ds_config.json",
     {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
      "zero_optimization": ZERO, "bf16": {"enabled": True}}, (), 64),
    ("deepspeed", "ds_config.json",
     {"train_batch_size": 32, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 0}}, (), 32),
    ("deepspeed", "ds_config.json",
     {"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
     ("--gpu", "2xl4"), 8),
    ("ms-swift", "args.yaml", {"model": "Qwen/Qwen3-8B", "tuner_type": "lora", "max_length": 1024}, (), 16),
    ("ms-swift", "args.yaml",
     {"model": "Qwen/Qwen3-8B", "tuner_type": "full", "max_length": 1024, "torch_dtype": "bfloat16",
      "deepspeed": "zero3", "NPROC_PER_NODE": 2, "use_liger_kernel": True}, ("--gpu", "2xh100"), 16),
    ("deepspeed", "ds_config.json", {"train_batch_size": 8, "bf16": {"enabled": True},
                                     "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, (), 8),
    ("accelerate", "accelerate.yaml",
     {"distributed_type": "FSDP", "num_processes": 1, "mixed_precision": "bf16", "fsdp_config": {}}, (), 16),
    ("deepspeed", "ds_config.json", {"zero_optimization": {"stage": 0}, "bf16": {"enabled": "auto"}}, (), 16),
]  # fmt: skip


def write(folder: Path, name: str, says: Any) -> Path:
    """The file; JSON is YAML too."""
    path = folder / name
    path.write_text(dumps(RecipeFile(model=MODEL, recipe=says)) if isinstance(says, Recipe) else json.dumps(says))
    return path


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any]:
    code = cli.main([str(w) for w in words])
    out, err = capsys.readouterr()
    assert out, err
    return code, json.loads(out)


def test_every_format_is_tried() -> None:
    of_images = {"simpletuner", "kohya"}  # whose model is no language model: tests/test_image_trainers.py
    assert {row[0] for row in FILES} | of_images == {f.name for f in FORMATS}


@pytest.mark.parametrize(
    ("name", "says", "more", "batch"),
    [row[1:] for row in FILES],
    ids=[f"{r[0]}-{i}" for i, r in enumerate(FILES)],
)
def test_plan_starts_where_estimate_stands_and_never_goes_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, says: Any, more: tuple[str, ...], batch: int
) -> None:
    card = () if "--gpu" in more else ("--gpu", "rtx-4090")
    words = (MODEL, "--from", write(tmp_path, name, says), *card, *more, "--json")
    code, one = answer(capsys, "estimate", *words)
    _, plan = answer(capsys, "plan", *words)
    first = plan["ladder"][0]
    assert first["title"].startswith("as in the file")
    assert first["recipe"] == one["recipe"]
    assert first["peak"] == one["peak"]
    assert first["verdict"] == one["verdict"] == {0: "fits", 3: "misfit", 4: "tight"}[code]
    r = one["recipe"]
    assert plan["job"]["effective_batch"] == r["micro_batch"] * r["accumulation"] * r["num_gpus"] == batch
    recipes = [rung["recipe"] for rung in plan["ladder"]]
    assert recipes[-1] == plan["recipe"]
    for before, rung in pairwise(plan["ladder"]):
        after = rung["recipe"]
        if rung["key"] != "tuned":  # a row that is said to be faster, at a price in bytes
            for field, order in ORDER.items():
                assert order.index(after[field]) >= order.index(before["recipe"][field])
            assert after["micro_batch"] <= before["recipe"]["micro_batch"]
        assert after["num_gpus"] == before["recipe"]["num_gpus"]
        assert after["micro_batch"] * after["accumulation"] * after["num_gpus"] == batch
    lion = "lion" in r["optimizer"]
    assert all(("lion" in x["optimizer"]) == lion for x in [*recipes, plan["recipe"]])


@pytest.mark.parametrize(("batch", "micro"), [(4, 4), (6, 3), (32, 4)])
def test_an_effective_batch_resizes_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, batch: int, micro: int
) -> None:
    path = write(tmp_path, "axolotl.yaml", AXOLOTL)
    _, plan = answer(capsys, "plan", "--from", path, "--gpu", "h100", "--effective-batch", batch, "--json")
    first = plan["ladder"][0]["recipe"]
    assert (first["micro_batch"], first["accumulation"]) == (micro, batch // micro)
    assert plan["recipe"]["micro_batch"] * plan["recipe"]["accumulation"] == batch


@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_a_batch_that_cannot_be_is_refused_alike(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    says = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": ZERO,
    }
    words = [command, MODEL, "--from", str(write(tmp_path, "ds.json", says)), "--gpu", "4xl4"]
    assert cli.main(words) == 2
    assert "a batch of 64 is not micro-batch 4 x accumulation 2 x 4 GPUs" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_an_impossible_file_is_refused_alike(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    path = write(tmp_path, "axolotl.yaml", AXOLOTL)
    assert cli.main([command, "--from", str(path), "--gpu", "t4"]) == 2
    assert "no bf16 units" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "says", "stated"),
    [
        ("axolotl.yaml", AXOLOTL | {"bf16": "auto"}, False),
        ("axolotl.yaml", AXOLOTL, True),
        ("args.json", {"output_dir": "out", "max_length": 512}, False),
        ("args.json", TRAINER | {"max_length": 512}, True),
        ("lora.yaml", {**FACTORY, "finetuning_type": "lora", "bf16": None}, False),
        ("ds_config.json", {"zero_optimization": {"stage": 0}, "bf16": {"enabled": "auto"}}, False),
    ],
)
def test_a_card_without_bf16_decides_what_a_file_leaves_open(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, says: Any, stated: bool
) -> None:
    words = ("estimate", MODEL, "--from", str(write(tmp_path, name, says)), "--json")
    _, newer = answer(capsys, *words, "--gpu", "a100-40gb")
    assert newer["recipe"]["precision"].startswith("bf16")
    if stated:
        assert cli.main([*words, "--gpu", "t4"]) == 2
    else:
        assert answer(capsys, *words, "--gpu", "t4")[1]["recipe"]["precision"] == "fp16-mixed"
