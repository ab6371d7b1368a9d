"""Recipes refused because a library fails on a model do fail, in the library's own code on the virtual card."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("trl")
pytest.importorskip("peft")

from memfit.tables.combinations import NOT_BY_TRL, ROUTERS
from memfit.virtual.jobs import run
from memfit.virtual.jobs.recipe import Setup
from memfit.virtual.observer import Observer
from memfit.virtual.virtual_gpu import virtual_gpu

SMALL = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 1,
    "intermediate_size_mlp": 512,
}  # fmt: skip


def _train(kind: str, **words: Any) -> None:
    with virtual_gpu("h100") as card:
        observer = Observer(card)
        with observer.watching():
            run(Setup(config={"model_type": kind, **SMALL}, sequence=64, **words), observer)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", NOT_BY_TRL)
def test_trl_fails(kind: str) -> None:
    with pytest.raises(AttributeError):
        _train(kind, trainer="trl")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ROUTERS)
def test_an_adapter_on_the_router_fails_and_others_do_not(kind: str) -> None:
    with pytest.raises(AttributeError, match="tuple"):
        _train(kind, trainer="transformers", method="lora")
    _train(kind, trainer="transformers", method="lora", targets=("q_proj", "v_proj"))
