"""memfit cache: show or empty the folder that keeps answers of traces and environments of lock files."""

from __future__ import annotations

from typing import Any

from memfit.cli import terminal
from memfit.cli.flags import COMMON, Flag, takes
from memfit.documents import traced_answers
from memfit.units import human, several

EXAMPLES = ("memfit cache", "memfit cache --clear")


@takes(Flag("clear", bool, "Remove all answers and environments.", default=False), *COMMON)
def run(**flags: Any) -> int:
    """Show the folder that keeps the answers of traces.

    'memfit plan' traces what no formula models; a recipe that was traced before is answered from this folder, which
    keeps the tapes too that its timelines are drawn from.
    'memfit diff' keeps there the environments that it makes of lock files.
    MEMFIT_CACHE names another one.
    """
    from rich.text import Text

    if flags["clear"]:
        traced_answers.clear()
    held = {**traced_answers.held(), **traced_answers.held_environments()}
    if flags["json"]:
        terminal.show_json({"schema": "memfit.cache/1", "folder": str(traced_answers.folder()), **held})
        return 0
    count, made = held["answers"], held["environments"]
    answers = f"{several(count, 'answer')}, {human(held['bytes'])} of at most {human(traced_answers.LIMIT)}"
    kept = f"{several(made, 'environment')} of lock files, {human(held['environment_bytes'])}"
    terminal.show(Text(f"{traced_answers.folder()}: {answers}; {kept}"))
    return 0
