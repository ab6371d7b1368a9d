"""Two runs side by side: what agrees, what explains the difference, and the exit code that says which."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from memfit.documents import codec, tape_file, watch_log
from memfit.footprints.compare import compare
from memfit.footprints.footprint_of_watch import REST, footprint_of
from memfit.nouns.footprint import Footprint, Levels, Line, PhasePeak
from memfit.nouns.sample import Header, MeterName, Sample, Watched
from memfit.nouns.tape import PHASES, ROLES, Alloc, Free, Mark, Phase, Role, Tape
from memfit.report.compare import compare_view
from memfit.units import GIB, MIB, human

Ran = Callable[..., tuple[int, str, str]]
SNAPSHOT = Path(__file__).parent / "data" / "snapshots" / "plain-full.pickle.gz"
SIZES: dict[Role, int] = {"parameters": 4 * GIB, "optimizer_states": 2 * GIB, "activations": 8 * GIB, "context": GIB}


def footprint(sizes: dict[Role, int], *phases: Phase, labels: dict[Role, str] | None = None) -> Footprint:
    lines = tuple(Line(role, (labels or {}).get(role, role), size) for role, size in sizes.items())
    device = sum(sizes.values())
    reserved = device - sizes.get("context", 0)
    levels = Levels(reserved, reserved, reserved, device)
    return Footprint(tuple(PhasePeak(p, "here", levels, lines) for p in phases or ("load", "step")), "formula")


peaks = st.dictionaries(st.sampled_from(ROLES), st.integers(1, 80 * GIB), min_size=1)


@given(peaks, peaks)
def test_roles_add_up_to_the_difference(left: dict[Role, int], right: dict[Role, int]) -> None:
    found = compare(footprint(left), footprint(right))
    assert sum(row.left for row in found.roles) == found.left
    assert sum(row.right for row in found.roles) == found.right
    assert sum(row.difference for row in found.roles) == found.difference
    assert (found.agreement == "agrees") == (abs(found.difference) <= found.band)


@given(peaks)
def test_a_run_agrees_with_itself(sizes: dict[Role, int]) -> None:
    found = compare(footprint(sizes), footprint(sizes))
    assert (found.agreement, found.difference, found.terms) == ("agrees", 0, ())


def test_the_largest_term_comes_first() -> None:
    more = SIZES | {"activations": 11 * GIB, "optimizer_states": GIB, "parameters": 4 * GIB + MIB}
    found = compare(footprint(SIZES), footprint(more))
    assert [(row.roles, row.difference) for row in found.roles][:2] == [
        (("activations",), 3 * GIB), (("optimizer_states",), -GIB),
    ]  # fmt: skip
    assert [(t.role, t.difference) for t in found.terms] == [("activations", 3 * GIB), ("optimizer_states", -GIB)]


def test_a_phase_that_only_keeps_the_level_explains_nothing() -> None:
    cached: dict[Role, int] = {"parameters": 4 * GIB, "fragmentation": 4 * GIB}
    left = (
        footprint(SIZES | {"activations": 9 * GIB}, "first_step"),
        footprint(SIZES | {"activations": 9 * GIB + MIB}, "step"),
    )
    right = footprint(SIZES | {"activations": 2 * GIB}, "first_step"), footprint(cached, "step")
    found = compare(*(Footprint(tuple(p for side in sides for p in side.phases), "formula") for sides in (left, right)))
    assert [row.roles for row in found.roles if row.difference] == [("activations",)]


def test_roles_that_a_watch_cannot_tell_apart_are_one() -> None:
    seen: dict[Role, int] = {"parameters": 4 * GIB, "temporaries": 11 * GIB, "context": GIB}
    found = compare(footprint(SIZES), footprint(seen, labels={"temporaries": REST}))
    by_roles = {row.roles: row.difference for row in found.roles}
    assert by_roles[("parameters",)] == 0
    (lump,) = (roles for roles in by_roles if len(roles) > 1)
    assert {"activations", "optimizer_states", "temporaries", "gradients"} <= set(lump)
    assert by_roles[lump] == GIB
    assert any("taken together" in note for note in found.notes)


@pytest.mark.parametrize("phase", PHASES)
def test_the_same_phase_is_compared_where_both_have_it(phase: Phase) -> None:
    left = footprint(SIZES, "load", "first_step", "step", "eval", "save", "resume", "merge")
    found = compare(left, footprint(SIZES, phase))
    assert found.right_phase == phase and len(found.phases) == 7
    both = compare(left, replace(left, phases=left.phases[::-1]))
    assert both.left_phase == both.right_phase


def phased(**sizes: int) -> Footprint:
    """A run whose phases reserve so much, in mebibytes."""
    made = {
        phase: footprint({"parameters": size * MIB}, phase)  # type: ignore[arg-type]
        for phase, size in sizes.items()
    }
    return Footprint(tuple(one.phases[0] for one in made.values()), "traced")


NEEDS = {  # left, right -> the answer, the phase that explains it, what it takes on both sides
    "its peak is in a phase that ties with the left's": (
        phased(first_step=470, step=470), phased(first_step=470, step=20_684), "more", "step", (470, 20_684),
    ),
    "its peak is in a phase that is small on the left": (
        phased(load=1, step=100, eval=30), phased(load=90, step=100, eval=200), "more", "eval", (30, 200),
    ),
    "of several phases the one that differs most": (
        phased(first_step=100, step=90), phased(first_step=120, step=118), "more", "step", (90, 118),
    ),
    "a phase that grew beneath the peak is no need": (
        phased(step=100, eval=10), phased(step=100, eval=60), "agrees", "step", (100, 100),
    ),
    "less where the left's peak is gone": (
        phased(first_step=50, step=400), phased(first_step=50, step=50), "less", "step", (400, 50),
    ),
    "one peak of the left is made up by another": (
        phased(step=100, eval=50), phased(step=50, eval=100), "agrees", "step", (100, 50),
    ),
    "what a run need not go through is no need": (
        phased(step=100, resume=10), phased(step=100, resume=300), "agrees", "step", (100, 100),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NEEDS)
def test_what_the_whole_runs_need_is_judged(case: str) -> None:
    left, right, agreement, phase, sizes = NEEDS[case]
    found = compare(left, right)
    assert (found.agreement, found.left_phase, found.right_phase) == (agreement, phase, phase)
    assert (found.left, found.right) == tuple(size * MIB for size in sizes)
    assert (found.left_need, found.right_need) == tuple(side.peak.levels.reserved for side in (left, right))
    assert sum(row.difference for row in found.roles) == found.difference


def view_of(left: Footprint, right: Footprint) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(compare_view("left", "right", compare(left, right)))
    return out.getvalue()


def test_every_phase_out_of_its_band_is_said() -> None:
    left, right = phased(load=10, step=100, eval=30), phased(load=5, step=100, eval=80)
    assert [row.agreement for row in compare(left, right).phases] == ["less", "agrees", "more"]
    assert "outside their own band: load below, eval above" in " ".join(view_of(left, right).split())


def test_a_peak_in_a_phase_of_the_right_alone_is_more() -> None:
    left, right = phased(load=10, step=100), phased(load=10, step=100, save=400)
    found = compare(left, right)
    assert (found.agreement, found.left_phase, found.right_phase) == ("more", "step", "save")
    assert "save against step" in view_of(left, right)
    assert any("no phase of both tells the difference" in note for note in found.notes)


def test_where_the_difference_is_made_has_its_own_sizes() -> None:
    text = " ".join(view_of(phased(step=100, eval=30), phased(step=100, eval=200)).split())
    assert "200 MiB reserved against 100 MiB: +100 MiB (+100.0%), the band is" in text
    assert "at the worst instant of the eval: 200 MiB reserved against 30.0 MiB: +170 MiB (+566.7%)" in text


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """The same run as a tape and as watched, and one that needs a gibibyte more."""
    found = {}
    for name, more in (("tape", 0), ("more", GIB)):
        events = (
            Mark("load", "weights"), Alloc(1, 4 * GIB, "parameters", "weights"),
            Mark("step", "forward"), Alloc(2, 5 * GIB + more, "activations", "layers.3.mlp: silu"), Free(2),
        )  # fmt: skip
        found[name] = tmp_path / f"{name}.tape.gz"
        found[name].write_bytes(tape_file.dumps(Tape(events, "traced")))
    size = Levels(9 * GIB, 9 * GIB, 9 * GIB, 10 * GIB)
    load = Levels(4 * GIB, 4 * GIB, 4 * GIB, 5 * GIB)
    lines = [
        watch_log.line(Header("train.py", "cuda", total=24 * GIB)),
        watch_log.line(Sample(0.0, 0, "load", load, load)),
        watch_log.line(Sample(1.0, 1, "step", load, size)),
        watch_log.shares_line((("parameters", 4 * GIB),)),
    ]
    found["watched"] = tmp_path / "run.jsonl"
    found["watched"].write_bytes(b"".join(lines))
    return found


CASES = [
    ("tape", "watched", 0, "AGREE"),
    ("tape", "more", 3, "MORE THAN EXPECTED"),
    ("more", "watched", 4, "LESS THAN"),
]


@pytest.mark.parametrize(("left", "right", "code", "words"), CASES)
def test_the_exit_code_says_which_needs_more(
    ran: Ran, files: dict[str, Path], left: str, right: str, code: int, words: str
) -> None:
    got, out, err = ran("compare", files[left], files[right])
    assert (got, err) == (code, "")
    assert words in out and "load" in out


def test_the_term_that_explains_it_is_named(ran: Ran, files: dict[str, Path]) -> None:
    _, out, _ = ran("compare", files["tape"], files["more"])
    (line,) = (line for line in out.splitlines() if "layers.*.mlp: silu" in line)
    assert line.split()[-3:] == ["5.00", "6.00", "+1.00"]


def test_names_of_files_cannot_steer_the_terminal(ran: Ran, files: dict[str, Path]) -> None:
    evil = files["tape"].with_name("\x1b[2J\x9b.tape.gz")
    evil.write_bytes(files["tape"].read_bytes())
    for names in ((evil, files["more"]), (files["more"], evil), (evil, "missing\x1b")):
        said = "".join(map(str, ran("compare", *names)))
        assert "\N{REPLACEMENT CHARACTER}" in said and not set("\x1b\x9b") & set(said)


def test_json_has_the_same(ran: Ran, files: dict[str, Path]) -> None:
    code, out, _ = ran("compare", files["tape"], files["more"], "--json")
    found: Any = codec.loads(out)
    assert code == 3
    assert (found.agreement, found.left, found.right, found.difference) == ("more", 9 * GIB, 10 * GIB, GIB)
    assert found.terms[0].label == "layers.*.mlp: silu"


def test_a_prediction_against_a_real_snapshot(ran: Ran, tmp_path: Path) -> None:
    recipe = tmp_path / "estimate.json"
    estimated = ran("estimate", "qwen2.5-0.5b", "--gpu", "l4", "--json")[1]
    recipe.write_text(estimated)
    code, out, _ = ran("compare", recipe, SNAPSHOT)
    assert code == 4
    most = max(phase["levels"]["reserved"] for phase in json.loads(estimated)["phases"])
    assert "taken together" in out and f"1012 MiB reserved against {human(most)}: " in out


def test_a_recipe_is_estimated_on_its_card(ran: Ran, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    ran("plan", "qwen2.5-0.5b", "--gpu", "l4", "--out", tmp_path, "--target", "trl")
    estimate = tmp_path / "estimate.json"
    estimate.write_text(ran("estimate", "--from", recipe, "--gpu", "l4", "--json")[1])
    code, out, _ = ran("compare", recipe, estimate)
    assert code == 0 and "+0.0%" in out


MISTAKES = {
    "two files are compared, not 1": ("a.json",),
    "cannot read a.json": ("a.json", "b.json"),
    "missing argument": (),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_line_and_a_hint(ran: Ran, message: str) -> None:
    code, out, err = ran("compare", *MISTAKES[message])
    assert (code, out) == (2, "")
    assert message in err and "hint: " in err


@given(st.binary(max_size=200))
def test_no_file_whatever_is_a_bug(content: bytes) -> None:
    from tempfile import TemporaryDirectory

    from memfit.documents import footprint_file
    from memfit.errors import MemfitError

    with TemporaryDirectory() as folder:
        for name in ("a.json", "a.toml", "a.jsonl", "a.pickle"):
            path = Path(folder) / name
            path.write_bytes(content)
            with pytest.raises(MemfitError):
                footprint_file.read(path)


def host_run(meter: MeterName, tensors: int, resident: int) -> Footprint:
    """What a watch without a card saw."""
    levels = Levels(tensors, tensors, tensors, resident)
    shares: tuple[tuple[Role, int], ...] = (("parameters", tensors // 4),) if tensors else ()
    return footprint_of(Watched(Header("run.py", meter), (Sample(1.0, 3, "step", levels, levels),), shares=shares))


@pytest.mark.parametrize(
    ("left", "right", "level", "difference"),
    [
        (host_run("tensors", GIB, 3 * GIB), host_run("tensors", 2 * GIB, 5 * GIB), "tensors", GIB),
        (host_run("tensors", GIB, 3 * GIB), host_run("rss", 0, 5 * GIB), "resident", 2 * GIB),
        (host_run("rss", 0, 3 * GIB), host_run("rss", 0, 3 * GIB), "resident", 0),
    ],
)
def test_runs_without_a_card_are_compared_by_what_they_have(
    left: Footprint, right: Footprint, level: str, difference: int
) -> None:
    found = compare(left, right)
    assert (found.level, found.difference) == (level, difference)
    assert sum(row.difference for row in found.roles) == difference
    out = io.StringIO()
    Console(file=out, width=160).print(compare_view("left", "right", found))
    assert not any(word in out.getvalue() for word in ("reserved", "fragmentation", "context", "CUDA"))
