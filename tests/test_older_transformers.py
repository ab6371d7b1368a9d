"""Runs of transformers 4 on one card and under FSDP1, against allocated peaks that are published to the byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memfit.catalogue.cards import find_gpu
from memfit.closed_form.run.account import Account
from memfit.closed_form.run.estimate import estimate
from memfit.models.hub import resolve_model
from memfit.nouns.job import Recipe
from memfit.tables.cautions import cautions
from memfit.tables.trainers import Trainer, trainer
from memfit.units import MIB, human

# foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv at 00febdc, c3a069c, b6c1455, 4e81c64,
# 9239802 and 24bdadb with the versions of refs/requirements.txt: Mistral-7B, 4,096 tokens, A100 80 GB, flash-attn,
# checkpointing, adapters of rank 16 on q, k, v and o. PEFT makes fp32 adapters from 0.12 on; only bf16=True autocasts
OLD_PEFT, NEW_PEFT, AUTOCAST = {"adapter_fp32": False}, {"adapter_fp32": True}, {"autocast": True}
PUBLISHED: tuple[tuple[str, dict[str, bool], dict[str, Any], tuple[tuple[int, int, int], ...]], ...] = (
    ("4.39.3", OLD_PEFT, {}, ((1, 4, 26108963328), (1, 8, 37098695168), (2, 2, 15123161088), (2, 4, 21433753600))),
    ("4.39.3", OLD_PEFT, {"lora_dropout": 0.1},
     ((1, 4, 26109561344), (1, 8, 37100825088), (2, 2, 15458877440), (2, 4, 22105014272))),
    ("4.43.3", NEW_PEFT, {"lora_dropout": 0.1}, ((2, 2, 15245721600), (2, 4, 22161342464))),
    ("4.44.2", AUTOCAST, {"lora_dropout": 0.1},
     ((1, 4, 25681144320), (1, 8, 36670876160), (2, 2, 14975934464), (2, 4, 21622071296))),
    ("4.45.2", NEW_PEFT, {"lora_dropout": 0.1},
     ((1, 4, 25653881344), (1, 8, 36643613184), (2, 2, 15245549568), (2, 4, 22161170432))),
    ("4.48.1", NEW_PEFT, {"lora_dropout": 0.1},
     ((1, 4, 26704571904), (1, 8, 38742912512), (2, 2, 15144870400), (2, 4, 21959827968))),
    ("4.44.2", AUTOCAST, {"lora_dropout": 0.1, "method": "qlora", "quantization": "nf4-double"},
     ((2, 2, 9525273600), (2, 4, 16171410432))),
    ("4.45.2", NEW_PEFT, {"method": "full", "optimizer": "adamw-foreach"}, ((1, 8, 72435230720), (2, 4, 36226136576))),
)  # fmt: skip
RUNS = [
    (f"transformers=={version}", numerics, changes, *run)
    for version, numerics, changes, runs in PUBLISHED
    for run in runs
]
MISTRAL, A100 = resolve_model("mistral-7b-v0.1", offline=True), find_gpu("a100-80gb")


def run_of(spec: str, numerics: dict[str, bool], cards: int, batch: int, **changes: Any) -> tuple[Recipe, Trainer]:
    recipe = Recipe(
        method="lora", lora_rank=16, lora_targets=("attention",), micro_batch=batch, sequence_length=4096,
        checkpointing="full", attention="flash", trainer=spec, num_gpus=cards, fsdp_version=1,
        shard="parameters" if cards > 1 else "none",
    )  # fmt: skip
    plain = {"autocast": False, "logits_to_fp32": False} | numerics
    return recipe.but(**changes), replace(trainer(spec), **plain)


@pytest.mark.parametrize(("spec", "numerics", "changes", "cards", "batch", "measured"), RUNS)
def test_allocated_peaks_are_those_that_were_measured(
    spec: str, numerics: dict[str, bool], changes: dict[str, Any], cards: int, batch: int, measured: int
) -> None:
    recipe, profile = run_of(spec, numerics, cards, batch, **changes)
    account = Account(MISTRAL, recipe, A100, False, profile)
    peak = max(instant.requested for instant in account.instants() if instant.phase == "step")
    assert peak == pytest.approx(measured, rel=2e-4 if spec != "transformers==4.39.3" else 1e-3)


@pytest.mark.parametrize(("batch", "shown"), [(2, 17316 * MIB), (4, 24995 * MIB)])
def test_what_nvidia_smi_showed_is_near_the_played_run(batch: int, shown: int) -> None:
    recipe, profile = run_of("transformers==4.44.2", AUTOCAST, 2, batch, lora_dropout=0.1)
    phases = estimate(MISTRAL, recipe, A100, padded=False, profile=profile, at_capacity=False).phases
    device = {phase.phase: phase.levels.device for phase in phases}
    assert -0.05 < device["step"] / shown - 1 < 0.02
    assert device["eval"] == device["step"]


def test_only_fsdp1_around_a_checkpointed_frozen_block_holds_its_input() -> None:
    def peak(spec: str = "transformers==4.51", **changes: Any) -> int:
        recipe = run_of(spec, {}, 2, 4)[0].but(**changes)
        account = Account(MISTRAL, recipe, A100, False)
        return max(i.requested for i in account.instants() if i.phase == "step" and i.name.startswith("backward of bl"))

    held = 2 * 31 * 4 * 4096 * 4096  # the inputs' gradients of all blocks but the first
    assert peak() - peak(fsdp_version=2) == pytest.approx(held, rel=0.2)
    assert peak(fsdp_version=2) == pytest.approx(peak("transformers==4.52"), rel=0.02)
    assert peak(method="full") == peak(method="full", fsdp_version=2)


@pytest.mark.parametrize(
    ("spec", "version", "more"),
    [("transformers", 1, True), ("transformers==4.57", 1, False), ("transformers", 2, False)],
)
def test_a_version_that_is_assumed_is_said_with_what_an_older_one_would_hold(
    spec: str, version: int, more: bool
) -> None:
    recipe = run_of(spec, {}, 2, 4)[0].but(fsdp_version=version)
    said = [line for line in cautions(MISTRAL, recipe, A100) if "FSDP1" in line]
    assert bool(said) == (version == 1)
    assert any(human(4 * 32 * 4 * 4096 * 4096) in line for line in said) == more
