"""One self-contained HTML file of a view: it opens without a server or a network, and its scripts are its own alone."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from hashlib import sha256
from html import escape

from memfit.report.words import visible

_META = "default-src 'none'; style-src {style}; script-src {script}; img-src data:; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True, slots=True)
class Look:
    """The stylesheet and the script of all views, as texts."""

    style: str
    script: str


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


def clean(html: str) -> str:
    """Return HTML with the control characters of its texts replaced; its own line breaks stay."""
    return "\n".join(map(visible, html.split("\n")))


def swatch(name: str) -> str:
    """Return a small square in the colour of a role."""
    return f'<svg class="swatch" aria-hidden="true"><rect class="{name}" width="11" height="11"/></svg>'


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
