"""The optional dependencies: the error where one is missing, with the command that installs it from where memfit is."""

from __future__ import annotations

import shlex
from pathlib import Path

from memfit._package import FOLDER
from memfit.errors import MemfitError


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
