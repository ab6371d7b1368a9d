"""memfit plan confirmed by a trace: when, what it says, and what happens when the trace disagrees or is interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl")

from memfit import Recipe, cli, estimate
from memfit.cli import confirm, terminal, trace
from memfit.errors import Unsupported
from memfit.nouns.plan import judge
from memfit.nouns.tape import Tape

PLAN = ("plan", "qwen2.5-0.5b", "--gpu", "rtx-4060", "--method", "lora")
Stub = Callable[[Callable[[Recipe], Any]], list[Recipe]]


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stub:
    """Puts a stub in the place of the trace: what it says of a recipe is its verdict, None for the formulas' own."""

    def stub(says: Callable[[Recipe], Any]) -> list[Recipe]:
        seen: list[Recipe] = []

        def traced(recipe: Recipe, name: str, found: Any, tell: Any, *, lean: bool) -> Any:
            seen.append(recipe)
            footprint = replace(estimate(found.architecture, recipe, found.gpu), source="traced")
            judgement = judge(footprint, found.gpu)
            verdict = says(recipe)
            answer = SimpleNamespace(judgement=replace(judgement, verdict=verdict or judgement.verdict))
            return footprint, answer, Tape((), "traced"), None

        monkeypatch.setattr(trace, "traced", traced)
        monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
        return seen

    return stub


@pytest.fixture
def person(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "interactive", lambda: True)


def test_pipes_and_json_stay_closed_form_unless_asked(tracing: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    seen = tracing(lambda recipe: None)
    assert cli.main(PLAN) == 0 and cli.main([*PLAN, "--json"]) == 0
    assert not seen
    capsys.readouterr()
    assert cli.main([*PLAN, "--json", "--trace"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["source"] == "traced" and "confirmed" in err and len(seen) == 1


@pytest.mark.parametrize("words", [[], ["--no-trace"], ["--json"]], ids=str)
@pytest.mark.usefixtures("person")
def test_a_person_sees_the_formulas_answer_first_and_the_trace_after(
    tracing: Stub, capsys: Any, words: list[str]
) -> None:
    seen = tracing(lambda recipe: None)
    assert cli.main([*PLAN, *words]) == 0
    out, err = capsys.readouterr()
    assert out.count("FITS") == (words != ["--json"])  # shown once, where the trace agrees
    assert len(seen) == (not words) and ("confirmed" in err) == (not words)


@pytest.mark.usefixtures("person")
def test_where_the_trace_disagrees_the_next_finalist_is_taken(tracing: Stub, capsys: Any) -> None:
    first: list[Recipe] = []
    seen = tracing(
        lambda recipe: (
            "misfit"
            if first in ([], [recipe]) and not first.append(recipe)  # type: ignore[func-returns-value]
            else None
        )
    )
    assert cli.main(PLAN) == 0
    out, err = capsys.readouterr()
    assert len(seen) == 2 and seen[0] != seen[1]
    assert out.count("FITS") == 2 and "does not fit" in err and "confirmed" in err


def test_it_ends_with_what_a_trace_said_or_says_that_none_did(tracing: Stub, capsys: Any) -> None:
    seen = tracing(lambda recipe: "tight")
    code = cli.main([*PLAN, "--trace", "--json"])
    out, err = capsys.readouterr()
    assert 1 < len(set(seen)) == len(seen) <= confirm.TRIES
    assert code == 4 if json.loads(out)["source"] == "traced" else "the one shown was not" in err


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), Unsupported("no", hint="no")], ids=["Ctrl-C", "refused"])
@pytest.mark.usefixtures("person")
def test_what_stops_the_trace_keeps_the_answer(tracing: Stub, capsys: Any, failure: BaseException) -> None:
    def fails(_: Recipe) -> None:
        raise failure

    tracing(fails)
    assert cli.main(PLAN) == 0
    out, err = capsys.readouterr()
    assert out.count("FITS") == 1 and "not traced" in err


def test_contradicting_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PLAN, "--trace", "--no-trace"]) == 2
    assert "contradict" in capsys.readouterr()[1]
