"""memfit explain on histories: what was there before the first event, and what a peak is made of when nothing failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.explain import Evidence, explain
from memfit.explain.memory import Memory
from memfit.explain.reading import BEFORE, memory_of
from memfit.finding import Cause
from memfit.report.explain import explain_view
from memfit.snapshot import read
from memfit.snapshot.roles import Births
from memfit.tape import Alloc, Event, Free, Mark, Oom, Piece, Role, Segment, Tape
from memfit.units import MIB

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "snapshots"  # where they lie beside the repository
ENGINE = [{"name": "torch::autograd::generated::BmmBackward0::apply(std::vector<at::Tensor>&&)", "filename": "??", "line": 0},
          {"name": "torch::autograd::Engine::thread_main()", "filename": "??", "line": 0}]  # fmt: skip
STEP = [{"name": "step", "filename": "/lib/torch/optim/adamw.py", "line": 9}]
CLEAR = [{"name": "zero_grad", "filename": "/lib/torch/optim/optimizer.py", "line": 9}]
CODE = [{"name": "forward", "filename": "/home/me/model.py", "line": 7}]

# ---- roles of what has no birth --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("death", "role"),
    [(ENGINE, "activations"), (CLEAR, "gradients"), (STEP, "optimizer_states"), (CODE, "temporaries"), ([], "temporaries")],
)  # fmt: skip
def test_the_stack_of_its_death_tells_what_an_older_tensor_was(death: object, role: Role) -> None:
    births = Births()
    births.add(0, MIB, 0, (), at_start=True)
    births.died(0, death)
    assert births.named([Free(0)])[0].role == role


def test_a_gradient_shows_one_parameter_of_its_size() -> None:
    births = Births()
    for number, size in enumerate((5 * MIB, 5 * MIB, 3 * MIB)):
        births.add(number, size, 0, (), at_start=True)
    births.add(3, 5 * MIB, 0, ENGINE)
    births.add(4, MIB, 0, CODE)
    named = births.named([births.allocs[3], births.allocs[4]])
    assert [named[n].role for n in range(4)] == ["parameters", "temporaries", "temporaries", "gradients"]


def test_a_tensor_of_the_backward_is_named_by_its_operator() -> None:
    births = Births()
    births.add(0, MIB, 0, ENGINE)
    assert births.allocs[0].label == "BmmBackward0"


# ---- what a peak is made of ------------------------------------------------------------------------------------------


def history(old: int, *events: Event) -> Memory:
    """A recording that begins with `old` bytes of which nothing is known."""
    start = (Segment(1 << 30, 0, False, False, (Piece(old, Alloc(0, old)),)),) if old else ()
    return memory_of(Tape((Mark("step", "recording"), *events), "measured", {}, start))


def test_what_was_there_before_is_not_guessed() -> None:
    memory = history(60 * MIB, Alloc(1, 20 * MIB, label="f (x.py:3)"))
    assert next((g.role, g.label, g.bytes) for g in memory.groups) == ("unknown", BEFORE, 60 * MIB)
    first = explain(Evidence(memory=memory))[0]
    assert (first.cause, first.evidence[0].bytes) == ("not-known", 60 * MIB)
    assert first.confidence != "certain" and "before the model" in first.remedies[0].text


def test_without_a_backward_pass_nothing_is_kept_for_one() -> None:
    memory = history(0, Alloc(1, 40 * MIB, "parameters", "w (x.py:1)"), Alloc(2, 60 * MIB, label="f (x.py:3)"))
    assert [f.cause for f in explain(Evidence(memory=memory))] == ["temporaries"]
    failed = history(0, Alloc(1, 60 * MIB, label="f (x.py:3)"), Oom(MIB))
    found = explain(Evidence(memory=failed))[0]
    assert (found.cause, found.confidence) == ("activations", "possible")


def test_a_tensor_for_each_parameter_is_a_second_list_of_them() -> None:
    weights = [Alloc(n, MIB, "parameters", "w (x.py:1)") for n in range(4)]
    twins = [Alloc(n, MIB, label="<listcomp> (x.py:9)") for n in range(4, 8)]
    found = explain(Evidence(memory=history(0, *weights, *twins)))[0]
    assert (found.cause, found.line) == ("temporaries", "x.py:9")
    assert "as many and as large as the parameters" in found.evidence[0].text


@pytest.mark.parametrize(
    ("name", "cause", "line", "unknown"),
    [
        ("Charan6924_a2__memory_snapshot.pickle", "not-known", "", 490),
        ("Wedsonlin_a2__medium_1024_training_memory_snapshot.pickle", "attention", "nn_utils.py:6", 16),
        ("ZidongLiu_DeComFL__memory.pickle", "temporaries", "adam_forward.py:168", 0),
        ("silmont2000_a2__mem_snapshot.pickle", "attention", "trace_peak_memory.py:7", 0),
    ],
)
def test_recorded_snapshots_are_explained(name: str, cause: Cause, line: str, unknown: int) -> None:
    """Their programs: inference without a backward, training with eager attention, zeroth-order steps, one attention."""
    if not SHARED.is_dir():
        pytest.skip("the snapshots lie beside the repository")
    memory = memory_of(read(SHARED / name))
    first = explain(Evidence(memory=memory))[0]
    assert (first.cause, first.line, memory.of("unknown") // MIB) == (cause, line, unknown)
    assert "filled" not in first.title


@pytest.mark.parametrize("width", [60, 100])
def test_the_screen_says_what_a_peak_is_made_of(width: int) -> None:
    from rich.console import Console

    memory = history(60 * MIB, Alloc(1, 20 * MIB, label="a_function_with_a_long_name (x.py:3)"))
    evidence = Evidence(memory=memory)
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as seen:
        console.print(explain_view("x.pickle", evidence, explain(evidence)))
    text = seen.get()
    assert "not recorded 60.0 MiB (75%)" in text and "room" not in text
    assert max(map(len, text.splitlines())) <= width
