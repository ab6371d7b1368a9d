"""The table of frameworks: which mapping reads which rows."""

from __future__ import annotations

import re
from collections.abc import Callable

from published import hfdoc, litgpt, peft, qwen, swift, torchtune
from published.case import Case, NotCovered
from published.rows import Row

FRAMEWORKS: tuple[tuple[str, Callable[[Row], Case]], ...] = (
    (r"lit-?gpt", litgpt.case),
    (r"torchtune", torchtune.case),
    (r"transformers Trainer$", hfdoc.case),
    (r"transformers Trainer \+ peft", qwen.case),
    (r"PEFT method_comparison", peft.case),
    (r"ms-swift sft", swift.case),
)


def case_of(row: Row) -> Case:
    """A row as a Case. Raises NotCovered with the reason."""
    if row.method.startswith("op:"):
        raise NotCovered("one loss operator, no training run")
    for pattern, mapping in FRAMEWORKS:
        if re.match(pattern, row.framework, re.IGNORECASE):
            return mapping(row)
    raise NotCovered(f"framework '{row.framework}' has no mapping")
