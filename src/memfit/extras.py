"""The optional dependencies: what each opens, and the error with the command that installs it from where memfit is."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from memfit._package import FOLDER
from memfit.errors import MemfitError

CPU_WHEELS = "https://download.pytorch.org/whl/cpu"  # PyTorch without CUDA: enough to plan and to trace


class Extra(NamedTuple):
    """What memfit does with one of pyproject.toml's optional dependencies."""

    name: str
    commands: tuple[str, ...]  # those that need it, or do more with it
    opens: str


EXTRAS = (
    Extra("trace", ("trace", "check", "plan"),
          "your training code on a virtual GPU; plans of what no formula models, and confirmed plans; memfit.watch"),
    Extra("train", ("train", "data"),
          "training that survives running out of memory; QLoRA; training files in .parquet"),
    Extra("watch", ("watch",),
          "memory of any command, measured by the card's driver; resident memory outside Linux"),
    Extra("data", ("data", "plan"), "tokens counted by a model's own tokenizer; sizes of images and recordings"),
    Extra("page", ("page", "watch"), "answers in a browser"),
    Extra("mcp", ("mcp",), "answers for agents over the Model Context Protocol"),
)  # fmt: skip


class MissingExtra(MemfitError):
    """An optional dependency is not installed."""

    def __init__(self, need: str, extra: str) -> None:
        super().__init__(f"{need} needs packages that are not installed", hint=install_command(extra))


def installer() -> str:
    """Return the words that install a package beside this memfit: `pip install`, or what pipx and uv have for it."""
    prefix = Path(sys.prefix)
    if (prefix / "pipx_metadata.json").is_file():
        return f"pipx runpip {shlex.quote(prefix.name)} install"
    config = prefix / "pyvenv.cfg"
    if config.is_file() and "\nuv = " in f"\n{config.read_text(encoding='utf-8')}":  # such an environment has no pip
        return f"uv pip install --python {shlex.quote(sys.executable)}"
    return "pip install"


def cpu_torch(*flags: str) -> str:
    """Return the command that installs PyTorch without CUDA."""
    return " ".join((installer(), *flags, "torch", "--index-url", CPU_WHEELS))


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this memfit: pip install 'memfit[trace]', if it is from the index.

    A source tree is named by its folder; an installation from a folder, a wheel or git by what pip noted of it
    (direct_url.json, PEP 610).
    """
    tree = Path(FOLDER).parents[1]
    if (tree / "pyproject.toml").is_file():
        return f"{installer()} -e {shlex.quote(f'{tree}[{extra}]')}"
    return f"{installer()} {shlex.quote(_requirement(extra))}"


def _requirement(extra: str) -> str:
    """Return the requirement that names the extra of the installed memfit."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution  # slow to import
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    plain = f"memfit[{extra}]"
    try:
        noted = json.loads(distribution("memfit").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return plain
    url = str(noted.get("url", ""))
    if version_control := noted.get("vcs_info"):
        return f"{plain} @ {version_control['vcs']}+{url}"
    parts = urlsplit(url)
    if parts.scheme == "file":
        path = url2pathname(parts.path)
        return f"{path}[{extra}]" if Path(path).exists() else plain
    return f"{plain} @ {url}" if url else plain
