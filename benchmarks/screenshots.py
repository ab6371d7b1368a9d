"""Look at the page: `python benchmarks/screenshots.py [FOLDER]` writes every view at two widths, light and dark.

`--readme` writes the picture at the top of the README instead. It drives the system's Chromium by Playwright.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VIEWS = ("answer", "timeline", "ladder", "map", "explain", "compare", "learn")
QUESTION = ("llama-3.1-8b", "--gpu", "rtx-4090")
FAILURE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 23.64 GiB "
    "of which 1.21 GiB is free. Of the allocated memory 20.55 GiB is allocated by PyTorch, and 1.40 GiB is reserved by "
    "PyTorch but unallocated."
)


@contextmanager
def served(*question: str) -> Iterator[str]:
    """Start `memfit page` in a process of its own; yield its address. It ends quietly when it is told to."""
    command = [sys.executable, "-m", "memfit", "page", *question, "--no-open", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = ""
        while "}" not in said:
            said += process.stdout.readline()
        try:
            yield json.loads(said)["address"]
        finally:
            process.terminate()
        assert process.wait(20) == 0


@contextmanager
def chromium() -> Iterator[Any]:
    """Start the system's Chromium, and yield it as Playwright's browser."""
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


def settled(page: Any) -> None:
    """Wait until nothing is asked any more."""
    time.sleep(0.5)
    while page.evaluate("document.querySelector('#status').textContent !== '' || !!document.querySelector('.stale')"):
        time.sleep(0.1)


def shown(page: Any, view: str) -> bool:
    """Show a view with something in it; return whether the page has it."""
    if not page.locator(f"#tab-{view}").count():
        return False
    page.click(f"#tab-{view}")
    if view == "explain":
        page.fill("#failed-text", FAILURE)
        page.click("#failure button")
    if view == "compare":
        page.click("#keep")
        page.focus("#slide-sequence-length")
        page.keyboard.press("ArrowRight")
    settled(page)
    return True


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "screenshots")
    parser.add_argument("--readme", action="store_true", help="write docs/page.png")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    looks = [(1280, "light"), (1280, "dark"), (360, "light"), (360, "dark")]
    with served(*QUESTION) as address, chromium() as browser:
        for width, scheme in looks[:1] if asked.readme else looks:
            context = browser.new_context(viewport={"width": width, "height": 840}, color_scheme=scheme)
            page = context.new_page()
            page.goto(address)
            page.wait_for_selector(".verdict", timeout=60_000)
            settled(page)
            if asked.readme:
                page.screenshot(path=ROOT / "docs" / "page.png")
                break
            for view in VIEWS:
                if shown(page, view):
                    page.screenshot(path=asked.folder / f"{view}-{width}-{scheme}.png", full_page=True, timeout=180_000)
            context.close()
    print(f"pictures in {ROOT / 'docs' if asked.readme else asked.folder}")


if __name__ == "__main__":
    main()
