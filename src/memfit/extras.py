"""The optional dependencies: what each opens, and the error with the command that installs it from where memfit is."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

from memfit._package import FOLDER
from memfit.errors import MemfitError

CPU_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"  # no CUDA: enough to plan and trace


class Extra(NamedTuple):
    """One row of pyproject.toml's optional dependencies, and what memfit does with it."""

    name: str
    requirements: tuple[str, ...]
    commands: tuple[str, ...]  # those that need it, or do more with it
    opens: str


EXTRAS = (
    Extra(
        "trace", ("torch>=2.10", "transformers>=5.0", "peft>=0.18", "accelerate>=1.10", "trl>=1.0"),
        ("trace", "check", "plan", "replay"),
        "your training code on a virtual GPU; plans of what no formula models, and confirmed plans; memfit.watch",
    ),
    Extra(
        "train",
        ("torch>=2.11", "transformers>=5.23,<6", "trl>=1.15,<2", "peft>=0.18,<1", "accelerate>=1.12,<2",
         "datasets>=4.0", "bitsandbytes>=0.48", "xxhash>=3"),
        ("train", "data"), "training that survives running out of memory; QLoRA; training files in .parquet",
    ),
    Extra("watch", ("nvidia-ml-py>=12", "psutil>=5.9"), ("watch",),
          "memory of any command, measured by the card's driver; resident memory outside Linux"),
    Extra("data", ("tokenizers>=0.20",), ("data", "plan"), "tokens counted by a model's own tokenizer"),
    Extra("page", ("starlette>=0.40", "uvicorn>=0.30"), ("page", "watch"), "answers in a browser"),
    Extra("mcp", ("mcp>=2,<3", "jsonschema>=4.20"), ("mcp",), "answers for agents over the Model Context Protocol"),
)  # fmt: skip


class MissingExtra(MemfitError):
    """An optional dependency is not installed."""

    def __init__(self, need: str, extra: str) -> None:
        super().__init__(f"{need} needs packages that are not installed", hint=install_command(extra))


def install_command(extra: str) -> str:
    """Return the pip command that adds an extra to this memfit: pip install 'memfit[trace]', if it is from the index.

    A source tree is named by its folder; an installation from a folder, a wheel or git by what pip noted of it
    (direct_url.json, PEP 610).
    """
    tree = Path(FOLDER).parents[1]
    if (tree / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{tree}[{extra}]')}"
    return f"pip install {shlex.quote(_requirement(extra))}"


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
