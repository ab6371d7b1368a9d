"""The user's own file with a plan's values: what is read back is the plan, and everything else is the user's."""

from __future__ import annotations

import dataclasses
import json
import random
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit import cli
from memfit.errors import BadInput, Unsupported
from memfit.frameworks import targets, training_keys
from memfit.frameworks.keys import Adopted
from memfit.frameworks.reading import adopt
from memfit.frameworks.revision import revised
from memfit.nouns.job import Columns, Recipe, Training, check_values
from plans import GRID, SINGLES, make_plan
from test_adopt import (
    ACCELERATE,
    AXOLOTL,
    AXOLOTL_CASES,
    COMPILED,
    DEEPSPEED,
    KEYS,
    LLAMAFACTORY,
    SFT,
    TRAINER,
    TRAINER_CASES,
    VALUES,
    expected,
)

FILES = {
    "axolotl": "axolotl.yaml", "llamafactory": "llamafactory.yaml", "accelerate": "accelerate.yaml",
    "deepspeed": "ds_config.json",
}  # fmt: skip
MINE = "# mine\nmy_own_key: 1e-3   # kept\nmy_list: [1,\n  2]\n"
PAIRS = 60  # of recipes, for each framework


@cache
def written(key: str) -> tuple[tuple[Recipe, dict[str, str]], ...]:
    """Recipes that a target can express, with its files."""
    found = []
    for recipe in dict.fromkeys((*SINGLES, *GRID[::3])):
        if recipe.method == "qlora" and recipe.offload == "parameters" and recipe.shard != "parameters":
            continue  # DeepSpeed cannot run it
        try:
            found.append((recipe, targets.export(make_plan(recipe), key)))
        except Unsupported:
            continue
    return tuple(row for row in found if FILES[key] in row[1])


def read(folder: Path, files: dict[str, str], name: str) -> Adopted:
    for file, text in files.items():
        (folder / file).write_text(text)
    return adopt(folder / name)


@pytest.mark.parametrize("key", FILES)
def test_a_file_with_another_plan_is_read_back_as_that_plan(tmp_path: Path, key: str) -> None:
    chosen, name = random.Random(key), FILES[key]
    own = MINE if name.endswith("yaml") else ""
    for _ in range(PAIRS):
        (before, files), (after, others) = chosen.choices(written(key), k=2)
        source = read(tmp_path, {**files, name: files[name] + own}, name)
        made = revised(make_plan(after), source)
        assert made.files[name].endswith(own) or own in made.files[name]
        back = read(tmp_path, made.files, name).recipe
        direct = read(tmp_path, others, name).recipe
        if key in ("axolotl", "llamafactory"):
            assert direct == expected(after, key)
            direct = direct.but(trainer=back.trainer)
            if after.method == "full":  # what a file says of adapters that are not there
                direct = direct.but(**{f: getattr(back, f) for f in LORA})
        else:
            if key == "accelerate":  # where torch.compile may be switched on as well as in the script
                assert back.compile == after.compile
            direct = direct.but(micro_batch=back.micro_batch, accumulation=back.accumulation, compile=back.compile)
        if "not a setting" in made.line:
            assert "precision" in made.line  # of a frozen base under DeepSpeed, which has two names
            direct = direct.but(precision=back.precision)
        assert back == direct, (before, after)


LORA = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "quantization")


@pytest.mark.parametrize("key", FILES)
def test_the_same_plan_changes_nothing(tmp_path: Path, key: str) -> None:
    name = FILES[key]
    for recipe, files in written(key)[::12]:
        source = read(tmp_path, files, name)
        made = revised(make_plan(recipe), source)
        body = [line for line in made.files[name].splitlines() if not line.startswith("#")]
        again = revised(make_plan(recipe), read(tmp_path, made.files, name))
        assert [line for line in again.files[name].splitlines() if not line.startswith("#")] == body
        for line in body:
            assert line in files[name] or str(tmp_path) in line  # which lies elsewhere now
        assert len(body) == sum(not line.startswith("#") for line in files[name].splitlines())


STYLES: list[Any] = [
    AXOLOTL, LLAMAFACTORY, TRAINER, SFT, DEEPSPEED, ACCELERATE,
    *({"base_model": "org/tiny-llama"} | added for added, _ in AXOLOTL_CASES),
    *({"output_dir": "o"} | added for added, _ in TRAINER_CASES),
    *({"model_name_or_path": "org/tiny-llama", "output_dir": "o", "max_length": 512} | a for a, _ in TRAINER_CASES),
    *(file | added for file, added, _, _ in COMPILED),
]  # fmt: skip
CHANGES: list[dict[str, Any]] = [
    {"checkpointing": "full"}, {"checkpointing": "none"}, {"checkpointing": "offload"},
    {"micro_batch": 1, "accumulation": 7}, {"micro_batch": 3}, {"optimizer": "adamw-8bit"}, {"optimizer": "galore"},
    {"attention": "flash"}, {"attention": "eager"}, {"loss": "fused"}, {"loss": "full"}, {"compile": True},
    {"compile": False}, {"padding": "packing"}, {"padding": "longest"}, {"sequence_length": 777}, {"lora_rank": 99},
    {"method": "qlora", "quantization": "nf4-double", "precision": "bf16"},
    {"method": "qlora", "quantization": "int8", "precision": "bf16"},
    {"method": "lora", "quantization": "none", "precision": "bf16", "lora_targets": ("attention",)},
    {"method": "full", "quantization": "none", "precision": "bf16"},
    {"shard": "parameters", "num_gpus": 4, "precision": "bf16-mixed"},
    {"shard": "gradients", "num_gpus": 4, "precision": "bf16-master"}, {"shard": "none", "offload": "none"},
    {"offload": "parameters", "shard": "none", "precision": "bf16-master", "num_gpus": 1}, {"precision": "fp16-mixed"},
]  # fmt: skip
NOT_READ = ("num_gpus", "trainer", "alloc_conf", "shard", "precision", "lora_targets")


@pytest.mark.parametrize("number", range(len(STYLES)))
def test_every_way_to_say_a_thing_is_changed_or_named(tmp_path: Path, number: int) -> None:
    path = tmp_path / "given.yaml"
    style = STYLES[number]
    dumped = json.dumps(style, indent=1) if number % 2 else yaml.safe_dump(style)
    path.write_text(style if isinstance(style, str) else dumped)
    source = adopt(path)
    assert source.source is not None
    for changes in CHANGES:
        wanted = source.recipe.but(**changes)
        try:
            made = revised(make_plan(wanted), source)
        except Unsupported as error:
            assert error.hint
            continue
        for file, text in made.files.items():
            (tmp_path / file).write_text(text)
        name = targets.own_file(source)
        back = adopt(tmp_path / name)
        path.write_text(source.source.text)
        for field in changes:
            same = getattr(back.recipe, field) == getattr(wanted, field)
            same |= wanted.method == "full" and field in LORA
            assert same or field in NOT_READ or source.format in ("accelerate", "deepspeed") or field in made.line
        for key in source.unknown:  # nothing of what memfit does not understand is touched
            top = key.split(".")[0]
            if top in ("optimizer", "optim", "attn_implementation", "torch_compile_backend", "torch_compile_mode"):
                continue
            assert top in made.files[name]


def test_unknown_keys_and_comments_survive(tmp_path: Path) -> None:
    path = tmp_path / "run.yml"
    path.write_text(AXOLOTL.replace("val_set_size: 0.05", "val_set_size: 0.05  # five in a hundred") + MINE)
    source = adopt(path)
    plan = make_plan(source.recipe.but(micro_batch=1, accumulation=8, checkpointing="offload"))
    plan = with_job(plan, source)
    made = revised(plan, source)
    before = path.read_text().splitlines()
    after = made.files["axolotl.yaml"].splitlines()
    assert [line for line in before if line not in after] == [
        "gradient_accumulation_steps: 4", "micro_batch_size: 2",
    ]  # fmt: skip
    added = [line for line in after if line not in before and not line.startswith("#")]
    assert set(added) >= {"gradient_accumulation_steps: 8", "micro_batch_size: 1"}
    assert "micro_batch_size 2 -> 1" in made.line
    assert made.line.removeprefix("axolotl.yaml: ") in after[3].replace("'", '"')


def with_job(plan: Any, source: Adopted) -> Any:
    architecture = dataclasses.replace(plan.job.architecture, name=source.model)
    job = dataclasses.replace(plan.job, architecture=architecture, dataset=source.data or "", training=source.training)
    return dataclasses.replace(plan, job=job)


PLUGINS = "base_model: m\nplugins:\n  - mine.Own\n  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin\n"


def test_plugins_of_the_user_stay(tmp_path: Path) -> None:
    source = read(tmp_path, {"a.yaml": PLUGINS.replace("CutCrossEntropyPlugin", "Other")}, "a.yaml")
    made = revised(make_plan(source.recipe.but(loss="fused", trainer="transformers")), source)
    found = yaml.safe_load(made.files["axolotl.yaml"])
    assert "mine.Own" in found["plugins"]
    source = read(tmp_path, {"a.yaml": "base_model: m\nplugins: [mine.Own]\n"}, "a.yaml")
    made = revised(make_plan(source.recipe.but(loss="fused")), source)
    assert yaml.safe_load(made.files["axolotl.yaml"])["plugins"][0] == "mine.Own"


@pytest.mark.parametrize("zero", ["[1]", "folder", "", "{broken"])
def test_a_deepspeed_file_that_is_none_is_replaced_or_refused(tmp_path: Path, zero: str) -> None:
    (tmp_path / "zero2.json").mkdir() if zero == "folder" else (tmp_path / "zero2.json").write_text(zero)
    text = "base_model: org/tiny-llama\ndeepspeed: zero2.json\n"
    try:
        source = read(tmp_path, {"a.yaml": text}, "a.yaml")
    except BadInput as error:
        assert error.hint
        return
    wanted = source.recipe.but(shard="parameters", precision="bf16-master", offload="optimizer", num_gpus=2)
    made = revised(make_plan(wanted), source)
    assert json.loads(made.files["ds_config.json"])["zero_optimization"]["stage"] == 3


def test_a_precision_that_memfit_cannot_write_stays(tmp_path: Path) -> None:
    """Fully trained in fp16 by axolotl, which loads fp16 weights: refused in an export, kept in the user's file."""
    source = read(tmp_path, {"a.yaml": "base_model: org/tiny-llama\nfp16: true\nbf16: false\n"}, "a.yaml")
    made = revised(make_plan(source.recipe.but(micro_batch=2, checkpointing="full")), source)
    back = read(tmp_path, made.files, "axolotl.yaml").recipe
    assert back == source.recipe.but(micro_batch=2, checkpointing="full")
    with pytest.raises(Unsupported):
        revised(make_plan(Recipe(precision="fp16-mixed", micro_batch=2)), read(tmp_path, {"b.yaml": PLUGINS}, "b.yaml"))


def test_the_users_deepspeed_file_is_revised_or_pointed_at(tmp_path: Path) -> None:
    zero = {"zero_optimization": {"stage": 2, "my_key": 1}, "bf16": {"enabled": True}, "train_batch_size": 8}
    files = {"a.yaml": "base_model: org/tiny-llama\nmicro_batch_size: 8\ndeepspeed: zero.json\n",
             "zero.json": json.dumps(zero)}  # fmt: skip
    source = read(tmp_path, files, "a.yaml")
    same = revised(make_plan(source.recipe), source)
    assert yaml.safe_load(same.files["axolotl.yaml"])["deepspeed"] == str(tmp_path / "zero.json")
    other = revised(make_plan(source.recipe.but(shard="parameters", num_gpus=2, micro_batch=4)), source)
    found = json.loads(other.files["ds_config.json"])
    assert (found["zero_optimization"]["stage"], found["zero_optimization"]["my_key"]) == (3, 1)
    assert found["train_batch_size"] == 8


@settings(deadline=None, max_examples=60)
@given(data=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=8), change=st.sampled_from(CHANGES))
def test_any_settings_are_revised_or_refused(
    data: dict[str, Any], change: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    for text in (json.dumps(data), yaml.safe_dump(data)):
        path.write_text(text)
        try:
            source = adopt(path)
            if source.source is None:
                return
            made = revised(make_plan(check_values(source.recipe.but(**change))), source)
        except BadInput as error:
            assert error.message and error.hint
        else:
            assert targets.own_file(source) in made.files


# ---- what is carried over to other frameworks

TRAINED = Training(
    learning_rate=3e-4, epochs=2.0, lr_scheduler="cosine", warmup=0.1, weight_decay=0.01, max_grad_norm=0.5,
    adam_beta2=0.95, seed=7, save_strategy="steps", save_steps=0.25, save_total_limit=3, eval_share=0.05,
    eval_strategy="steps", eval_steps=0.5, columns=Columns(fields=("question", "answer")),
)  # fmt: skip


@pytest.mark.parametrize("key", ["axolotl", "llamafactory"])
def test_how_a_run_trains_comes_back(tmp_path: Path, key: str) -> None:
    for training in (
        TRAINED,
        dataclasses.replace(TRAINED, warmup=30.0, save_strategy="epoch", save_steps=0.0, eval_share=100.0),
        dataclasses.replace(TRAINED, columns=Columns(fields=("words",)), eval_steps=0.25),
        dataclasses.replace(TRAINED, columns=Columns(fields=("turns",), chat=True)),
    ):
        plan = make_plan(Recipe(), dataset="org/rows")
        plan = dataclasses.replace(plan, job=dataclasses.replace(plan.job, training=training))
        found = read(tmp_path, targets.export(plan, key), f"{key}.yaml")
        assert found.training == training
        assert found.data == "org/rows"
        assert found.source is not None
        left = {name for name in found.source.lost if not name.startswith("datasets[0].")}
        assert left <= {"excess_length_strategy", "template", "pad_to_sequence_len"}


def test_axolotls_counts_per_epoch_and_defaults(tmp_path: Path) -> None:
    said = "base_model: m\nnum_epochs: 2\nlearning_rate: 2e-4\n"
    assert adopted(tmp_path, said) == Training(
        learning_rate=2e-4, epochs=2.0, lr_scheduler="cosine", warmup=0.03, save_strategy="epoch"
    )
    found = adopted(tmp_path, said + "saves_per_epoch: 2\nevals_per_epoch: 1\nval_set_size: 0.1\nwarmup_steps: 9\n")
    assert (found.save_strategy, found.save_steps) == ("steps", 0.25)
    assert (found.eval_strategy, found.eval_steps) == ("steps", 0.5)
    assert (found.warmup, found.eval_share) == (9, 0.1)
    assert adopted(tmp_path, "base_model: m\nsaves_per_epoch: 1\n").save_strategy == "epoch"
    assert adopted(tmp_path, "base_model: m\nspecial_tokens: {pad_token: x}\n").pad_token == "x"
    for text in ("seed: many", "max_steps: -1", "weight_decay: -3", "warmup_ratio: [1]", "save_strategy: often"):
        adopted(tmp_path, f"base_model: m\n{text}\n")


def adopted(folder: Path, text: str) -> Training:
    return read(folder, {"a.yaml": text}, "a.yaml").training


def test_llamafactorys_datasets_are_looked_up(tmp_path: Path) -> None:
    info = {
        "own": {"file_name": "rows.json"},
        "chat": {"hf_hub_url": "org/chat", "formatting": "sharegpt", "columns": {"messages": "talk"}},
        "rank": {"file_name": "r.json", "ranking": True},
    }
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    head = "model_name_or_path: m\nfinetuning_type: lora\n"
    found = read(tmp_path, {"lf.yaml": head + "dataset: own\nval_size: 0.1\n"}, "lf.yaml")
    assert found.data == str(tmp_path / "data" / "rows.json")
    assert found.training.columns == Columns(fields=("instruction", "input", "output"))
    assert found.training.eval_share == 0.1
    found = read(tmp_path, {"lf.yaml": head + "dataset: chat,own\n"}, "lf.yaml")
    assert found.data == "org/chat" and found.training.columns is not None
    assert (found.training.columns.fields, found.training.columns.role) == (("talk",), "from")
    assert found.source is not None and "dataset own" in found.source.lost
    found = read(tmp_path, {"lf.yaml": head + "dataset: rank\n"}, "lf.yaml")
    assert found.training.columns is None
    assert found.source is not None and "dataset" in found.source.lost


def test_the_default_folder_of_datasets_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text('{"own": {"file_name": "rows.json"}}')
    head = "model_name_or_path: org/tiny-llama\nfinetuning_type: lora\ndataset: own\n"
    source = read(tmp_path, {"lf.yaml": head}, "lf.yaml")
    plan = make_plan(source.recipe, dataset=source.data or "")
    found = yaml.safe_load(revised(plan, source).files["llamafactory.yaml"])
    assert (found["dataset"], found["dataset_dir"]) == ("own", str(tmp_path / "data"))
    other = revised(make_plan(source.recipe, dataset="org/rows"), source)
    found = yaml.safe_load(other.files["llamafactory.yaml"])
    assert (found["dataset"], found["dataset_dir"]) == ("train", ".")
    assert json.loads(other.files["dataset_info.json"])["train"]["hf_hub_url"] == "org/rows"


def test_scripts_hold_what_a_file_said(tmp_path: Path) -> None:
    told = dataclasses.replace(TRAINED, pad_token="<|end_of_text|>")
    plan = make_plan(Recipe(), dataset="org/rows")
    for key, field in product(("trl", "transformers"), dataclasses.fields(Training)):  # each alone
        one = Training(**{field.name: getattr(told, field.name)})
        files = targets.export(dataclasses.replace(plan, job=dataclasses.replace(plan.job, training=one)), key)
        compile(files["train.py"], "train.py", "exec")
    plan = dataclasses.replace(plan, job=dataclasses.replace(plan.job, training=told))
    for key in ("trl", "transformers"):
        files = targets.export(plan, key)
        script = files["train.py"]
        compile(script, "train.py", "exec")
        for words in ('lr_scheduler_type="cosine"', "warmup_steps=0.1", "weight_decay=0.01", "seed=7",
                      "save_total_limit=3", "EVAL_SHARE = 0.05", "eval_steps=0.5", "SAVE_STEPS = 0.25",
                      '("question", "answer")', 'TOKENS = {"pad_token": "<|end_of_text|>"}'):  # fmt: skip
            assert words in script, words
        assert targets.recipe_file.loads(files["recipe.toml"]).training == told


def test_names_of_training_are_those_of_the_libraries() -> None:
    transformers = pytest.importorskip("transformers")
    known = {f.name for f in dataclasses.fields(transformers.TrainingArguments)}
    assert set(training_keys.write(TRAINED, "transformers")) <= known
    keys = json.loads((Path(__file__).parent / "data" / "framework_keys.json").read_text())
    told = dataclasses.replace(TRAINED, pad_token="x", warmup=3.0)
    assert set(training_keys.write(told, "axolotl")) <= set(keys["axolotl"].split())


# ---- the commands


def ran(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = cli.main([str(word) for word in words])
    return code, capsys.readouterr().err


OWN = AXOLOTL.replace("NousResearch/Meta-Llama-3.1-8B", "Qwen/Qwen2.5-7B")


def test_plan_writes_the_framework_it_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, out = tmp_path / "my.yaml", tmp_path / "run"
    path.write_text(OWN)
    code, err = ran(capsys, "plan", "--from", path, "--gpu", "rtx-4090", "--no-trace", "--out", out)
    assert code == 0 and sorted(p.name for p in out.iterdir()) == ["axolotl.yaml", "recipe.toml"]
    assert "axolotl.yaml: changed:" in err
    before, after = yaml.safe_load(OWN), yaml.safe_load((out / "axolotl.yaml").read_text())
    for key in ("datasets", "val_set_size", "lr_scheduler", "special_tokens", "num_epochs", "lora_alpha"):
        assert after[key] == before[key]
    assert adopt(out / "axolotl.yaml").training == adopt(path).training
    assert targets.recipe_file.read(out / "recipe.toml").training == adopt(path).training
    planned = targets.recipe_file.read(out / "recipe.toml").recipe
    assert cli.main(["estimate", "--from", str(out / "axolotl.yaml"), "--gpu", "rtx-4090", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"] == json.loads(json.dumps(dataclasses.asdict(planned)))
    code, err = ran(capsys, "plan", "--from", out / "axolotl.yaml", "--gpu", "rtx-4090", "--no-trace", "--out", out,
                    "--force")  # fmt: skip
    assert code == 0
    assert yaml.safe_load((out / "axolotl.yaml").read_text()) == after


def test_another_target_gets_what_it_can_hold(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, out = tmp_path / "my.yaml", tmp_path / "run"
    path.write_text(OWN + "wandb_project: mine\nmy_own_key: 3\n")
    words = ("plan", "--from", path, "--gpu", "rtx-4090", "--no-trace", "--out", out, "--target", "llamafactory",
             "--ignore", "my_own_key")  # fmt: skip
    code, err = ran(capsys, *words)
    assert code == 0
    (line,) = (line for line in err.splitlines() if "not carried over" in line)
    assert "wandb_project" in line and "my_own_key" in line and "pad_token" in line and "lr_scheduler" not in line
    found = adopt(out / "llamafactory.yaml")
    wanted = dataclasses.replace(adopt(path).training, pad_token="", eval_strategy="epoch")
    assert found.training == wanted


def test_keys_of_a_task_that_no_script_has_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "dpo.yaml"
    path.write_text(
        "model_name_or_path: Qwen/Qwen2.5-0.5B\nbeta: 0.5\nloss_type: ipo\nlabel_smoothing: 0.0\n"
        "packing: true\nuse_liger_kernel: true\nper_device_train_batch_size: 2\nbf16: true\n"
    )
    words = ("plan", "--from", path, "--task", "dpo", "--gpu", "l4", "--no-trace", "--out", tmp_path / "run")
    code, err = ran(capsys, *words)
    assert code == 0, err
    (lost,) = (line for line in err.splitlines() if "not carried over" in line)
    assert "beta" in lost and "loss_type" in lost and "label_smoothing" not in lost
    (without,) = (line for line in err.splitlines() if "judged without" in line)
    assert "packing" in without and "fused" in without
    code, err = ran(capsys, "plan", "qwen2.5-0.5b", "--task", "dpo", "--gpu", "l4", "--loss", "full")
    assert code == 0 and "no effect" not in err


def test_export_takes_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, out = tmp_path / "my.yaml", tmp_path / "run"
    path.write_text(OWN)
    code, err = ran(capsys, "export", "--from", path, "--gpu", "h100", "--out", out)
    assert code == 0 and "changed: nothing" in err
    assert (out / "axolotl.yaml").read_text().endswith(OWN)
    code, err = ran(capsys, "export", out / "recipe.toml", "--from", path, "--out", tmp_path / "again")
    assert code == 0 and (tmp_path / "again" / "axolotl.yaml").read_text().endswith(OWN)
    code, err = ran(capsys, "export", "--from", path, "--gpu", "h100", "--target", "trl", "--out", tmp_path / "trl")
    assert code == 0 and "EVAL_SHARE = 0.05" in (tmp_path / "trl" / "train.py").read_text()
    assert ran(capsys, "export", "--out", out)[0] == 2
    code, err = ran(capsys, "export", "--from", path, "--gpu", "h100")
    assert code == 2 and "--target axolotl" in err


def test_other_data_replaces_the_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, out, rows = tmp_path / "my.yaml", tmp_path / "run", tmp_path / "rows.jsonl"
    path.write_text(OWN)
    rows.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 9)
    code, _ = ran(capsys, "plan", "--from", path, "--gpu", "h100", "--no-trace", "--out", out, "--data", rows)
    (entry,) = yaml.safe_load((out / "axolotl.yaml").read_text())["datasets"]
    assert code == 0 and (entry["path"], entry["type"]) == (str(rows), "chat_template")


def test_arguments_get_no_key_that_a_script_would_refuse(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """TrainingArguments name neither model nor data, nor adapters: the line says what they cannot hold."""
    path, out, rows = tmp_path / "args.json", tmp_path / "run", tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"output_dir": "o", "per_device_train_batch_size": 2, "bf16": True}, indent=4))
    rows.write_text('{"text": "a b c"}\n' * 9)
    words = ("plan", "qwen2.5-7b", "--from", path, "--gpu", "rtx-4090", "--no-trace", "--out", out, "--force")
    code, err = ran(capsys, *words, "--method", "qlora", "--sequence-length", 512, "--data", rows)
    found = json.loads((out / "args.json").read_text())
    transformers = pytest.importorskip("transformers")
    assert code == 0 and set(found) <= {f.name for f in dataclasses.fields(transformers.TrainingArguments)}
    (line,) = (line for line in err.splitlines() if "changed:" in line)
    for said in ("method qlora", f"data {rows}", "sequence_length 512", "--target transformers"):
        assert said in line
    assert sorted(p.name for p in out.iterdir()) == ["args.json", "recipe.toml"]


def test_a_launchers_file_comes_with_a_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    zero = {"train_micro_batch_size_per_gpu": 4, "train_batch_size": 32, "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "weight_decay": 0.1}}, "bf16": {"enabled": True},
            "steps_per_print": 7}  # fmt: skip
    path, out = tmp_path / "ds.json", tmp_path / "run"
    path.write_text(json.dumps(zero, indent="\t"))
    code, _ = ran(capsys, "plan", "qwen2.5-7b", "--from", path, "--gpu", "4xa100-40gb", "--no-trace", "--out", out)
    found, script = json.loads((out / "ds_config.json").read_text()), (out / "train.py").read_text()
    assert code == 0 and found["optimizer"] == zero["optimizer"] and found["steps_per_print"] == 7
    assert "LEARNING_RATE = 3e-05" in script and "weight_decay=0.1" in script  # DeepSpeed's must equal the Trainer's
    recipe = targets.recipe_file.read(out / "recipe.toml").recipe
    assert found["train_micro_batch_size_per_gpu"] == recipe.micro_batch
    assert found["train_batch_size"] == recipe.effective_batch == 32
    (tmp_path / "acc.yaml").write_text(ACCELERATE + "machine_rank: 0  # mine\n")
    words = ("plan", "qwen2.5-7b", "--from", tmp_path / "acc.yaml", "--gpu", "8xh100", "--no-trace", "--out", out)
    code, _ = ran(capsys, *words, "--force")
    by_script = ACCELERATE.replace("activation_checkpointing: true", "activation_checkpointing: false")  # else both do
    assert code == 0 and (out / "accelerate.yaml").read_text().endswith(by_script + "machine_rank: 0  # mine\n")
