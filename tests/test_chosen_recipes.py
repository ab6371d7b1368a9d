"""The trace of the recipe that a plan chooses needs what the plan says, within the band that the plan states.

Jobs on models of few blocks and on small cards, so that what the planner seldom chooses is chosen: DDP, checkpoints in
host memory, FSDP2 with a head apart from the embedding, and with shards in host memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("trl")

from memfit import Job, Recipe, find_gpu, make_plan
from memfit.allocator.capacity import capacity
from memfit.closed_form.parallel.sharding import NCCL_BYTES
from memfit.footprints.footprint_of_trace import judged
from memfit.models.families import architecture
from memfit.models.hub import resolve_config
from memfit.nouns.alloc_settings import parse_alloc_conf
from memfit.nouns.gpu import Gpu
from memfit.nouns.plan import Plan
from memfit.units import GIB
from memfit.virtual.tracing import trace_recipe

pytestmark = pytest.mark.filterwarnings("ignore")
LITTLE = 64 << 20  # bytes that a need of less than 1.3 GiB may be off: its segments are 20 MiB and more


def card(gib: float, name: str = "a100-80gb") -> Gpu:
    return replace(find_gpu(name), total_bytes=int(gib * GIB), context_bytes=256 << 20)


SHARDED = (("shard", "parameters"),)
# model with two blocks, GiB of the card, cards, method, length, what the user set
JOBS: tuple[tuple[str, float, int, Any, int, tuple[tuple[str, Any], ...]], ...] = (
    ("pythia-410m", 1.75, 2, "qlora", 512, (("shard", "none"),)),  # DDP sends the weights in flat copies
    ("tinyllama-1.1b", 2.0, 4, "lora", 512, SHARDED),  # the loss gathers the head
    ("llama-3.2-1b", 5.5, 1, "full", 1024, (("checkpointing", "offload"), ("optimizer", "adamw-8bit"))),
)  # fmt: skip
MORE: tuple[tuple[str, float, int, Any, int, tuple[tuple[str, Any], ...]], ...] = (
    ("tinyllama-1.1b", 1.8, 2, "qlora", 512, (*SHARDED, ("offload", "parameters"))),  # gathered on the host
    ("tinyllama-1.1b", 2.2, 4, "qlora", 512, (*SHARDED, ("loading", "whole"))),
    ("llama-3.2-1b", 3.0, 4, "qlora", 4096, (*SHARDED, ("offload", "parameters"), ("checkpointing", "offload"))),
    ("smollm2-135m", 2.6, 2, "full", 4096, SHARDED),
    ("qwen2.5-0.5b", 6.0, 8, "full", 512, (("shard", "none"),)),
    ("llama-3.2-1b", 2.0, 1, "lora", 512, (("optimizer", "adamw-8bit"),)),
    ("qwen3-0.6b", 5.0, 1, "full", 512, (("optimizer", "paged-adamw-8bit"),)),
    ("qwen3-0.6b", 3.0, 1, "auto", 2048, ()),
    ("smollm2-135m", 1.6, 1, "auto", 4096, ()),
)  # fmt: skip


def planned(name: str, gib: float, count: int, method: Any, length: int, wanted: Any) -> tuple[Plan, dict[str, Any]]:
    config = {**resolve_config(name), "num_hidden_layers": 2}
    config |= {"layer_types": config["layer_types"][:2]} if config.get("layer_types") else {}
    job = Job(
        architecture=architecture(config, name), gpu=card(gib), num_gpus=count, method=method, sequence_length=length,
        wanted=wanted,
    )  # fmt: skip
    return make_plan(job), config


def needed_by_trace(recipe: Recipe, config: dict[str, Any], gpu: Gpu) -> int:
    """Return the reserved bytes on the card, or without a limit where it does not run there, and NCCL's."""
    tape, _ = trace_recipe(recipe, config, gpu)
    nccl = NCCL_BYTES if recipe.num_gpus > 1 else 0
    answer = capacity(judged(tape), parse_alloc_conf(recipe.alloc_conf), gpu=gpu, reserve=nccl)
    assert answer.judgement is not None
    return answer.judgement.need + nccl


@pytest.mark.parametrize("job", [*JOBS, *(pytest.param(j, marks=pytest.mark.nightly) for j in MORE)], ids=str)
def test_the_trace_of_the_chosen_recipe_needs_what_the_plan_says(job: Any) -> None:
    plan, config = planned(*job)
    assert plan.judgement.verdict != "misfit"
    need = needed_by_trace(plan.recipe, config, plan.job.gpu)
    assert abs(need - plan.judgement.need) <= max(plan.judgement.band, LITTLE), plan.recipe
