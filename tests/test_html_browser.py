"""The files of --html in Chromium: whole at every width, by keyboard, and without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memfit import cli
from memfit.allocator.replay import replay
from memfit.cli.web_files import look
from memfit.documents import watch_log
from memfit.documents.tape_file import dumps
from memfit.footprints.rank_peaks import peak_of_rank
from memfit.nouns.alloc_settings import AllocSettings
from memfit.nouns.footprint import Footprint, Levels, PhasePeak
from memfit.nouns.sample import Alarm, Header, Sample
from memfit.nouns.tape import Alloc, Mark, Phase, Tape
from memfit.report.document_html import document
from memfit.report.rank_lanes_html import rank_lanes
from memfit.units import GIB
from test_page_browser import CHROMIUM, browser
from test_timeline import TAPE, TORCH

__all__ = ["browser"]
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium: apt-get install chromium")

FAILURE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 23.64 GiB "
    "of which 1.21 GiB is free. Of the allocated memory 20.55 GiB is allocated by PyTorch, and 1.40 GiB is reserved."
)
SNAPSHOT = Path(__file__).parent / "data" / "snapshots" / "plain-full.pickle.gz"
# what does not fit beside what else there is: the page, tables, words of pictures over each other
FAULTS = """() => {
  const found = [], root = document.documentElement, seen = e => e.checkVisibility() && e.textContent.trim();
  if (root.scrollWidth > innerWidth) found.push("the page scrolls");
  for (const box of document.querySelectorAll(".wide"))
    if (box.scrollWidth > box.clientWidth) found.push(`a table scrolls: ${box.textContent.slice(0, 60)}`);
  const texts = [...document.querySelectorAll("svg:not(.flame svg) > text, svg g > text")].filter(seen);
  const boxes = texts.map(text => [text.textContent, text.getBoundingClientRect()]);
  boxes.forEach(([said, a], n) => {
    if (a.left < 0 || a.right > innerWidth + 1) found.push(`cut: ${said}`);
    for (const [other, b] of boxes.slice(n + 1))
      if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2 &&
          Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 5)
        found.push(`${said} over ${other}`);
  });
  return found;
}"""


def made(folder: Path) -> list[Path]:
    """Write a file of every kind."""

    def file(name: str) -> str:
        return str(folder / f"{name}.html")

    model = ("llama-3.1-8b", "--gpu", "rtx-4090")
    (folder / "failure.log").write_text(FAILURE)
    tape = folder / "run.tape.gz"
    tape.write_bytes(dumps(TAPE))
    cli.main(["plan", *model, "--no-trace", "--html", file("plan")])
    cli.main(["estimate", *model, "--method", "lora", "--html", file("over")])  # which does not fit
    cli.main(["explain", str(SNAPSHOT), "--html", file("snapshot")])
    cli.main(["explain", str(folder / "failure.log"), "--model", *model, "--html", file("failure")])
    cli.main(["replay", str(tape), "--gpu-memory", "600MiB", "--html", file("replay")])
    cli.main(["compare", str(tape), str(SNAPSHOT), "--html", file("compare")])
    log = folder / "run.jsonl"
    log.write_bytes(b"".join(map(watch_log.line, watched())))
    cli.main(["watch", str(log), "--html", file("watch")])
    (folder / "ranks.html").write_bytes(document("ranks", ranks(), look()))
    return sorted(folder.glob("*.html"))


def watched() -> tuple[Header | Sample | Alarm, ...]:
    """Return the log of a run that ends above its band, with a warning."""
    sizes = [Levels(size * GIB, size * GIB, size * GIB, (size + 1) * GIB) for size in (12, 14, 17, 19)]
    bands = tuple(PhasePeak(phase, "", size, ()) for phase, size in zip(("load", "step"), sizes, strict=False))
    header = Header("train.py", "cuda", "NVIDIA L4", 22 * GIB, predicted=Footprint(bands, "formula"))
    phases: tuple[Phase, ...] = ("load", "step", "step", "step")
    samples = (Sample(float(n), n, phases[n], size, size) for n, size in enumerate(sizes))
    return header, *samples, Alarm("card", 3, "step", 19 * GIB, 20 * GIB, "the card is nearly full")


def ranks() -> str:
    """Return the lanes of two ranks, one of which holds ten times as much."""
    long = Tape((*TAPE.events, Mark("step", "backward"), Alloc(5, GIB // 2, "activations", "stage.1.mlp")), "traced")
    found = []
    for rank, tape in enumerate((long, TAPE)):
        timeline = replay(tape.events, settings=AllocSettings(), torch=TORCH)
        found.append((peak_of_rank(rank, (rank,), f"stage {rank}", tape, timeline, GIB, (), 0, False), tape))
    return rank_lanes(found, AllocSettings(), TORCH, GIB)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return made(tmp_path_factory.mktemp("html"))


@pytest.mark.parametrize("width", [360, 1280, 2560])
def test_every_file_is_whole_at_every_width(browser: Any, files: list[Path], width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, offline=True)
    page, wrong = context.new_page(), []
    page.on("console", lambda said: wrong.append(said.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    assert len(files) == 8
    for file in files:
        page.goto(file.as_uri())
        wrong += [f"{file.stem}: {fault}" for fault in page.evaluate(FAULTS)]
    context.close()
    assert not wrong


def test_each_lane_names_what_is_alive_by_pointer_and_keyboard(browser: Any, files: list[Path]) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(next(file for file in files if file.stem == "ranks").as_uri())
    page.hover(".plot >> nth=0", position={"x": 1000, "y": 60})
    assert "stage.1.mlp" in page.inner_text("#tip")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert "rank 1" in page.evaluate("document.activeElement.getAttribute('aria-label')")
    page.keyboard.press("End")
    assert "gradients" in page.inner_text("#tip") and "stage.1.mlp" not in page.inner_text("#tip")
    page.close()
