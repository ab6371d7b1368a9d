"""Find planted causes in a snapshot with stacks, beside the process that failed and by the file alone."""

from __future__ import annotations

import traceback
from functools import cache
from itertools import product
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from memfit import virtual_gpu  # noqa: E402
from memfit.documents.snapshot.history import tape_of  # noqa: E402
from memfit.explain import explain, read_text  # noqa: E402
from memfit.explain.history.reading import memory_of  # noqa: E402
from memfit.holders.retained import roots_of  # noqa: E402
from memfit.nouns.finding import Cause, Finding  # noqa: E402
from smoke import smoke  # noqa: E402
from test_planted_oom import MARK, PROGRAMS, card_of, planted_cause, run  # noqa: E402

pytestmark = pytest.mark.usefixtures("nothing_left")

# causes that only the process shows for certain: who holds what, by which name, and which weights are in 32 bits.
# A file alone need not name them, but it must not call another cause certain.
NEEDS_PROCESS: frozenset[Cause] = frozenset([
    "companion-models", "exception", "kbit-upcast", "kv-cache", "modules-to-save", "other-process", "reference-model",
    "stale-checkpoint", "temporaries", "two-copies", "wrong-dtype",
])  # fmt: skip
LEAST_ALONE = 7  # programs of these causes that the file names all the same
# programs whose cause only operators show, which stacks="python" does not record
NEEDS_OPERATORS = frozenset(["caches_of_every_token", "eager_attention"])
# programs whose cause a file without operators does not show, though the process does
ALONE_NEEDS_OPERATORS = NEEDS_OPERATORS | {"eval_keeps_logits", "scores_in_the_first_step", "three_states_per_weight"}
# what a file shows for certain of these causes: tensors are kept, but not by what; states, but not of which weights
SHOWN_AS: dict[Cause, Cause] = {"exception": "leak", "kv-cache": "leak", "modules-to-save": "optimizer-states"}


@cache
def explained(path: Path, stacks: str) -> tuple[Cause, Finding, Finding]:
    """Return the planted cause, what is found in the process, and what is found in the file alone."""
    gpu, room = card_of(path)
    with virtual_gpu(gpu, capacity=room):
        torch.cuda.memory._record_memory_history(stacks=stacks)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            run(path)
        text, roots = "".join(traceback.format_exception(caught.value)), roots_of(caught.value)
        memory = memory_of(tape_of(torch.cuda.memory._snapshot()))
    return planted_cause(path), explain(read_text(text, memory, roots))[0], explain(read_text("", memory))[0]


def named(finding: Finding, path: Path, planted: Cause) -> bool:
    """Are the planted cause and its line the finding?"""
    line = next(n for n, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if text.endswith(MARK))
    return (finding.cause, finding.line) == (planted, f"{path.name}:{line}")


def right_or_uncertain(finding: Finding, planted: Cause) -> bool:
    """Is no other cause called certain?"""
    return finding.cause in (planted, SHOWN_AS.get(planted)) or finding.confidence != "certain"


def stories(case: tuple[Path, str]) -> list[object]:
    """Return what a recording shows: with operators the cause, without them as much, less, or less alone."""
    path, stacks = case
    if stacks == "all":
        return [planted_cause(path)]
    if path.stem in ALONE_NEEDS_OPERATORS:
        return [case]
    return ["process" if planted_cause(path) in NEEDS_PROCESS else "file"]


CASES = smoke(product(PROGRAMS, ("all", "python")), stories)


@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
@pytest.mark.parametrize(("path", "stacks"), CASES, ids=lambda value: getattr(value, "stem", value))
def test_what_a_card_records_shows_the_planted_cause(path: Path, stacks: str) -> None:
    planted, live, alone = explained(path, stacks)
    assert right_or_uncertain(live, planted) and right_or_uncertain(alone, planted)
    python = stacks == "python"
    assert named(live, path, planted) or (python and path.stem in NEEDS_OPERATORS)
    assert alone.cause == planted or planted in NEEDS_PROCESS or (python and path.stem in ALONE_NEEDS_OPERATORS)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
def test_a_file_alone_names_some_of_what_the_process_shows() -> None:
    found = [explained(path, "all") for path in PROGRAMS if planted_cause(path) in NEEDS_PROCESS]
    assert sum(alone.cause == planted for planted, _, alone in found) >= LEAST_ALONE
