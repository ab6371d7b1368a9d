"""Print views and JSON to stdout, and notes, progress and errors to stderr; pipes get plain text."""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from memfit.errors import EXIT_FITS, EXIT_MISFIT, EXIT_NOT_JUDGED, EXIT_TIGHT

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console, RenderableType

    from memfit.nouns.plan import Verdict
    from memfit.nouns.tape import Tape

EXIT_OF: dict[Verdict, int] = {
    "fits": EXIT_FITS, "tight": EXIT_TIGHT, "misfit": EXIT_MISFIT, "not_judged": EXIT_NOT_JUDGED,
}  # fmt: skip
UNBOUNDED = 10_000  # columns in a pipe: nothing is wrapped there, so one fact stays one line
PROGRESS_AFTER = 0.4  # seconds before progress is shown
PLAINER = {"·": "-", "±": "+-", "▶": ">", "│": "|", "╎": "!", "■": "#", "█": "#"}


def forgive_encodings() -> None:
    """Make stdout and stderr replace characters that their encoding lacks instead of raising."""
    codecs.register_error("plainer", _plainer)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller (`>&-`)
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="plainer")


def _plainer(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(PLAINER.get(c, "?") for c in error.object[error.start : error.end]), error.end


def interactive() -> bool:
    """Return whether stdout is a terminal."""
    return sys.stdout.isatty()


def show(view: RenderableType) -> None:
    """Print a view to stdout, without control characters, since its names come from files."""
    from memfit.report.layout import Visible

    view, out = Visible(view), console(sys.stdout)
    if out.is_terminal:
        out.print(view, crop=False)  # the terminal itself wraps long commands
        return
    with out.capture() as captured:
        out.print(view)
    # drop the padding of the last column
    sys.stdout.write("".join(line.rstrip() + "\n" for line in captured.get().rstrip("\n").split("\n")))


def show_json(document: Any) -> None:
    """Print a document, or plain data, as JSON to stdout."""
    sys.stdout.write(json_text(document))


def json_text(document: Any) -> str:
    """Return a document, or plain data, as JSON that is safe to print."""
    from memfit.documents import codec

    text = codec.dumps(document)
    for c in {c for c in set(text) - {"\n"} if not c.isprintable()}:  # control characters inside strings
        text = text.replace(c, json.dumps(c)[1:-1])
    return text + "\n"


def drop_output() -> None:
    """Discard output that cannot be written (`| head` has ended, the disk is full), so that Python exits quietly."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def note(text: str) -> None:
    """Print one line to stderr."""
    _print_line("note:", "dim", text)


def notes(lines: Iterable[str]) -> None:
    """Print each line to stderr."""
    for line in lines:
        note(line)


def check_files(flags: Mapping[str, Any], *names: str) -> None:
    """Refuse, before anything is computed, files that flags name and that cannot be written."""
    from memfit.documents.output_files import check_free

    check_free([Path(flags[name]) for name in names if flags[name]], flags["force"])


def write_file(flags: Mapping[str, Any], name: str, made: Callable[[], bytes]) -> None:
    """Write the file that a flag names, if it is given."""
    if flags[name]:
        from memfit.documents.output_files import write_files

        write_files({Path(flags[name]): made()}, flags["force"])
        note(f"wrote {flags[name]}")


def open_browser(address: str, wanted: bool | None = None) -> None:
    """Open an address in a browser. wanted: None where it depends on somebody looking on at a display."""
    windows = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if wanted or (wanted is None and sys.stdout.isatty() and windows):  # one in the terminal would take the terminal
        import webbrowser

        webbrowser.open(address)


def note_card(tape: Tape | None) -> None:
    """Note which GPU is shown, if the snapshot has several."""
    if tape and (chosen := tape.about.get("chosen")):
        note(f"{chosen} (--device N shows another)")


def error(message: str, hint: str = "") -> None:
    """Print an error and its hint to stderr."""
    _print_line("error:", "bold red", message)
    if hint:
        _print_line("hint:", "bold", hint)


def sentence(message: str) -> str:
    """Return click's message without its capital and full stop, as memfit's own are."""
    message = " ".join(message.split()).rstrip(".")
    return message[:1].lower() + message[1:]


def console(file: TextIO) -> Console:
    """Make a rich console that takes text literally and, without a terminal, never wraps."""
    from memfit.report.layout import Output

    made = Output(file=file, highlight=False, markup=False, emoji=False, soft_wrap=False, legacy_windows=False)
    return made if made.is_terminal else Output(file=file, highlight=False, markup=False, emoji=False, width=UNBOUNDED)


def _print_line(label: str, style: str, message: str) -> None:
    from rich.text import Text

    from memfit.report.words import visible

    one_line = visible(" ".join(message.split()))
    with suppress(OSError):  # stderr itself is closed
        console(sys.stderr).print(Text.assemble((label, style), " ", one_line), soft_wrap=True)


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """Yield tell(text, share of 1), which draws on stderr if that is a terminal and the work takes a while."""
    if not sys.stderr.isatty():
        yield lambda text, share: None
        return
    from time import monotonic

    start, live = monotonic(), _Live()

    def tell(text: str, share: float) -> None:
        if monotonic() - start > PROGRESS_AFTER:
            live.update(text, share)

    try:
        yield tell
    finally:
        live.stop()


class _Live:
    """A progress bar that is created when it is first drawn."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.task: Any = None

    def update(self, text: str, share: float) -> None:
        if self.bar is None:
            from rich.progress import BarColumn, Progress, TextColumn

            self.bar = Progress(
                TextColumn("{task.description}"), BarColumn(), console=console(sys.stderr), transient=True
            )
            self.task = self.bar.add_task(text, total=1.0)
            self.bar.start()
        self.bar.update(self.task, description=text, completed=share)

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
