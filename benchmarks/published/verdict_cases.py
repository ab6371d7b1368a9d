"""Published runs without a figure: those that ran out of memory, and those that fitted; each as a recipe on a card."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import published.profiles.torchtune  # noqa: F401  registers the compiled loss
from memfit.catalogue.cards import find_gpu
from memfit.models.families import architecture
from memfit.nouns.architecture import Architecture
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Recipe
from memfit.tables.trainers import Trainer, trainer
from published import litgpt, trl
from published.case import NotCovered
from published.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What happened, and what to judge."""

    name: str
    fitted: bool
    architecture: Architecture
    recipe: Recipe
    gpu: Gpu
    profile: Trainer


def out_of_memory(row: Row) -> Outcome:
    """A run that ended with out-of-memory. Raises NotCovered."""
    row = replace(row, quantity=row.quantity or "reserved")
    if row.framework.startswith("lit"):
        case = litgpt.case(_litgpt_cards(row), several=True)
    elif row.framework == "TRL SFTTrainer":
        case = trl.case(row)
    else:
        raise NotCovered(f"{row.framework}, {row.sharding}")
    name = (
        f"{row.model} {case.recipe.method} b{case.recipe.micro_batch} s{case.recipe.sequence_length}, {row.n_gpus} GPUs"
    )
    return Outcome(
        name=name, fitted=False, architecture=case.architecture, recipe=case.recipe, gpu=case.gpu, profile=case.profile
    )


def _litgpt_cards(row: Row) -> Row:
    """How many cards a litgpt run used. Raises NotCovered where FSDP1 does not shard what it should.

    The table of config_hub says 4, some of its files 2; the peaks printed beside it are those of 2 cards (gemma-2b
    16.2 GiB, phi-2 13.4 GiB). With adapters FSDP1 flattens frozen and trained weights together, and the published peaks
    are those of a whole copy of the model beside the shard.
    """
    if row.n_gpus == "1":
        return row
    if row.method != "full":
        raise NotCovered("FSDP1 with adapters: frozen and trained weights in one flat parameter")
    return replace(row, n_gpus="2")


# llm-foundry's MPT presets: width, heads, layers; a GPT-2 with biases, learned positions and no dropout
MPT = {
    "125m": (768, 12, 12), "350m": (1024, 16, 24), "760m": (1536, 12, 24), "1b": (2048, 16, 24), "3b": (2560, 20, 32),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48), "70b": (8192, 64, 80),
}  # fmt: skip
CARDS = {"h100_80gb": "h100", "a100_80gb": "a100-80gb", "a100_40gb": "a100-40gb"}
SHARDS = {"FULL_SHARD": "parameters", "SHARD_GRAD_OP": "gradients"}


@cache
def mpt(size: str, positions: int) -> Architecture:
    """One preset at one sequence length."""
    width, heads, layers = MPT[size]
    config: dict[str, object] = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": width, "n_layer": layers, "n_head": heads,
        "vocab_size": 50368, "n_positions": positions, "activation_function": "gelu",
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip
    return architecture(config, f"mpt-{size}")


def fits(path: Path) -> Iterator[Outcome]:
    """llm-foundry's throughput table: every line ran. Low-precision norms and a fused cross entropy, so plain bf16."""
    profile = replace(trainer("transformers"), autocast=False, heads=(("full", "torchtune-compiled"),))
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            length = int(line["SeqLen (T)"])
            recipe = Recipe(
                method="full", precision="bf16-master", optimizer="adamw", micro_batch=int(line["MicroBatchSize"]),
                accumulation=int(line["GradAccum"]), sequence_length=length,
                checkpointing="full" if line["Activation Checkpointing"] == "True" else "none", attention="flash",
                num_gpus=int(line["# GPUs"]), shard=SHARDS[line["Sharding Strategy"]],
            )  # fmt: skip
            yield Outcome(
                name=f"MPT-{line['Model']} b{recipe.micro_batch} s{length}, {recipe.num_gpus} {line['GPU']}",
                fitted=True, architecture=mpt(line["Model"], length), recipe=recipe,
                gpu=find_gpu(CARDS[line["GPU"]]), profile=profile,
            )  # fmt: skip
