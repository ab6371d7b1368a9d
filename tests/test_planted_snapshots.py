"""Planted causes as a card with a recording shows them: a snapshot with stacks, beside the process that failed and without it."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from memfit import find_gpu, virtual_gpu  # noqa: E402
from memfit.explain import explain, read_text  # noqa: E402
from memfit.explain.reading import memory_of  # noqa: E402
from memfit.finding import Cause, Finding  # noqa: E402
from memfit.live.roots import roots_of  # noqa: E402
from memfit.snapshot.history import tape_of  # noqa: E402
from memfit.units import GIB, MIB  # noqa: E402
from test_planted_oom import HEAD, MARK, PROGRAMS  # noqa: E402

# program -> the cause that is named instead, because no stack tells the operator, or a weight's dtype
LIVE: dict[str, Cause] = {
    "caches_of_every_token": "leak", "eager_attention": "activations", "loaded_in_fp32": "capacity",
}  # fmt: skip
# the same of the file alone: who holds what, by which name, is known to the process only
ALONE: dict[str, Cause] = {
    **LIVE, "all_data_on_the_card": "activations", "another_process": "activations",
    "checkpoint_kept": "temporaries", "doubles_from_numpy": "activations",
    "ema_copy": "temporaries", "embedding_in_fp32": "activations", "error_being_handled": "activations",
    "error_kept": "activations", "errors_in_a_list": "activations", "eval_keeps_logits": "logits", "kv_cache": "leak",
    "old_model_kept": "activations", "optimizer_step": "optimizer-states", "reference_model": "capacity",
    "scores_in_the_first_step": "fragmentation",
}  # fmt: skip
CERTAIN = {"caches_of_every_token", "eval_keeps_logits", "kv_cache", "optimizer_step"}  # of these, certain of it


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    gc.collect()


def explained(path: Path) -> tuple[Cause, Finding, Finding]:
    """(the planted cause, what is found in the process, what is found in the file)."""
    source = path.read_text(encoding="utf-8")
    head = HEAD.search(source)
    assert head is not None
    room, foreign = int(head["card"]) * MIB, 8 * GIB if head["cause"] == "other-process" else 0
    gpu = replace(find_gpu("rtx-4090"), total_bytes=room + foreign + MIB, context_bytes=MIB)
    with virtual_gpu(gpu, capacity=room):
        torch.cuda.memory._record_memory_history()
        with pytest.raises(torch.OutOfMemoryError) as caught:
            exec(compile(source, str(path), "exec"), {"__name__": "__main__"})
        text, roots = "".join(traceback.format_exception(caught.value)), roots_of(caught.value)
        memory = memory_of(tape_of(torch.cuda.memory._snapshot()))
    return head["cause"], explain(read_text(text, memory, roots))[0], explain(read_text("", memory))[0]  # type: ignore[return-value]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_what_a_card_records_tells_the_planted_cause(path: Path) -> None:
    cause, live, alone = explained(path)
    assert live.cause == LIVE.get(path.stem, cause) and alone.cause == ALONE.get(path.stem, cause)
    for found, others in ((live, LIVE), (alone, ALONE)):
        assert path.stem not in others or found.confidence != "certain" or path.stem in CERTAIN
    line = next(n for n, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if text.endswith(MARK))
    if path.stem not in LIVE:
        assert live.line == f"{path.name}:{line}"
