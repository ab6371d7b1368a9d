"""memfit cache: show or empty the folder that keeps the answers of traces."""

from __future__ import annotations

from typing import Any

from memfit.cli import terminal
from memfit.cli.flags import COMMON, Flag, takes
from memfit.documents import traced_answers
from memfit.units import human

EXAMPLES = ("memfit cache", "memfit cache --clear")


@takes(Flag("clear", bool, "Remove all answers.", default=False), *COMMON)
def run(**flags: Any) -> int:
    """Show the folder that keeps the answers of traces.

    'memfit plan' traces what no formula models; a recipe that was traced before is answered from this folder.
    MEMFIT_CACHE names another one.
    """
    from rich.text import Text

    if flags["clear"]:
        traced_answers.clear()
    held = traced_answers.held()
    if flags["json"]:
        terminal.show_json({"schema": "memfit.cache/1", "folder": str(traced_answers.folder()), **held})
        return 0
    count = held["answers"]
    terminal.show(Text(f"{traced_answers.folder()}: {count} answer{'s' * (count != 1)}, {human(held['bytes'])} "
                       f"of at most {human(traced_answers.LIMIT)}"))  # fmt: skip
    return 0
