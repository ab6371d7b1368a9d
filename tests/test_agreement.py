"""Hold the planner's answers against each other: with more hardware, with explicit choices, with what is printed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agreement
from memfit import Job, find_gpu, make_plan, resolve_model
from memfit.catalogue.cards import list_gpus
from memfit.frameworks.targets import TARGETS, export, writable
from smoke import smoke

MODELS = ("qwen2.5-0.5b", "llama-3.2-3b", "llama-2-7b", "qwen3-30b-a3b", "qwen3-32b", "llama-3.1-70b", "gpt2")
CARDS = ("t4", "rtx-3060-12gb", "rtx-4090", "rtx-a6000", "a100-80gb", "h100", "mi300x", "m4-max-128gb")


def job(model: str, gpu: str, **changes: Any) -> Job:
    return Job(architecture=resolve_model(model), gpu=find_gpu(gpu), **changes)


@settings(deadline=None, max_examples=8, derandomize=True)
@given(
    model=st.sampled_from(MODELS), gpu=st.sampled_from(CARDS), count=st.sampled_from((1, 2, 3, 8)),
    method=st.sampled_from(("auto", "full", "lora", "qlora")), length=st.sampled_from((512, 1024)),
)  # fmt: skip
def test_the_answers_about_a_job_agree(model: str, gpu: str, count: int, method: str, length: int) -> None:
    card = find_gpu(gpu)
    asked = job(model, gpu, num_gpus=1 if card.unified else count, method=method, sequence_length=length)
    assert [str(found) for found in agreement.checked(asked, every=False)] == []


# what was once answered "does not fit" on more hardware, or by `auto`: model, cards, method
FIT = [
    ("qwen3-32b", "rtx-4090", 1, "qlora"), ("qwen3-32b", "rtx-4090", 2, "qlora"),
    ("llama-3.1-70b", "rtx-a6000", 1, "qlora"), ("llama-3.1-70b", "rtx-a6000", 2, "qlora"),
    ("llama-3.1-405b", "h100", 8, "auto"), ("llama-3.1-405b", "h100", 8, "lora"),
    ("llama-3.1-70b", "rtx-4090", 2, "auto"), ("deepseek-v3-671b", "h200", 8, "auto"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "gpu", "count", "method"), smoke(FIT, lambda case: case[2:]))
def test_what_fits_one_way_fits_by_the_other(model: str, gpu: str, count: int, method: Any) -> None:
    assert make_plan(job(model, gpu, num_gpus=count, method=method)).judgement.verdict == "fits"


@pytest.mark.parametrize("count", smoke((8, 2, 4), lambda count: [count > 2]))
def test_more_cards_than_a_node_has_host_memory_for_do_not_hurt(count: int) -> None:
    """Every card adds a process that loads the weights to the host."""
    wanted = (("lora_rank", 64),)
    asked = job("mistral-large-2407", "rtx-4080-super", num_gpus=count, method="qlora", sequence_length=4096)
    found = make_plan(replace(asked, wanted=wanted, effective_batch=8, host_memory=256 << 30))
    assert (found.judgement.verdict, found.recipe.num_gpus) == ("fits", 2)


@pytest.mark.nightly
def test_an_explicit_choice_finds_nothing_that_auto_does_not() -> None:
    asked = job("qwen3-32b", "t4", method="qlora")
    plan = make_plan(asked)
    assert plan.judgement.verdict == "misfit"
    assert list(agreement.checked(asked, every=True)) == []


def test_recommended_cards_fit_with_the_peak_that_is_shown() -> None:
    asked = job("llama-3.1-70b", "rtx-4090", num_gpus=2, method="qlora", wanted=(("offload", "none"),))
    offered = make_plan(asked, cards=list_gpus()).alternatives
    assert offered
    for option in offered:
        again = make_plan(replace(asked, gpu=find_gpu(option.gpu), num_gpus=option.num_gpus))
        assert (again.recipe, again.judgement) == (option.recipe, option.judgement)


@pytest.mark.parametrize("key", [key for key in TARGETS if key != "diffusers"])  # which runs another task
@pytest.mark.parametrize(("model", "gpu", "count"), [("llama-3.2-1b", "rtx-4090", 1), ("llama-3.1-8b", "h100", 8)])
def test_a_plan_for_a_target_can_be_written_for_it(key: str, model: str, gpu: str, count: int) -> None:
    asked = job(model, gpu, num_gpus=count, trainer=TARGETS[key].trainer or "trl")
    assert export(make_plan(asked, writable=writable(asked, key)), key)


FULL = """
model_name_or_path: llama-3.2-1b
stage: sft
finetuning_type: full
pure_bf16: true
cutoff_len: 512
per_device_train_batch_size: 1
gradient_accumulation_steps: 16
"""


def test_a_file_is_offered_more_cards_at_its_own_effective_batch(ran: Any, tmp_path: Path) -> None:
    """A file's batch is per card, so that more cards are the same job only with --effective-batch."""
    (file := tmp_path / "llamafactory.yaml").write_text(FULL)
    words = ("plan", "--from", file, "--offload", "none", "--json")
    found = json.loads(ran(*words, "--gpu", "rtx-3070")[1])
    assert found["verdict"] == "misfit"
    offered = next(option for option in found["alternatives"] if option["num_gpus"] > 1)
    assert sum("--effective-batch 16" in note for note in found["notes"]) == 1
    card = f"{offered['num_gpus']}x{next(g.short for g in list_gpus() if g.name == offered['gpu'])}"
    asked = json.loads(ran(*words, "--gpu", card, "--effective-batch", 16)[1])
    assert (asked["recipe"], asked["need"]) == (offered["recipe"], offered["judgement"]["need"])


def test_techniques_answers_as_the_plan_of_a_trainer_that_reads_a_file(ran: Any) -> None:
    words = ("llama-3.1-70b", "--gpu", "8xh100", "--sequence-length", "32k", "--trainer", "axolotl", "--json")
    plan, techniques = (json.loads(ran(command, *words)[1]) for command in ("plan", "techniques"))
    assert (plan["recipe"], plan["need"]) == (techniques["recipe"], techniques["need"])


def test_loading_is_said_to_have_no_effect_only_where_it_has_none(ran: Any) -> None:
    words = ("qwen2.5-7b", "--loading", "sharded", "--method", "full")
    several, alone = (ran("plan", *words, "--gpu", gpu) for gpu in ("4xrtx-a6000", "rtx-a6000"))
    assert ("--loading" in several[2], "--loading" in alone[2]) == (False, True)
    assert "sharded one by one" in several[1]


def test_the_largest_sequence_is_not_the_recipes_own_where_host_memory_ends_the_longest() -> None:
    asked = job("mistral-large-2407", "rtx-4080-super", num_gpus=2, method="qlora", effective_batch=2)
    plan = make_plan(replace(asked, sequence_length=4096, host_memory=256 << 30, wanted=(("lora_rank", 64),)))
    longer = replace(plan.job, sequence_length=plan.largest["sequence_length"])
    assert longer.sequence_length >= 8192  # by estimate 11.8 of 15.2 GiB
    assert make_plan(longer).judgement.verdict == "fits"
