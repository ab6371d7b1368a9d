"""What `memfit diff` says of two answers: tensors aligned, the deciding line of a library named, mistakes refused."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from rich.console import Console

from memfit.check import lock_files
from memfit.check.environments import environment
from memfit.check.lock_files import pins_of
from memfit.check.upgrade import footprints, upgrade
from memfit.documents import codec
from memfit.documents.check_doc import DiffDoc, diff_doc
from memfit.documents.traced_answers import clear, environments
from memfit.errors import BadInput
from memfit.footprints.compare import compare
from memfit.nouns.check import CheckJob, JobAnswer, PhaseShares, Share
from memfit.nouns.footprint import Levels
from memfit.report.upgrade import upgrade_view
from memfit.units import MIB
from memfit.virtual.process.recorded_inputs import recording

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


def test_what_a_changed_function_reads_and_keeps_is_its_doing(library: Made) -> None:
    text = """
def forward(ctx, x, weight):
    out = linear(x, weight)
    ctx.tensors = {}
    return out
"""
    old, new = library("1.0", text.format("(x, weight)")), library("1.1", text.format("(None, weight)"))
    envs = environment(str(old)), environment(str(new))
    reads = ((f"{old}/losses/heads.py:3", "train.py:3"),)
    base = answer("fits", Share("activations", "mlp: mul", 8 * MIB, ("train.py:2",), reads))
    head = answer("fits", Share("activations", "mlp: mul", 2 * MIB, ("train.py:2",)))
    (place,) = upgrade(CheckJob("", "l4", ("python", "train.py")), envs, base, head).places
    assert (place.line, place.code) == (4, "ctx.tensors = (x, weight)")
    assert (place.keeps, place.only_base, place.added) == (True, True, -6 * MIB)


PYLOCK = """
lock-version = "1.0"
[[packages]]
name = "torch"
version = "2.13.0+cu128"
[[packages]]
name = "PyWin32"
version = "1"
marker = "sys_platform == 'win32'"
"""
UV = """
version = 1
requires-python = ">=3.11"
[[package]]
name = "job"
source = { virtual = "." }
dependencies = [
  { name = "torch", version = "2.13.0", source = { registry = "index" } },
  { name = "pywin32", marker = "sys_platform == 'win32'" },
  { name = "peft", extra = ["more"] },
]
[[package]]
name = "torch"
version = "2.12.0"
source = { registry = "index" }
[[package]]
name = "torch"
version = "2.13.0"
source = { registry = "index" }
dependencies = [{ name = "nvidia-cublas" }]
[[package]]
name = "nvidia-cublas"
version = "13"
source = { registry = "index" }
[[package]]
name = "peft"
version = "0.21"
source = { registry = "index" }
[package.optional-dependencies]
more = [{ name = "psutil" }]
[[package]]
name = "psutil"
version = "7"
source = { registry = "index" }
[[package]]
name = "unused"
version = "1"
source = { git = "somewhere" }
"""
POETRY = """
[[package]]
name = "torch"
version = "2.13.0"
groups = ["main"]
[[package]]
name = "nvidia-cublas"
version = "13.1.1.3"
groups = ["main"]
[[package]]
name = "nvidia-cublas"
version = "13.10.0.20"
groups = ["main"]
[[package]]
name = "pytest"
version = "8"
groups = ["dev"]
[metadata]
lock-version = "2.1"
"""


@pytest.mark.parametrize(
    ("name", "text", "pins"),
    [
        ("pylock.toml", PYLOCK, {"torch": "2.13.0"}),
        ("uv.lock", UV, {"torch": "2.13.0", "peft": "0.21", "psutil": "7"}),
        ("poetry.lock", POETRY, {"torch": "2.13.0"}),
        ("a.txt", "torch==2.13.0 \\\n  --hash=sha256:0\nTRL[x]==1.0 # why\npywin32==1; os_name == 'nt'\n",
         {"torch": "2.13.0", "trl[x]": "1.0"}),
        ("a.txt", "torch==2.13.0\n-r more.txt\n", "no pin of a release"),
        ("a.txt", "torch==2.13.0\nx @ git+https://host/x\n", "no exact version"),
        ("a.txt", "torch==2.*\n", "no exact version"),
        ("a.txt", "trl==1.0\n", "no torch"),
        ("pylock.toml", PYLOCK + "[[packages]]\nname = 'x'\n[packages.vcs]\ntype = 'git'", "no release on an index"),
        ("pylock.toml", PYLOCK + "[[packages]]\nname = '--index-url'\nversion = '1'", "no pin of a release"),
        ("pylock.toml", 'lock-version = "1.0"\npackages = 3', "is damaged"),
        ("uv.lock", UV.replace('{ name = "peft",', '{ name = "unused" }, { name = "peft",'), "no release on an index"),
    ],
)  # fmt: skip
def test_a_lock_file_is_pins_of_releases(name: str, text: str, pins: dict[str, str] | str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    if isinstance(pins, str):
        with pytest.raises(BadInput, match=pins):
            pins_of(tmp_path / name)
    else:
        assert pins_of(tmp_path / name) == pins


def test_an_environment_of_a_lock_file_is_made_once_of_wheels_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def run(words: list[str], path: Path) -> None:
        ran.append(words)
        (environments() / Path(words[-1]).name).mkdir(parents=True, exist_ok=True) if "venv" in words else None

    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(lock_files, "_run", run)
    (tmp_path / "a.txt").write_text("torch==2.13.0\ntrl==1.0\n")
    said: list[str] = []
    made = lock_files.installed(tmp_path / "a.txt", said.append)
    pips = ran[1:]
    assert all(words[words.index("--only-binary") + 1] == ":all:" for words in pips)
    assert "torch==2.13.0" in pips[0] and "--no-deps" in pips[0] and "trl==1.0" in pips[1]
    (tmp_path / "b.txt").write_text("# other words\ntrl==1.0\ntorch==2.13.0\n")
    assert lock_files.installed(tmp_path / "b.txt", said.append) == made and len(ran) == 3 and len(said) == 1
    clear()
    assert not made.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--env", "requirements.txt", "--env", "."), "pip freeze"),
        (("--env", "nowhere", "--env", "nowhere"), "no environment"),
        (("--env", "pins.txt", "--env", "nowhere"), "no environment"),  # before the pins are installed
        (("--env", "."), "two environments"),
    ],
)
def test_mistakes_are_refused_with_a_way_on(
    words: tuple[str, ...], said: str, ran: Callable[..., tuple[int, str, str]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requirements.txt").write_text("torch\n")
    (tmp_path / "pins.txt").write_text("torch==0.0.0\n")
    (tmp_path / "train.py").write_text("")
    code, _, err = ran("diff", *words, "--gpu", "l4", "train.py")
    assert code == 2 and said in err


def test_an_older_bitsandbytes_runs_above_a_stand_in_that_ends_with_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    import memfit

    package = tmp_path / "bitsandbytes"
    package.mkdir()
    (package / "__init__.py").write_text("from . import cextension, functional\n")
    load = "import ctypes\nlib = ctypes.cdll.LoadLibrary(str(__file__).replace('cextension.py', '{}'))\n"
    (package / "cextension.py").write_text(load.format("libbitsandbytes_cpu.so"))
    (package / "functional.py").write_text("from .cextension import lib\nadam = lib.cadam\nname2qmap = {}\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    try:
        with memfit.virtual_gpu("l4"):
            import bitsandbytes

            assert bitsandbytes.functional.adam(0) == 0
        with pytest.raises(RuntimeError, match="virtual GPU"):
            bitsandbytes.functional.adam(0)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "bitsandbytes"]:
            del sys.modules[name]


def test_what_a_backward_allocates_is_named_by_the_line_that_made_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    import memfit

    script = tmp_path / "train.py"
    script.write_text("def run(x):\n    y = x.exp()\n    z = y.sum()\n    z.backward()\n")
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "root").write_text(str(tmp_path))
    monkeypatch.setenv("MEMFIT_RECORD", str(tmp_path / "records"))
    space: dict[str, Any] = {}
    exec(compile(script.read_text(), str(script), "exec"), space)
    with memfit.virtual_gpu("l4") as card, recording(card.ledger):
        space["run"](torch.ones(1 << 20, device="cuda", requires_grad=True))
    said = json.loads((tmp_path / "records" / "process.json").read_text())
    assert "train.py:2\ntrain.py:4" in {said["chains"][index] for index in said["lines"].values()}
