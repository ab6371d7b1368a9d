"""Files of SimpleTuner and sd-scripts with a plan's values: what is read back is the plan, the rest is the user's."""

from __future__ import annotations

import dataclasses
import json
import random
import shlex
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from conftest import Ran
from memfit.cli import plan_of_task
from memfit.errors import Unsupported
from memfit.frameworks import image_trainers, targets
from memfit.frameworks.keys import Adopted
from memfit.frameworks.reading import adopt
from memfit.nouns.plan import Plan
from plans import make_plan
from test_image_trainers import KOHYA, LOKR, SD3

OWN = {"my_own_key": {"train_batch_size": [1, 2]}, "validation_prompt": "\u001b[31m \u2028 \"x\" \\"}  # fmt: skip
CHANGES: list[dict[str, Any]] = [
    {"micro_batch": 1, "accumulation": 8}, {"checkpointing": "none"}, {"checkpointing": "full"}, {"num_gpus": 2},
    {"checkpointing": "full", "checkpoint_interval": 2},
    {"checkpointing": "full", "checkpoint_interval": 2, "checkpoint_stride": 4}, {"precision": "fp32"},
    {"precision": "fp16-mixed"}, {"keep_gradients": False}, {"keep_gradients": True}, {"lora_rank": 8},
    {"lora_rank": 8, "lora_alpha": 8}, {"lora_dropout": 0.0}, {"method": "full", "precision": "bf16"},
    *({"optimizer": key} for key in dict.fromkeys(image_trainers._SIMPLETUNER_OPTIMIZERS.values())),
    *({"method": "qlora", "quantization": key} for key in image_trainers._BASES.values()),
]  # fmt: skip
STYLES: list[dict[str, Any]] = [
    {}, {"lora_alpha": None}, {"optimizer": "prodigy"}, {"set_grads_to_none": True, "lora_dropout": 0.5},
    {"gradient_checkpointing": False}, {"gradient_checkpointing": False, "gradient_checkpointing_interval": 3},
    {"gradient_checkpointing_interval": 2, "gradient_checkpointing_segment_stride": 4},
    {"gradient_checkpointing_segment_stride": 4}, {"gradient_checkpointing_interval": 1},
    {"gradient_checkpointing": False, "gradient_checkpointing_backend": "unsloth"}, {"model_type": "full"},
    {"base_model_precision": "nf4-bnb"}, {"base_model_precision": "fp8-torchao", "quantize_via": "cpu"},
    {"base_model_precision": "int8-sdnq", "quantize_via": "cpu", **image_trainers._ROTATED}, {"sdnq_group_size": 32},
    {"lora_type": "lycoris", "lycoris_config": "none.json"},
]  # fmt: skip


def write(folder: Path, changes: dict[str, Any], prefix: str = "") -> Adopted:
    path = folder / "config.json"
    path.write_text(json.dumps({prefix + key: value for key, value in (SD3 | changes).items()}, indent=4))
    return adopt(path)


def planned(source: Adopted, **changes: Any) -> Plan:
    plan = make_plan(source.recipe.but(**changes), model=source.model or "m")
    return dataclasses.replace(plan, job=dataclasses.replace(plan.job, task=source.task, shape=source.shape))


def exported(source: Adopted, folder: Path = Path("run"), **changes: Any) -> targets.Written:
    return targets.exported(planned(source, **changes), targets.own_target(source), source, folder)


def read_back(folder: Path, files: dict[str, str], name: str) -> Adopted:
    (folder / "again").mkdir(exist_ok=True)
    (folder / "again" / name).write_text(files[name])
    return adopt(folder / "again" / name)


@pytest.mark.parametrize("prefix", ["", "--"])
@pytest.mark.parametrize("number", range(len(STYLES)))
def test_what_is_read_back_is_the_plan_and_the_rest_is_the_users(tmp_path: Path, number: int, prefix: str) -> None:
    source = write(tmp_path, STYLES[number] | OWN, prefix)
    assert source.source is not None
    before = dict(source.source.data)
    for changes in CHANGES:
        if source.recipe.method == "full" and changes.keys() & {"lora_rank", "lora_dropout"}:
            continue
        if source.recipe.method == "qlora" and changes.get("method") == "full":
            changes = {**changes, "quantization": "none"}
        wanted = source.recipe.but(**changes)
        try:
            made = exported(source, **changes)
        except Unsupported as error:
            assert error.hint.startswith("--")
            continue
        back = read_back(tmp_path, made.files, "config.json")
        if wanted.checkpointing == "none":  # then a file's groups say nothing
            wanted = wanted.but(checkpoint_interval=1, checkpoint_stride=0)
        if wanted.method == "full":
            wanted = wanted.but(**{f: getattr(back.recipe, f) for f in ("lora_rank", "lora_alpha", "lora_dropout")})
        assert back.recipe == wanted, changes
        assert set(back.unknown) <= set(source.unknown)
        after = json.loads(made.files["config.json"])
        changed = {key for key in {*before, *after} if before.get(key) != after.get(key)}
        for key in changed:
            assert key.removeprefix("--") in made.notes[0]
            assert key.startswith(prefix)
        assert [key for key in after if key in before] == [key for key in before if key in after]
        for name, value in OWN.items():
            assert after[prefix + name] == value


@pytest.mark.parametrize("number", range(len(STYLES)))
def test_the_same_plan_leaves_the_text_as_it_is(tmp_path: Path, number: int) -> None:
    source = write(tmp_path, STYLES[number] | OWN)
    made = exported(source)
    assert source.source is not None and made.files["config.json"] == source.source.text


def test_only_the_spans_of_changed_values_are_replaced(tmp_path: Path) -> None:
    text = (
        json.dumps(SD3, indent=3).replace('"train_batch_size": 3', '"train_batch_size"  :\t3').replace("0.0001", "1e-4")
    )
    (tmp_path / "mine.json").write_text(text)
    source = adopt(tmp_path / "mine.json")
    made = exported(source, micro_batch=2)
    assert made.files["mine.json"] == text.replace(":\t3", ":\t2")


def test_a_key_that_stands_twice_is_changed_where_it_counts(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SD3, "train_batch_size": 7, "--train_batch_size": 2}))
    made = exported(adopt(path), micro_batch=5)
    found = json.loads(made.files["config.json"])
    assert (found["train_batch_size"], found["--train_batch_size"]) == (7, 5)


@pytest.mark.parametrize(
    "changes",
    [{"attention": "flash"}, {"compile": True}, {"optimizer": "muon"}, {"precision": "bf16-master"},
     {"method": "qlora", "quantization": "nf4"}, {"checkpointing": "selective"}, {"shard": "parameters", "num_gpus": 2},
     {"offload": "optimizer"}, {"adapter": "dora"}, {"adapter": "lokr"}, {"modules_to_save": ("proj_out",)},
     {"context_parallel": 2, "num_gpus": 2}, {"method": "full", "precision": "fp16-mixed"}],
)  # fmt: skip
@pytest.mark.parametrize("tool", ["simpletuner", "kohya"])
def test_what_no_key_says_is_refused_with_what_does(tmp_path: Path, tool: str, changes: dict[str, Any]) -> None:
    (tmp_path / "x.toml").write_text(KOHYA)
    source = adopt(tmp_path / "x.toml") if tool == "kohya" else write(tmp_path, {})
    with pytest.raises(Unsupported) as error:
        exported(source, **changes)
    assert "--" in error.value.hint and "\n" not in error.value.message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sequence_length": 99}, "99"),
        ({"lora_targets": ("to_q",)}, "to_q"),
        ({"lora_targets": ("all-linear",)}, "all"),
    ],
)
def test_what_a_file_leaves_to_others_is_said(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    source = write(tmp_path, {})
    assert said in exported(source, **changes).notes[0] and "--target" not in exported(source, **changes).notes[0]


def test_model_data_and_images_that_the_file_has_otherwise_are_said(tmp_path: Path) -> None:
    source = write(tmp_path, {"resolution": 1024, "data_backend_config": None})
    plan = planned(source)
    shape = dataclasses.replace(plan.job.shape, image=(512, 640), cached=False)
    architecture = dataclasses.replace(plan.job.architecture, name="flux.1-dev")
    job = dataclasses.replace(plan.job, shape=shape, dataset="mine.jsonl", architecture=architecture)
    line = targets.exported(dataclasses.replace(plan, job=job), targets.own_target(source), source).notes[0]
    for said in ("512 x 640", "mine.jsonl", "flux.1-dev", "encoded"):
        assert said in line


@pytest.mark.parametrize(("family", "flavour"), [("z_image", "turbo"), ("z-image", ""), ("flux", "schnell")])
def test_a_second_adapter_is_not_quantised_unsaid(tmp_path: Path, family: str, flavour: str) -> None:
    words = {"model_family": family, "model_flavour": flavour}
    source = write(tmp_path, words)
    assert any("is not counted" in line for line in source.assumed)
    with pytest.raises(Unsupported, match="second adapter"):
        exported(source, method="qlora", quantization="fp8-torchao")
    assert exported(source, method="qlora", quantization="int8-sdnq")
    source = write(tmp_path, {**words, "disable_assistant_lora": True})
    made = exported(source, method="qlora", quantization="fp8-torchao")
    back = read_back(tmp_path, made.files, "config.json")
    assert back.unknown == () and not any("is not counted" in line for line in back.assumed)


def test_files_that_lie_beside_the_users_are_still_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are found from the folder where the tool is started stay as they are."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "l.json").write_text(json.dumps(LOKR))
    sets = tmp_path / "config" / "sets.json"
    sets.write_text(json.dumps([{"resolution": 512, "resolution_type": "pixel"}]))
    monkeypatch.chdir(tmp_path)
    words = {"lora_type": "lycoris", "lycoris_config": "l.json", "data_backend_config": "config/sets.json"}
    source = write(tmp_path / "config", words)
    made = exported(source, micro_batch=1)
    found = json.loads(made.files["config.json"])
    assert found["data_backend_config"] == "config/sets.json" and found["lycoris_config"] == "config/l.json"
    back = read_back(tmp_path, made.files, "config.json")
    assert (back.recipe, back.shape) == (source.recipe.but(micro_batch=1), source.shape)
    assert set(made.files) == {"config.json", "recipe.toml"}


@pytest.mark.parametrize("name", ["a b; rm -rf x.json", "\u202e$(id).json", "-x.json"])
def test_a_name_is_quoted_in_the_command(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(SD3))
    command = exported(adopt(path), Path("my run"), alloc_conf="expandable_segments:True", num_gpus=2).command
    assert shlex.split(command) == [
        "PYTORCH_ALLOC_CONF=expandable_segments:True", "simpletuner", "train", f"env=my run/{name}", "num_processes=2"
    ]  # fmt: skip


def test_kohyas_keys_stay_in_their_sections(tmp_path: Path) -> None:
    path = tmp_path / "sdxl.toml"
    path.write_text("# mine\n" + KOHYA + 'my_own_key = [1, "\\u001b"]\n')
    source, chosen = adopt(path), random.Random(1)
    before = tomllib.loads(path.read_text())
    optimizers = list(image_trainers._KOHYA_OPTIMIZERS.values())
    for batch, checkpointing, rank in product((1, 4), ("none", "full"), (4, 32)):
        changes = {"micro_batch": batch, "accumulation": 3, "checkpointing": checkpointing, "lora_rank": rank,
                   "optimizer": chosen.choice(optimizers), "precision": chosen.choice(["bf16", "fp32"])}  # fmt: skip
        made = exported(source, **changes)
        back = read_back(tmp_path, made.files, "sdxl.toml")
        assert back.recipe == source.recipe.but(**changes, lora_alpha=rank)
        after = tomllib.loads(made.files["sdxl.toml"])
        assert after["training_arguments"]["my_own_key"] == [1, "\x1b"]
        assert after["model_arguments"] == before["model_arguments"]
        assert after["gradient_accumulation_steps"] == 3  # which the file did not have: sections say nothing
        assert "--config_file run/sdxl.toml" in made.command
    again = exported(back, micro_batch=9)
    assert tomllib.loads(again.files["sdxl.toml"])["training_arguments"]["train_batch_size"] == 9


@pytest.fixture
def without_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(request: Any, row: Any, name: str, flags: Any, progress: Any = None) -> Plan:
        assert request.adopted is not None
        return planned(request.adopted, micro_batch=1, accumulation=3)

    monkeypatch.setattr(plan_of_task, "plan", plan)


@pytest.mark.usefixtures("without_traces")
def test_plan_writes_the_file_and_says_how_to_start_it(ran: Ran, tmp_path: Path) -> None:
    write(tmp_path, OWN)
    config, out = tmp_path / "config.json", tmp_path / "run"
    words = ("plan", "--from", config, "--gpu", "rtx-4090", "--ignore", "my_own_key", "--out")
    text = config.read_text()
    code, _, said = ran(*words, tmp_path)
    assert code == 2 and "--force" in said and "config.json" in said
    assert config.read_text() == text and {*tmp_path.iterdir()} == {config}  # which lies in that folder
    code, shown, said = ran(*words, out)
    assert code == 0, said
    assert json.loads((out / "config.json").read_text())["train_batch_size"] == 1
    assert (out / "recipe.toml").is_file() and f"simpletuner train env={out / 'config.json'}" in said
    assert f"memfit trace --from {out / 'config.json'}" in shown
    assert ran(*words, out)[0] == 2 and ran(*words, out, "--force")[0] == 0
    assert "\x1b" not in shown + said
    assert "--keep-gradients" in shown  # a command that can be typed
    code, shown, _ = ran(*words[:-1])  # without --out it is offered
    assert f"memfit plan --from {config} --ignore my_own_key --gpu rtx-4090 --out run/" in shown


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--attention", "flash"), "--attention sdpa"),
        (("--optimizer", "muon"), "--optimizer adamw-bf16"),
        (("--method", "qlora", "--optimizer", "muon"), "--optimizer adamw-bf16"),  # its file can say QLoRA
    ],
)
def test_a_plan_that_cannot_be_written_says_why(ran: Ran, tmp_path: Path, words: tuple[str, str], hint: str) -> None:
    """Before anything is traced."""
    pytest.importorskip("diffusers")
    write(tmp_path, {"model_family": "z_image", "resolution": 64, "resolution_type": "pixel"})
    code, _, said = ran("plan", "--from", tmp_path / "config.json", "--gpu", "h100", *words, "--out", tmp_path / "run")
    assert code == 2 and hint in said and not (tmp_path / "run").exists()


def test_export_asks_for_a_folder_by_a_command_that_works(ran: Ran, tmp_path: Path) -> None:
    write(tmp_path, {})
    code, _, said = ran("export", "--from", tmp_path / "config.json")
    assert code == 2 and "--target" not in said and f"--from {tmp_path / 'config.json'}" in said


@pytest.mark.nightly  # half a minute
@pytest.mark.filterwarnings("ignore")
def test_a_plan_by_traces_is_written_into_the_file(ran: Ran, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    words = {"model_family": "z_image", "model_flavour": "turbo", "lora_rank": 4, "train_batch_size": 2,
             "resolution": 64, "resolution_type": "pixel", "data_backend_config": None}  # fmt: skip
    write(tmp_path, words)
    out = tmp_path / "run"
    code, shown, said = ran("plan", "--from", tmp_path / "config.json", "--gpu", "h100", "--out", out)
    assert code == 0 and "FITS" in shown, said
    assert adopt(out / "config.json").recipe.effective_batch == 2
