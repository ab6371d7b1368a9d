"""Explain histories: what was there before the first event, and what a peak is made of when nothing failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit import cli
from memfit.documents import watch_log
from memfit.documents.snapshot import read
from memfit.documents.snapshot.roles import Allocations
from memfit.explain import Evidence, Root, explain, read_watch
from memfit.explain.history.reading import BEFORE, NOWHERE, memory_of
from memfit.explain.memory import Memory
from memfit.nouns.finding import Cause
from memfit.nouns.footprint import Levels
from memfit.nouns.sample import Header, Leak, LeakHolder, MeterName, Sample, Watched
from memfit.nouns.tape import Alloc, Event, Free, Mark, Oom, Piece, Role, Segment, Tape
from memfit.report.explain import explain_view
from memfit.units import MIB

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "snapshots"  # where they lie beside the repository
ENGINE = [{"name": "torch::autograd::generated::BmmBackward0::apply(std::vector<at::Tensor>&&)",
           "filename": "??", "line": 0},
          {"name": "torch::autograd::Engine::thread_main()", "filename": "??", "line": 0}]  # fmt: skip
STEP = [{"name": "step", "filename": "/lib/torch/optim/adamw.py", "line": 9}]
CLEAR = [{"name": "zero_grad", "filename": "/lib/torch/optim/optimizer.py", "line": 9}]
CODE = [{"name": "forward", "filename": "/home/me/model.py", "line": 7}]

# ---- roles of what has no birth --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("death", "role"),
    [(ENGINE, "activations"), (CLEAR, "gradients"), (STEP, "optimizer_states"), (CODE, "temporaries"),
     ([], "temporaries")],
)  # fmt: skip
def test_the_stack_of_its_death_tells_what_an_older_tensor_was(death: object, role: Role) -> None:
    births = Allocations()
    births.add(MIB, 0, ())
    births.old = 1
    births.died(0, death)
    assert births.named([Free(0)])[0].role == role


def test_a_gradient_shows_one_parameter_of_its_size() -> None:
    births = Allocations()
    for size in (5 * MIB, 5 * MIB, 3 * MIB):
        births.add(size, 0, ())
    births.old = 3
    births.add(5 * MIB, 0, ENGINE)
    births.add(MIB, 0, CODE)
    named = births.named([births.allocs[3], births.allocs[4]])
    assert [named[n].role for n in range(4)] == ["parameters", "temporaries", "temporaries", "gradients"]


def test_a_tensor_of_the_backward_is_named_by_its_operator() -> None:
    births = Allocations()
    births.add(MIB, 0, ENGINE)
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


@pytest.mark.parametrize("file", ["logits.py", "attention_softmax.py", "zeros.py"])
def test_the_name_of_a_file_tells_nothing_of_its_tensors(file: str) -> None:
    events = (
        Mark("step", "forward"),
        Alloc(1, 60 * MIB, label=f"f: mm ({file}:3)"),
        Oom(MIB, label=f"f: mm ({file}:4)"),
    )
    memory = history(0, *events)
    found = explain(Evidence(memory=memory))
    assert (memory.asker, memory.line) == ("f: mm", f"{file}:4") and [f.cause for f in found] == ["activations"]
    step = (
        Mark("step", "optimizer step"),
        Alloc(2, 20 * MIB, label="f: sqrt (x.py:5)"),
        Oom(MIB, label=f"f: sqrt ({file}:5)"),
    )
    assert explain(Evidence(memory=history(0, *events[:2], *step)))[0].cause == "optimizer-step"


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
    """They are of inference without a backward, training with eager attention, zeroth-order steps, one attention."""
    if not SHARED.is_dir():
        pytest.skip("the snapshots lie beside the repository")
    memory = memory_of(read(SHARED / name))
    first = explain(Evidence(memory=memory))[0]
    assert (first.cause, first.line, memory.of("unknown") // MIB) == (cause, line, unknown)
    assert "filled" not in first.title


def test_tensors_without_a_stack_are_no_weights() -> None:
    found = explain(Evidence(memory=memory_of(Tape((Alloc(0, 9 * MIB), Oom(MIB)), "measured"))))[0]
    assert (found.cause, found.holders[0].role, found.holders[0].module) == ("not-known", "unknown", NOWHERE)


def watched(*leaks: Leak, meter: MeterName = "cuda") -> Watched:
    levels = Levels(60 * MIB, 60 * MIB, 90 * MIB, 95 * MIB)
    looks = tuple(Sample(n, n, "step", levels, levels) for n in range(3))
    return Watched(Header("train.py", meter), looks, leaks=leaks, shares=(("parameters", 50 * MIB),))


def test_a_watched_run_is_told_by_its_roles_and_its_leaks() -> None:
    holder = LeakHolder("container", "history", "train.py:12", "history.append(loss)", 1, MIB)
    found = explain(read_watch(watched(Leak(MIB, 10, 30, 20 * MIB, (holder,)))))[0]
    assert (found.cause, found.confidence, found.line) == ("leak", "certain", "train.py:12")
    assert "'history'" in found.evidence[0].text
    memory = read_watch(watched()).memory
    assert memory is not None and memory.of("parameters") == 50 * MIB and memory.of("unknown") == 10 * MIB
    assert memory.reserved == 90 * MIB


def test_only_pytorchs_own_meter_knows_what_is_reserved() -> None:
    memory = read_watch(watched(meter="rss")).memory
    assert memory is not None and memory.reserved == memory.allocated


def test_the_command_reads_the_log_of_a_watch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = watched()
    (tmp_path / "watch.jsonl").write_bytes(b"".join(map(watch_log.line, (run.header, *run.samples))))
    assert cli.main(["explain", str(tmp_path / "watch.jsonl")]) == 4  # of which nothing is told apart
    assert "not recorded 60.0 MiB (100%)" in capsys.readouterr().out


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


# ---- what a variable keeps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("copies", "made", "cause"),
    [
        (1, "before", "stale-checkpoint"),
        (1, "later", "two-copies"),
        (0, "before", "temporaries"),
        (0, "now", "long-sample"),
    ],
)
def test_a_checkpoint_has_weights_and_is_older_than_training(copies: int, made: str, cause: Cause) -> None:
    """By its name alone, as of a list of hidden states, nothing is one."""
    kept = Alloc(9, 40 * MIB, label="load (x.py:3)")
    events: list[Event] = [Alloc(1, 20 * MIB, "parameters", "w (x.py:1)")]
    for number, turn in enumerate(("first", "later", "now")):
        events += [kept] if (made, turn) in (("before", "first"), ("later", "now")) else []
        events += [Mark("step", "forward"), *([kept] if made == turn == "now" else [])]
        events += [Alloc(20 + number, 5 * MIB, label="f (x.py:5)")]
        events += [Mark("step", "backward"), Free(20 + number), Mark("step", "after the step")] if turn != "now" else []
    memory = memory_of(Tape((*events, Oom(MIB // 2)), "measured", {}, ()))
    root = Root("states", "x.py:3", "collection", 40 * MIB, 4, copies=copies)
    assert explain(Evidence(memory=memory, roots=(root,)))[0].cause == cause
