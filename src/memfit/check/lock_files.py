"""Lock files, read as exact pins that one interpreter needs, and the environment that is installed from them.

requirements.txt with pins, pylock.toml (PEP 751), uv.lock and poetry.lock are read. What is no pin of a release on an
index (a folder, a repository, an address) is refused: pip would run its build. Only wheels are installed, so nothing of
a package runs before the job does. PyTorch is its CPU build, which a trace needs and which needs no CUDA packages.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from memfit.documents.traced_answers import environments
from memfit.errors import BadInput
from memfit.extras import CPU_WHEELS
from memfit.reading import bounds
from memfit.reading.settings_text import of_toml

KEPT = 6  # environments, those that were used last; one takes 1 to 2 GB
_MOST = 64 << 20  # bytes of a lock file; those of large projects have 5 MB
_DONE = "memfit.json"  # in a finished environment: what it was made of
_TORCH = ("torch", "torchvision", "torchaudio")  # of which the CPU build is installed
_CUDA = ("nvidia-", "cuda-")  # packages that only PyTorch's CUDA build needs
_HINT = "make the virtual environment yourself: python -m venv env-a && env-a/bin/pip install ...; then --env env-a"
_PIN = re.compile(r"[a-z0-9][a-z0-9-]*(?:\[[\w.,-]+\])?==[\w.!]+")
_OPTION = re.compile(r"\s--hash[=\s]\S+")
Pins = dict[str, str]  # name as PyPI normalises it -> version


def is_lock(path: Path) -> bool:
    """Return whether a file is named as a lock file."""
    return path.suffix in (".txt", ".lock") or (path.suffix == ".toml" and path.name.startswith("pylock"))


def pins_of(path: Path) -> Pins:
    """Return the releases that a lock file names for this interpreter. Raises BadInput."""
    text = bounds.content_of(path, _MOST, "a lock file has some MB at most").decode(errors="replace")
    rows: Iterable[tuple[str, str]]
    if path.suffix == ".txt":
        rows = _of_requirements(path.name, text)
    else:
        try:
            data = of_toml(text)
        except ValueError as error:
            raise BadInput(f"{path.name} is no TOML: {error}", hint="lock it again") from error
        read = next((read for key, read in _READERS.items() if key in data), None)
        if read is None:
            raise BadInput(
                f"{path.name} is no lock file that memfit reads",
                hint="it reads requirements.txt with pins, pylock.toml, uv.lock and poetry.lock",
            )
        rows = read(path.name, data)
    found: Pins = {}
    try:
        for name, version in rows:
            if name.startswith(_CUDA):  # poetry locks two versions of some, both for Linux
                continue
            if not _PIN.fullmatch(f"{name}=={version}"):  # it becomes an argument of pip
                raise BadInput(f"{path.name}: {name!r} {version!r} is no pin of a release", hint=_HINT)
            if found.setdefault(name, version) != version:
                raise BadInput(f"{path.name} has {name} {found[name]} and {version} for this interpreter", hint=_HINT)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInput(f"{path.name} is damaged: {type(error).__name__}: {error}"[:200], hint="lock it again") from None
    if "torch" not in found:
        raise BadInput(f"{path.name} has no torch, without which nothing is traced", hint="add a line torch==VERSION")
    return found


def _applies(marker: str, **known: Any) -> bool:
    from packaging.markers import Marker

    if not marker:
        return True
    return Marker(marker).evaluate(
        {"extra": "", "extras": frozenset(), "dependency_groups": frozenset(), **known}, "lock_file"
    )


def _named(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _public(version: str) -> str:
    """Return a version without the part that names a build, as in 2.13.0+cu128."""
    return version.partition("+")[0]


def _of_requirements(file: str, text: str) -> Iterator[tuple[str, str]]:
    from packaging.requirements import InvalidRequirement, Requirement

    for line in re.sub(r"\\\n", " ", text).splitlines():
        stripped = _OPTION.sub("", re.sub(r"(^|\s)#.*", "", line)).strip()
        if not stripped or stripped.startswith(("-i ", "--index-url", "--extra-index-url", "--find-links", "-f ")):
            continue  # where pip looks is settled by its own settings
        try:
            one = Requirement(stripped)
        except InvalidRequirement as error:
            raise BadInput(f"{file}: {stripped} is no pin of a release", hint=_HINT) from error
        exact = [s.version for s in one.specifier if s.operator in ("==", "===") and "*" not in s.version]
        if one.url or not exact:
            raise BadInput(
                f"{file}: {stripped} names no exact version",
                hint="pip freeze, or uv pip compile, writes a file in which every line does",
            )
        if one.marker is None or _applies(str(one.marker)):
            extras = f"[{','.join(sorted(one.extras))}]" if one.extras else ""
            yield _named(one.name) + extras, _public(exact[0])


def _of_pylock(file: str, data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    groups = frozenset(data.get("default-groups", ()))
    for one in data["packages"]:
        if not _applies(one.get("marker", ""), dependency_groups=groups):
            continue
        if {"vcs", "directory", "archive"} & one.keys() or "version" not in one:
            raise _no_release(file, one["name"])
        yield _named(one["name"]), _public(one["version"])


def _of_poetry(file: str, data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for one in data["package"]:
        marker = one.get("markers", "")
        if isinstance(marker, dict):  # by group
            marker = marker.get("main", "")
        if one.get("optional") or "main" not in one.get("groups", ["main"]) or not _applies(marker):
            continue
        if one.get("source", {}).get("type", "legacy") != "legacy":  # another index is of this type
            raise _no_release(file, one["name"])
        yield _named(one["name"]), _public(one["version"])


def _of_uv(file: str, data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Walk the dependencies from the project's own packages, as markers stand on the edges."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for one in data["package"]:
        by_name.setdefault(one["name"], []).append(one)
    own = ("editable", "virtual")
    todo = [(one, "") for one in data["package"] if set(own) & one["source"].keys()]
    seen = {(one["name"], one.get("version"), extra) for one, extra in todo}
    while todo:
        one, extra = todo.pop()
        if not set(own) & one["source"].keys():
            if "registry" not in one["source"]:
                raise _no_release(file, one["name"])
            yield _named(one["name"]), _public(one["version"])
        edges = one.get("optional-dependencies", {}).get(extra, ()) if extra else one.get("dependencies", ())
        for edge in edges:
            if not _applies(edge.get("marker", "")):
                continue
            fitting = [p for p in by_name[edge["name"]] if edge.get("version", p.get("version")) == p.get("version")]
            for wanted in ("", *edge.get("extra", ())):
                for package in fitting:
                    if (key := (package["name"], package.get("version"), wanted)) not in seen:
                        seen.add(key)
                        todo.append((package, wanted))


def _no_release(file: str, name: str) -> BadInput:
    return BadInput(f"{file}: {name} is no release on an index, and building it would run its code", hint=_HINT)


# by a key that only this format has, the most particular first
_READERS: dict[str, Callable[[str, Mapping[str, Any]], Iterable[tuple[str, str]]]] = {
    "lock-version": _of_pylock, "metadata": _of_poetry, "requires-python": _of_uv,
}  # fmt: skip


def installed(path: Path, tell: Callable[[str], None]) -> Path:
    """Return the environment of a lock file in memfit's cache folder, made now if it was not. Raises BadInput."""
    pins = pins_of(path)
    about = {"pins": sorted(pins.items()), "python": list(sys.version_info[:3]), "prefix": sys.base_prefix}
    digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
    folder = environments() / digest
    if (folder / _DONE).is_file():
        os.utime(folder / _DONE)
        return folder
    torch = {name: version for name, version in pins.items() if name in _TORCH}
    rest = {name: version for name, version in pins.items() if name not in _TORCH}
    versions = ", ".join(f"{name} {version}" for name, version in sorted(pins.items()) if name in _SHOWN)
    tell(
        f"{path}: installing {len(pins)} pinned packages as wheels into {folder}, with PyTorch's CPU build "
        f"({versions}; `memfit cache --clear` removes it)"
    )
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier attempt
    try:
        _run([sys.executable, "-m", "venv", str(folder)], path)
        # what requirements.txt leaves open is settled by pip; of a build for CUDA nothing is
        loose = path.suffix == ".txt"
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--only-binary", ":all:", "--no-input"]
        _run([*pip, "--no-deps", "--extra-index-url", CPU_WHEELS, *_words(torch)], path)
        _check_build(folder, path)
        if rest or loose:
            _run([*pip, *([] if loose else ["--no-deps"]), *_words(torch if loose else {}), *_words(rest)], path)
        (folder / _DONE).write_text(json.dumps({"from": path.name, **about}))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    for old in sorted(environments().glob(f"*/{_DONE}"), key=lambda done: -done.stat().st_mtime)[KEPT:]:
        shutil.rmtree(old.parent, ignore_errors=True)
    return folder


_SHOWN = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "deepspeed")


def _words(pins: Pins) -> list[str]:
    return [f"{name}=={version}" for name, version in pins.items()]


def _run(words: list[str], path: Path) -> None:
    """Run a command whose output goes to stderr."""
    done = subprocess.run(words, stdout=sys.stderr.fileno(), check=False)
    if done.returncode:
        what = "pip" if "pip" in words else "python -m venv"
        raise BadInput(f"{path}: {what} could not install it (see above)", hint=_HINT)


def _check_build(folder: Path, path: Path) -> None:
    """Raise BadInput if an index gave PyTorch's build for CUDA, which cannot be imported without CUDA's packages."""
    for about in folder.glob("lib/python*/site-packages/torch-*.dist-info/METADATA"):
        if re.search(r"^Requires-Dist: (nvidia|cuda)-", about.read_text(errors="replace"), re.MULTILINE):
            raise BadInput(
                f"{path}: pip found only PyTorch's build for CUDA",
                hint=f"pin a version that {CPU_WHEELS} has",
            )
