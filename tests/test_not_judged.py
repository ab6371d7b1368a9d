"""A setting that can change memory and is not understood withholds the verdict in every command until it is ignored."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import Ran
from memfit.cli.flags import as_flags
from memfit.documents import recipe_file
from memfit.errors import Unsupported
from memfit.frameworks import deepspeed
from memfit.frameworks.reading import adopt
from memfit.frameworks.task_keys import unknown_for
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Judgement, NotUnderstood, withheld
from memfit.nouns.zero_settings import ZeroSettings, parse_zero_conf
from memfit.units import GIB

CONFIGS = Path(__file__).parent / "data" / "configs"
MODEL = "qwen2.5-0.5b"
CARD = ("--gpu", "rtx-4090")
AXOLOTL = {"base_model": MODEL, "adapter": "lora", "sequence_len": 512, "micro_batch_size": 1}


def write(folder: Path, says: dict[str, Any], name: str = "run.yaml") -> Path:
    """The file; JSON is YAML too."""
    path = folder / name
    path.write_text(json.dumps(says))
    return path


# ---- one verdict in every command


@pytest.mark.parametrize("command", ["estimate", "plan", "techniques"])
def test_a_key_that_is_not_understood_withholds_the_verdict(ran: Ran, tmp_path: Path, command: str) -> None:
    path = write(tmp_path, AXOLOTL | {"fp8": True})
    code, out, _ = ran(command, "--from", path, *CARD)
    assert code == 5
    headline = next(line for line in out.splitlines() if "NOT JUDGED" in line)
    assert "fp8" in headline and "True" in headline
    assert "FITS" not in out and "--ignore fp8" in out
    document = json.loads(ran(command, "--from", path, *CARD, "--json")[1])
    bodies = document["techniques"] if command == "techniques" else [document]
    assert {body["verdict"] for body in bodies} == {"not_judged"}
    assert all([found["key"] for found in body["not_understood"]] == ["fp8"] for body in bodies)
    assert all(body["peak"]["reserved"] > GIB for body in bodies)  # of what was understood


@pytest.mark.parametrize("command", ["estimate", "plan"])
def test_an_ignored_key_is_judged_without_and_noted(ran: Ran, tmp_path: Path, command: str) -> None:
    path = write(tmp_path, AXOLOTL | {"rl": "dpo", "gptq": True, "fp8": True})
    assert ran(command, "--from", path, *CARD, "--ignore", "rl", "--ignore", "gptq")[0] == 5
    code, out, err = ran(command, "--from", path, *CARD, "--ignore", "rl", "--ignore", "gptq", "--ignore", "fp8")
    assert code == 0 and "FITS" in out
    assert all(key in err for key in ("rl", "gptq", "fp8"))
    plain = ran(command, "--from", write(tmp_path, AXOLOTL), *CARD)[1]
    assert out.split("next:")[0] == plain.split("next:")[0]


def test_a_plan_that_is_not_judged_recommends_nothing(ran: Ran, tmp_path: Path) -> None:
    path = write(tmp_path, AXOLOTL | {"fp8": True})
    plan = json.loads(ran("plan", "--from", path, *CARD, "--json")[1])
    assert (plan["alternatives"], plan["largest"], plan["refused"]) == ([], {}, [])
    assert {rung["verdict"] for rung in plan["ladder"]} == {"not_judged"}


def test_what_was_not_understood_travels_with_the_recipe(ran: Ran, tmp_path: Path) -> None:
    path = write(tmp_path, AXOLOTL | {"fp8": True})
    written = ("plan", "--from", path, *CARD, "--out", tmp_path / "run", "--target", "trl")
    assert ran(*written)[0] == 5 and not (tmp_path / "run").exists()
    assert ran(*written, "--force")[0] == 5
    recipe = tmp_path / "run" / "recipe.toml"
    assert recipe_file.read(recipe).not_understood == ("fp8",)
    assert ran("estimate", "--from", recipe)[0] == 5
    launch = ("launch", recipe, "--target", "torchrun", "--out", tmp_path / "job")
    code, out, err = ran(*launch)
    assert (code, out) == (5, "") and "NOT JUDGED" in err and "fp8" in err
    assert ran("export", recipe, "--target", "trl", "--out", tmp_path / "more")[0] == 5
    assert ran(*launch, "--ignore", "fp8")[0] == 0


def test_the_next_command_judges(ran: Ran, tmp_path: Path) -> None:
    path = write(tmp_path, AXOLOTL | {"gptq": True, "fp8": True})
    for command in ("estimate", "plan"):
        line = ran(command, "--from", path, *CARD)[1].split("next: ")[1].splitlines()[0]
        assert ran(*line.split()[1:])[0] == 0


def test_a_key_that_can_only_add_leaves_a_misfit(ran: Ran, tmp_path: Path) -> None:
    says = {"base_model": "llama-2-7b", "micro_batch_size": 1, "neftune_noise_alpha": 5}
    small, large = (ran("estimate", "--from", write(tmp_path, says), "--gpu", g) for g in ("rtx-4090", "8xh200"))
    assert (small[0], large[0]) == (3, 5)
    assert "neftune_noise_alpha" in small[2]
    says["base_model"] = "llama-3.1-70b"
    plan = json.loads(ran("plan", "--from", write(tmp_path, says), "--gpu", "rtx-3060", "--json")[1])
    assert (plan["verdict"], plan["alternatives"]) == ("misfit", [])
    judgement = Judgement("misfit", GIB, 2 * GIB, 0, -GIB)
    adds, other = NotUnderstood("a", "more", adds=True), NotUnderstood("b", "other")
    assert withheld(judgement, ()) is judgement is withheld(judgement, [adds])
    assert withheld(judgement, [adds, other]).verdict == "not_judged"


def test_a_key_that_can_only_free_leaves_what_fits(ran: Ran, tmp_path: Path) -> None:
    says = {"base_model": "llama-2-7b", "rl": "dpo", "micro_batch_size": 1, "precompute_ref_log_probs": True,
            "adapter": "lora", "lora_r": 8, "lora_target_linear": True, "sequence_len": 512}  # fmt: skip
    large, small = (ran("estimate", "--from", write(tmp_path, says), "--gpu", g) for g in ("h200", "rtx-3060"))
    assert (large[0], small[0]) == (0, 5), (large, small)
    fits = Judgement("fits", 2 * GIB, GIB, 0, GIB)
    frees, adds = NotUnderstood("a", "less", frees=True), NotUnderstood("b", "more", adds=True)
    assert withheld(fits, [frees]) is fits
    assert withheld(fits, [frees, adds]).verdict == "not_judged" == withheld(fits, [adds]).verdict


def test_a_key_of_other_models_does_not_withhold(ran: Ran, tmp_path: Path) -> None:
    says = {"model_name_or_path": MODEL, "stage": "sft", "finetuning_type": "lora", "image_max_pixels": 262144,
            "moe_aux_loss_coef": 0.1, "per_device_train_batch_size": 1}  # fmt: skip
    assert ran("estimate", "--from", write(tmp_path, says), *CARD)[0] == 0
    code, out, _ = ran("estimate", "qwen2.5-vl-3b", "--from", write(tmp_path, says), *CARD)
    assert code == 5 and "image_max_pixels" in out


# ---- cases from public reports: (file, flags, exit code, keys that were not understood, GiB of the peak where judged)

CASES: list[tuple[str, tuple[str, ...], int, set[str], float | None]] = [
    ("a1_1024_1", ("--gpu", "a100-80gb"), 0, set(), 17.1),
    ("a1_2048_1", ("--gpu", "a100-80gb"), 0, set(), 19.5),
    ("a1_2048_2", ("--gpu", "a100-80gb"), 0, set(), 24.4),
    ("a7_single", ("--gpu", "rtx-4090"), 3, set(), None),
    ("b5_dpo", ("--gpu", "h100"), 0, set(), None),  # counted as DPO
    ("b5_fp8", ("--gpu", "8xh100"), 5, {"flex_attention", "flex_attn_compile_kwargs", "fp8",
                                        "fp8_enable_fsdp_float8_all_gather"}, None),
    ("b7_alpaca", ("--gpu", "rtx-4090"), 0, set(), None),
    ("b7_lf_sft", ("--gpu", "rtx-4090"), 0, set(), 19.5),
    ("b7_lf_pt", ("--gpu", "rtx-4090"), 0, set(), 19.5),
    ("b7_lf_dpo", ("--gpu", "rtx-4090"), 5, {"stage"}, None),
    ("b7_lf_kto", ("--gpu", "rtx-4090"), 5, {"stage"}, None),
    ("b7_lf_ppo", ("--gpu", "rtx-4090"), 5, {"stage"}, None),
    ("b7_lf_rm", ("--gpu", "rtx-4090"), 5, {"stage"}, None),
    ("b7_trl_dpo", ("--gpu", "h100"), 0, set(), None),  # counted as DPO
    ("b7_trl_grpo", ("--gpu", "h100"), 5,
     {"use_vllm", "vllm_mode", "vllm_gpu_memory_utilization", "num_generations", "max_prompt_length",
      "max_completion_length", "beta"}, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "card", "code", "keys", "peak"), CASES, ids=[c[0] for c in CASES])
def test_cases(ran: Ran, name: str, card: tuple[str, ...], code: int, keys: set[str], peak: float | None) -> None:
    answered, out, _ = ran("estimate", "--from", CONFIGS / f"{name}.yaml", *card, "--json")
    found = json.loads(out)
    assert answered == code
    assert {x["key"] for x in found["not_understood"]} == keys
    assert peak is None or found["need"] / GIB == pytest.approx(peak, rel=0.03)


def test_a_stage_is_only_judged_where_it_is_one_forward_of_one_model(tmp_path: Path) -> None:
    for stage, unknown in (("sft", ()), ("pt", ()), ("dpo", ("stage",)), ("ppo", ("stage",))):
        says = {"model_name_or_path": "m", "stage": stage, "finetuning_type": "lora"}
        assert adopt(write(tmp_path, says)).unknown == unknown


@pytest.mark.parametrize(
    ("says", "task", "left"),
    [
        ("b5_dpo", "dpo", ()), ("b7_lf_dpo", "dpo", ()), ("b7_lf_kto", "kto", ()), ("b7_lf_rm", "reward", ()),
        ("b7_trl_dpo", "dpo", ()), ("b7_lf_ppo", "sft", ("stage",)), ("b7_lf_sft", "sft", ()),
        ({"base_model": "m", "rl": "kto"}, "kto", ()), ({"base_model": "m", "reward_model": True}, "reward", ()),
        ({"base_model": "m", "rl": "ipo", "precompute_ref_log_probs": True}, "dpo", ("precompute_ref_log_probs",)),
        ({"base_model": "m", "rl": "dpo", "precompute_ref_log_probs": False, "fp8": True}, "dpo", ("fp8",)),
        ({"model_name_or_path": "m", "stage": "dpo", "pref_loss": "simpo"}, "sft", ("stage",)),
        ({"model_name_or_path": "m", "stage": "dpo", "pref_ftx": 0.1, "ref_model": "x"}, "dpo",
         ("pref_ftx", "ref_model")),
        ({"output_dir": "o", "beta": 0.1, "loss_type": "sigmoid", "sync_ref_model": True}, "dpo", ("sync_ref_model",)),
        ({"output_dir": "o", "beta": 0.1, "loss_type": ["sigmoid", "sft"]}, "sft", ("loss_type", "beta")),
        ({"output_dir": "o", "center_rewards_coefficient": 0.01}, "reward", ()),
        ({"output_dir": "o", "desirable_weight": 1.0, "loss_type": "kto"}, "kto", ()),
    ],
)  # fmt: skip
def test_a_file_of_preferences_says_its_task(
    says: str | dict[str, Any], task: str, left: tuple[str, ...], tmp_path: Path
) -> None:
    found = adopt(CONFIGS / f"{says}.yaml" if isinstance(says, str) else write(tmp_path, says))
    assert found.task == task
    assert set(unknown_for(found, task)) == set(left)
    own = found.format == "llamafactory" and task != "sft"  # whose loss keeps more than TRL's
    assert ("stage" in unknown_for(found, task, by_trl=False)) == (own or "stage" in left)


# ---- DeepSpeed: what the trainer fills in, and sizes

ZERO = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}


def test_a_precision_left_open_is_told_once(ran: Ran, tmp_path: Path) -> None:
    """On a card without bf16 the file's "auto" is fp16, and no second note says that it is bf16."""
    says = ZERO | {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    said = {gpu: ran("estimate", MODEL, "--from", write(tmp_path, says), "--gpu", gpu)[2] for gpu in ("2xt4", "2xl4")}
    assert "counted in fp16" in said["2xt4"] and "TRL's default" not in said["2xt4"]
    assert "TRL's default" in said["2xl4"]


def test_auto_is_the_trainers_value(ran: Ran, tmp_path: Path) -> None:
    cards = (MODEL, "--gpu", "2xh100", "--json", "--from")
    need = {}
    for enabled in (True, "auto", None):
        block = {"bf16": {"enabled": enabled}} if enabled else {}
        found = json.loads(ran("estimate", *cards, write(tmp_path, ZERO | block, "ds.json"))[1])
        need[enabled] = found["need"], found["recipe"]["precision"]
    assert need[True] == need["auto"]
    assert need[True][1] == "bf16-master" and need[None][1] == "fp32"


def test_accelerate_without_a_precision_leaves_it_to_the_trainer(tmp_path: Path) -> None:
    for kind, precision in (("FSDP", "bf16-mixed"), ("DEEPSPEED", "bf16-master")):
        found = adopt(write(tmp_path, {"distributed_type": kind, "num_processes": 2, "mixed_precision": "no"}))
        assert found.recipe.precision == precision
        assert any("precision" in line for line in found.assumed)


SIZES: list[tuple[int, dict[str, Any], str]] = [
    (2, {"reduce_bucket_size": 50_000_000}, ""),
    (2, {}, "reduce_bucket_size:500000000"),
    (2, {"reduce_bucket_size": 2e8, "stage3_max_live_parameters": 7}, "reduce_bucket_size:200000000"),
    (3, {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "sub_group_size": 0},
     "reduce_bucket_size:auto,prefetch_bucket_size:auto,sub_group_size:0"),
    (3, {"reduce_bucket_size": 5e7, "max_live_parameters": 0, "stage3_max_reuse_distance": 0,
         "stage3_param_persistence_threshold": 1e4, "sub_group_size": 1e9},
     "param_persistence_threshold:10000,max_live_parameters:0,max_reuse_distance:0"),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "says", "conf"), SIZES)
def test_sizes_are_read(tmp_path: Path, stage: int, says: dict[str, Any], conf: str) -> None:
    found = adopt(write(tmp_path, {"zero_optimization": {"stage": stage, **says}}))
    assert (found.recipe.zero_conf, found.unknown) == (conf, ())


@pytest.mark.parametrize(("stage", "says", "conf"), SIZES)
def test_sizes_are_written_as_they_were_read(tmp_path: Path, stage: int, says: dict[str, Any], conf: str) -> None:
    recipe = adopt(write(tmp_path, {"zero_optimization": {"stage": stage, **says}, "bf16": {"enabled": True}})).recipe
    (tmp_path / "again.json").write_text(deepspeed.text(recipe))
    assert adopt(tmp_path / "again.json").recipe == recipe
    assert recipe.zero_conf == conf


def test_auto_sizes_follow_the_width() -> None:
    text = "reduce_bucket_size:auto,prefetch_bucket_size:auto,param_persistence_threshold:auto"
    assert parse_zero_conf(text, 1000) == ZeroSettings(
        reduce_bucket_size=1_000_000, prefetch_bucket_size=900_000, param_persistence_threshold=10_000
    )


def need_of(ran: Ran, conf: str, shard: str, *more: str) -> int:
    """The need of Llama-3-8B over four cards, computed by formula."""
    words = ("llama-3-8b", "--gpu", "4xh200", "--shard", shard, "--precision", "bf16-master", *more)
    return int(json.loads(ran("estimate", *words, "--zero-conf", conf, "--json")[1])["need"])


def test_sizes_have_their_effect(ran: Ran) -> None:
    usual, large = (need_of(ran, f"reduce_bucket_size:{n}", "gradients") for n in (50_000_000, 500_000_000))
    assert large - usual > 2 * 350_000_000  # the peak moves from the step into the backward
    usual, live = (need_of(ran, f"max_live_parameters:{n}", "parameters") for n in (10**9, 0))
    assert live < usual
    usual, kept = (need_of(ran, f"param_persistence_threshold:{n}", "parameters") for n in (100_000, 10**8))
    assert kept > usual  # every weight of a block stays whole
    usual, groups = (need_of(ran, f"sub_group_size:{n}", "parameters") for n in (10**9, 0))
    assert groups <= usual


def test_sizes_are_checked(ran: Ran) -> None:
    for conf in ("bucket:3", "reduce_bucket_size:x", "sub_group_size:auto", "reduce_bucket_size:-1"):
        assert ran("estimate", MODEL, *CARD, "--zero-conf", conf)[0] == 2
    assert Recipe().zero_conf == ""


# ---- GPUs that share sequences

MESH = {"distributed_type": "FSDP", "num_processes": 4, "mixed_precision": "bf16", "fsdp_config": {"fsdp_version": 2}}


@pytest.mark.parametrize(("name", "peak"), [("b3_cp", 190), ("b3_alst", 160)])
def test_each_card_has_its_share_of_a_sequence(ran: Ran, name: str, peak: int) -> None:
    words = ("estimate", "qwen3-8b", "--gpu", "h100", "--sequence-length", "32768", "--json")
    shared = json.loads(ran(*words, "--from", CONFIGS / f"{name}.yaml")[1])
    assert shared["need"] / GIB == pytest.approx(peak, rel=0.07)
    recipe = Recipe(**{**shared["recipe"], "lora_targets": ()})
    assert recipe.context_parallel == 2
    assert recipe.effective_batch == recipe.micro_batch * recipe.accumulation * recipe.num_gpus // 2 == 16


MESHES: list[tuple[dict[str, Any], tuple[str, ...], int]] = [
    ({"cp_size": 4}, (), 4),
    ({"cp_size": 1, "tp_size": 1}, (), 1),
    ({"cp_size": 2, "cp_comm_strategy": "alltoall"}, ("parallelism_config",), 1),
    ({"cp_size": 2, "tp_size": 2}, ("parallelism_config",), 1),
    ({"dp_replicate_size": 2, "dp_shard_size": 2}, ("parallelism_config",), 1),
    ({"sp_size": 2}, ("parallelism_config",), 1),  # Ulysses needs DeepSpeed
    ({"cp_size": 2, "ep_size": 2}, ("parallelism_config",), 1),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "unknown", "shares"), MESHES)
def test_meshes_are_read_or_not_understood(
    tmp_path: Path, mesh: dict[str, Any], unknown: tuple[str, ...], shares: int
) -> None:
    block = {f"parallelism_config_{name}": size for name, size in mesh.items()}
    found = adopt(write(tmp_path, MESH | {"parallelism_config": block}))
    assert (found.unknown, found.recipe.context_parallel) == (unknown, shares)


SFT = {"output_dir": "o", "max_length": 512, "fsdp": "full_shard", "fsdp_config": {"version": 2}}
LORA = {"model_name_or_path": "m", "stage": "sft", "finetuning_type": "lora", "do_train": True}
OTHERS: list[tuple[dict[str, Any], tuple[str, ...], int]] = [
    *((AXOLOTL | {key: 2}, (key,), 1) for key in (
        "context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size", "dp_shard_size",
        "dp_replicate_size", "expert_parallel_size")),
    (AXOLOTL | {"context_parallel_size": 1, "tensor_parallel_size": 1, "dp_shard_size": 1, "heads_k_stride": 2}, (), 1),
    (SFT | {"parallelism_config": {"cp_size": 2}}, (), 2),
    (SFT | {"parallelism_config": {"tp_size": 2}}, ("parallelism_config",), 1),
    (SFT | {"parallelism_config": {"tp_size": 1, "dp_shard_size": 4}}, (), 1),
    ({"output_dir": "o", "parallelism_config": {"cp_size": 2}}, ("parallelism_config",), 1),  # not sharded
    (AXOLOTL | {"plugins": ["axolotl.integrations.grokfast.GrokfastPlugin"]}, ("plugins",), 1),
    (AXOLOTL | {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "lora_mlp_kernel": True}, (), 1),
    (AXOLOTL | {"eval_sequence_len": 1024}, ("eval_sequence_len",), 1),
    (AXOLOTL | {"eval_sequence_len": 512, "use_ray": True}, (), 1),
    (LORA | {"use_galore": True, "finetuning_type": "full", "galore_layerwise": True}, ("galore_layerwise",), 1),
    ({"zero_optimization": {"stage": 2}, "activation_checkpointing": {"cpu_checkpointing": True}}, (), 1),
]  # fmt: skip


@pytest.mark.parametrize(("says", "unknown", "shares"), OTHERS)
def test_what_is_spread_over_cards_in_other_files(
    tmp_path: Path, says: dict[str, Any], unknown: tuple[str, ...], shares: int
) -> None:
    found = adopt(write(tmp_path, says))
    assert (found.unknown, found.recipe.context_parallel) == (unknown, shares)


@pytest.mark.parametrize("says", [
    {"model": "m", "model_class": "llm", "dist_config": {"name": "fsdp2"}, "output_dir": "o"},
    {"model_name_or_path": "m", "template": "qwen", "infer_backend": "huggingface"},
    {"peft_type": "LORA", "base_model_name_or_path": "m"},
])  # fmt: skip
def test_a_file_that_trains_nothing_known_is_refused(tmp_path: Path, says: dict[str, Any]) -> None:
    with pytest.raises(Unsupported):
        adopt(write(tmp_path, says))


def test_a_plan_keeps_shared_sequences(ran: Ran, tmp_path: Path) -> None:
    words = (MODEL, "--gpu", "2xh100", "--shard", "parameters", "--context-parallel", "2")
    assert ran("estimate", *words)[0] == 0
    assert ran("estimate", MODEL, "--gpu", "2xh100", "--context-parallel", "2")[0] == 2  # not sharded
    assert ran("estimate", MODEL, "--gpu", "3xh100", *words[3:])[0] == 2
    path = write(tmp_path, MESH | {"parallelism_config": {"cp_size": 2}})
    for line in ran("plan", MODEL, "--gpu", "h100", "--from", path)[1].split("next: ")[1].splitlines():
        assert ran(*line.split()[1:])[0] == 0
    given = (MODEL, "--gpu", "h100", "--from", path, "--json")
    one, plan = (json.loads(ran(command, *given)[1]) for command in ("estimate", "plan"))
    assert plan["ladder"][0]["recipe"] == one["recipe"]
    assert plan["ladder"][0]["need"] == one["need"]
    for recipe in (plan["recipe"], *(rung["recipe"] for rung in plan["ladder"])):
        assert recipe["context_parallel"] == 2
        assert (
            recipe["micro_batch"] * recipe["accumulation"] * recipe["num_gpus"] // 2 == plan["job"]["effective_batch"]
        )


@pytest.mark.nightly
def test_a_ring_agrees_with_its_trace(ran: Ran, tmp_path: Path) -> None:
    """The trace runs torch's own ring attention."""
    pytest.importorskip("torch")
    pytest.importorskip("trl")
    from transformers import LlamaConfig

    length, mesh = 16384, MESH | {"num_processes": 2, "parallelism_config": {"parallelism_config_cp_size": 2}}
    wrapped = {"fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    path = write(tmp_path, mesh | wrapped)
    script = Path(__file__).parent / "data" / "scripts" / "context_parallel.py"
    command = ("trace", script, "--gpu", "2xh100", "--from", path, "--json", "--", length, "full", tmp_path / "out")
    run = [sys.executable, "-m", "memfit", *map(str, command)]
    traced = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=512, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4,
        head_dim=64, vocab_size=2048, max_position_embeddings=length, tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path / "model")
    words = ("--from", path, "--gpu", "2xh100", "--sequence-length", length, "--accumulation", 1, "--micro-batch", 1)
    formula = ran("estimate", tmp_path / "model", *words, "--checkpointing", "full", "--json")[1]
    step = [
        next(p["levels"]["allocated"] for p in json.loads(text)["phases"] if p["phase"] == "step")
        for text in (traced, formula)
    ]
    assert step[1] == pytest.approx(step[0], rel=0.005)


# ---- other tools, other tasks

FOREIGN = {
    "torchtune": {"output_dir": "o", "model": {"_component_": "torchtune.models.llama3_1.lora_llama3_1_8b"}},
    "NeMo Automodel": {"model": {"_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained"}},
    "Megatron": {"tensor_model_parallel_size": 2, "num_layers": 32, "micro_batch_size": 1, "seq_length": 4096},
    "torchtitan": {"job": {}, "model": {"name": "llama3"}, "training": {"seq_len": 8192}, "parallelism": {}},
}


@pytest.mark.parametrize("tool", FOREIGN)
def test_a_file_of_another_tool_is_named(ran: Ran, tmp_path: Path, tool: str) -> None:
    code, out, err = ran("estimate", MODEL, "--from", write(tmp_path, FOREIGN[tool]), *CARD)
    assert (code, out) == (2, "")
    assert tool in err.splitlines()[0] and "memfit trace" in err.splitlines()[1]


@pytest.mark.parametrize(
    ("name", "text", "tool"),
    [
        ("train.py", "from unsloth import FastLanguageModel\n", "Unsloth"),
        ("run.sh", "torchrun pretrain_gpt.py --tensor-model-parallel-size 2\n", "Megatron"),
        ("train.sh", "NPROC_PER_NODE=4 megatron sft --model Qwen/Qwen2.5-14B --micro_batch_size 1\n", "Megatron"),
        ("train.py", "import torch\n", "script"),
        ("arguments.txt", "--num-layers 32\n--hidden-size 4096\n--seq-length 4096\n", "Megatron"),
    ],
)
def test_a_script_is_traced(ran: Ran, tmp_path: Path, name: str, text: str, tool: str) -> None:
    (tmp_path / name).write_text(text)
    code, out, err = ran("plan", MODEL, "--from", tmp_path / name, *CARD)
    assert (code, out) == (2, "")
    assert tool in err.splitlines()[0] and "memfit trace" in err.splitlines()[1]


@pytest.mark.parametrize(
    "words",
    [("bert-base-uncased",), ("t5-small",), ("whisper-tiny",), (MODEL, "--task", "dpo"), ("qwen2.5-vl-3b",)], ids=str,
)  # fmt: skip
def test_techniques_of_a_task_are_counted_as_its_plan_and_estimates_are(ran: Ran, words: tuple[str, ...]) -> None:
    plan, found = (json.loads(ran(command, *words, *CARD, "--json")[1]) for command in ("plan", "techniques"))
    assert (found["recipe"], found["need"]) == (plan["recipe"], plan["need"])
    last = found["techniques"][-1]
    recipe = Recipe(**{n: tuple(v) if isinstance(v, list) else v for n, v in last["recipe"].items()})
    images = ("--images", 1) if "vl" in words[0] else ()  # an estimate counts text alone unless they are asked for
    one = json.loads(ran("estimate", *words, *images, *CARD, *as_flags(recipe), "--json")[1])
    assert one["need"] == last["need"]


@pytest.mark.parametrize(
    "words", [("bert-base-uncased",), ("whisper-tiny",), (MODEL, "--task", "dpo"), (MODEL, "--task", "grpo")], ids=str
)
def test_an_estimate_of_a_task_is_that_of_its_plan(ran: Ran, words: tuple[str, ...]) -> None:
    plan = json.loads(ran("plan", *words, *CARD, "--json")[1])
    recipe = Recipe(**{n: tuple(v) if isinstance(v, list) else v for n, v in plan["recipe"].items()})
    one = json.loads(ran("estimate", *words, *CARD, *as_flags(recipe), "--json")[1])
    assert (one["recipe"], one["peak"]) == (plan["recipe"], plan["peak"])
    swept = json.loads(ran("sweep", *words, *CARD, *as_flags(recipe), "--over", "compile=no", "--json")[1])
    assert swept["cells"][0]["recipe"] == one["recipe"]


def test_a_key_of_another_task_is_answered_with_that_task(ran: Ran, tmp_path: Path) -> None:
    says = {"output_dir": "out", "max_length": 512, "beta": 0.1, "ref_model_init_kwargs": None}
    path = write(tmp_path, says)
    for command in ("estimate", "plan"):
        code, out, err = ran(command, MODEL, "--from", path, *CARD)
        assert code == 5 and "--task dpo" in err and "ref_model_init_kwargs" not in out
        assert ran(*out.split("next: ")[1].splitlines()[0].split()[1:])[0] == 0


def test_a_classifier_is_counted_as_one(ran: Ran, tmp_path: Path) -> None:
    from memfit.models.hub import resolve_config

    config = resolve_config(MODEL) | {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = ran("estimate", tmp_path, *CARD)
    assert code == 0 and "classification" in out
