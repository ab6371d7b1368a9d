"""memfit.explain_oom(): explains an out-of-memory of running code from the allocator and the variables as they were."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from memfit.explain import Clue, Evidence, explain, read_text
from memfit.explain.history.reading import memory_of
from memfit.explain.memory import Memory
from memfit.live.holders.roots import roots_of
from memfit.live.oom.line_observer import LineObserver, about
from memfit.live.oom.logits import logits_clue
from memfit.nouns.finding import Finding

if TYPE_CHECKING:
    from memfit.virtual.device.card import Card

MAX_ENTRIES = 200_000  # events a real card's history holds: some hundred bytes of host memory each


@dataclass(slots=True)
class Explained:
    """What the context found; empty until memory ran out."""

    evidence: Evidence | None = None
    findings: tuple[Finding, ...] = ()


@contextmanager
def explain_oom(tell: Callable[[str], object] | None = None) -> Iterator[Explained]:
    """While it is open, a torch.OutOfMemoryError that leaves it is explained to `tell` (default: stderr), then goes on.

    On a real card memory history is recorded from here on, where it is not recorded already; on a virtual one (memfit.virtual_gpu) every allocation with
    its module and line. An explanation that fails is itself only a line: the error is never lost.
    """
    found = Explained()
    card = _virtual_card()
    with _watched(card) as memory:
        try:
            yield found
        except torch.OutOfMemoryError as error:
            try:
                text = "".join(traceback.format_exception(error))
                evidence = read_text(text, memory(), roots_of(error))
                found.evidence = replace(evidence, clues=_sums(error, evidence))
                found.findings = explain(found.evidence)
                (tell or _to_stderr)(said(found))
            except Exception as failure:
                (tell or _to_stderr)(f"memfit could not explain it: {type(failure).__name__}: {failure}")
            raise


def _sums(error: BaseException, evidence: Evidence) -> tuple[Clue, ...]:
    """What the size of the request says."""
    asked = evidence.memory.asked if evidence.memory else 0
    clue = logits_clue(error, asked) if asked else None
    return (clue,) if clue else ()


def said(found: Explained) -> str:
    """The explanation as plain text."""
    import io

    from rich.console import Console

    from memfit.report.explain import explain_view
    from memfit.report.layout import Visible

    assert found.evidence is not None
    out = io.StringIO()
    Console(file=out, width=160, highlight=False, markup=False, emoji=False).print(
        Visible(explain_view("out of memory", found.evidence, found.findings))
    )
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def _virtual_card() -> Card | None:
    dispatch = sys.modules.get("memfit.virtual.device.dispatch")
    return dispatch._CARD[-1] if dispatch is not None and dispatch._CARD else None


@contextmanager
def _watched(card: Card | None) -> Iterator[Callable[[], Memory | None]]:
    """Yields what reads the memory of the card at the last out-of-memory."""
    if card is not None:
        observer = LineObserver(card)
        with observer.watching():
            yield lambda: memory_of(observer.tape(about(card)))
    elif torch.cuda.is_available() and torch._C._cuda_isHistoryEnabled():
        yield _of_real_card  # somebody records already, perhaps from the start: it goes on as it was
    elif torch.cuda.is_available():
        torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES)
        try:
            yield _of_real_card
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
    else:
        yield lambda: None


def _of_real_card() -> Memory | None:
    from memfit.documents.snapshot.history import tape_of

    version = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    return memory_of(tape_of(torch.cuda.memory._snapshot(), torch=(version[0], version[1])))
