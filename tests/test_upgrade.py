"""What `memfit diff` says of two answers: tensors aligned, the deciding line of a library named, mistakes refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console

from memfit.check.environments import environment
from memfit.check.upgrade import footprints, upgrade
from memfit.documents import codec
from memfit.documents.diff_doc import DiffDoc, diff_doc
from memfit.footprints.compare import compare
from memfit.nouns.check import CheckJob, JobAnswer, PhaseShares, Share
from memfit.nouns.footprint import Levels
from memfit.report.upgrade import upgrade_view
from memfit.units import MIB

OLD = '''
def outer(x):
    return loss(x)

def loss(x):
    """Return the loss."""
    return cross_entropy(x)
'''
NEW = '''
# moved by a comment
def outer(x):
    return loss(x)

def loss(x):
    """Return the loss, and say so in other words."""
    x = x.float()
    return cross_entropy(x)
'''
Made = Callable[[str, str], Path]


@pytest.fixture
def library(tmp_path: Path) -> Made:
    """Return what writes a folder, as `pip install --target` makes it, with one library of a version."""

    def write(version: str, text: str) -> Path:
        folder = tmp_path / version
        (folder / "losses").mkdir(parents=True)
        (folder / "losses" / "heads.py").write_text(text)
        (folder / f"losses-{version}.dist-info").mkdir()
        (folder / f"losses-{version}.dist-info" / "METADATA").write_text(f"Name: losses\nVersion: {version}\n")
        return folder

    return write


def answer(verdict: Literal["fits", "misfit"], *shares: Share) -> JobAnswer:
    total = sum(share.bytes for share in shares)
    phase = PhaseShares("step", "backward", Levels(total, total, total, total), shares)
    return JobAnswer("train.py", "l4", "traced", verdict, 900 * MIB, total, 0, (phase,))


def test_the_line_that_decides_is_named_with_its_versions(library: Made) -> None:
    old, new = library("1.0", OLD), library("2.0", NEW)
    envs = environment(str(old)), environment(str(new))

    def at(folder: Path, inner: int, outer: int) -> tuple[str, ...]:
        return (f"{folder}/losses/heads.py:{inner}", f"{folder}/losses/heads.py:{outer}", "train.py:3")

    same = Share("parameters", "weight", 100 * MIB, ("train.py:1",))
    base = answer("fits", same, Share("activations", "head: _log_softmax", 200 * MIB, at(old, 7, 3)),
                  Share("temporaries", "old name", 8 * MIB))  # fmt: skip
    head = answer("misfit", same, Share("activations", "head: _log_softmax", 400 * MIB, at(new, 9, 4)),
                  Share("activations", "head: copy", 600 * MIB, at(new, 8, 4)),
                  Share("temporaries", "new name", 8 * MIB))  # fmt: skip
    found = upgrade(CheckJob("", "l4", ("python", "train.py")), envs, base, head)
    assert [(row.label, row.added) for row in found.tensors] == [
        ("head: copy", 600 * MIB), ("head: _log_softmax", 200 * MIB)
    ]  # fmt: skip
    first = found.places[0]
    assert (first.place, first.versions, first.added) == ("losses/heads.py:8", ("1.0", "2.0"), 600 * MIB)
    assert [(v.library, v.base, v.head) for v in found.versions] == [("losses", "1.0", "2.0")]
    assert found.exit_code == 3
    document = diff_doc(found)
    assert codec.loads(codec.dumps(document)) == document and isinstance(document, DiffDoc)
    assert compare(*footprints(found)).difference == 800 * MIB
    for width in (100, 10_000):  # a terminal and a pipe
        out = io.StringIO()
        Console(file=out, width=width).print(upgrade_view(found))
        assert max(map(len, out.getvalue().splitlines())) <= width
        assert "losses/heads.py:8" in out.getvalue() and "does not fit" in out.getvalue()
    # the other way round the line is one that the new version no longer has
    back = upgrade(CheckJob("", "l4", ("python", "train.py")), envs[::-1], head, base)
    assert (back.places[0].only_base, back.places[0].added, back.exit_code) == (True, -600 * MIB, 0)


def test_the_same_functions_decide_nothing(library: Made) -> None:
    old, new = library("1.0", OLD), library("1.1", OLD.replace("\ndef outer", "\n\n\ndef outer"))
    envs = environment(str(old)), environment(str(new))
    sides = [answer("fits", Share("activations", "x", n * MIB, (f"{f}/losses/heads.py:{line}",)))
             for n, f, line in ((1, old, 7), (2, new, 9))]  # fmt: skip
    found = upgrade(CheckJob("", "l4", ("python", "train.py")), envs, *sides)
    assert found.tensors[0].added == MIB and found.tensors[0].decided is None and not found.places


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--env", "requirements.txt", "--env", "."), "pip install -r requirements.txt"),
        (("--env", "nowhere", "--env", "nowhere"), "no environment"),
        (("--env", "."), "two environments"),
    ],
)
def test_mistakes_are_refused_with_a_way_on(
    words: tuple[str, ...], said: str, ran: Callable[..., tuple[int, str, str]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requirements.txt").write_text("torch\n")
    (tmp_path / "train.py").write_text("")
    code, _, err = ran("diff", *words, "--gpu", "l4", "train.py")
    assert code == 2 and said in err
