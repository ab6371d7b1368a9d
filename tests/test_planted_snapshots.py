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
from memfit.documents.snapshot.history import tape_of  # noqa: E402
from memfit.explain import explain, read_text  # noqa: E402
from memfit.explain.history.reading import memory_of  # noqa: E402
from memfit.live.holders.retained import roots_of  # noqa: E402
from memfit.nouns.finding import Cause, Finding  # noqa: E402
from memfit.units import GIB, MIB  # noqa: E402
from test_planted_oom import HEAD, MARK, PROGRAMS  # noqa: E402

# who holds what, by which name, and which weights are wide, is known to the process only: what the file alone tells instead
ALONE: dict[str, Cause] = {
    "all_data_on_the_card": "activations", "another_process": "capacity", "checkpoint_kept": "temporaries",
    "doubles_from_numpy": "activations", "embedding_in_fp32": "activations",
    "error_being_handled": "activations", "error_kept": "activations", "kv_cache": "leak",
    "loaded_in_fp32": "capacity", "old_model_kept": "capacity", "reference_model": "capacity",
    "best_state_so_far": "temporaries", "checkpoint_moved_whole": "activations", "companions_in_a_pipeline": "capacity",
    "ema_of_tensors": "activations", "last_error_shown": "activations", "modules_trained_whole": "optimizer-states",
    "teachers_in_a_wrapper": "capacity", "encoders_beside_a_net": "capacity", "gradients_of_every_task": "activations",
    "errors_of_a_sweep": "leak", "errors_in_a_log": "leak", "two_checkpoints_compared": "capacity",
}  # fmt: skip
# stacks="python" tell no operators: of attention, of a cache that grows; nor a workspace from a gradient
LIVE_PYTHON: dict[str, Cause] = {"caches_of_every_token": "leak", "eager_attention": "activations"}
ALONE_PYTHON: dict[str, Cause] = {
    **ALONE, **LIVE_PYTHON, "eval_keeps_logits": "eval-leftovers", "scores_in_the_first_step": "fragmentation",
    "three_states_per_weight": "optimizer-step",
}  # fmt: skip
CERTAIN = {
    "caches_of_every_token",
    "errors_in_a_log",
    "errors_of_a_sweep",
    "eval_keeps_logits",
    "modules_trained_whole",
}  # of these, certain of it


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    gc.collect()


def explained(path: Path, stacks: str = "all") -> tuple[Cause, Finding, Finding]:
    """(the planted cause, what is found in the process, what is found in the file)."""
    source = path.read_text(encoding="utf-8")
    head = HEAD.search(source)
    assert head is not None
    room, foreign = int(head["card"]) * MIB, 8 * GIB if head["cause"] == "other-process" else 0
    gpu = replace(find_gpu("rtx-4090"), total_bytes=room + foreign + MIB, context_bytes=MIB)
    with virtual_gpu(gpu, capacity=room):
        torch.cuda.memory._record_memory_history(stacks=stacks)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            exec(compile(source, str(path), "exec"), {"__name__": "__main__"})
        text, roots = "".join(traceback.format_exception(caught.value)), roots_of(caught.value)
        memory = memory_of(tape_of(torch.cuda.memory._snapshot()))
    return head["cause"], explain(read_text(text, memory, roots))[0], explain(read_text("", memory))[0]  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("stacks", "live_instead", "alone_instead"), [("all", {}, ALONE), ("python", LIVE_PYTHON, ALONE_PYTHON)]
)
@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_what_a_card_records_tells_the_planted_cause(
    path: Path, stacks: str, live_instead: dict[str, Cause], alone_instead: dict[str, Cause]
) -> None:
    cause, live, alone = explained(path, stacks)
    for found, instead in ((live, live_instead), (alone, alone_instead)):
        assert found.cause == instead.get(path.stem, cause)
        assert path.stem not in instead or found.confidence != "certain" or path.stem in CERTAIN
    line = next(n for n, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if text.endswith(MARK))
    if path.stem not in live_instead:
        assert live.line == f"{path.name}:{line}"
