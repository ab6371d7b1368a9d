"""All errors shown to the user, each with a one-line message, a `hint:` and an exit code.

MemfitError            (never raised itself)
├── BadInput       2   what was typed or read cannot be used
│   ├── UnknownName    a model, GPU, optimizer ... that is in no table
│   └── Unsupported    known, but not modelled: refused instead of guessed
├── MissingExtra   2   an optional dependency is not installed (extras.py)
├── Refused        2   the command would overwrite or destroy something
├── NotJudged      5   a setting that can change memory was not understood
└── NothingTrained 6   a traced script did not train on the card
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST_NAME = 200  # characters of a mistyped name that the message repeats
MOST_NAMES = 40  # that a hint lists where none resembles the mistyped one
SOME_CARD = "--gpu CARD"  # in hints: the command line puts the card that was typed in place of CARD
TRACE_SCRIPT = f"memfit trace train.py {SOME_CARD}"  # what works for whatever has no formula
TRACE_HINT = f"trace the script that trains it: {TRACE_SCRIPT}; 'memfit models' lists what is covered"
EXIT_FITS, EXIT_BAD_INPUT, EXIT_MISFIT, EXIT_TIGHT, EXIT_NOT_JUDGED, EXIT_NOTHING_TRAINED = 0, 2, 3, 4, 5, 6


class MemfitError(Exception):
    """Base of all errors shown to the user as one line and a hint, without a traceback."""

    exit_code: int = EXIT_BAD_INPUT

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")  # a traceback shows it

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by what was made, as errors pass between processes; the arguments that made it differ by class."""
        return _restored, (type(self), self.message, self.hint)


def _restored(kind: type[MemfitError], message: str, hint: str) -> MemfitError:
    error = kind.__new__(kind)
    MemfitError.__init__(error, message, hint=hint)
    return error


class BadInput(MemfitError):
    """Something typed or read cannot be used."""


class Unsupported(BadInput):
    """Known, but not modelled; refused instead of guessed."""


class UnknownName(BadInput):
    """A name that is in no table; the hint offers similar ones."""

    def __init__(self, what: str, name: str, known: Iterable[str], *, hint: str = "") -> None:
        shown = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."
        known = list(known)
        found = suggested(name, known, hint) or (
            f"choose one of {', '.join(known)}" if len(known) <= MOST_NAMES else ""
        )
        super().__init__(f"unknown {what} '{shown}'", hint=found)


def suggested(name: str, known: Iterable[str], hint: str, cutoff: float = 0.5) -> str:
    """Return `hint`, preceded by the names of `known` that resemble `name`, if any do."""
    near = difflib.get_close_matches(name[:LONGEST_NAME].lower(), sorted(known), n=3, cutoff=cutoff)
    return " ".join(filter(None, (f"did you mean {' or '.join(near)}?" if near else "", hint)))


class Refused(MemfitError):
    """The command would overwrite or destroy something."""


class NotJudged(MemfitError):
    """A setting that can change memory was not understood, so there is no verdict to act on."""

    exit_code = EXIT_NOT_JUDGED


class NothingTrained(MemfitError):
    """A traced script allocated nothing on the card or trained elsewhere, so there is no verdict."""

    exit_code = EXIT_NOTHING_TRAINED
