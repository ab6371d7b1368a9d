"""Exports: the files run, carry the recipe, use keys the frameworks have, and never overwrite or execute anything."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import math
import os
import re
import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memfit.closed_form.run.account import Account
from memfit.closed_form.run.estimate import closed_form
from memfit.documents.recipe_file import loads
from memfit.errors import BadInput, Refused, UnknownName, Unsupported
from memfit.frameworks import llamafactory, process_layout, targets
from memfit.frameworks import names as names
from memfit.frameworks import text as export_text
from memfit.frameworks.data_keys import layout_of
from memfit.frameworks.reading import adopt
from memfit.models.hub import resolve_model
from memfit.nouns.job import Columns, Recipe, Training
from memfit.nouns.plan import Judgement, Plan
from memfit.tables.optimizers import OPTIMIZERS
from memfit.units import GIB, human
from plans import CHOICES, GRID, IMAGES, LLAMA, SINGLES, changed, make_plan


@cache
def written(key: str) -> tuple[tuple[Recipe, dict[str, str]], ...]:
    """Every recipe of the grids that a target can express, with its files."""
    found = []
    for recipe in dict.fromkeys((*SINGLES, *GRID[::3])):
        try:
            found.append((recipe, targets.export(make_plan(recipe), key)))
        except Unsupported as error:
            assert error.hint, error.message
    return tuple(found)


# ---- what each target can say


@pytest.mark.parametrize("key", [key for key in targets.TARGETS if key != "diffusers"])  # which runs one task
def test_every_recipe_is_written_or_refused_with_a_hint(key: str) -> None:
    assert len(written(key)) > 40
    for recipe, files in written(key):
        assert loads(files["recipe.toml"]).recipe == recipe
        for name, text in files.items():
            assert text.endswith("\n") and not text.endswith("\n\n"), name
            if name.endswith(".json"):
                json.loads(text)
            if name.endswith(".yaml"):
                assert isinstance(yaml.safe_load(text), dict)
            if name.endswith(".py"):
                compile(text, name, "exec", dont_inherit=True)


TRAINED = Training(learning_rate=3e-4, epochs=2.5, max_steps=7, save_steps=0.25, eval_data="held-out.jsonl")


def with_training(training: Training) -> Plan:
    plan = make_plan(Recipe())
    return dataclasses.replace(plan, job=dataclasses.replace(plan.job, training=training))


@pytest.mark.parametrize("key", ["trl", "transformers"])
def test_scripts_train_as_they_were_told(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for told, wanted in (
        (TRAINED, (3e-4, 2.5, 7, 0.25, "held-out.jsonl")),
        (Training(), (2e-5, 1, -1, 500, None)),
        (Training(eval_data='it"s {MODEL}.jsonl'), (2e-5, 1, -1, 500, 'it"s {MODEL}.jsonl')),
    ):
        files = targets.export(with_training(told), key)
        assert loads(files["recipe.toml"]).training == told
        tree = ast.parse(files["train.py"])
        kept = [n for n in tree.body if isinstance(n, ast.Assign) or getattr(n, "name", "") == "arguments"]
        names: dict[str, Any] = {"argparse": argparse}
        exec(compile(ast.Module(kept, []), "train.py", "exec", dont_inherit=True), names)
        args = names["arguments"]([])
        assert (args.learning_rate, args.epochs, args.max_steps, args.save_steps, args.eval_data) == wanted


def test_other_frameworks_take_rate_epochs_and_steps() -> None:
    axolotl, factory = (
        yaml.safe_load(targets.export(with_training(TRAINED), key)[f"{key}.yaml"])
        for key in ("axolotl", "llamafactory")
    )
    assert (axolotl["learning_rate"], axolotl["num_epochs"], axolotl["max_steps"]) == (3e-4, 2.5, 7)
    assert (factory["learning_rate"], factory["num_train_epochs"], factory["max_steps"]) == (3e-4, 2.5, 7)
    assert "max_steps" not in targets.export(with_training(Training()), "axolotl")["axolotl.yaml"]


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in CHOICES.items() for v in values])
def test_trl_writes_every_choice(field: str, value: str) -> None:
    recipe = changed(field, value)
    assert "train.py" in targets.export(make_plan(recipe), "trl")


REFUSED = [
    ("trl", Recipe(method="full", quantization="nf4"), "--method qlora"),
    ("trl", Recipe(method="qlora"), "--quantization"),
    *((name, Recipe(method="qlora", quantization=key), "--quantization nf4-double")
      for name in ("trl", "axolotl", "llamafactory") for key in IMAGES),
    ("trl", Recipe(optimizer="muon"), "--optimizer"),
    ("trl", Recipe(optimizer="adamw-forloop"), "--optimizer adamw"),
    ("trl", Recipe(trainer="trl==1.3"), "--trainer trl"),
    ("trl", Recipe(method="lora", lora_targets=("q_proj", "lm_head")), "--target transformers"),
    ("trl", Recipe(precision="bf16", offload="optimizer"), "--precision bf16-master"),
    ("trl", Recipe(precision="bf16-master", offload="optimizer", optimizer="adafactor"), "--optimizer adamw"),
    ("trl", Recipe(optimizer="adamw-8bit", shard="parameters", num_gpus=2), "--optimizer adamw-8bit-torchao"),
    ("trl", Recipe(method="qlora", quantization="int8", shard="parameters", num_gpus=2), "--quantization nf4-double"),
    ("trl", Recipe(optimizer="galore", precision="bf16-master", shard="gradients", num_gpus=2), "--optimizer"),
    ("transformers", Recipe(loss="chunked"), "--loss fused"),
    ("transformers", Recipe(padding="packing"), "--padding longest"),
    ("transformers", Recipe(checkpointing="selective"), "--checkpointing full"),
    ("axolotl", Recipe(precision="bf16-mixed"), "--precision bf16"),
    ("axolotl", Recipe(precision="bf16", shard="parameters", num_gpus=2), "--precision bf16-mixed"),
    ("axolotl", Recipe(precision="fp16-mixed"), "--precision bf16"),
    ("axolotl", Recipe(optimizer="muon", precision="bf16-master"), "--optimizer adamw"),
    ("llamafactory", Recipe(optimizer="galore", precision="bf16-master"), "--optimizer adamw-8bit"),
    ("llamafactory", Recipe(loss="chunked"), "--loss fused"),
    ("llamafactory", Recipe(method="lora", precision="fp32"), "--precision bf16"),
    ("llamafactory", Recipe(precision="bf16", shard="parameters", num_gpus=2), "--precision bf16-master"),
    ("deepspeed", Recipe(precision="bf16"), "--shard optimizer"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "recipe", "hint"), REFUSED)
def test_what_a_target_cannot_express_is_refused(key: str, recipe: Recipe, hint: str) -> None:
    with pytest.raises(Unsupported) as caught:
        targets.export(make_plan(recipe), key)
    assert hint in caught.value.hint


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(UnknownName, match="axolotle") as caught:
        targets.target("axolotle")
    assert "axolotl" in caught.value.hint
    assert targets.target("LLaMA-Factory").key == "llamafactory"


def calls(script: str) -> dict[str, dict[str, Any]]:
    """The keyword arguments of every call in a script, literals as values."""
    found: dict[str, dict[str, Any]] = {}
    constants = {
        t.id: n.value
        for n in ast.parse(script).body
        if isinstance(n, ast.Assign)
        for t in n.targets
        if isinstance(t, ast.Name)
    }
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            for k in node.keywords:
                value = constants.get(k.value.id, k.value) if isinstance(k.value, ast.Name) else k.value
                try:
                    found.setdefault(called, {})[str(k.arg)] = ast.literal_eval(value)
                except ValueError:
                    found.setdefault(called, {})[str(k.arg)] = ast.unparse(value)
    return found


def trl_calls(**recipe: Any) -> dict[str, dict[str, Any]]:
    return calls(targets.export(make_plan(Recipe(**recipe)), "trl")["train.py"])


PRECISIONS = [
    ({"precision": "bf16"}, "bfloat16", {"bf16": True}),
    ({"precision": "bf16-mixed"}, "float32", {"bf16": True}),
    ({"precision": "bf16-master"}, "bfloat16", {"bf16": True}),
    ({"precision": "fp16-mixed"}, "float32", {"bf16": False, "fp16": True}),
    ({"precision": "fp32"}, "float32", {"bf16": False}),
    # accelerate would keep FSDP2 weights in fp32 if autocast were on
    ({"precision": "bf16", "shard": "parameters", "num_gpus": 2}, "bfloat16", {"bf16": False}),
    ({"precision": "bf16", "shard": "parameters", "num_gpus": 2, "method": "lora"}, "bfloat16", {"bf16": True}),
    ({"precision": "fp16-mixed", "shard": "gradients", "num_gpus": 2}, "float16", {"bf16": False, "fp16": True}),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "dtype", "autocast"), PRECISIONS)
def test_trl_precision(recipe: dict[str, Any], dtype: str, autocast: dict[str, bool]) -> None:
    config = trl_calls(**recipe)["SFTConfig"]
    assert config["model_init_kwargs"] == {"dtype": dtype, "attn_implementation": "sdpa"}
    found = {k: {"not args.cpu": True}.get(v, v) for k, v in config.items() if k in ("bf16", "fp16")}
    assert found == autocast


def test_trl_carries_the_recipe() -> None:
    found = trl_calls(
        method="qlora", quantization="nf4-double", lora_rank=8, lora_alpha=24, lora_dropout=0.1,
        lora_targets=("attention",), micro_batch=3, accumulation=5, sequence_length=777, padding="packing",
        checkpointing="offload", attention="flash", optimizer="paged-adamw-8bit",
    )  # fmt: skip
    assert found["LoraConfig"] == {
        "r": 8, "lora_alpha": 24, "lora_dropout": 0.1, "target_modules": ["k_proj", "o_proj", "q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
    }  # fmt: skip
    assert found["BitsAndBytesConfig"] == {
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
    }  # fmt: skip
    config = found["SFTConfig"]
    assert (config["max_length"], config["per_device_train_batch_size"], config["gradient_accumulation_steps"]) == (
        777,
        3,
        5,
    )
    assert config["packing"] is True and config["optim"] == "paged_adamw_8bit"
    assert config["gradient_checkpointing"] is True and config["gradient_checkpointing_kwargs"] == {"offload": True}
    assert config["model_init_kwargs"]["attn_implementation"] == "flash_attention_2"


def test_sharded_4bit_weights_are_stored_so_that_they_can_be_sharded() -> None:
    found = trl_calls(method="qlora", quantization="nf4", shard="parameters", num_gpus=2)
    assert found["BitsAndBytesConfig"]["bnb_4bit_quant_storage"] == "bfloat16"


BACKENDS = [
    (Recipe(), "plain", None),
    (Recipe(num_gpus=4), "ddp", "MULTI_GPU"),
    (Recipe(num_gpus=4, shard="parameters"), "fsdp", "FSDP"),
    (Recipe(num_gpus=4, shard="gradients", precision="bf16-master"), "deepspeed", "DEEPSPEED"),
    (Recipe(precision="bf16-master"), "deepspeed", "DEEPSPEED"),
    (Recipe(precision="bf16-master", method="lora"), "plain", None),
    (Recipe(precision="bf16-master", offload="parameters"), "deepspeed", "DEEPSPEED"),
]


@pytest.mark.parametrize(("recipe", "kind", "distributed"), BACKENDS)
def test_the_launcher_files_match_the_backend(recipe: Recipe, kind: str, distributed: str | None) -> None:
    files = targets.export(make_plan(recipe), "trl")
    assert process_layout.backend(recipe) == kind
    assert (process_layout.ACCELERATE_FILE in files) == (distributed is not None)
    assert (process_layout.DEEPSPEED_FILE in files) == (kind == "deepspeed")
    start = "accelerate launch --config_file accelerate.yaml train.py" if distributed else "python train.py"
    assert f"    {start} --data data.jsonl\n" in files["train.py"]
    named = make_plan(recipe, dataset="/data/named.jsonl")
    assert f"    {start}\n" in targets.export(named, "trl")["train.py"]  # the file knows its data
    if distributed:
        config = yaml.safe_load(files[process_layout.ACCELERATE_FILE])
        assert (config["distributed_type"], config["num_processes"]) == (distributed, recipe.num_gpus)


ZERO = [
    ({"shard": "optimizer", "num_gpus": 2}, {"stage": 1}),
    ({"shard": "gradients", "num_gpus": 2}, {"stage": 2}),
    ({"shard": "parameters", "num_gpus": 2}, {"stage": 3}),
    ({"offload": "optimizer"}, {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}),
    ({"offload": "parameters"}, {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}),
]


@pytest.mark.parametrize(("changes", "expected"), ZERO)
def test_deepspeed_stage_and_offload(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    recipe = Recipe(precision="bf16-master", micro_batch=2, accumulation=3, **changes)
    config = json.loads(targets.export(make_plan(recipe), "deepspeed")[process_layout.DEEPSPEED_FILE])
    assert expected.items() <= config["zero_optimization"].items()
    assert config["train_batch_size"] == "auto"  # the Trainer fills it in
    assert config["bf16"] == {"enabled": True}


def test_pure_bf16_under_deepspeed_has_no_master_copy() -> None:
    config = json.loads(
        targets.export(make_plan(Recipe(shard="gradients", num_gpus=2)), "deepspeed")[process_layout.DEEPSPEED_FILE]
    )
    assert config["bf16"] == {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


NEEDS = [
    (Recipe(), {"trl"}, {"peft", "bitsandbytes", "deepspeed", "kernels"}),
    (Recipe(method="lora"), {"trl", "peft"}, {"bitsandbytes"}),
    (Recipe(method="qlora", quantization="nf4"), {"peft", "bitsandbytes"}, {"deepspeed"}),
    (Recipe(optimizer="adamw-8bit"), {"bitsandbytes"}, {"peft"}),
    (Recipe(optimizer="adamw-4bit"), {"torchao"}, {"bitsandbytes"}),
    (Recipe(attention="flash"), {"kernels"}, set()),
    (Recipe(precision="bf16-master"), {"deepspeed"}, set()),
]


@pytest.mark.parametrize(("recipe", "needed", "not_needed"), NEEDS)
def test_requirements_name_what_the_script_needs(recipe: Recipe, needed: set[str], not_needed: set[str]) -> None:
    text = targets.export(make_plan(recipe), "trl")["requirements.txt"]
    packages = {re.split(r"[><=~]", line)[0] for line in text.splitlines()}
    assert needed <= packages and not packages & not_needed


# ---- what is told: savings, predictions


def test_each_choice_is_commented_with_what_it_saves_in_this_run() -> None:
    model = resolve_model("llama-3.1-8b")
    recipe = Recipe(
        method="qlora", quantization="nf4-double", checkpointing="full", optimizer="paged-adamw-8bit", micro_batch=2,
        accumulation=8, sequence_length=1024,
    )  # fmt: skip
    plan = make_plan(recipe)
    plan = dataclasses.replace(plan, job=dataclasses.replace(plan.job, architecture=model))
    script = targets.export(plan, "trl")["train.py"]

    def peak(r: Recipe) -> int:
        return closed_form(Account(model, r, plan.job.gpu)).requested

    for line, without, against in (
        ("ADAPTER = ", recipe.but(method="full", quantization="none"), "training every weight"),
        ("QUANTIZATION = ", recipe.but(method="lora", quantization="none"), "a 16-bit base"),
        ("MICRO_BATCH = 2", recipe.but(micro_batch=16, accumulation=1), "the whole batch at once"),
        ("gradient_checkpointing=True", recipe.but(checkpointing="none"), "keeping all activations"),
        ('optim="paged_adamw_8bit"', recipe.but(optimizer="adamw"), "AdamW (fused)"),
        ("model_init_kwargs=", recipe.but(precision="fp32"), "fp32"),
    ):
        note = f"saves {human(peak(without) - peak(recipe))} against {against}\n"
        assert re.search(re.escape(note) + rf"\s*{re.escape(line)}|{re.escape(line)}.*{re.escape(note)}", script), line
    assert script.count(" against ") == 6


@pytest.mark.parametrize("key", ["trl", "transformers", "axolotl", "accelerate", "deepspeed"])
def test_a_choice_that_saves_nothing_says_nothing(key: str) -> None:
    files = targets.export(make_plan(Recipe(sequence_length=16, precision="fp32")), key)
    assert not any("saves" in text for text in files.values())


def test_a_plan_that_does_not_fit_says_so() -> None:
    over = dataclasses.replace(make_plan(Recipe()), judgement=Judgement("misfit", 23 * GIB, 60 * GIB, 0, -37 * GIB))
    for key in ("trl", "axolotl"):
        assert "does NOT fit" in next(iter(targets.export(over, key).values()))


# ---- names other people's code must know


def known_keys() -> dict[str, set[str]]:
    data = json.loads((Path(__file__).parent / "data" / "framework_keys.json").read_text())
    return {name: set(words.split()) for name, words in data.items() if name != "source"}


def test_trl_script_uses_names_the_libraries_have() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("trl")
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig
    from transformers.training_args import OptimizerNames
    from trl import SFTConfig, SFTTrainer

    has = {
        "SFTConfig": {f.name for f in dataclasses.fields(SFTConfig)},
        "LoraConfig": {f.name for f in dataclasses.fields(LoraConfig)},
        "SFTTrainer": set(inspect.signature(SFTTrainer.__init__).parameters),
        "BitsAndBytesConfig": set(inspect.signature(BitsAndBytesConfig.__init__).parameters),
    }
    for _, files in written("trl"):
        found = calls(files["train.py"])
        for name, fields in has.items():
            assert set(found.get(name, {})) <= fields, name
        assert found["SFTConfig"]["optim"] in {o.value for o in OptimizerNames}
        assert found["SFTConfig"]["loss_type"] in _choices(SFTConfig, "loss_type")


def _choices(config: type, name: str) -> list[str]:
    return next(list(f.metadata["choices"]) for f in dataclasses.fields(config) if f.name == name)


def test_transformers_script_uses_names_the_library_has() -> None:
    pytest.importorskip("torch")
    from transformers import Trainer, TrainingArguments

    fields = {f.name for f in dataclasses.fields(TrainingArguments)}
    for _, files in written("transformers"):
        found = calls(files["train.py"])
        assert set(found["TrainingArguments"]) <= fields
        assert set(found["Trainer"]) <= set(inspect.signature(Trainer.__init__).parameters)


def test_accelerate_file_uses_keys_the_launcher_has() -> None:
    pytest.importorskip("torch")
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    top = {f.name for f in dataclasses.fields(ClusterConfig)}
    flags = {action.dest for action in launch_command_parser()._actions}
    for _, files in written("accelerate"):
        config = yaml.safe_load(files[process_layout.ACCELERATE_FILE])
        assert set(config) <= top
        assert set(config.get("fsdp_config", {})) | set(config.get("deepspeed_config", {})) <= flags
        ClusterConfig(**{"use_cpu": False, "debug": False, "mixed_precision": "no", **config})


def test_yaml_and_json_use_keys_the_frameworks_have() -> None:
    pytest.importorskip("torch")
    from transformers import TrainingArguments

    known = known_keys()
    trainer = {f.name for f in dataclasses.fields(TrainingArguments)}
    for _, files in written("axolotl"):
        config = yaml.safe_load(files["axolotl.yaml"])
        assert set(config) <= known["axolotl"]
        assert set(config["datasets"][0]) <= known["axolotl.datasets"]
        assert set(config.get("fsdp_config", {})) <= known["axolotl.fsdp_config"]
    for _, files in written("llamafactory"):
        assert set(yaml.safe_load(files["llamafactory.yaml"])) <= known["llamafactory"] | trainer
    for _, files in written("deepspeed"):
        config = json.loads(files[process_layout.DEEPSPEED_FILE])
        zero = config["zero_optimization"]
        assert set(config) <= known["deepspeed"]
        assert set(zero) <= known["deepspeed.zero_optimization"]
        assert set(config.get("bf16", {})) <= known["deepspeed.bf16"]
        assert set(zero.get("offload_param", {})) <= known["deepspeed.offload"]


FILES_OF = {
    "transformers": {"output_dir": "out"}, "axolotl": {"base_model": "m"},
    "llamafactory": {"model_name_or_path": "m", "finetuning_type": "full"},
}  # fmt: skip


def test_optimizer_names_go_both_ways(tmp_path: Path) -> None:
    """By all its settings, in every framework; what one has no switch for is refused."""
    for row, (framework, named) in product(OPTIMIZERS.values(), FILES_OF.items()):
        try:
            settings = names.optim(Recipe(optimizer=row.key), framework)
        except Unsupported as error:
            assert error.hint
            continue
        path = tmp_path / "given.yaml"
        path.write_text(yaml.safe_dump(named | settings))
        found = adopt(path)
        assert (found.recipe.optimizer, found.unknown) == (row.key, ())


# ---- the data, as each framework is told about it

AXOLOTL = {
    "text.jsonl": {"type": "completion"}, "lines.txt": {"type": "completion", "ds_type": "text"},
    "messages.jsonl": {"field_messages": "messages",
                       "message_property_mappings": {"role": "role", "content": "content"}},
    "conversations.jsonl": {"field_messages": "conversations",
                            "message_property_mappings": {"role": "from", "content": "value"}},
    "questions.csv": {"ds_type": "csv", "type": {"field_instruction": "question", "field_output": "answer",
                                                 "format": "{instruction}", "no_input_format": "{instruction}"}},
    "instructions.jsonl": {"type": "alpaca", "ds_type": "json"},
    "ids.jsonl": None, "instructions.tsv": None, "chat-pairs.jsonl": None,
}  # fmt: skip
FACTORY = {
    "text.jsonl": {"formatting": "alpaca", "columns": {"prompt": "text"}},
    "messages.jsonl": {"formatting": "sharegpt", "columns": {"messages": "messages"}},
    "conversations.jsonl": {"formatting": "sharegpt", "columns": {"messages": "conversations"}},
    "questions.csv": {"columns": {"prompt": "question", "response": "answer"}},
    "instructions.jsonl": {"columns": {"prompt": "instruction", "query": "input", "response": "output"}},
    "ids.jsonl": None, "instructions.tsv": None, "chat-pairs.jsonl": None,
}  # fmt: skip
TOLD = [("axolotl", *row) for row in AXOLOTL.items()] + [("llamafactory", *row) for row in FACTORY.items()]


@pytest.mark.parametrize(("key", "name", "expected"), TOLD, ids=lambda value: value if isinstance(value, str) else "")
def test_the_layout_is_told_or_refused(tmp_path: Path, key: str, name: str, expected: dict[str, Any] | None) -> None:
    (tmp_path / name).write_text(DATA[name])
    plan = make_plan(Recipe(), dataset=str(tmp_path / name))
    if expected is None:
        with pytest.raises(Unsupported) as caught:
            targets.export(plan, key)
        assert caught.value.hint.endswith("--target trl")
        return
    files = targets.export(plan, key)
    if key == "axolotl":
        (found,) = yaml.safe_load(files["axolotl.yaml"])["datasets"]
        assert found["path"] == str(tmp_path / name)
        if found["type"] == "chat_template":
            assert found["chat_template"] == "tokenizer_default_fallback_chatml"  # base models have none
    else:
        found = json.loads(files["dataset_info.json"])["train"]
        assert found["file_name"] == str(tmp_path / name)
        config = yaml.safe_load(files["llamafactory.yaml"])
        assert config["stage"] == ("pt" if name == "text.jsonl" else "sft") and config["template"] == "default"
        tags = {"user_tag": "human", "assistant_tag": "gpt", "role_tag": "from", "content_tag": "value"}
        assert (tags.items() <= found.get("tags", {}).items()) == (name == "conversations.jsonl")
    assert expected.items() <= found.items()


def test_files_name_the_model_and_the_data_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text(DATA["text.jsonl"])
    for model in ("model", "model/config.json"):
        files = targets.export(make_plan(Recipe(), model=model, dataset="rows.jsonl"), "trl")
        assert f'MODEL = "{tmp_path / "model"}"' in files["train.py"]
        assert f'DATA = "{tmp_path / "rows.jsonl"}"' in files["train.py"]
        assert loads(files["recipe.toml"]).data == str(tmp_path / "rows.jsonl")
    files = targets.export(make_plan(Recipe(), model="org/hub", dataset="org/set"), "trl")
    assert 'MODEL = "org/hub"' in files["train.py"] and 'DATA = "org/set"' in files["train.py"]


def test_a_dataset_on_the_hub_has_no_file_type() -> None:
    plan = make_plan(Recipe(), dataset="org/set")
    (entry,) = yaml.safe_load(targets.export(plan, "axolotl")["axolotl.yaml"])["datasets"]
    assert entry["path"] == "org/set" and "ds_type" not in entry
    assert json.loads(targets.export(plan, "llamafactory")["dataset_info.json"])["train"]["hf_hub_url"] == "org/set"


@pytest.mark.parametrize(("model", "data", "warned"), [
    ("org/llama-8b", "messages.jsonl", True), ("org/llama-8b", "instructions.jsonl", True),
    ("org/llama-8b", "text.jsonl", False),
    ("org/llama-8b-instruct", "messages.jsonl", False), ("org/llama-8b", "", False),
])  # fmt: skip
def test_chats_on_a_base_model_are_warned_of(tmp_path: Path, model: str, data: str, warned: bool) -> None:
    if data:
        (tmp_path / data).write_text(DATA[data])
    plan = make_plan(Recipe(), model=model, dataset=str(tmp_path / data) if data else "")
    assert any("base model" in line for line in targets.notes(plan, "trl")) == warned


@pytest.mark.parametrize("path", ["", "nowhere.jsonl", "nul\0", "x" * 5000])
def test_data_that_cannot_be_looked_at_is_taken_for_chats(path: str) -> None:
    assert layout_of(path).fields == ("messages",)


TEMPLATES = [
    ("meta-llama/Llama-3.1-8B-Instruct", "llama3"), ("meta-llama/Llama-3.1-8B", "default"),
    ("Qwen/Qwen2.5-7B-Instruct", "qwen"),
    ("Qwen/Qwen3-8B", "qwen3"), ("Qwen/Qwen3-8B-Base", "default"),
    ("google/gemma-2-9b-it", "gemma2"), ("google/gemma-2-9b", "default"),
    ("meta-llama/Llama-2-7b-chat-hf", "llama2"), ("microsoft/phi-4", "phi4"),
    ("mistralai/Mistral-7B-Instruct-v0.3", "mistral"),
    ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "deepseekr1"),
    ("openai/gpt-oss-20b", "gpt_oss"), ("org/own-instruct", None),
    ("Qwen/Qwen3-4B-Instruct-2507", "qwen3_nothink"), ("google/gemma-7b-it", "gemma"),
    ("google/gemma-3-4b-it", "gemma3"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "expected"), TEMPLATES)
def test_llamafactory_gets_the_template_a_model_was_trained_with(model: str, expected: str | None) -> None:
    assert llamafactory.template(model) == expected
    config = yaml.safe_load(targets.export(make_plan(Recipe(), model=model), "llamafactory")["llamafactory.yaml"])
    assert config.get("template") == expected


# ---- nothing in a name is executed


def no_file(name: str) -> bool:
    """Names of what exists ('~', '.') are written as absolute paths instead."""
    return targets.absolute(name) is None


@pytest.mark.parametrize("text", ["\n", "\n\n", " a\nb", "a\n\n", "a\nb", "a\nb\n", "a\n\nb", "\n#", "a: b\n", "\r\n"])
def test_text_of_several_lines_reads_back(text: str) -> None:
    words = {"first": text, "second": {"inner": text}, "last": 1}
    assert yaml.safe_load(export_text.yaml_text(words, {"first": "a note", "last": "another"})) == words


@settings(deadline=None)
@given(st.text(max_size=40), st.text(max_size=40).filter(no_file), st.text(max_size=20))
@example("\n", "0", "")
def test_any_name_stays_data(model: str, dataset: str, alloc_conf: str) -> None:
    recipe = Recipe(alloc_conf=alloc_conf, method="lora", lora_targets=(model,))
    files = targets.export(make_plan(recipe, model=model, dataset=dataset), "trl")
    tree = ast.parse(files["train.py"])
    constants = {
        n.targets[0].id: n.value for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
    }
    assert ast.literal_eval(constants["MODEL"]) == model
    assert ast.literal_eval(constants["DATA"]) == (dataset or "data.jsonl")
    called = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    assert called <= KNOWN_CALLS
    config = yaml.safe_load(targets.export(make_plan(recipe, model=model, dataset=dataset), "axolotl")["axolotl.yaml"])
    assert config["base_model"] == model


KNOWN_CALLS = {
    "os.environ.setdefault", "LoraConfig", "argparse.ArgumentParser", "parser.add_argument", "parser.parse_args",
    "Path(data).exists", "Path", "load_dataset", "arguments", "build", "SFTConfig", "SFTTrainer", "load",
    "trainer.train", "trainer.save_model", "main", "load_tokenizer", "chat", "sample", "message.get", "row.get",
    "part.get", "roles.get", "READERS.get", "json.loads", "found.append", "isinstance", "len", "set", "any", "next",
    "print", "SystemExit", "data.endswith", "rows.filter", "usable.map", "samples[0].values", "' and '.join",
    "'\\n\\n'.join", "''.join", "AutoTokenizer.from_pretrained", "Path(data).suffix.lower", "Path(data).read_text",
    "read", "types", "Path(data).open", "csv.reader", "str", "type", "dict", "dict.fromkeys", "zip", "all", "enumerate",
    "turns.append", "Dataset.from_list", "Features", "List", "Value", "rows.features.values", "text.lstrip",
    "text.lstrip().startswith", "text.splitlines", "x.strip", "kind.startswith", "checkpoint_of", "last_checkpoint",
    "Path(output).glob", "max", "int", "path.rpartition", "trainer.is_world_process_zero",
}  # fmt: skip


# ---- the writer


def test_write_refuses_to_overwrite_and_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    paths = targets.write({"train.py": "a\n", "sub/x.yaml": "b\n"}, folder)
    assert [p.read_text() for p in paths] == ["a\n", "b\n"]
    with pytest.raises(Refused, match=r"train\.py") as caught:
        targets.write({"new.txt": "n", "train.py": "other"}, folder)
    assert "--force" in caught.value.hint
    assert not (folder / "new.txt").exists() and (folder / "train.py").read_text() == "a\n"
    targets.write({"train.py": "other"}, folder, force=True)
    assert sorted(p.name for p in folder.iterdir()) == ["sub", "train.py"]
    assert (folder / "train.py").read_text() == "other"


def test_write_does_not_follow_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("precious")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "train.py").symlink_to(outside)
    with pytest.raises(Refused):
        targets.write({"train.py": "a"}, folder)
    targets.write({"train.py": "a"}, folder, force=True)
    assert outside.read_text() == "precious"
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(Refused):
        targets.write({"gone": "a"}, folder)


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", ""])
def test_write_stays_inside_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="outside"):
        targets.write({name: "a"}, tmp_path / "run")


def test_write_says_why_it_cannot(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot write"):
        targets.write({"x": "a"}, tmp_path / "file" / "run")
    with pytest.raises(BadInput, match="not valid text"):
        targets.write({"x": "\udc80"}, tmp_path)
    assert not (tmp_path / "x").exists()


# ---- the scripts are well written


@pytest.mark.parametrize("key", ["trl", "transformers"])
def test_scripts_are_clean(tmp_path: Path, key: str) -> None:
    for number, (_, files) in enumerate(written(key)[::7]):
        (tmp_path / f"train_{number}.py").write_text(files["train.py"])
    for command in (("check", "--select", "E,F,I,UP,B,SIM,PTH,RET"), ("format", "--check")):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--isolated", "--line-length", "120", str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


# ---- the scripts run


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


_TURNS = [{"role": "user", "content": "is it 1?"}, {"role": "assistant", "content": "yes"}]
_SHARED = [{"from": "human", "value": "is it 1?"}, {"from": "gpt", "value": "yes"}]
_TOOLS = [{"type": "function", "function": {"name": "look_up"}}]


def _parts(*parts: dict[str, Any]) -> dict[str, Any]:
    asked = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    return {"messages": [asked, {"role": "assistant", "content": list(parts)}]}


# one file per layout and file type that `memfit data` reads, each of twelve samples
DATA = {
    "text.jsonl": _lines([{"text": f"the number {i}"} for i in range(12)]),
    "list.json": json.dumps([{"text": f"the number {i}", "prompt": "ignored"} for i in range(12)]),
    "lines.txt": "".join(f"the number {i}\n" for i in range(12)),
    "messages.jsonl": _lines([{"messages": _TURNS, "id": i} for i in range(12)]),
    "parts.jsonl": _lines(
        [{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, _TURNS[1]]}] * 12),
    "conversations.jsonl": _lines([{"conversations": _SHARED}] * 12),
    "conversations-roles.jsonl": _lines([{"conversations": _TURNS}] * 12),
    "pairs.jsonl": _lines([{"prompt": f"is it {i}?", "completion": " it is"} for i in range(12)]),
    "chat-pairs.jsonl": _lines([{"prompt": _TURNS[:1], "completion": _TURNS[1:]}] * 12),
    "responses.jsonl": _lines([{"prompt": "is it?", "response": " it is"}] * 12),
    "questions.csv": "question,answer\n" + "is it?, it is\n" * 12,
    "instructions.jsonl": _lines([{"instruction": "add", "input": f"{i} and 1", "output": f"{i + 1}"}
                                  for i in range(12)]),
    "instructions.tsv": "instruction\toutput\n" + "say it\tit\n" * 12,
    "ids.jsonl": _lines([{"input_ids": [1, 2, 3, 256]}] * 12),
    "keyed-parts.jsonl": _lines([_parts({"type": "thinking", "thinking": "hm"},
                                        {"type": "text", "text": "it is 42"})] * 12),
    "cached-parts.jsonl": _lines([_parts({"type": "text", "text": "it is 42", "cache_control": {"type": "x"}})] * 12),
    "tool-chat-pairs.jsonl": _lines([{"prompt": _TURNS[:1], "completion": _TURNS[1:], "tools": _TOOLS}] * 12),
    "tool-messages.jsonl": _lines([{"messages": _TURNS, "tools": _TOOLS}] * 6
                                  + [{"messages": _TURNS, "tools": None}] * 6),
    "tool-text-messages.jsonl": _lines([{"messages": _TURNS, "tools": json.dumps(_TOOLS)}] * 12),
    "template-messages.jsonl": _lines([{"messages": _TURNS, "chat_template_kwargs": {"tools": _TOOLS}}] * 12),
    "empty-tool-messages.jsonl": _lines([{"messages": _TURNS, "tools": json.dumps(_TOOLS) if i % 2 == 0 else ""}
                                         for i in range(12)]),
    "some-template-messages.jsonl": _lines(
        [{"messages": _TURNS, **({"chat_template_kwargs": {"tools": _TOOLS}} if i % 2 == 0 else {})}
         for i in range(12)]),
    "number-pairs.jsonl": _lines([{"prompt": i, "completion": i * 2} for i in range(12)]),
    "number-text.jsonl": _lines([{"text": i} for i in range(12)]),
    "ended-text.jsonl": _lines([{"text": f"the number {i}<eos>"} for i in range(12)]),
    "ended-pairs.jsonl": _lines([{"prompt": "is it?", "completion": " it is<eos>"}] * 12),
    "masked-ids.jsonl": _lines([{"input_ids": [1, 2, 3, 256], "completion_mask": [0, 0, 1, 1]}] * 12),
    "system-instructions.jsonl": _lines(
        [{"system": "SYS", "instruction": "add", "output": "2", "history": [["q", "a"]]}] * 12),
    "system-conversations.jsonl": _lines([{"system": "SYS", "conversations": _SHARED}] * 12),
    "number-questions.csv": "question,answer\n" + "".join(f"{i} - {i}?,0\n" for i in range(12)),
    "NA-QUESTIONS.CSV": "question,answer\n" + "is there?,NA\nis it?,None\nwill it?,False\n" * 4,
    "number-questions.jsonl": _lines([{"question": "is it?", "answer": i % 2 == 0} for i in range(12)]),
    "dated-pairs.jsonl": _lines([{"prompt": "when?", "completion": f"2026-11-{i + 10}"} for i in range(12)]),
    "stamped-messages.jsonl": _lines([{"messages": [{**turn, "timestamp": "2026-11-20"} for turn in _TURNS]}] * 12),
    "dated-pairs.json": json.dumps([{"prompt": "when?", "completion": f"2026-11-{i + 10}"} for i in range(12)]),
    "broken.jsonl": _lines([{"text": None}, {"other": 1}, *({"text": f"the number {i}"} for i in range(12))]),
}  # fmt: skip


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a 2-layer Llama, a byte-level tokenizer that begins with BOS, and DATA."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("trl")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {
        "<eos>": 256,
        "<bos>": 257,
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 257)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>")
    fast.save_pretrained(folder / "model")  # a base model's: without a chat template
    torch.manual_seed(0)
    config = LlamaConfig(
        **{k: v for k, v in LLAMA.items() if k not in ("model_type", "architectures")} | {"vocab_size": 258},
        eos_token_id=256,
        bos_token_id=257,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    for name, text in DATA.items():
        (folder / name).write_text(text)
    return folder


# one process runs the script twice, as `python train.py ...` would
_TWICE = """\
import runpy, sys
script, *arguments = sys.argv[1:]
for extra in (["--max-steps", "2", "--resume"], ["--max-steps", "3", "--resume"]):  # as clusters start it, both times
    sys.argv = [script, *arguments, *extra]
    runpy.run_path(script, run_name="__main__")
"""


def forked(code: str, words: list[str], folder: Path) -> str:
    """stdout of Python code with arguments, in a process that has made its imports."""
    import runs

    return runs.script(code, words, folder, folder / "hf")


def run(command: list[str], folder: Path) -> str:
    """stdout of a run with no network and no GPU."""
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(folder / "hf"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    path = {"PATH": str(Path(sys.executable).parent), "HOME": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env=quiet | path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def check_run(output: Path, stdout: str, method: str) -> None:
    """Finite losses of both runs, checkpoints of step 2 and 3, and saved weights that have learned."""
    losses = [float(x) for x in re.findall(r"'train_loss': '?([^',}]+)", stdout)]
    assert len(losses) == 2 and all(math.isfinite(x) and x > 0 for x in losses), stdout
    weights = "model.safetensors" if method == "full" else "adapter_model.safetensors"
    for place in (output, output / "checkpoint-2", output / "checkpoint-3"):
        assert (place / weights).stat().st_size > 1000, place
    if method != "full":
        from safetensors.torch import load_file

        adapter = load_file(output / weights)
        assert len(adapter) == 2 * 7 * 2  # A and B of seven projections in two layers
        assert all(bool(t.any()) for name, t in adapter.items() if "lora_B" in name)  # B starts at zero: it was trained


RUNS = [
    ("trl", Recipe(method="lora", padding="packing", optimizer="sgd-momentum"), "messages.jsonl"),
    ("trl", Recipe(method="qlora", quantization="nf4-double", precision="fp16-mixed", checkpointing="full"),
     "instructions.tsv"),
    ("transformers", Recipe(method="qlora", quantization="nf4", checkpointing="full", optimizer="adafactor"),
     "pairs.jsonl"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "recipe", "data"), RUNS, ids=lambda value: getattr(value, "method", value))
def test_train_py_trains_and_resumes(tiny: Path, tmp_path: Path, key: str, recipe: Recipe, data: str) -> None:
    if recipe.method == "qlora":
        pytest.importorskip("bitsandbytes")
    recipe = recipe.but(micro_batch=2, accumulation=2, sequence_length=64)
    plan = make_plan(recipe, model=str(tiny / "model"), dataset=str(tiny / data))
    targets.write(targets.export(plan, key), tmp_path)
    printed = forked(_TWICE, ["train.py", "--cpu"], tmp_path)
    check_run(tmp_path / "output", printed, recipe.method)
    assert printed.count("output holds no checkpoint: training starts at the beginning") == 1


@pytest.mark.parametrize("key", ["trl", "transformers"])
def test_train_py_learns_as_a_file_said(tiny: Path, tmp_path: Path, key: str) -> None:
    """A cosine with warm-up, a share of the data held out and evaluated, and a special token of the file."""
    told = Training(
        learning_rate=1e-3, lr_scheduler="cosine", warmup=0.5, weight_decay=0.1, max_steps=4, eval_share=0.25,
        eval_steps=2.0, save_strategy="no", pad_token="<bos>", columns=Columns(fields=("question", "answer")),
    )  # fmt: skip
    recipe = Recipe(precision="fp32", micro_batch=2, sequence_length=64)
    plan = make_plan(recipe, model=str(tiny / "model"), dataset=str(tiny / "questions.csv"))
    plan = dataclasses.replace(plan, job=dataclasses.replace(plan.job, training=told))
    targets.write(targets.export(plan, key), tmp_path)
    script = "import runpy, sys; made = runpy.run_path('train.py'); args = made['arguments'](['--cpu'])\n"
    script += "trainer = made['build'](args); trainer.args.logging_steps = 1; trainer.train()\n"
    script += (
        "print('LEFT', len(trainer.eval_dataset), len(trainer.train_dataset), trainer.processing_class.pad_token)\n"
    )
    script += "print('RATES', [x['learning_rate'] for x in trainer.state.log_history if 'learning_rate' in x])\n"
    script += "print('EVALUATED', [x['step'] for x in trainer.state.log_history if 'eval_loss' in x])"
    printed = forked(script, [], tmp_path)
    assert "LEFT 3 9 <bos>" in printed
    rates = json.loads(printed.split("RATES ")[1].splitlines()[0])
    assert rates == pytest.approx([0.0, 0.5e-3, 1e-3, 0.5e-3])
    assert "EVALUATED [2, 4]" in printed
    assert not list((tmp_path / "output").glob("checkpoint-*"))


# what scripts hand to their trainer, without the training: one process for all
_HANDED = """\
import json, runpy, sys
import transformers, trl
handed = []
def record(self, **_):
    trained = {str(p.dtype) for p in self.model.parameters() if p.requires_grad}
    rows = [{k: row[k] for k in ("input_ids", "labels")} for row in self.train_dataset]
    handed.append({"trained": sorted(trained), "rows": rows})
transformers.Trainer.train = record
transformers.Trainer.save_model = trl.SFTTrainer.save_model = lambda self: None
for script, data in json.loads(sys.argv[1]):
    sys.argv = [script, "--cpu", "--data", data]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        handed.append(str(error))
print("HANDED", json.dumps(handed))
"""
NO_SAMPLES, NO_FILE = "odd.jsonl", "gone.jsonl"
REFUSED = {
    NO_SAMPLES: _lines([{"body": "x"}]),
    "preferences.jsonl": _lines([{"messages": _TURNS[:1], "chosen": "a", "rejected": "b"}] * 3),
    "mixed-pairs.jsonl": _lines([{"prompt": "p", "completion": "c"},
                                 {"prompt": _TURNS[:1], "completion": _TURNS[1:]}] * 3),
    "uneven-labels.jsonl": _lines([{"input_ids": [1, 2, 3, 256], "labels": [1, 2]}] * 3),
    "uneven-mask.jsonl": _lines([{"input_ids": [1, 2, 3, 256], "completion_mask": [0, 1]}] * 3),
    "roleless.jsonl": _lines([{"messages": [{"content": "hi"}, {"content": "ho"}]}] * 3),
}  # fmt: skip
HANDED_LENGTH = 160  # tokens: all of every sample
QLORA = Recipe(method="qlora", quantization="nf4", sequence_length=HANDED_LENGTH)
PLAIN = Recipe(sequence_length=HANDED_LENGTH, precision="fp32")
HANDED = [
    *(("trl", PLAIN, name) for name in (*DATA, *REFUSED, NO_FILE)),
    *(("transformers", PLAIN, name) for name in DATA),
    ("trl", QLORA, "text.jsonl"), ("trl", QLORA.but(precision="fp16-mixed"), "text.jsonl"),
]  # fmt: skip


# file -> what its first sample is, learned and not; "" where only what is learned is looked at
LEARNED = {
    "keyed-parts.jsonl": "### assistant\nit is 42", "cached-parts.jsonl": "### assistant\nit is 42",
    "tool-chat-pairs.jsonl": '"name": "look_up"', "tool-messages.jsonl": '"name": "look_up"',
    "tool-text-messages.jsonl": '"name": "look_up"', "template-messages.jsonl": '"name": "look_up"',
    "system-instructions.jsonl": "### system\nSYS\n### user\nq\n### assistant\na",
    "system-conversations.jsonl": "### system\nSYS\n", "number-questions.csv": "0 - 0?0",
    "NA-QUESTIONS.CSV": "is there?NA", "number-questions.jsonl": "is it?True",
    "dated-pairs.jsonl": "when?2026-11-10", "dated-pairs.json": "when?2026-11-10",
}  # fmt: skip


def test_scripts_hand_every_layout_to_their_trainer(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    for name, text in REFUSED.items():
        (tiny / name).write_text(text)
    work = []
    for key, recipe, name in HANDED:
        place = tmp_path / f"{key}-{recipe.method}-{recipe.precision}"
        targets.write(targets.export(make_plan(recipe, model=str(tiny / "model")), key), place, force=True)
        work.append((str(place / "train.py"), str(tiny / name)))
    printed, answer = forked(_HANDED, [json.dumps(work)], tmp_path).split("HANDED ", 1)
    keys = [(key, recipe.precision, name) for key, recipe, name in HANDED]
    handed = dict(zip(keys, json.loads(answer), strict=True))

    vocabulary = json.loads((tiny / "model" / "tokenizer.json").read_text())["model"]["vocab"]
    letters = {token: letter for letter, token in vocabulary.items() if token < 256}
    for name in DATA:
        rows = handed["trl", "fp32", name]["rows"]
        assert rows == handed["transformers", "fp32", name]["rows"], name  # TRL tokenises by itself
        assert len(rows) == 12, name
        for row in rows:
            assert row["input_ids"].count(257) == ("ids.jsonl" not in name), name  # BOS, once
            assert 0 < len(row["input_ids"]) == len(row["labels"]) <= HANDED_LENGTH, name
            assert row["labels"][-1] != -100, name  # the answer is learned
            assert row["input_ids"].count(256) == 1 or not name.startswith("ended"), name  # EOS, once
        text = "".join(letters.get(token, "") for token in rows[0]["input_ids"]).replace("Ġ", " ").replace("Ċ", "\n")
        assert LEARNED.get(name, "") in text, (name, text)
    assert handed["trl", "fp32", "masked-ids.jsonl"]["rows"][0]["labels"] == [-100, -100, 3, 256]
    assert "preferences (chosen, rejected)" in handed["trl", "fp32", "preferences.jsonl"]
    assert "text in some rows and messages in others" in handed["trl", "fp32", "mixed-pairs.jsonl"]
    assert "4 input_ids have 2 labels" in handed["trl", "fp32", "uneven-labels.jsonl"]
    assert "4 input_ids have 2 labels" in handed["trl", "fp32", "uneven-mask.jsonl"]
    assert "a message has neither `role`" in handed["trl", "fp32", "roleless.jsonl"]

    chats = sum(word in name for name in DATA for word in ("messages", "parts", "conv", "chat", "instructions"))
    assert printed.count("has no chat template; CHAT_TEMPLATE is used") == 2 * chats
    assert handed["trl", "fp32", NO_FILE] == f"there is no file {tiny / NO_FILE}"  # not asked of the Hub
    assert "broken.jsonl: 2 of 14 rows without text are left out" in printed
    assert "odd.jsonl has the columns ['body'], but needs" in handed["trl", "fp32", NO_SAMPLES]
    # TRL makes the adapters of QLoRA bf16, which the loss scaler of fp16 cannot take: the script widens them
    assert handed["trl", "bf16", "text.jsonl"]["trained"] == ["torch.bfloat16"]
    assert handed["trl", "fp16-mixed", "text.jsonl"]["trained"] == ["torch.float32"]


def test_train_py_as_a_user_types_it(tiny: Path, tmp_path: Path) -> None:
    recipe = Recipe(precision="bf16-mixed", checkpointing="full", sequence_length=64)
    targets.write(targets.export(make_plan(recipe, model="replaced by --model"), "trl"), tmp_path)
    words = ["train.py", "--cpu", "--model", str(tiny / "model"), "--data", str(tiny / "text.jsonl")]
    words += ["--output", "elsewhere", "--max-steps"]
    first = run([sys.executable, *words, "2"], tmp_path)
    state = tmp_path / "elsewhere" / "checkpoint-2" / "trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"total_flos": 1e15}))
    (tmp_path / "elsewhere" / "checkpoint-9").mkdir()  # stopped while it saved: the Trainer's state comes last
    os.utime(tmp_path / "elsewhere" / "checkpoint-9", (0, 0))  # the first to make way
    again = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    check_run(tmp_path / "elsewhere", first + forked(again, [*words, "3", "--resume"], tmp_path), "full")
    resumed = json.loads((tmp_path / "elsewhere" / "checkpoint-3" / "trainer_state.json").read_text())
    assert resumed["global_step"] == 3 and resumed["total_flos"] > 1e15  # counted on from the checkpoint, not from zero
