"""Exports: the files run, carry the recipe, use keys the frameworks have, and never overwrite or execute anything."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import math
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit import export
from memfit import framework_names as names
from memfit.errors import BadInput, Refused, UnknownName, Unsupported
from memfit.export import launch
from memfit.job import Recipe
from memfit.plan import Judgement
from memfit.recipe_file import loads
from memfit.units import GIB
from plans import CHOICES, GRID, LLAMA, SINGLES, changed, make_plan


@cache
def written(key: str) -> tuple[tuple[Recipe, dict[str, str]], ...]:
    """Every recipe of the grids that a target can express, with its files."""
    found = []
    for recipe in dict.fromkeys((*SINGLES, *GRID)):
        try:
            found.append((recipe, export.export(make_plan(recipe), key)))
        except Unsupported as error:
            assert error.hint, error.message
    return tuple(found)


# ---- what each target can say


@pytest.mark.parametrize("key", export.TARGETS)
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


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in CHOICES.items() for v in values])
def test_trl_writes_every_choice(field: str, value: str) -> None:
    recipe = changed(field, value)
    assert "train.py" in export.export(make_plan(recipe), "trl")


REFUSED = [
    ("trl", Recipe(method="full", quantization="nf4"), "--method qlora"),
    ("trl", Recipe(method="qlora"), "--quantization"),
    ("trl", Recipe(optimizer="muon"), "--optimizer"),
    ("trl", Recipe(optimizer="adamw-forloop"), "--optimizer adamw"),
    ("trl", Recipe(trainer="trl==1.3"), "--trainer trl"),
    ("trl", Recipe(method="lora", lora_targets=("q_proj", "lm_head")), "--export transformers"),
    ("trl", Recipe(method="qlora", quantization="nf4", precision="fp16-mixed"), "--precision bf16"),
    ("trl", Recipe(precision="bf16-mixed", shard="gradients", num_gpus=2), "--precision bf16-master"),
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
    ("axolotl", Recipe(method="lora", precision="fp16-mixed"), "--precision bf16"),
    ("llamafactory", Recipe(loss="chunked"), "--loss fused"),
    ("llamafactory", Recipe(method="lora", precision="fp32"), "--precision bf16"),
    ("llamafactory", Recipe(precision="bf16", shard="parameters", num_gpus=2), "--precision bf16-master"),
    ("deepspeed", Recipe(precision="bf16"), "--shard optimizer"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "recipe", "hint"), REFUSED)
def test_what_a_target_cannot_express_is_refused(key: str, recipe: Recipe, hint: str) -> None:
    with pytest.raises(Unsupported) as caught:
        export.export(make_plan(recipe), key)
    assert hint in caught.value.hint


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(UnknownName, match="axolotle") as caught:
        export.target("axolotle")
    assert "axolotl" in caught.value.hint
    assert export.target("LLaMA-Factory").key == "llamafactory"


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
    return calls(export.export(make_plan(Recipe(**recipe)), "trl")["train.py"])


PRECISIONS = [
    ({"precision": "bf16"}, "bfloat16", {"bf16": True}),
    ({"precision": "bf16-mixed"}, "float32", {"bf16": True}),
    ({"precision": "bf16-master"}, "bfloat16", {"bf16": True}),
    ({"precision": "fp16-mixed"}, "float32", {"fp16": True}),
    ({"precision": "fp32"}, "float32", {"bf16": False}),
    # accelerate would keep FSDP2 weights in fp32 if autocast were on
    ({"precision": "bf16", "shard": "parameters", "num_gpus": 2}, "bfloat16", {"bf16": False}),
    ({"precision": "bf16", "shard": "parameters", "num_gpus": 2, "method": "lora"}, "bfloat16", {"bf16": True}),
    ({"precision": "fp16-mixed", "shard": "gradients", "num_gpus": 2}, "float16", {"fp16": True}),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "dtype", "autocast"), PRECISIONS)
def test_trl_precision(recipe: dict[str, Any], dtype: str, autocast: dict[str, bool]) -> None:
    config = trl_calls(**recipe)["SFTConfig"]
    assert config["model_init_kwargs"] == {"dtype": dtype, "attn_implementation": "sdpa"}
    assert {k: v for k, v in config.items() if k in ("bf16", "fp16")} == autocast


def test_trl_carries_the_recipe() -> None:
    found = trl_calls(
        method="qlora", quantization="nf4-double", lora_rank=8, lora_alpha=24, lora_dropout=0.1, lora_targets=("attention",),
        micro_batch=3, accumulation=5, sequence_length=777, padding="packing", checkpointing="offload", attention="flash",
        optimizer="paged-adamw-8bit",
    )  # fmt: skip
    assert found["LoraConfig"] == {
        "r": 8, "lora_alpha": 24, "lora_dropout": 0.1, "target_modules": ["k_proj", "o_proj", "q_proj", "v_proj"], "task_type": "CAUSAL_LM",
    }  # fmt: skip
    assert found["BitsAndBytesConfig"] == {
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
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
    files = export.export(make_plan(recipe), "trl")
    assert launch.backend(recipe) == kind
    assert (launch.ACCELERATE_FILE in files) == (distributed is not None)
    assert (launch.DEEPSPEED_FILE in files) == (kind == "deepspeed")
    start = "accelerate launch --config_file accelerate.yaml train.py" if distributed else "python train.py"
    assert f"    {start} --data data.jsonl\n" in files["train.py"]
    if distributed:
        config = yaml.safe_load(files[launch.ACCELERATE_FILE])
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
    config = json.loads(export.export(make_plan(recipe), "deepspeed")[launch.DEEPSPEED_FILE])
    assert expected.items() <= config["zero_optimization"].items()
    assert config["train_batch_size"] == recipe.effective_batch
    assert config["bf16"] == {"enabled": True}


def test_pure_bf16_under_deepspeed_has_no_master_copy() -> None:
    config = json.loads(
        export.export(make_plan(Recipe(shard="gradients", num_gpus=2)), "deepspeed")[launch.DEEPSPEED_FILE]
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
    text = export.export(make_plan(recipe), "trl")["requirements.txt"]
    packages = {re.split(r"[><=~]", line)[0] for line in text.splitlines()}
    assert needed <= packages and not packages & not_needed


# ---- what is told: savings, predictions


def test_each_choice_is_commented_with_what_it_saved() -> None:
    start = Recipe()
    checkpointed = start.but(checkpointing="full")
    smaller = checkpointed.but(micro_batch=2)
    lora = smaller.but(method="lora", optimizer="paged-adamw-8bit")
    final = lora.but(micro_batch=1, alloc_conf="expandable_segments:True")
    steps = (
        ("bf16", start.but(micro_batch=4), 0), ("+ activation checkpointing", checkpointed.but(micro_batch=4), 14 * GIB),
        ("+ micro-batch 2", smaller, GIB), ("LoRA r16", lora, 43 * GIB), ("+ micro-batch 1", final, GIB // 2),
    )  # fmt: skip
    script = export.export(make_plan(final, steps), "trl")["train.py"]
    assert "gradient_checkpointing=True,  # saves 14.0 GiB: activation checkpointing\n" in script
    assert "MICRO_BATCH = 1  # saves 1.50 GiB: micro-batch 1\n" in script  # both rungs that moved it
    assert re.search(r"LORA = LoraConfig\(.*# saves 43.0 GiB: LoRA r16\n", script)
    assert script.count("GiB: ") == 3  # no byte is claimed twice


def test_a_rung_that_was_taken_back_saves_nothing() -> None:
    steps = (("a", Recipe(), 0), ("+ checkpointing", Recipe(checkpointing="full"), GIB), ("- again", Recipe(), -GIB))
    assert "GiB: " not in export.export(make_plan(Recipe(), steps), "trl")["train.py"]


def test_a_plan_that_does_not_fit_says_so() -> None:
    over = dataclasses.replace(make_plan(Recipe()), judgement=Judgement("misfit", 23 * GIB, 60 * GIB, 0, -37 * GIB))
    for key in ("trl", "axolotl"):
        assert "does NOT fit" in next(iter(export.export(over, key).values()))


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
        config = yaml.safe_load(files[launch.ACCELERATE_FILE])
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
        config = json.loads(files[launch.DEEPSPEED_FILE])
        zero = config["zero_optimization"]
        assert set(config) <= known["deepspeed"]
        assert set(zero) <= known["deepspeed.zero_optimization"]
        assert set(config.get("bf16", {})) <= known["deepspeed.bf16"]
        assert set(zero.get("offload_param", {})) <= known["deepspeed.offload"]


def test_optimizer_names_go_both_ways() -> None:
    for recipe in (r for r in SINGLES if names.row(r).hf_name):
        try:
            spelled = names.optim(recipe, "trl")
        except Unsupported:
            continue
        back = names.our_optimizer(spelled.optim)
        assert back == recipe.optimizer or (back, recipe.optimizer) == ("sgd", "sgd-momentum")


# ---- nothing in a name is executed


@settings(deadline=None)
@given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=20))
def test_any_name_stays_data(model: str, dataset: str, alloc_conf: str) -> None:
    recipe = Recipe(alloc_conf=alloc_conf, method="lora", lora_targets=(model,))
    files = export.export(make_plan(recipe, model=model, dataset=dataset), "trl")
    tree = ast.parse(files["train.py"])
    constants = {
        n.targets[0].id: n.value for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
    }
    assert ast.literal_eval(constants["MODEL"]) == model
    assert ast.literal_eval(constants["DATA"]) == (dataset or "data.jsonl")
    called = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    assert called <= KNOWN_CALLS
    config = yaml.safe_load(export.export(make_plan(recipe, model=model, dataset=dataset), "axolotl")["axolotl.yaml"])
    assert config["base_model"] == model


KNOWN_CALLS = {
    "os.environ.setdefault", "LoraConfig", "argparse.ArgumentParser", "parser.add_argument", "parser.parse_args", "Path(data).exists",
    "Path", "load_dataset", "arguments", "SFTConfig", "SFTTrainer", "load", "trainer.train", "trainer.save_model", "main",
}  # fmt: skip


# ---- the writer


def test_write_refuses_to_overwrite_and_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    paths = export.write({"train.py": "a\n", "sub/x.yaml": "b\n"}, folder)
    assert [p.read_text() for p in paths] == ["a\n", "b\n"]
    with pytest.raises(Refused, match=r"train\.py") as caught:
        export.write({"new.txt": "n", "train.py": "other"}, folder)
    assert "--force" in caught.value.hint
    assert not (folder / "new.txt").exists() and (folder / "train.py").read_text() == "a\n"
    export.write({"train.py": "other"}, folder, force=True)
    assert sorted(p.name for p in folder.iterdir()) == ["sub", "train.py"]
    assert (folder / "train.py").read_text() == "other"


def test_write_does_not_follow_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("precious")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "train.py").symlink_to(outside)
    with pytest.raises(Refused):
        export.write({"train.py": "a"}, folder)
    export.write({"train.py": "a"}, folder, force=True)
    assert outside.read_text() == "precious"
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(Refused):
        export.write({"gone": "a"}, folder)


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", ""])
def test_write_stays_inside_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="outside"):
        export.write({name: "a"}, tmp_path / "run")


def test_write_says_why_it_cannot(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot write"):
        export.write({"x": "a"}, tmp_path / "file" / "run")
    with pytest.raises(BadInput, match="not valid text"):
        export.write({"x": "\udc80"}, tmp_path)
    assert not (tmp_path / "x").exists()


# ---- the scripts are well written


@pytest.mark.skipif(shutil.which("ruff") is None, reason="ruff is not installed")
@pytest.mark.parametrize("key", ["trl", "transformers"])
def test_scripts_are_clean(tmp_path: Path, key: str) -> None:
    for number, (_, files) in enumerate(written(key)[::7]):
        (tmp_path / f"train_{number}.py").write_text(files["train.py"])
    for command in (("check", "--select", "E,F,I,UP,B,SIM,PTH,RET"), ("format", "--check")):
        done = subprocess.run(
            ["ruff", *command, "--isolated", "--line-length", "120", str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


# ---- the scripts run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a 2-layer Llama, a byte-level tokenizer and one small dataset per row format."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("trl")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"<eos>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    fast.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        **{k: v for k, v in LLAMA.items() if k not in ("model_type", "architectures")},
        eos_token_id=256,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    rows = {
        "text": [{"text": f"the number {i}"} for i in range(12)],
        "messages": [{"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes"}]} for i in range(12)],
        "pairs": [{"prompt": f"is it {i}?", "completion": " it is"} for i in range(12)],
    }  # fmt: skip
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return folder


# one interpreter runs the script twice, as `python train.py ...` would, to pay for the imports once
_TWICE = """\
import runpy, sys
script, *arguments = sys.argv[1:]
for extra in (["--max-steps", "2"], ["--max-steps", "3", "--resume"]):
    sys.argv = [script, *arguments, *extra]
    runpy.run_path(script, run_name="__main__")
"""


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
    ("trl", Recipe(method="lora", padding="packing", optimizer="sgd-momentum"), "messages"),
    ("trl", Recipe(method="qlora", quantization="nf4-double", checkpointing="full"), "pairs"),
    ("transformers", Recipe(method="qlora", quantization="nf4", checkpointing="full", optimizer="adafactor"), "pairs"),
]


@pytest.mark.parametrize(("key", "recipe", "data"), RUNS, ids=lambda value: getattr(value, "method", value))
def test_train_py_trains_and_resumes(tiny: Path, tmp_path: Path, key: str, recipe: Recipe, data: str) -> None:
    if recipe.method == "qlora":
        pytest.importorskip("bitsandbytes")
    recipe = recipe.but(micro_batch=2, accumulation=2, sequence_length=64, trainer=key)
    plan = make_plan(recipe, model=str(tiny / "model"), dataset=str(tiny / f"{data}.jsonl"))
    export.write(export.export(plan, key), tmp_path)
    check_run(tmp_path / "output", run([sys.executable, "-c", _TWICE, "train.py", "--cpu"], tmp_path), recipe.method)


def test_train_py_as_a_user_types_it(tiny: Path, tmp_path: Path) -> None:
    recipe = Recipe(precision="bf16-mixed", checkpointing="full", sequence_length=64)
    export.write(export.export(make_plan(recipe, model="replaced by --model"), "trl"), tmp_path)
    command = [sys.executable, "train.py", "--cpu", "--model", str(tiny / "model"), "--data", str(tiny / "text.jsonl")]
    command += ["--output", "elsewhere", "--max-steps"]
    first = run([*command, "2"], tmp_path)
    state = tmp_path / "elsewhere" / "checkpoint-2" / "trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"total_flos": 1e15}))
    check_run(tmp_path / "elsewhere", first + run([*command, "3", "--resume"], tmp_path), "full")
    resumed = json.loads((tmp_path / "elsewhere" / "checkpoint-3" / "trainer_state.json").read_text())
    assert resumed["global_step"] == 3 and resumed["total_flos"] > 1e15  # counted on from the checkpoint, not from zero
