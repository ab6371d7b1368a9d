"""Several virtual cards against recorded runs of FSDP2 and DDP: `python benchmarks/oracle_sharded.py [FILE | DIR]`.

FILE is tests/data/sharded_runs.json (levels of the last step), DIR holds whole records (`*.json`, every phase). Prints
a row for every record and phase that is out of bounds, and a summary; exits 1 if there is one.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from oracle import CARDS, MODELS

from memfit.tape import Tape


def setup_of(case: dict[str, Any], config: dict[str, Any]) -> Any:
    from memfit.virtual.jobs.setup import Setup

    full = case["tune"] == "full"
    rank = 16 if full else int(case["tune"].split("_")[0].removeprefix("lora"))
    return Setup(
        config=config, trainer="torch", method="full" if full else "lora", dtype=case["weights"], rank=rank, alpha=2 * rank,
        autocast="bf16" if case["mixed"] else "", checkpointing="none" if case["ckpt"] == "none" else "nonreentrant", attention=case["attn"],
        micro_batch=case["mb"], sequence=case["seq"], accumulation=case["accum"], clip=case["clip"], steps=case["steps"],
        mask=case["mask"], load="meta", use_cache=False, world_size=case["world"],
        shard="parameters" if case["mode"] == "fsdp2" else "none", reshard=case["reshard"], sync_each=case["sync_each"],
        bucket_view=case["view"],
    )  # fmt: skip


def traced(case: dict[str, Any], config: dict[str, Any], *, late: bool) -> tuple[Tape, Any]:
    """The tape of a case, and the settings it was made under. late: NCCL's watchdog looks late."""
    from memfit.cards import find_gpu
    from memfit.virtual import Answers, virtual_gpu
    from memfit.virtual.jobs import run
    from memfit.virtual.observer import Observer

    capacity = case["total_gib"] << 30
    gpu = replace(find_gpu(CARDS[case["cc"]]), total_bytes=capacity, context_bytes=0, sm_count=108)
    with virtual_gpu(gpu, world_size=case["world"], answers=Answers(late_watchdog=late)) as card:
        observer = Observer(card)
        with observer.watching():
            run(setup_of(case, config), observer)
        return observer.tape({}), card.ledger.allocator.settings
