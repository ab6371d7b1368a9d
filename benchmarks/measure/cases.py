"""The table of runs: small models with random weights under every trainer, each a Setup."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memfit.catalogue import config, names
from memfit.virtual.jobs.recipe import Setup

NESTED = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


@dataclass(frozen=True, slots=True)
class Case:
    """One run. words: arguments of Setup; alloc_conf: of PyTorch's allocator."""

    name: str
    model: str
    words: dict[str, Any] = field(default_factory=dict)
    alloc_conf: str = ""

    def setup(self) -> Setup:
        """Return the job of the case."""
        entry = names.find(self.model)
        assert entry is not None, self.model
        return Setup(config=dict(config(entry)), **{"load": "device", "sequence": 512, **self.words})


def _cases() -> list[Case]:
    found: list[Case] = []

    def add(name: str, model: str, alloc_conf: str = "", **words: Any) -> None:
        found.append(Case(name, model, words, alloc_conf))

    small = ("qwen2.5-0.5b", "llama-3.2-1b", "gpt2", "smollm2-135m", "pythia-160m")
    for model in small:
        add(f"loop {model}", model, trainer="torch", optimizer="adamw_torch")
        add(f"trainer {model}", model, trainer="transformers", dtype="fp32", autocast="bf16", micro_batch=2)
        add(
            f"sft {model} lora",
            model,
            trainer="trl",
            method="lora",
            autocast="bf16",
            checkpointing="nonreentrant",
            micro_batch=4,
        )
    one = "qwen2.5-0.5b"
    for sequence in (128, 1024, 2048, 4096):
        add(f"loop length {sequence}", one, trainer="torch", sequence=sequence)
    for optimizer in (
        "adamw_torch",
        "adamw_forloop",
        "sgd_momentum",
        "adafactor",
        "adamw_bnb_8bit",
        "paged_adamw_8bit",
    ):
        add(f"loop {optimizer}", one, trainer="torch", optimizer=optimizer)
    for kind in ("none", "nonreentrant", "reentrant"):
        add(
            f"trainer checkpointing {kind}",
            one,
            trainer="transformers",
            autocast="bf16",
            checkpointing=kind,
            micro_batch=4,
        )
    for attention in ("eager", "sdpa"):
        for mask in ("ones", "padded"):
            add(f"loop {attention} {mask}", one, trainer="torch", attention=attention, mask=mask, micro_batch=2)
    add("sft expandable", one, "expandable_segments:True", trainer="trl", autocast="bf16", micro_batch=2)
    add("sft max_split", one, "max_split_size_mb:128", trainer="trl", autocast="bf16", micro_batch=2)
    add("sft qlora", one, trainer="trl", method="qlora", load="checkpoint", quantization=NESTED, autocast="bf16")
    add(
        "trainer qlora",
        one,
        trainer="transformers",
        method="qlora",
        load="checkpoint",
        quantization=NESTED,
        autocast="bf16",
    )
    add("trainer accumulation", one, trainer="transformers", autocast="bf16", accumulation=3)
    add("trainer evaluate", one, trainer="transformers", autocast="bf16", evaluate=True)
    add("loop fp16", one, trainer="torch", dtype="fp32", autocast="fp16")
    return found


CASES: tuple[Case, ...] = tuple(_cases())
