"""How a notebook shows memfit's nouns: by the views of the page, each in a frame of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from html import escape
from typing import Any

from memfit.allocator.replay import made_with
from memfit.cli.html_answer import plan_page
from memfit.cli.web_files import look
from memfit.report.answer_html import phases_html, tensors_html
from memfit.report.comparison_html import comparison_html
from memfit.report.document_html import document
from memfit.report.explanation_html import explanation_html
from memfit.report.timeline_html import plot_html
from memfit.report.watched_html import watched_html

HEIGHT = 720  # pixels of a frame; it scrolls


def install() -> None:
    """Teach the nouns to show themselves. A noun knows no view, so that a notebook has to ask for it.

    Nothing is imported: a noun whose module is not loaded yet is taught when that is asked for.
    """
    for module, name, view in VIEWS:
        noun = getattr(sys.modules.get(module), name, None)
        if noun is not None and not hasattr(noun, "_repr_html_"):
            setattr(noun, "_repr_html_", view)  # noqa: B010 - no field of the noun


def _framed(page: bytes) -> str:
    """Return a page in a frame, whose policy is its own."""
    return (
        f'<iframe srcdoc="{escape(page.decode(), quote=True)}" width="100%" height="{HEIGHT}" sandbox="allow-scripts" '
        'frameborder="0" title="memfit"></iframe>'
    )


def _document(title: str, body: str) -> str:
    return _framed(document(title, body, look()))


def _plan(plan: Any) -> str:
    return _framed(plan_page(plan))


def _footprint(footprint: Any) -> str:
    return _document("footprint", tensors_html(footprint.peak, None) + phases_html(footprint))


def _tape(tape: Any) -> str:
    torch, settings = made_with(tape)
    return _document("timeline", plot_html(tape, settings, torch, go_on=True))


def _comparison(found: Any) -> str:
    return _document("comparison", comparison_html("", "", None, found))


def _explained(found: Any) -> str:
    if not found.findings:
        return "<p>No memory ran out.</p>"
    return _document("explanation", explanation_html("this process", found.evidence, found.findings))


def _watched(run: Any) -> str:
    return _document(run.header.name, watched_html(run))


VIEWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("memfit.nouns.plan", "Plan", _plan),
    ("memfit.nouns.footprint", "Footprint", _footprint),
    ("memfit.nouns.tape", "Tape", _tape),
    ("memfit.nouns.sample", "Watched", _watched),
    ("memfit.footprints.compare", "Comparison", _comparison),
    ("memfit.live.explain_oom", "Explained", _explained),
)
