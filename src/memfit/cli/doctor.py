"""memfit doctor: say what is installed, what could be added, and whether card, driver and cache are in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from memfit.cli import terminal
from memfit.cli.flags import COMMON, takes
from memfit.cli.installation import Finding, findings, versions
from memfit.documents.listings import DoctorDoc, LineDoc
from memfit.errors import EXIT_BAD_INPUT, EXIT_FITS

EXAMPLES = ("memfit doctor", "memfit doctor --json")
_STYLES = {"ok": "green", "note": "dim", "fault": "bold red"}


@takes(*COMMON)
def run(**flags: Any) -> int:
    """Say what is installed, and whether all is in order.

    Libraries and the extras that would add some, PyTorch's build, the card, its driver, and the cache of traces.
    Exit code 0 if all is in order, 2 if not; a missing extra, or no card, is in order.
    """
    found = findings()
    if flags["json"]:
        rows = tuple(LineDoc(about=f.about, state=f.state, text=f.text, type_next=f.type_next) for f in found)
        terminal.show_json(DoctorDoc(versions=versions(), findings=rows))
    else:
        _show(found, ", ".join(f"{name} {version}" for name, version in versions().items()))
    return EXIT_BAD_INPUT if any(f.state == "fault" for f in found) else EXIT_FITS


def _show(found: Iterable[Finding], versions: str) -> None:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in found:
        table.add_row(Text(one.state, _STYLES[one.state]), one.about, one.text)
        if one.type_next:
            table.add_row("", "", Text(one.type_next, "bold"))
    terminal.show(Group(Text(versions), "", table))
