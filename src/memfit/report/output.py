"""A console for output that somebody may close: that is an error of the one who writes, as with print, not the end of the process."""

from __future__ import annotations

from rich.console import Console


class Output(Console):
    """rich's own ends the process with code 1 where nobody reads any more, whichever output it is, and closes stdout besides."""

    def on_broken_pipe(self) -> None:
        """Raises BrokenPipeError."""
        raise BrokenPipeError("nobody reads the output")
