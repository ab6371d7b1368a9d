"""Every key of each framework is read, changes no memory, or is known to change it: held against the real schemas."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from memfit.frameworks import schemas
from memfit.frameworks.keys import Keys
from memfit.frameworks.reading import adopt
from memfit.frameworks.schemas import Schema
from memfit.models.hub import resolve_model

KNOWN = json.loads((Path(__file__).parent / "data" / "framework_keys.json").read_text())
# files that together take every branch of each reader
LORA = {"adapter": "qlora", "load_in_4bit": True, "gradient_checkpointing": True}
FILES: dict[str, list[dict[str, Any]]] = {
    "axolotl": [{"base_model": "m"}, {"base_model": "m", **LORA}, {"base_model": "m", "fsdp_config": {"x": 1}}],
    "llamafactory": [
        {"model_name_or_path": "m", "stage": "sft", "finetuning_type": "lora", "quantization_bit": 4},
        *({"model_name_or_path": "m", "stage": "sft", switch: True} for switch in ("use_galore", "use_apollo")),
    ],
    "transformers": [
        {"output_dir": "o"}, {"output_dir": "o", "max_length": 8, "use_peft": True, "load_in_4bit": True},
        {"output_dir": "o", "activation_checkpointing_kwargs": {"selective": True}},
    ],
    "accelerate": [
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}},
        {"distributed_type": "FSDP", "fsdp_config": {"activation_checkpointing": True}},
        {"distributed_type": "NO", "dynamo_backend": "INDUCTOR"},
    ],
    "deepspeed": [
        {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}, "fp16": {"enabled": True}}
        for stage in (1, 3)
    ],
}  # fmt: skip


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """The keys that each reader asks for, whatever block they are in."""
    found: dict[str, set[str]] = {}
    plain = Keys.take

    for name, files in FILES.items():
        mine = found.setdefault(name, set())

        def take(self: Keys, *names: str, default: Any = None, mine: set[str] = mine) -> Any:
            mine.update(names)
            return plain(self, *names, default=default)

        monkeypatch.setattr(Keys, "take", take)
        for data in files:
            path = tmp_path / "file.yaml"
            path.write_text(json.dumps(data))
            assert adopt(path).format == name
    return found


def unclassified(keys: Iterable[str], read: set[str], *rows: Schema) -> set[str]:
    """The keys that are neither read, nor harmless, nor known to change memory."""

    def known(key: str) -> bool:
        harmless = any(fnmatchcase(key, pattern) for row in rows for pattern in row.harmless)
        return key in read or harmless or any(row.reason(key) for row in rows)

    return {key for key in keys if not known(key)}


def test_every_key_of_transformers_and_trl_is_classified(read: dict[str, set[str]]) -> None:
    pytest.importorskip("torch")
    trl = pytest.importorskip("trl")
    from transformers import TrainingArguments

    for config in (TrainingArguments, trl.SFTConfig, trl.ModelConfig, trl.ScriptArguments):
        keys = {f.name for f in dataclasses.fields(config)}
        assert not unclassified(keys, read["transformers"], schemas.TRAINER), config


def test_keys_that_only_other_tasks_have_are_not_read_as_sft() -> None:
    pytest.importorskip("torch")
    trl = pytest.importorskip("trl")
    sft = {f.name for f in dataclasses.fields(trl.SFTConfig)}
    for config in (trl.DPOConfig, trl.GRPOConfig, trl.KTOConfig, trl.RewardConfig, trl.RLOOConfig):
        own = {f.name for f in dataclasses.fields(config)} - sft
        assert own
        missed = {key for key in own if not any(fnmatchcase(key, p) for p in schemas.TRL_OTHER_TASKS)}
        assert not missed, config
    assert not {key for key in sft if any(fnmatchcase(key, p) for p in schemas.TRL_OTHER_TASKS)}


def test_every_key_of_accelerate_is_classified(read: dict[str, set[str]]) -> None:
    pytest.importorskip("torch")
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    keys = {f.name for f in dataclasses.fields(ClusterConfig)}
    assert not unclassified(keys, read["accelerate"], schemas.ACCELERATE)
    flags = {action.dest for action in launch_command_parser()._actions}
    fsdp = {name.removeprefix("fsdp_") for name in flags if name.startswith("fsdp_")}
    assert not unclassified(fsdp, read["accelerate"], schemas.FSDP)
    zero = {name for name in flags if "deepspeed" in name or name.startswith(("zero", "offload_", "gradient_"))}
    assert not unclassified(zero - {"use_deepspeed"}, read["accelerate"], schemas.ACCELERATE_DEEPSPEED)


@pytest.mark.parametrize(
    ("listed", "format", "row"),
    [
        ("axolotl", "axolotl", schemas.AXOLOTL),
        ("axolotl.integrations", "axolotl", schemas.AXOLOTL),
        ("axolotl.fsdp_config", "accelerate", schemas.FSDP),
        ("llamafactory", "llamafactory", schemas.LLAMAFACTORY),
        ("deepspeed", "deepspeed", schemas.DEEPSPEED),
        ("deepspeed.zero_optimization", "deepspeed", schemas.ZERO),
        ("deepspeed.offload", "deepspeed", schemas.OFFLOAD),
        ("deepspeed.bf16", "deepspeed", schemas.HALF),
        ("deepspeed.fp16", "deepspeed", schemas.HALF),
    ],
)
def test_every_key_of_the_other_tools_is_classified(
    read: dict[str, set[str]], listed: str, format: str, row: Schema
) -> None:
    keys = KNOWN[listed].split()
    assert len(keys) > 4
    assert not unclassified(keys, read[format], row)


MINIMAL = {"axolotl": {"base_model": "m"}, "transformers": {"output_dir": "o"},
           "llamafactory": {"model_name_or_path": "m", "stage": "sft", "do_train": True}}  # fmt: skip


@pytest.mark.parametrize("format", MINIMAL)
def test_a_table_decides_what_blocks(tmp_path: Path, read: dict[str, set[str]], format: str) -> None:
    """A key that is set blocks the verdict if it may change memory, and only then."""
    row = {"axolotl": schemas.AXOLOTL, "transformers": schemas.TRAINER, "llamafactory": schemas.LLAMAFACTORY}[format]
    keys = set(KNOWN.get(format, "").split()) | {
        key for table in (row.adds, row.changes) for text in table.values() for key in text.split() if "*" not in key
    }
    keys = {key for key in keys if not any(fnmatchcase(key, p) for p in schemas.TRL_OTHER_TASKS)}
    blocked = 0
    for key in sorted(keys - read[format]):
        path = tmp_path / "file.yaml"
        path.write_text(json.dumps({**MINIMAL[format], key: 7}))
        harmless = any(fnmatchcase(key, pattern) for pattern in row.harmless)
        assert (key in adopt(path).unknown) == (not harmless), key
        assert harmless or schemas.reasons([key], format)[0].why
        blocked += not harmless
    assert blocked > 5


def test_a_key_of_another_kind_of_model_does_not_block() -> None:
    dense, experts = resolve_model("llama-2-7b"), resolve_model("mixtral-8x7b")
    pictures = resolve_model("qwen2.5-vl-7b")
    assert [schemas.concerns("image_max_pixels", a) for a in (dense, experts, pictures)] == [False, False, True]
    assert [schemas.concerns("moe_aux_loss_coef", a) for a in (dense, experts)] == [False, True]
    assert [schemas.concerns("liger_layer_norm", resolve_model(m)) for m in ("llama-2-7b", "gpt2")] == [False, True]
    assert schemas.concerns("rl", dense)
