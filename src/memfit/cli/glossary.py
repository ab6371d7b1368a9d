"""memfit glossary: the meaning of each word memfit prints."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from memfit.cli import terminal
from memfit.cli.flags import COMMON, Argument, takes
from memfit.report.reference import glossary_view, lookup, term_view, terms

EXAMPLES = ("memfit glossary", 'memfit glossary "activation checkpointing"')


@takes(*COMMON, argument=Argument("term", "one word or phrase", "TERM", many=True))
def run(term: Sequence[str] = (), **flags: Any) -> int:
    """Explain the words memfit prints."""
    known = load()
    if term:
        one = lookup(known, " ".join(term))
        if flags["json"]:
            terminal.show_json({"schema": "memfit.glossary/1", "terms": [asdict(one)]})
        else:
            terminal.show(term_view(one))
    elif flags["json"]:
        terminal.show_json({"schema": "memfit.glossary/1", "terms": [asdict(t) for t in known]})
    else:
        terminal.show(glossary_view(known))
    return 0


def load() -> Any:
    """Read the terms of glossary.toml."""
    from importlib.resources import files

    return terms(tomllib.loads((files("memfit") / "catalogue" / "glossary.toml").read_text(encoding="utf-8")))
