"""One self-contained HTML file of a view: it opens without a server or a network, and its scripts are its own alone."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from html import escape
from itertools import repeat

from memfit.report.bar import NCCL
from memfit.report.words import ROLE_WORDS, UNKNOWN, VERDICT_COLOURS, visible

_META = "default-src 'none'; style-src {style}; script-src {script}; img-src data:; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True, slots=True)
class Look:
    """The stylesheet and the script of all views, as texts."""

    style: str
    script: str


def stylesheet(views: str) -> str:
    """Return the whole stylesheet: a colour for each role and verdict, as in the terminal, in front of views.css."""
    found: dict[str, str] = {role: word.colour for role, word in ROLE_WORDS.items()}
    found |= {"unknown": UNKNOWN.colour, "nccl": NCCL.colour, "slack": found["fragmentation"]}
    names = ";".join(f"--{name}:{colour}" for name, colour in (found | VERDICT_COLOURS).items())
    fills = "\n".join(f".{name} {{ fill: var(--{name}); }}" for name in found)
    return f":root {{ {names} }}\n{fills}\n{views}"


def document(title: str, body: str, look: Look) -> bytes:
    """Return the file in UTF-8. Its Content-Security-Policy names style and script by their digests.

    body: HTML whose texts are escaped.
    """
    policy = _META.format(style=_digest(look.style), script=_digest(look.script))
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(visible(title))}</title>\n<style>{look.style}</style>\n"
        f'<main class="document">\n{clean(body)}\n</main>\n<script type="module">{look.script}</script>\n</html>\n'
    ).encode()


def words(text: str) -> str:
    """Return a text for HTML: control characters replaced, markup escaped."""
    return escape(visible(text), quote=True)


def breakable(text: str) -> str:
    """Return a text for HTML whose long names, as of modules and settings, may go on in another line."""
    return re.sub(r"(?<=[._/=])(?=\w)", "<wbr>", words(text))


def slug(text: str) -> str:
    """Return a text as a part of an id: lower case, dashes for all that is neither letter nor digit."""
    return "-".join("".join(c if c.isascii() and c.isalnum() else " " for c in text.lower()).split())


@lru_cache(maxsize=1024)
def term(name: str, said: str = "") -> str:
    """Return a word that the page links to its entry in the glossary of Learn; elsewhere it is plain text."""
    return f'<a data-term="term-{slug(name)}">{words(said or name)}</a>'


def clean(html: str) -> str:
    """Return HTML with the control characters of its texts replaced; its own line breaks stay."""
    return "\n".join(map(visible, html.split("\n")))


def swatch(name: str) -> str:
    """Return a small square in the colour of a role."""
    return f'<svg class="swatch" aria-hidden="true"><rect class="{name}" width="11" height="11"/></svg>'


_CLASSES = {">": ' class="number"', "=": ' class="formula"'}  # by what stands in front of a head


def html_table(
    heads: Iterable[str], rows: Iterable[Sequence[str]], marks: Iterable[str] = repeat(""), kind: str = ""
) -> str:
    """Return a table of cells in HTML. A head with '>' in front has numbers under it, one with '=' a formula.

    A row's cells beyond the heads are notes below it. marks: classes of the rows; kind: the class of the table.
    """
    heads = tuple(heads)
    classes = [_CLASSES.get(head[:1], "") for head in heads]
    head = "".join(f"<th{c}>{words(h[bool(c) :])}</th>" for h, c in zip(heads, classes, strict=True))
    made = ""
    for row, mark in zip(rows, marks, strict=False):
        cells, notes = row[: len(heads)], row[len(heads) :]
        above = f' class="{mark or "noted"}"' if mark or notes else ""
        made += f"<tr{above}>{''.join(f'<td{c}>{x}</td>' for x, c in zip(cells, classes, strict=True))}</tr>"
        made += "".join(f'<tr><td class="formula" colspan="{len(heads)}">{note}</td></tr>' for note in notes)
    own = f' class="{kind}"' if kind else ""
    return f'<div class="wide"><table{own}><tr>{head}</tr>{made}</table></div>'


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
