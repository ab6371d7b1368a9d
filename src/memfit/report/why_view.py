"""Prints what why.py explains: one line of arithmetic per share, and the table of tensors with bytes per token."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.closed_form.why import Kept, Reason, Why
from memfit.report.layout import GAP, table, text
from memfit.report.words import ROLE_WORDS, instant, tokens
from memfit.units import human

ROWS = 20  # tensors shown by name; the small ones are summed


def why_view(why: Why) -> Group:
    """The arithmetic of the peak, then the tensors the forward pass keeps and those at work at the worst instant."""
    parts: list[RenderableType] = [
        text(f"why {human(why.peak.levels.device)}: {instant(why.peak)}", "bold"),
        _sums(why.reasons),
    ]
    per_token = sum(k.bytes * k.count for k in why.kept if k.where == "block" and k.per_token) // max(why.tokens, 1)
    kept = f"kept by the forward pass for the backward pass: {human(sum(k.total for k in why.kept))}, {human(per_token)} per token in {why.blocks} blocks"
    for title, group in ((kept, why.kept), (f"at work at the worst instant, {why.peak.instant}", why.working)):
        if group:
            parts += ["", text(title, "bold"), _tensors(group, why.tokens)]
    return Group(*parts)


def arithmetic(reason: Reason) -> str:
    """'6,738,415,616 x 2 x 2 B = 25.1 GiB', summands joined; a lone size is not repeated."""
    told = (t.text if t.text == human(t.bytes) else f"{t.text} = {human(t.bytes)}" for t in reason.terms)
    return " + ".join(told)


def _sums(reasons: Sequence[Reason]) -> Table:
    grid = Table.grid(padding=(0, GAP, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(overflow="fold")
    for reason in reasons:
        sums = arithmetic(reason)
        told = f"{reason.words}: {sums}" if sums and sums != human(reason.bytes) else reason.words
        grid.add_row(Text(f"{reason.label}:", ROLE_WORDS[reason.role].colour), human(reason.bytes), text(told))
    return grid


def _tensors(group: Sequence[Kept], count: int) -> RenderableType:
    made = table("tensor", ">B per token", ">x tokens", ">x tensors", ">together")
    shown, rest = group[:ROWS], group[ROWS:]
    for kept in shown:
        made.add_row(text(_place(kept)), *_per_token(kept, count), tokens(kept.count), human(kept.total))
    if rest:
        many, total = sum(k.count for k in rest), sum(k.total for k in rest)
        made.add_row(text(f"{len(rest)} smaller kinds"), "", "", tokens(many), human(total))
    return made


def _place(kept: Kept) -> str:
    return kept.label if kept.where == "block" else f"{kept.where}: {kept.label}"


def _per_token(kept: Kept, count: int) -> tuple[str, str]:
    """Bytes per token and tokens; a tensor that does not grow with the tokens shows its size alone."""
    if not kept.per_token or kept.bytes % count:
        return human(kept.bytes), "-"
    return tokens(kept.bytes // count), tokens(count)
