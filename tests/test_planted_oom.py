"""Planted causes: small programs that run out of memory on a virtual card, each for one reason, named with its line."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from memfit import explain_oom, find_gpu, virtual_gpu  # noqa: E402
from memfit.live.explain_oom import Explained  # noqa: E402
from memfit.nouns.finding import CAUSES  # noqa: E402
from memfit.units import GIB, MIB  # noqa: E402
from smoke import smoke  # noqa: E402

PROGRAMS = sorted((Path(__file__).parent / "data" / "planted").glob("*.py"))
HEAD = re.compile(r"^# cause: (?P<cause>[\w-]+) · card: (?P<card>\d+) MiB$", re.MULTILINE)
MARK = "# <-"  # on the line that is to be named


def planted_cause(path: Path) -> str:
    """Return the cause in the head of a program."""
    head = HEAD.search(path.read_text(encoding="utf-8"))
    assert head is not None
    return head["cause"]


CASES = smoke(PROGRAMS, lambda path: [planted_cause(path)])


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    gc.collect()


def planted(path: Path) -> tuple[Explained, str, list[str]]:
    """(what was explained, the planted cause, what was told)."""
    source = path.read_text(encoding="utf-8")
    head = HEAD.search(source)
    assert head is not None
    room = int(head["card"]) * MIB
    foreign = 8 * GIB if head["cause"] == "other-process" else 0
    gpu = replace(find_gpu("rtx-4090"), total_bytes=room + foreign + MIB, context_bytes=MIB)
    told: list[str] = []
    with virtual_gpu(gpu, capacity=room), pytest.raises(torch.OutOfMemoryError), explain_oom(told.append) as found:
        exec(compile(source, str(path), "exec"), {"__name__": "__main__"})
    return found, head["cause"], told


@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_planted_cause_is_named_with_its_line(path: Path) -> None:
    found, cause, told = planted(path)
    line = next(n for n, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if text.endswith(MARK))
    first = found.findings[0]
    assert (first.cause, first.line) == (cause, f"{path.name}:{line}")
    assert first.evidence and first.remedies and len(told) == 1 and cause.upper() in told[0]


def test_there_are_enough_and_every_cause_is_one() -> None:
    causes = [HEAD.search(path.read_text(encoding="utf-8")) for path in PROGRAMS]
    assert len(PROGRAMS) >= 25
    assert all(found is not None and found["cause"] in CAUSES for found in causes)


def test_without_a_card_nothing_is_recorded_and_errors_go_through() -> None:
    told: list[str] = []
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 3\.00 GiB"), explain_oom(told.append) as found:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
    assert found.evidence is not None and found.evidence.memory is None
    assert found.findings[0].cause == "not-known" and len(told) == 1


def test_other_errors_are_not_touched() -> None:
    told: list[str] = []
    with pytest.raises(ValueError), explain_oom(told.append) as found:
        raise ValueError
    assert not told and not found.findings
