"""Read the experiments of PEFT's method comparison: the adapter and the training settings that a row names.

peft_experiments.json holds the configurations that the results of the comparison state, without what is PEFT's default.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from published.case import NotCovered
from published.rows import Row

SPARSE = ("FROD", "SHIRA")  # they compute with sparse tensors, whose temporaries the virtual GPU does not know
DATA = Path(__file__).resolve().parents[1] / "peft_experiments.json"


def experiment_of(row: Row, kind: str) -> dict[str, Any]:
    """Return {"config": PEFT's arguments, "train": those of the script} of a row's text or image experiment."""
    if "experimental branch" in row.notes:
        raise NotCovered("a run of an experimental branch, whose code is not released")
    named = re.search(r"experiment ([^;]+);", row.notes)
    table = json.loads(DATA.read_text(encoding="utf-8"))[kind]
    if named is None or named[1] not in table:
        raise NotCovered("its experiment is not published")
    found: dict[str, Any] = {"train": {}, **table[named[1]]}
    return found


def adapted(model: Any, experiment: dict[str, Any]) -> Any:
    """Return the model under the experiment's PEFT method. Raises NotCovered where the installed PEFT has no such."""
    given = dict(experiment["config"])
    if not given:
        return model
    if given["peft_type"] in SPARSE:
        raise NotCovered(f"{given['peft_type']} computes with sparse tensors")
    from peft import get_peft_model
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kind = given.pop("peft_type")
    if kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
        raise NotCovered(f"PEFT's method {kind}, which its releases do not have")
    made = PEFT_TYPE_TO_CONFIG_MAPPING[kind](**_named(given))
    return get_peft_model(model, made, autocast_adapter_dtype=experiment["train"].get("autocast_adapter_dtype", True))


def _named(given: dict[str, Any]) -> dict[str, Any]:
    if "use_bdlora" in given:
        from peft.tuners.lora.config import BdLoraConfig

        given = {**given, "use_bdlora": BdLoraConfig(**given["use_bdlora"])}
    return given


def stated(row: Row, model: Any) -> None:
    """Raise NotCovered where the model does not train as many weights as the row states."""
    trained, told = sum(p.numel() for p in model.parameters() if p.requires_grad), row.stated("trainable")
    if told and trained != told:
        raise NotCovered(f"{trained:,} trained weights, of {told:,} that the row states")
