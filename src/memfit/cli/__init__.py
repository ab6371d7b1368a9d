"""The command line: parse, call, show. Data goes to stdout, all else to stderr; errors never show a traceback.

Exit codes: 0 fits (or done) · 1 a bug in memfit · 2 bad input · 3 does not fit · 4 too tight to promise ·
5 not judged · 6 a script that trained nothing on the card · 130 interrupted.
"""

from __future__ import annotations

import errno
import gc
import os
import shlex
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from memfit.cli import terminal
from memfit.errors import EXIT_BAD_INPUT, SOME_CARD, MemfitError

if TYPE_CHECKING:
    from click import ClickException

EXIT_BUG, EXIT_INTERRUPTED, EXIT_PIPE = 1, 130, 141  # 128 + the signal's number, as shells report it
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
REPORT = "this is a bug in memfit; please report it with the output of the same command and --debug"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        gc.disable()  # cycle collection takes a tenth of a half-second process and frees nothing
    terminal.forgive_encodings()
    if "--debug" in args:
        return run_words(args)
    try:
        return run_words(args)
    except MemfitError as error:
        terminal.error(error.message, _with_card(error.hint, args))
        return error.exit_code
    except (KeyboardInterrupt, EOFError):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        terminal.drop_output()
        return EXIT_PIPE
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            terminal.error(f"no file has so long a name: {str(error.filename)[:60]} ...", "give the path of a file")
            return EXIT_BAD_INPUT
        if error.errno not in NO_ROOM:
            return _bug(error)
        terminal.drop_output()
        terminal.error(f"the output cannot be written: {error.strerror}", "is the disk full?")
        return EXIT_BAD_INPUT
    except Exception as error:  # a bug in memfit: one line, never a traceback
        return _bug(error)


def _with_card(hint: str, args: list[str]) -> str:
    """Return the hint with the card of the command line, or with some card, in place of CARD."""
    card = next((after for flag, after in pairwise(args) if flag == "--gpu"), "rtx-4090")
    return hint.replace(SOME_CARD, f"--gpu {shlex.quote(card)}")


def _bug(error: Exception) -> int:
    terminal.error(f"{type(error).__name__}: {error}", REPORT)
    return EXIT_BUG


def run_words(args: list[str]) -> int:
    """Run the command through click, and print click's usage errors in memfit's format. Raises MemfitError."""
    from click.exceptions import ClickException, Exit

    from memfit.cli.tree import app

    if "_MEMFIT_COMPLETE" in os.environ:  # a shell asks for completions
        app.main(args, prog_name="memfit")
    try:
        # app.main() would handle a closed pipe itself
        with app.make_context("memfit", args, max_content_width=100) as context:
            code = app.invoke(context)
        sys.stdout.flush()
    except Exit as stop:  # --help and --version
        code = stop.exit_code
        sys.stdout.flush()
    except ClickException as misuse:
        return _misuse(misuse, args)
    return code if isinstance(code, int) else 0


def _misuse(misuse: ClickException, words: list[str]) -> int:
    from click import NoSuchOption

    from memfit.cli.flags import meant_flag

    where = getattr(misuse, "ctx", None)
    command = where.command_path if where else " ".join(["memfit", *words[:1]])  # click's parser says none
    message, hint = misuse.format_message(), f"see: {command} --help"
    if "extra argument" in message:
        hint = f"a value with spaces needs quotes, as in --gpu 'm3 max'; {hint}"
    meant = meant_flag(misuse.option_name) if isinstance(misuse, NoSuchOption) else ""
    if where and any(meant.partition(" ")[0] in row.opts for row in where.command.params):
        message, hint = misuse.message, f"use {meant} instead; {hint}"
    script = next((word for word in words if word.endswith((".py", ".sh"))), "")
    if isinstance(misuse, NoSuchOption) and script and words[0] == "trace":
        hint = f"what {script} takes follows after --: memfit trace {script} ... -- {misuse.option_name} ...; {hint}"
    terminal.error(terminal.sentence(message), hint)
    return EXIT_BAD_INPUT
