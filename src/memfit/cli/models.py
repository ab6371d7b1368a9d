"""memfit models: list the catalogue of models, or search it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from memfit.cli import terminal
from memfit.cli.flags import COMMON, Argument, takes
from memfit.documents.listings import ModelRowDoc, ModelsDoc
from memfit.errors import UnknownName
from memfit.models.hub import list_models
from memfit.report.reference import models_view

EXAMPLES = ("memfit models qwen",)


@takes(*COMMON, argument=Argument("text", "part of a name or family", "TEXT"))
def run(text: str | None = None, **flags: Any) -> int:
    """List the models in memfit's catalogue, which need no network."""
    every = list_models()
    text = text or ""
    words = text.lower().split()
    rows = [e for e in every if all(any(w in name.lower() for name in (*e.names, e.family)) for w in words)]
    if not rows:
        raise UnknownName(
            "model", text, [n for e in every for n in e.names], hint="any org/name on Hugging Face works too"
        )
    if flags["json"]:
        terminal.show_json(ModelsDoc(models=tuple(ModelRowDoc(**asdict(e)) for e in rows)))
        return 0

    terminal.show(models_view(rows))
    return 0
