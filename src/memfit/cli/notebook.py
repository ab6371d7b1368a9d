"""How a notebook shows memfit's nouns: by the views of the page, each in a frame of its own."""

from __future__ import annotations

from html import escape
from typing import Any

from memfit.nouns.footprint import Footprint
from memfit.nouns.plan import Plan

HEIGHT = 720  # pixels of a frame; it scrolls


def install() -> None:
    """Teach the nouns to show themselves. A noun knows no view, so that a notebook has to ask for it."""
    for noun, view in ((Plan, _plan), (Footprint, _footprint)):
        if not hasattr(noun, "_repr_html_"):
            setattr(noun, "_repr_html_", view)  # noqa: B010 - no field of the noun


def _framed(page: bytes) -> str:
    """Return a page in a frame, whose policy is its own."""
    return (
        f'<iframe srcdoc="{escape(page.decode(), quote=True)}" width="100%" height="{HEIGHT}" sandbox="allow-scripts" '
        'title="memfit"></iframe>'
    )


def _plan(plan: Any) -> str:
    from memfit.cli.html_answer import plan_page

    return _framed(plan_page(plan))


def _footprint(footprint: Any) -> str:
    from memfit.cli.web_files import look
    from memfit.report.answer_html import phases_html, tensors_html
    from memfit.report.document_html import document

    body = tensors_html(footprint.peak, None) + phases_html(footprint)
    return _framed(document("footprint", body, look()))
