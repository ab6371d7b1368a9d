"""The table of frameworks: which mapping reads which rows, and why the others have none."""

from __future__ import annotations

import re
from collections.abc import Callable

from memfit.closed_form.run.account import Account
from memfit.errors import MemfitError
from memfit.nouns.job import check_values
from published import axolotl, hfdoc, litgpt, peft, qwen, qwenvl, swift, torchtune, trl
from published.case import Case, NotCovered
from published.rows import Row

FRAMEWORKS: tuple[tuple[str, Callable[[Row], Case]], ...] = (
    (r"lit-?gpt", litgpt.case),
    (r"torchtune", torchtune.case),
    (r"transformers Trainer$", hfdoc.case),
    (r"transformers Trainer \+ peft", qwen.case),
    (r"PEFT method_comparison", peft.case),
    (r"axolotl", axolotl.case),
    (r"ms-swift sft", swift.case),
    (r"TRL SFTTrainer (packing|FSDP2 \+ CP)", trl.case),
)

REASONS: tuple[tuple[str, str], ...] = (
    (r"torch \+ timm", "a vision transformer"),
    (r"torchtitan", "FSDP2 over several cards: another model, a compiled loss, or linear layers in 8 bits"),
    (r"TRL SFTTrainer", "sharded over several cards, or with context parallelism"),
    (r"TRL notebook", "generation (GRPO) or a vision model inside a notebook"),
    (r"ms-swift$", "header comment of an example: neither card nor lengths are stated"),
    (r"fsdp_qlora", "18 GiB of offloaded weights, which a trace would hold in real memory"),
    (r"transformers \+ peft notebook", "what is allocated after the forward, no peak"),
    (r"accelerate \+ peft", "an encoder-decoder"),
    (r"torchrun_main", "GaLore's 8-bit states, updated in the backward pass, are not modelled"),
    (r"LLaMA-Factory fork", "BAdam's block-wise optimizer is not modelled"),
    (r"transformers Trainer \+ DeepSpeed", "a vision model under DeepSpeed on several cards"),
    (r"llama-recipes", "FSDP1 over 4 cards on lengths that are not stated"),
    (r"PyTorch script", "a classifier of the author's own layers"),
    (r"PyTorch snapshot", "a course's own model and optimizer code"),
    (r"torch profiler", "nanotron's own model code"),
)


def _read(row: Row, mapping: Callable[[Row], Case]) -> Case:
    """A row by its framework's mapping. Raises NotCovered, also for a cell that the mapping cannot read."""
    try:
        case = mapping(row)
        check_values(case.recipe.but(quantization="none"))  # published bases have formats of their own
    except (LookupError, ValueError, StopIteration, MemfitError) as error:
        raise NotCovered(f"{type(error).__name__} in a cell that is not known: {error}") from error
    if not Account(case.architecture, case.recipe, case.gpu, case.padded, case.profile).static.trained:
        raise NotCovered(f"adapters on {', '.join(case.recipe.lora_targets)}: the model has no such module")
    return case


def case_of(row: Row) -> Case:
    """A row as a Case. Raises NotCovered with the reason."""
    if row.method.startswith("op:"):
        raise NotCovered("one loss operator, no training run")
    if row.group == "qwenvl":
        return _read(row, qwenvl.case)
    for pattern, mapping in FRAMEWORKS:
        if re.match(pattern, row.framework, re.IGNORECASE):
            return _read(row, mapping)
    for pattern, reason in REASONS:
        if re.match(pattern, row.framework):
            raise NotCovered(reason)
    raise NotCovered(f"framework '{row.framework}' has no mapping")
