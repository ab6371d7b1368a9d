"""Explain every place at which programs of the libraries allocate, as the traceback they would fail with there.

The tracebacks are those of the installed libraries, taken on a virtual card. A traceback tells who asked last; so a
cause is certain only where what is done at that place is the cause.
"""

from __future__ import annotations

import gc
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
state = pytest.importorskip("accelerate.state")

from memfit import virtual_gpu  # noqa: E402
from memfit.explain import explain, read_text  # noqa: E402
from memfit.nouns.finding import Cause, Finding  # noqa: E402
from memfit.virtual.device.card import Card  # noqa: E402

PROGRAMS = sorted((Path(__file__).parent / "data" / "places").glob("*.py"))
MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 23.64 GiB "
    "of which 20.56 MiB is free. Including non-PyTorch memory, this process has 23.60 GiB memory in use. Of the "
    "allocated memory 22.85 GiB is allocated by PyTorch, and 290.12 MiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation.  See documentation for Memory Management  "
    "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf)"
)
# cause -> words of the places that do what it says, in the innermost frames: path, function and code
WHAT_IT_IS: dict[Cause, str] = {
    "attention": r"eager_attention_forward",
    "eval-generate": r"generation/",
    "eval-logits": r"concat|pad_across_processes|gather",
    "logits": r"loss_utils\.py|cross_entropy|convert_to_fp32|_fused_forward|logits",
    "merge": r"peft/.*(?:merge|get_delta_weight)",
    "optimizer-states": r"_init_group",
    "resume-states": r"load_state_dict|_process_value",
}
INNER = 6  # frames


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    state.AcceleratorState._reset_state(reset_partial_state=True)
    gc.collect()


def run(path: Path, folder: Path) -> dict[tuple[str, ...], list[traceback.FrameSummary]]:
    """The stack of every place of a program, by its innermost lines."""
    stacks: dict[tuple[str, ...], list[traceback.FrameSummary]] = {}
    inner = Card.allocate

    def allocate(card: Card, size: int, label: str) -> int:
        frame = sys._current_frames()[threading.main_thread().ident or 0]  # a backward runs on a thread of its own
        stack = [f for f in traceback.extract_stack(frame) if "/memfit/" not in f.filename]
        begin = next((number for number, f in enumerate(stack) if f.filename == str(path)), None)
        if begin is not None:  # the card's own come before the program
            stack = [f for f in stack[begin:] if f.filename != __file__]
            stacks.setdefault(tuple(f"{f.filename}:{f.lineno}" for f in stack[-3:]), stack)
        return inner(card, size, label)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Card, "allocate", allocate)
        patch.setattr(sys, "argv", [str(path), str(folder)])
        with virtual_gpu("h100"):
            exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {"__name__": "__main__"})
    return stacks


@cache
def explained(path: Path, folder: Path) -> list[tuple[list[traceback.FrameSummary], Finding]]:
    """Each place's stack, and the first finding of its traceback alone."""
    head = "Traceback (most recent call last):\n"
    texts = [(stack, head + "".join(traceback.format_list(stack)) + MESSAGE) for stack in run(path, folder).values()]
    return [(stack, explain(read_text(text))[0]) for stack, text in texts]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")
def test_what_is_certain_of_a_place_is_what_is_done_there(path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = explained(path, tmp_path_factory.getbasetemp() / path.stem)
    assert len(found) > 30
    certain = [(stack, finding.cause) for stack, finding in found if finding.confidence == "certain"]
    assert certain
    for stack, cause in certain:
        inner = "\n".join(f"{f.filename} {f.name} {f.line}" for f in stack[-INNER:])
        assert re.search(WHAT_IT_IS[cause], inner), f"{cause}, certain:\n{inner}"
