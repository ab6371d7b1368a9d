"""memfit watch: measure a command from outside while it runs, or show the log of a watched run."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from memfit.catalogue import cards
from memfit.cli import page, terminal
from memfit.cli.flags import COMMON, TAKEN, Argument, Flag, takes
from memfit.cli.html_answer import watched_page
from memfit.cli.logs import read_watched
from memfit.documents import footprint_file
from memfit.documents.watch_doc import watched_doc
from memfit.errors import EXIT_FITS, BadInput, MemfitError
from memfit.extras import MissingExtra
from memfit.live.outside.command import program_of
from memfit.live.outside.command import run as run_child
from memfit.live.outside.processes import outside_meter
from memfit.live.watch.outputs import REFRESH, Screen, open_sinks
from memfit.live.watch.recorder import Recorder, check_log
from memfit.nouns.gpu import Gpu
from memfit.nouns.sample import METERS, Header
from memfit.report.watching import closing_view, live_view, status_of

EXAMPLES = (
    "memfit watch -- python train.py --epochs 1",
    "memfit watch --predicted run/recipe.toml --live -- python run/train.py",
    "memfit watch --page -- python train.py",
    "memfit watch memfit-watch.jsonl --html run.html",
)
WHAT = Argument(
    "what", "a command after '--', or the .jsonl log of a run, which is shown and in a terminal followed",
    "LOG|-- COMMAND", required=True, many=True,
)  # fmt: skip
MEASURES = ("auto", "nvml", "rss")
LOG = "memfit-watch.jsonl"
OWN = (
    Flag("predicted", str, "The prediction to compare with: recipe.toml, tape, snapshot, JSON or another log.", "FILE"),
    Flag("log", str, f"Append samples here as JSON lines. Default: {LOG}.", "FILE"),
    Flag("every", float, "Seconds between samples. Default: 1.", "SECONDS"),
    Flag(
        "measure", str, "Measure the card through its driver, or resident memory. Default: the card, if there is one.",
        "|".join(MEASURES),
    ),
    Flag("to", str, "Also send samples to: tensorboard[:DIR], wandb[:PROJECT], prometheus[:PORT].", "A,B"),
    Flag("live", bool, "Show a live view below the command's output.", default=False),
)  # fmt: skip
PAGE = Flag("page", bool, "Show the run in a browser while it lasts, over the prediction.", default=False)
HTML = (
    Flag("html", str, "Write the run, over the prediction, to open in a browser.", "FILE"),
    Flag("force", bool, "Overwrite files.", default=False),
)
FASTEST, SLOWEST = 0.01, 3600.0


@takes(*OWN, PAGE, *HTML, *COMMON, argument=WHAT)
def run(what: tuple[str, ...], **flags: Any) -> int:
    """Watch a run's memory live.

    Starts a command, measures it from outside and returns its exit code. Phases, steps and leaks are visible only from
    inside: put memfit.watch(model, optimizer), memfit.MemfitCallback or memfit.LightningCallback into the script.
    """
    terminal.check_files(flags, "html")
    if len(what) == 1 and what[0].endswith(".jsonl"):
        return _show_log(Path(what[0]), flags)
    return _watch(list(what), flags)


def _watch(command: list[str], flags: dict[str, Any]) -> int:
    every = 1.0 if flags["every"] is None else flags["every"]
    if not FASTEST <= every <= SLOWEST:
        raise BadInput(f"--every must be from {FASTEST:g} to {SLOWEST:g} seconds", hint="--every 1")
    measure = flags["measure"] or "auto"
    if measure not in MEASURES:
        raise BadInput(f"--measure cannot be '{measure[:40]}'", hint=f"choose one of {', '.join(MEASURES)}")
    program_of(command)  # before an empty log is begun
    log = Path(flags["log"] or LOG)
    check_log(log)  # before sinks open files and ports
    if not log.parent.is_dir():
        raise BadInput(
            f"there is no folder {log.parent} for the log", hint=shlex.join(["mkdir", "-p", str(log.parent)])
        )
    meter, note = outside_meter(measure)
    predicted = footprint_file.of(flags["predicted"], _card(flags["predicted"], meter))
    if note:
        terminal.note(note)
    header = _header(command, meter, predicted)
    sinks = open_sinks((part.strip() for part in (flags["to"] or "").split(",") if part.strip()), header)
    screen, show_line = _screen(flags)
    with _page(log) if flags["page"] else nullcontext():
        recorder = Recorder(header, log, sinks, screen)
        code, watched = run_child(command, recorder, meter, every, show_line, aside=flags["json"])
        if killed := _killed_by(code):
            terminal.note(killed)
        terminal.write_file(flags, "html", lambda: watched_page(watched))
    if flags["json"]:
        with suppress(OSError):  # the command's exit code is the answer, whether this is read or not
            terminal.show_json(watched_doc(watched, code))
    terminal.drop_output()
    return code


def _killed_by(code: int) -> str:
    """Return which signal an exit code of a command, or of the shell that ran it, stands for; "" for none."""
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return ""
    host = ", which the kernel sends where the machine's own memory runs out (dmesg shows it)" * (name == "SIGKILL")
    return f"exit code {code}: the command was ended by {name}{host}"


@contextmanager
def _page(log: Path) -> Iterator[None]:
    """Open the page over a log; where somebody looks on, it stays after the command until Ctrl-C."""
    try:
        import uvicorn  # noqa: F401
    except ModuleNotFoundError:
        raise MissingExtra("the page", "page") from None
    command = [sys.executable, "-m", "memfit", "page", "--follow", str(log), "--no-open"]
    quiet = subprocess.DEVNULL
    # a session of its own: Ctrl-C is for the command that is watched
    page = subprocess.Popen(
        command, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet, start_new_session=True, text=True
    )
    try:
        assert page.stdout is not None
        address = page.stdout.readline().strip()
        terminal.note(f"the page: {address}" if address else "the page did not start; memfit page says why")
        if address:
            terminal.open_browser(address)
        yield
        if address and sys.stdin.isatty() and sys.stderr.isatty():
            terminal.note("the command has ended; the page stays until Ctrl-C")
            with suppress(KeyboardInterrupt):
                page.wait()
    finally:
        page.terminate()
        page.wait()


def _card(predicted: str | None, meter: Any) -> Gpu | None:
    """Return the watched card, whose context counts in the prediction; None if no prediction is compared with it."""
    if predicted and METERS[meter.name].compared == "device":
        with suppress(MemfitError):
            return cards.local_gpu()
    return None


def _header(command: list[str], meter: Any, predicted: Any) -> Header:
    name = next((Path(word).name for word in command if word.endswith(".py")), Path(command[0]).name)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return Header(name, meter.name, meter.card, meter.total, started, predicted=predicted)


def _screen(flags: dict[str, Any]) -> tuple[Screen, Any]:
    """Return the screen and, for a live view, the function that shows the command's own lines."""
    from memfit.live.watch.outputs import Live, Plain, Quiet

    if flags["json"]:
        return Quiet(), None
    if not (flags["live"] and sys.stderr.isatty()):
        return Plain(), None
    from rich.text import Text

    live = Live()
    return live, lambda line: live.console.print(Text.from_ansi(line))


def _show_log(path: Path, flags: dict[str, Any]) -> int:
    """Show the log; in a terminal follow it as it grows."""
    given = [row.flag for row in OWN if flags[row.name] not in (None, row.default, False)]
    if given:
        raise BadInput(f"{given[0]} is for a command that is started", hint="memfit watch -- python train.py")
    if sys.stdout.isatty() and not (flags["json"] or flags["html"] or flags["page"]):
        return _follow(path)
    watched = read_watched(path)
    terminal.write_file(flags, "html", lambda: watched_page(watched))
    if flags["page"]:
        return _follow_on_page(path)
    if flags["json"]:
        terminal.show_json(watched_doc(watched))
    else:
        terminal.show(closing_view(watched))
    return EXIT_FITS


def _follow_on_page(path: Path) -> int:
    """Show the log on the page until Ctrl-C."""
    unset = {row.parameter: () if row.many else row.default for row in TAKEN[page.run][0]}
    return page.run(**{**unset, "follow": str(path)})


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0  # reading it reports a missing file


def _follow(path: Path) -> int:
    """Show the live view of a log until Ctrl-C; the file is read again when it has grown."""
    size, view = -1, None
    from rich.live import Live

    with Live(console=terminal.console(sys.stdout), auto_refresh=False) as live:
        while True:
            found = _size(path)
            if found != size and (found or size < 0):  # empty or gone for a while: it is rotated
                size, watched = found, read_watched(path)
                view = live_view(status_of(watched)) if watched.samples else None
                if view is not None:
                    live.update(view, refresh=True)
            time.sleep(REFRESH)
