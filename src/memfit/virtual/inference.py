"""Decide what a forward pass without a backward is for: an evaluation, or a part of a training step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Literal

from memfit.nouns.tape import FORWARD, GENERATION, WITHOUT_GRADIENTS, Phase

# functions of Trainers, of Lightning and of scripts from which an evaluation runs its passes, or a training step
_EVALUATES = frozenset({
    "evaluate", "evaluation_loop", "prediction_loop", "prediction_step", "validate", "validation_step", "test_step",
    "predict_step", "eval_step",
})  # fmt: skip
_TRAINS = frozenset({"training_step", "train_step", "_precompute_ref_logps"})
_GENERATES = frozenset({"generate"})
_NAMES = _EVALUATES | _TRAINS | _GENERATES

Part = Literal["evaluation", "training", ""]


def caller() -> tuple[Part, str]:
    """Return what the functions on the stack run a pass for, "" if they do not show it, and the pass's instant.

    Trainers evaluate by generating, and generate within a training step: the outer function decides the part.
    """
    found: set[str] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _NAMES:
            found.add(frame.f_code.co_name)
        frame = frame.f_back
    part: Part = "evaluation" if found & _EVALUATES else "training" if found & _TRAINS else ""
    instant = GENERATION if found & _GENERATES else WITHOUT_GRADIENTS if part == "training" else FORWARD
    return part, instant


@dataclass(frozen=True, slots=True)
class OpenPass:
    """A pass of a script's own loop whose purpose later passes show.

    mark: index of its mark. batches: number of the iterator of the batch that it may use, 0 without one. module: id of
    the module that ran, evaluates: whether that was in evaluation mode and made no tokens. phase: that of training.
    """

    mark: int
    batches: int
    module: int
    evaluates: bool
    phase: Phase


def settled(
    marks: list[tuple[int, Phase, str]], passes: Sequence[OpenPass], learned: set[int], trained: set[int], last: int
) -> None:
    """Give those of the passes that belong to a training step its phase.

    learned: numbers of the iterators from whose batches a backward followed. trained: ids of the modules that were
    trained. last: index of the mark of the last backward. A batch decides. Without one, what is done with a module that
    is never trained (a teacher, a reward model), or with a trained one in training mode (a reference without its
    adapters), serves the training that goes on; after the last backward, what was done before serves the next step.
    """
    earlier: set[tuple[int, bool]] = set()
    for one in (one for one in passes if one.mark < len(marks)):
        at, phase, instant = marks[one.mark]
        kind = one.module, one.evaluates
        serves = one.batches in learned
        if not one.batches:
            serves = kind in earlier or (one.mark < last and not (one.evaluates and one.module in trained))
        if phase == "eval" and serves:
            earlier.add(kind)
            marks[one.mark] = at, one.phase, WITHOUT_GRADIENTS if instant == FORWARD else instant
