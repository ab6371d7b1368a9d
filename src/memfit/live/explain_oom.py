"""memfit.explain_oom(): explain an out-of-memory error of running code from the allocator and the live variables."""

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
from memfit.holders.retained import frames_of, roots_of
from memfit.live.line_observer import LineObserver, about
from memfit.nouns.alloc_settings import torch_version
from memfit.nouns.finding import Finding, Proof
from memfit.units import human

if TYPE_CHECKING:
    from memfit.virtual.device.card import Card

MAX_ENTRIES = 200_000  # events of a real card's history: some hundred bytes of host memory each
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
    """Explain a torch.OutOfMemoryError raised in this context: pass the text to `tell` (default: print it to stderr).

    On a real card memory history is recorded from here on, unless it is recorded already; on a virtual one
    (memfit.virtual_gpu) every allocation with its module and line. The error is raised again, also where explaining
    it fails.
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
                clue = logits_clue(error, evidence.memory.asked if evidence.memory else 0)
                found.evidence = replace(evidence, clues=(clue,) if clue else ())
                found.findings = explain(found.evidence)
                (tell or _to_stderr)(_text(found))
            except Exception as failure:
                (tell or _to_stderr)(f"memfit could not explain it: {type(failure).__name__}: {failure}")
            raise


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
        yield _of_real_card  # the program records already: leave its recording as it is
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

    return memory_of(tape_of(torch.cuda.memory._snapshot(), torch=torch_version(torch.__version__)))


# --- logits: the request that failed, compared with the shapes in the frames ---


def logits_clue(error: BaseException, requested: int) -> Clue | None:
    """Recognise `requested` bytes as tokens x words x width of a tensor or an output layer in the error's frames."""
    for rows, words, name in _shapes(error):
        for width in WIDTHS:
            if words >= LEAST_WORDS and rows and 0 <= requested - rows * words * width < ROUNDING:
                text = f"{human(requested)} are {rows:,} tokens x {words:,} words x {width} B, as of '{name}'"
                return Clue("logits", SURE + SHOWN, Proof(text, requested))
    return None


def _shapes(error: BaseException) -> Iterator[tuple[int, int, str]]:
    """Yield (rows, columns, name) of the frames' tensors and of what their layers make of them, innermost first."""
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
