"""A hook of MkDocs: the files of the repository's root as pages of the site, their links and those to them mended."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "skills/memfit/SKILL.md": "skill.md",
}
LINK = re.compile(r"(\]\()([^)#\s]+)([^)]*\))")
FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that do not lie in docs/."""
    for path, page in PAGES.items():
        text = FRONT_MATTER.sub("", (ROOT / path).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=linked(text, posixpath.dirname(path))))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links from docs/ to the pages of the root at their place on the site."""
    return markdown if page.file.generated_by else linked(markdown, "docs")


def linked(text: str, folder: str) -> str:
    """Return a text of a folder of the repository with its links to files as the site has them."""

    def mended(link: re.Match[str]) -> str:
        target = link[2]
        if re.match(r"[a-z]+:", target):
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        return f"{link[1]}{PAGES.get(path, path.removeprefix('docs/'))}{link[3]}"

    return LINK.sub(mended, text)
