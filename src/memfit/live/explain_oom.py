"""memfit.explain_oom(): explains an out-of-memory of running code from the allocator and the variables as they were."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memfit.explain import Clue, Evidence, explain, read_text
from memfit.explain.evidence import SHOWN, SURE
from memfit.explain.history.reading import memory_of
from memfit.explain.memory import Memory
from memfit.live.holders.retained import frames_of, roots_of
from memfit.live.line_observer import LineObserver, about
from memfit.nouns.finding import Finding, Proof
from memfit.units import human

if TYPE_CHECKING:
    from memfit.virtual.device.card import Card

MAX_ENTRIES = 200_000  # events that a real card's history holds: some hundred bytes of host memory each
LEAST_WORDS = 30_000  # entries of a vocabulary: hidden layers of most models are narrower
WIDTHS = (4, 2)  # bytes of a logit
ROUNDING = 512  # bytes by which a request may exceed its tensor


@dataclass(slots=True)
class Explained:
    """What explain_oom found; empty until memory ran out."""

    evidence: Evidence | None = None
    findings: tuple[Finding, ...] = ()


@contextmanager
def explain_oom(tell: Callable[[str], object] | None = None) -> Iterator[Explained]:
    """Explain a torch.OutOfMemoryError that leaves this context to `tell` (default: stderr), and raise it again.

    On a real card memory history is recorded from here on, unless it is recorded already; on a virtual one
    (memfit.virtual_gpu) every allocation with its module and line. An explanation that fails is only reported as
    such: the error is never lost.
    """
    found = Explained()
    card = _virtual_card()
    with _recorded(card) as memory:
        try:
            yield found
        except torch.OutOfMemoryError as error:
            try:
                text = "".join(traceback.format_exception(error))
                evidence = read_text(text, memory(), roots_of(error))
                found.evidence = replace(evidence, clues=_sums(error, evidence))
                found.findings = explain(found.evidence)
                (tell or _to_stderr)(_text(found))
            except Exception as failure:
                (tell or _to_stderr)(f"memfit could not explain it: {type(failure).__name__}: {failure}")
            raise


def _sums(error: BaseException, evidence: Evidence) -> tuple[Clue, ...]:
    """Return what the size of the request shows."""
    asked = evidence.memory.asked if evidence.memory else 0
    clue = logits_clue(error, asked) if asked else None
    return (clue,) if clue else ()


def _text(found: Explained) -> str:
    """Return the explanation as plain text."""
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
def _recorded(card: Card | None) -> Iterator[Callable[[], Memory | None]]:
    """Record what the card does; yield a function that reads its memory as of the last out-of-memory."""
    if card is not None:
        observer = LineObserver(card)
        with observer.watching():
            yield lambda: memory_of(observer.tape(about(card)))
    elif torch.cuda.is_available() and torch._C._cuda_isHistoryEnabled():
        yield _of_real_card  # the program records already, perhaps from its start: leave that as it is
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


# --- logits: the request that failed, compared with the shapes in the frames ---


def logits_clue(error: BaseException, asked: int) -> Clue | None:
    """Recognise `asked` bytes as tokens x words x width of a tensor or an output layer in the frames of the error."""
    for rows, words, name in _shapes(error):
        for width in WIDTHS:
            if words >= LEAST_WORDS and rows and 0 <= asked - rows * words * width < ROUNDING:
                text = f"{human(asked)} are {rows:,} tokens x {words:,} words x {width} B, as of '{name}'"
                return Clue("logits", SURE + SHOWN, Proof(text, asked))
    return None


def _shapes(error: BaseException) -> Iterator[tuple[int, int, str]]:
    """Yield (rows, columns, name) of what the frames hold, the innermost frame first."""
    for frame in reversed(frames_of(error)):
        values = list(frame.f_locals.items())
        for name, value in values:
            if isinstance(value, Tensor) and value.dim() >= 2:
                yield value.numel() // max(value.shape[-1], 1), value.shape[-1], name
        for _, layer in values:
            if isinstance(layer, torch.nn.Linear):
                for name, value in values:
                    if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[-1] == layer.in_features:
                        yield value.numel() // value.shape[-1], layer.out_features, name
