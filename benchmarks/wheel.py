"""Build the wheel, install it in fresh environments by pip, pipx and uvx, plan in each, and measure what each takes.

    python benchmarks/wheel.py              # pip, pip with each extra but train, pipx and uvx where they are installed
    python benchmarks/wheel.py core trace   # some of them

`trace` installs PyTorch by its exact version of constraints.txt first: a looser request takes gigabytes of CUDA
packages. The exit code is 1 where an answer differs from this tree's, or where the wheel lacks a file of the package.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "constraints.txt"
MB = 10**6
QUESTION = ("plan", "meta-llama/Llama-2-7b-hf", "--gpu", "rtx-4090", "--json", "--no-trace")
TRACED = ("trace", "smollm2-135m", "--gpu", "rtx-4090", "--sequence-length", "128", "--json")
FITS = (0, 3, 4)  # exit codes of a verdict


def run(*command: str | Path, **env: str) -> str:
    """Run a program outside the tree with nothing of memfit's on its path, and return what it prints."""
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = [str(word) for word in command]
    done = subprocess.run(
        words, env=plain | env, cwd=tempfile.gettempdir(), capture_output=True, text=True, check=False
    )
    if done.returncode not in FITS:
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def package_files() -> set[str]:
    """Return the files that git keeps of the package, as the wheel names them."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src/memfit"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {name.removeprefix("src/") for name in listed.stdout.splitlines()}


def build(folder: Path) -> Path:
    """Build the wheel, and compare its files with those of the tree."""
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--constraint", PINS, "-w", folder, ROOT)
    wheel = next(folder.glob("memfit-*.whl"))
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    held = {name for name in names if "/_native." not in name or name.endswith(".cpp")}
    if held != package_files():
        raise SystemExit(f"the wheel differs from the tree: {sorted(held ^ package_files())}")
    return wheel


def size(folder: Path) -> int:
    """Return the bytes of the files below a folder; a file with several names counts once."""
    files = {(s.st_dev, s.st_ino): s.st_size for f in folder.rglob("*") if f.is_file() for s in [f.lstat()]}
    return sum(files.values())


PIP_ITSELF = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence")


def installed_size(environment: Path) -> int:
    """Return the bytes of the packages of a virtual environment, without pip."""
    packages = next(environment.glob("lib/python*/site-packages"))
    return sum(size(f) if f.is_dir() else f.stat().st_size for f in packages.iterdir()
               if not f.name.startswith(PIP_ITSELF))  # fmt: skip


def by_pip(wheel: Path, folder: Path, extra: str = "") -> tuple[int, list[Path | str]]:
    """Install by pip in a fresh environment; return the bytes of the packages, and the command."""
    venv.create(folder, with_pip=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--constraint", PINS]
    if extra in ("trace", "train"):
        run(*pip, "torch")
    run(*pip, f"{wheel}[{extra}]" if extra else wheel)
    return installed_size(folder), [folder / "bin" / "memfit"]


def by_pipx(wheel: Path, folder: Path) -> tuple[int, list[Path | str]]:
    """Install by pipx into a folder of its own."""
    where = {"PIPX_HOME": str(folder), "PIPX_BIN_DIR": str(folder / "bin"), "PIP_CONSTRAINT": str(PINS)}
    run("pipx", "install", wheel, **where)
    return installed_size(folder / "venvs" / "memfit"), [folder / "bin" / "memfit"]


def by_uvx(wheel: Path, folder: Path) -> tuple[int, list[Path | str]]:
    """Run by uvx, with a cache of its own."""
    words = ["uvx", "--quiet", "--cache-dir", folder, "--constraints", PINS, "--from", wheel, "memfit"]
    run(*words, "--version")
    return size(folder), words


WAYS: dict[str, Callable[[Path, Path], tuple[int, list[Path | str]]]] = {
    "core": by_pip, "pipx": by_pipx, "uvx": by_uvx,
    **{extra: lambda wheel, folder, extra=extra: by_pip(wheel, folder, extra)  # type: ignore[misc]
       for extra in ("watch", "data", "page", "mcp", "trace", "train")},
}  # fmt: skip


def rows(names: list[str], folder: Path) -> Iterator[str]:
    """Install the wheel in each way and run it; yield a row of the table."""
    wheel = build(folder)
    expected = json.loads(run(sys.executable, "-m", "memfit", *QUESTION, PYTHONPATH=str(ROOT / "src")))
    yield f"| the wheel | {wheel.stat().st_size / MB:.1f} MB |"
    for name in names:
        if name in ("pipx", "uvx") and not shutil.which(name):
            yield f"| {name} | not installed here |"
            continue
        taken, command = WAYS[name](wheel, folder / name)
        if json.loads(run(*command, *QUESTION)) != expected:
            raise SystemExit(f"{name}: the plan differs from the one of this tree")
        if name == "trace":
            json.loads(run(*command, *TRACED))
        run(*command, "--version")
        shutil.rmtree(folder / name)
        yield f"| {name} | {taken / MB:,.0f} MB |"


def main() -> None:
    """Print the table, one row as soon as it is known."""
    names = sys.argv[1:] or [name for name in WAYS if name != "train"]
    if unknown := set(names) - set(WAYS):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}\nhint: one of {', '.join(WAYS)}")
    with tempfile.TemporaryDirectory() as made:
        print("| installed by | on disk |\n|---|---:|")
        for row in rows(names, Path(made)):
            print(row, flush=True)


if __name__ == "__main__":
    main()
