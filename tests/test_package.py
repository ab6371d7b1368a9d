"""What is handed out: the wheel's files, the extras, the versions, `memfit doctor`, and the documentation's site."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from conftest import Ran
from memfit import __version__
from memfit.allocator import PlainAllocator, quick
from memfit.cli import installation
from memfit.cli.tree import COMMANDS
from memfit.documents.snapshot import pickles
from memfit.extras import CPU_WHEELS, EXTRAS, cpu_torch, installer
from memfit.virtual import supported

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_every_extra_is_in_the_table_with_its_commands() -> None:
    assert {extra.name for extra in EXTRAS} == PROJECT["optional-dependencies"].keys() - {"dev"}
    assert all(extra.commands and set(extra.commands) <= COMMANDS.keys() for extra in EXTRAS)


def test_the_wheel_holds_every_file_of_the_package() -> None:
    """The list is hatchling's own, which the build goes through; nothing is built."""
    from hatchling.builders.wheel import WheelBuilder

    held = {Path(file.relative_path).as_posix() for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    here = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "src" / "memfit").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".so", ".pyd")
    }
    assert {name for name in held if "__pycache__" not in name} == here
    data = {Path(name).suffix for name in here} - {".py"}
    assert {".toml", ".json", ".css", ".js", ".html", ".txt"} <= data


@pytest.mark.parametrize(
    ("extra", "package", "version", "state"),
    [
        ("trace", "torch", "2.10.0+cpu", "ok"),
        ("trace", "torch", "2.9.1", "fault"),
        ("train", "trl", "2.0.0", "fault"),
        ("train", "trl", "1.16.0rc1", "ok"),
        ("train", "xxhash", "", "note"),
    ],
)
def test_a_version_is_held_against_its_requirement(
    extra: str, package: str, version: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other packages are those of the oldest version that will do."""

    def installed(row: Requirement) -> str:
        oldest = next(part.version for part in row.specifier if part.operator == ">=")
        return version if row.name == package else oldest

    monkeypatch.setattr(installation, "_installed", installed)
    assert {found.about: found.state for found in installation._extras()}[f"memfit[{extra}]"] == state


def test_version_and_doctor_name_versions_without_importing_them(tmp_path: Path) -> None:
    code = (
        "import sys; from memfit.cli import main; main(['--version']); print(main(['doctor', '--json']));"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, last = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
    assert (first, last) == (f"memfit {__version__}", "False False")
    document = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])
    listed = dict(line.split(" ") for line in done.stdout.partition("{")[0].splitlines())
    assert document["versions"] == listed and supported.versions().items() <= listed.items()


def _states(ran: Ran) -> tuple[int, dict[str, dict[str, str]]]:
    code, out, _ = ran("doctor", "--json")
    return code, {row["about"]: row for row in json.loads(out)["findings"]}


def test_what_is_out_of_order_ends_in_two(ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "kept"))
    assert (_states(ran)[1]["cache"]["state"], (tmp_path / "kept").exists()) == ("ok", False)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "file"))
    code, found = _states(ran)
    assert (code, found["cache"]["state"]) == (2, "fault") and "MEMFIT_CACHE" in found["cache"]["type_next"]
    monkeypatch.setattr(supported, "versions", lambda: {"torch": "2.9.0"})
    assert _states(ran)[1]["PyTorch"]["state"] == "fault"
    monkeypatch.setattr(installation, "_installed", lambda requirement: "")
    monkeypatch.setattr(supported, "versions", dict)
    found = _states(ran)[1]
    assert {found[f"memfit[{extra.name}]"]["state"] for extra in EXTRAS} == {"note"}
    assert found["replays"]["state"] == ("ok" if PlainAllocator is not quick.PlainAllocator else "note")
    assert found["snapshots"]["state"] == ("ok" if pickles.engine else "note")
    assert found["PyTorch"]["type_next"] == cpu_torch()


@pytest.mark.parametrize(
    ("file", "text", "first"),
    [("pipx_metadata.json", "{}", "pipx runpip"), ("pyvenv.cfg", "home = x\nuv = 0.9\n", "uv pip"), ("x", "", "pip ")],
)
def test_a_command_installs_where_memfit_is(
    file: str, text: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / file).write_text(text)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert installer().startswith(first) and cpu_torch().endswith(CPU_WHEELS)


@pytest.mark.parametrize(
    ("build", "card", "command"),
    [("CPU", False, ""), ("CPU", True, "pip install"), ("CUDA 13.0", False, "whl/cpu"), ("CUDA 13.0", True, "")],
)
def test_the_build_of_pytorch_is_held_against_the_card(
    build: str, card: bool, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supported, "versions", lambda: {"torch": "2.13.0"})
    monkeypatch.setattr(installation, "torch_build", lambda: build)
    last = list(installation._torch(card))[-1]
    assert command in last.type_next and (last.state == "ok") is not bool(command)


@pytest.mark.parametrize(
    ("words", "rooms"),
    [
        (["llama-3.1-8b"], {"explain", "frameworks", "train"}),
        (["google/vit-base-patch16-224"], {"explain", "frameworks", "train"}),
        (["llama-3.1-8b", "--out", "run"], {"explain", "train"}),
    ],
)
def test_a_plan_loads_nothing_that_reads_logs_or_files_it_was_not_given(
    words: list[str], rooms: set[str], tmp_path: Path
) -> None:
    """Importing the readers of logs, snapshots and other tools' files takes longer than making most plans."""
    code = (
        "import sys; from memfit.cli import main; main(['plan', *sys.argv[1:], '--gpu', 'rtx-4090']);"
        "print(*{name.split('.')[1] for name in sys.modules if name.startswith('memfit.')})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "planner" in loaded and not loaded & rooms


@pytest.mark.parametrize(
    ("smi", "states"),
    [
        ("echo 'NVIDIA H100 80GB HBM3, 81559, 551, 9.0'", ["ok", "ok"]),
        ("echo 'NVIDIA H100 80GB HBM3, 40960, 551, 9.0'", ["ok", "note"]),  # a part of a card is none of the catalogue
        ("exit 9", ["fault"]),
    ],
)
def test_the_card_is_held_against_the_catalogue(
    smi: str, states: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [found.state for found in installation._card()] == states


def test_the_site_is_built_without_a_warning_and_asks_no_other_host(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.html")}
    assert {"index.html", "install.html", "changelog.html", "contributing.html", "skill.html"} <= set(pages)
    for text in pages.values():
        assert not re.search(r'(?:\bsrc|<link[^>]*href)="(?:https?:)?//', text)
    assert (tmp_path / "search" / "search_index.js").stat().st_size > 100_000


def test_the_metadata_agree() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cited["version"], cited["license"]) == (__version__, PROJECT["license"])
    action, gitlab = (yaml.safe_load((ROOT / name).read_text()) for name in ("action.yml", "integrations/gitlab.yml"))
    assert action["inputs"]["install"]["default"] == gitlab["memfit"]["variables"]["MEMFIT_INSTALL"]
    assert action["inputs"]["install"]["default"].endswith(CPU_WHEELS)
