"""TRL's long-context benchmark: transformers' Trainer, of which SFTTrainer is one, under accelerate's FSDP2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memfit.catalogue import config as catalogued
from memfit.catalogue import names
from memfit.nouns.gpu import Gpu
from memfit.nouns.tape import Mark, Tape
from memfit.virtual.tracing import trace_recipe
from published.frameworks import case_of
from published.predict import TRAINING
from published.rows import Row

PACKAGES = ("transformers", "accelerate", "liger-kernel")


def tape(row: Row, gpu: Gpu) -> Tape:
    """Return the tape of the training on rank 0; neither evaluation nor checkpoint followed it."""
    entry = names.find(row.model)
    assert entry is not None
    config: dict[str, Any] = catalogued(entry)
    found = trace_recipe(case_of(row).recipe.but(trainer="transformers"), config, gpu, lean=True)[0]
    after = (n for n, event in enumerate(found.events) if isinstance(event, Mark) and event.phase not in TRAINING)
    return replace(found, events=found.events[: next(after, None)])
