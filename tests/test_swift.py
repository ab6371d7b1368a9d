"""Commands and settings of ms-swift. Defaults and presets are those of its swift/arguments and swift/config (4.6)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memfit import cli
from memfit.errors import MemfitError
from memfit.frameworks.reading import Adopted, adopt

# examples/train/packing/llm.sh, shortened
PACKING = """\
# 22GB
CUDA_VISIBLE_DEVICES=0 \\
swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --dataset 'AI-ModelScope/alpaca-gpt4-data-zh#500' \\
              'swift/self-cognition#500' \\
    --torch_dtype bfloat16 --lora_rank 4 \\
    --max_length 2048 --packing true --attn_impl flash_attn
"""
# examples/train/multi-gpu/deepspeed/train_zero3.sh
ZERO3 = """\
nproc_per_node=2
export PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True'
NPROC_PER_NODE=$nproc_per_node swift sft --model Qwen/Qwen2.5-7B-Instruct --tuner_type full --torch_dtype bfloat16 \\
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) --max_length=2048 \\
    --deepspeed zero3_offload --freeze_vit no --freeze_aligner no
"""


def read(folder: Path, text: str, name: str = "train.sh") -> Adopted:
    path = folder / name
    path.write_text(text)
    return adopt(path)


def says(found: Adopted, **expected: Any) -> None:
    assert {name: getattr(found.recipe, name) for name in expected} == expected
    assert not found.unknown


def test_a_command_is_read_from_its_script(tmp_path: Path) -> None:
    found = read(tmp_path, PACKING)
    says(found, method="lora", lora_rank=4, lora_alpha=32, lora_dropout=0.05, lora_targets=("all-linear",),
         precision="bf16", padding="packing", sequence_length=2048, micro_batch=1, accumulation=16, attention="flash",
         checkpointing="full", loss="full", num_gpus=1, trainer="ms-swift")  # fmt: skip
    assert found.model == "Qwen/Qwen2.5-7B-Instruct"


def test_variables_choose_cards_and_allocator(tmp_path: Path) -> None:
    says(read(tmp_path, ZERO3), method="full", num_gpus=2, accumulation=8, shard="parameters", offload="parameters",
         precision="bf16-master", alloc_conf="expandable_segments:True")  # fmt: skip


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("--fsdp fsdp2 --gradient_checkpointing false", {"shard": "parameters", "checkpointing": "full"}),
        ("--quant_method bnb --quant_bits 4", {"method": "qlora", "quantization": "nf4-double"}),
        ("--gradient_checkpointing false --use_dora true", {"checkpointing": "none", "adapter": "dora"}),
        ("--use_liger_kernel --loss_scale ignore_empty_think", {"loss": "fused"}),
        ("--use_liger_kernel --loss_scale default+hermes", {"loss": "full"}),  # tokens are weighed by their logits
        ("--target_modules q_proj v_proj", {"lora_targets": ("q_proj", "v_proj")}),
        ("--train_type full --freeze_vit false --freeze_aligner false", {"method": "full", "precision": "bf16"}),
        ("--torch_dtype float16", {"precision": "fp16-mixed"}),
    ],
)
def test_arguments_become_the_recipe(tmp_path: Path, more: str, expected: dict[str, Any]) -> None:
    says(read(tmp_path, f"swift sft --model Qwen/Qwen3-8B --max_length 512 {more}\n"), **expected)


@pytest.mark.parametrize(
    ("command", "key"),
    [
        ("swift sft --tuner_type llamapro", "tuner_type"),
        ("CUDA_VISIBLE_DEVICES=0,1 swift sft", "CUDA_VISIBLE_DEVICES"),  # one process, the model over both cards
        ("swift sft --quant_bits 4 --quant_method hqq", "quant_bits"),
        ("swift rlhf --rlhf_type grpo", "rlhf_type"),
        ("swift sft --tuner_backend unsloth", "tuner_backend"),
        ("swift sft --sequence_parallel_size 2", "sequence_parallel_size"),
        ("swift sft --vit_gradient_checkpointing false", "vit_gradient_checkpointing"),
        ("swift sft --tuner_type full", "freeze_vit"),
    ],
)
def test_what_is_not_modelled_is_named(tmp_path: Path, command: str, key: str) -> None:
    assert key in read(tmp_path, f"{command} --model Qwen/Qwen3-8B --max_length 512\n").unknown


@pytest.mark.parametrize(("kind", "task"), [("", "dpo"), ("--rlhf_type kto", "kto"), ("--rlhf_type rm", "reward")])
def test_preferences_are_a_task(tmp_path: Path, kind: str, task: str) -> None:
    assert read(tmp_path, f"swift rlhf {kind} --model Qwen/Qwen3-8B --max_length 512\n").task == task


def test_settings_are_read_and_a_command_that_trains_nothing_is_not(tmp_path: Path) -> None:
    data = {"model": "Qwen/Qwen3-8B", "swift_version": "4.6.0", "tuner_type": "lora", "max_length": 512}
    says(read(tmp_path, json.dumps(data), "args.json"), sequence_length=512)
    with pytest.raises(MemfitError, match="is a script"):
        read(tmp_path, "swift infer --model Qwen/Qwen3-8B\n")


def test_a_plan_of_a_command_is_written_as_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.sh").write_text(PACKING)
    words = ["plan", "--from", str(tmp_path / "train.sh"), "--gpu", "rtx-4090", "--out", str(tmp_path / "out")]
    assert cli.main(words) == 0, capsys.readouterr().err
    assert "Qwen2.5-7B-Instruct" in (tmp_path / "out" / "train.py").read_text()


def test_weights_stored_in_few_bits_are_counted_in_sixteen_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate", "Qwen/Qwen2.5-7B-Instruct-AWQ", "--gpu", "h100", "--method", "lora"]) == 0
    assert "AWQ" in "".join(line for line in capsys.readouterr().err.splitlines() if line.startswith("note"))
