"""Model resolution (being built): a name becomes an Architecture."""

from __future__ import annotations

import json
from importlib.resources import files

from memfit.architecture import Architecture
from memfit.errors import UnknownName
from memfit.families import architecture


def resolve_model(text: str, *, offline: bool | None = None, token: str | None = None) -> Architecture:
    """The Architecture of a catalogue model."""
    stem = text.rsplit("/", 1)[-1].lower().removesuffix("-hf").removesuffix("-instruct")
    path = files("memfit") / "catalogue" / "models" / f"{stem}.json"
    if not path.is_file():
        raise UnknownName("model", text, [])
    return architecture(json.loads(path.read_text()), text)
