"""Planted causes: small programs that run out of memory on a virtual card, each for one reason, named with its line."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from memfit import explain_oom, find_gpu, virtual_gpu  # noqa: E402
from memfit.live.explain_oom import Explained  # noqa: E402
from memfit.nouns.finding import CAUSES, Cause  # noqa: E402
from memfit.nouns.gpu import Gpu  # noqa: E402
from memfit.units import GIB, MIB  # noqa: E402
from smoke import smoke  # noqa: E402

pytestmark = pytest.mark.usefixtures("nothing_left")

PROGRAMS = sorted((Path(__file__).parent / "data" / "planted").glob("*.py"))
HEAD = re.compile(r"^# cause: (?P<cause>[\w-]+) · card: (?P<card>\d+) MiB$", re.MULTILINE)
MARK = "# <-"  # on the line that is to be named


def mlp(width: int = 256, depth: int = 4, **words: Any) -> nn.Sequential:
    """Return linear layers on the card, for programs that do not make a model of their own."""
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to("cuda", **words)


GIVEN = {"__name__": "__main__", "torch": torch, "nn": nn, "F": nn.functional, "mlp": mlp}  # names of every program


def head(path: Path) -> re.Match[str]:
    """Return the cause and the card in the head of a program."""
    found = HEAD.search(path.read_text(encoding="utf-8"))
    assert found is not None
    return found


def planted_cause(path: Path) -> Cause:
    """Return the cause in the head of a program."""
    return head(path)["cause"]  # type: ignore[return-value]


def card_of(path: Path) -> tuple[Gpu, int]:
    """Return the card of a program, and the bytes it has for tensors."""
    room, foreign = int(head(path)["card"]) * MIB, 8 * GIB if planted_cause(path) == "other-process" else 0
    return replace(find_gpu("rtx-4090"), total_bytes=room + foreign + MIB, context_bytes=MIB), room


def run(path: Path) -> None:
    """Run a program to its end."""
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), dict(GIVEN))


CASES = smoke(PROGRAMS, lambda path: [planted_cause(path)])


def planted(path: Path) -> tuple[Explained, list[str]]:
    """Return what was explained of a program, and what was told."""
    gpu, room = card_of(path)
    told: list[str] = []
    with virtual_gpu(gpu, capacity=room), pytest.raises(torch.OutOfMemoryError), explain_oom(told.append) as found:
        run(path)
    return found, told


@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_planted_cause_is_named_with_its_line(path: Path) -> None:
    found, told = planted(path)
    cause = planted_cause(path)
    line = next(n for n, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if text.endswith(MARK))
    first = found.findings[0]
    assert (first.cause, first.line) == (cause, f"{path.name}:{line}")
    assert first.evidence and first.remedies and len(told) == 1 and cause.upper() in told[0]


def test_there_are_enough_and_every_cause_is_one() -> None:
    assert len(PROGRAMS) >= 25 and set(map(planted_cause, PROGRAMS)) <= set(CAUSES)


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
