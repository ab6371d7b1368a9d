"""The page in Chromium: a cold start, a shared address, the keyboard, a narrow screen, dark, and without a network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from memfit.documents import watch_log
from memfit.nouns.footprint import Footprint, Levels, PhasePeak
from memfit.nouns.sample import Header, Sample
from memfit.units import GIB
from screenshots import served

sync = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium: apt-get install chromium")

CATALOGUE = Path(__file__).parents[1] / "src" / "memfit" / "catalogue" / "models"
WAIT = 60_000  # milliseconds


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served("llama-3.1-8b", "--gpu", "rtx-4090") as found:
        yield found


@contextmanager
def opened(browser: Any, address: str, wait: str = ".verdict", **words: Any) -> Iterator[Any]:
    """Open an address in a window of its own that reaches this machine alone; fail on any error of script or policy."""
    context = browser.new_context(**words)
    context.route(lambda url: "127.0.0.1" not in url, lambda route: route.abort())
    page, wrong = context.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if "Content Security" in said.text else None)
    page.on(
        "request",
        lambda sent: wrong.append(sent.url) if "127.0.0.1" not in sent.url and sent.url[:5] != "data:" else None,
    )
    page.goto(address)
    page.wait_for_selector(wait, timeout=WAIT)
    yield page
    context.close()
    assert not wrong


def until(page: Any, expression: str) -> None:
    """Wait until an expression holds. The page's policy forbids what Playwright's own wait would evaluate in it."""
    end = time.monotonic() + WAIT / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        time.sleep(0.03)


def settled(page: Any) -> None:
    """Wait until the answer of the last question is shown."""
    until(page, "document.querySelector('#status').textContent === '' && !document.querySelector('.stale')")


# the words in the first column of a table that stand on more than one line
BROKEN = """[...document.querySelectorAll('td:first-child')].filter(c => c.offsetParent).flatMap(cell => {
  const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), found = [];
  while (texts.nextNode()) for (const word of texts.currentNode.data.matchAll(/[A-Za-z0-9]+/g)) {
    const range = document.createRange();
    range.setStart(texts.currentNode, word.index);
    range.setEnd(texts.currentNode, word.index + word[0].length);
    if (new Set([...range.getClientRects()].map(r => r.top)).size > 1) found.push(word[0]);
  }
  return found;
})"""


@pytest.mark.parametrize(
    "words", [{"viewport": {"width": 1280, "height": 900}}, {"viewport": {"width": 360, "height": 740}},
              {"viewport": {"width": 2560, "height": 1300}, "color_scheme": "dark"}],
)  # fmt: skip
def test_every_view_from_a_cold_start(browser: Any, address: str, words: dict[str, Any]) -> None:
    with opened(browser, address, **words) as page:
        assert "FITS" in page.inner_text(".verdict")
        top = "document.querySelector('{}').getBoundingClientRect().top"
        assert page.evaluate(f"{top.format('#content')} <= {top.format('#ask')}")  # the answer before its question
        for view in ("timeline", "ladder", "map", "answer"):
            page.click(f"#tab-{view}")
            settled(page)
            assert page.locator(f"#view-{view} :is(svg, .verdict)").first.is_visible()
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert not page.evaluate(BROKEN)
        page.hover(".level.reserved .bar g")
        for level in ("requested", "device", "reserved"):
            page.click(f"label:has([value={level}])")
            assert page.locator(f".level.{level}").is_visible()


def test_a_slider_answers_and_the_address_comes_back_the_same(browser: Any, address: str) -> None:
    with opened(browser, address) as page:
        page.focus("#slide-micro-batch")
        page.keyboard.press("End")
        until(page, "document.querySelector('.verdict').textContent.includes('micro-batch 64')")
        until(page, "location.search.includes('micro-batch=64')")
        settled(page)
        shared, said = page.url, page.inner_text(".verdict")
        command = page.inner_text("#command")
    with opened(browser, shared) as page:
        settled(page)
        assert page.inner_text(".verdict") == said and page.inner_text("#command") == command
        page.click("#pins button")
        until(page, "!location.search.includes('micro-batch')")
        settled(page)
        page.go_back()
        settled(page)
        assert page.inner_text(".verdict") == said


def test_a_slider_that_is_held_is_not_taken_away_by_the_answer(browser: Any, address: str) -> None:
    with opened(browser, address) as page:
        settled(page)
        box = page.locator("#slide-micro-batch").bounding_box()
        middle = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + 2, middle)
        page.mouse.down()
        until(page, "location.search.includes('micro-batch=1&') || location.search.endsWith('micro-batch=1')")
        settled(page)
        page.mouse.move(box["x"] + box["width"] - 2, middle)
        until(page, "location.search.includes('micro-batch=64')")
        page.mouse.up()
        settled(page)
        assert page.inner_text("label[for=slide-micro-batch] output") == "64"


def test_a_measured_run_is_compared_with_the_question_that_is_shown(browser: Any, address: str, tmp_path: Path) -> None:
    log, size = tmp_path / "memfit-watch.jsonl", Levels(GIB, GIB, GIB, GIB)
    card = Header("train.py", "cuda", "NVIDIA L4", 22 * GIB)
    log.write_bytes(watch_log.line(card) + watch_log.line(Sample(1.0, 1, "step", size, size)))
    with opened(browser, address) as page:
        settled(page)
        page.click("#tab-compare")
        page.set_input_files("#measured", log)
        until(page, "document.querySelector('#compared table') !== null")
        settled(page)
        before = page.inner_text("#compared")
        page.focus("#slide-sequence-length")
        page.keyboard.press("End")
        until(page, "location.search.includes('sequence-length=')")
        settled(page)
        assert page.inner_text("#compared") != before


def test_data_are_chosen_kept_shared_and_taken_away(browser: Any, address: str, tmp_path: Path) -> None:
    file = tmp_path / "my <b>data.jsonl"
    file.write_text("".join(json.dumps({"text": "word " * n}) + "\n" for n in range(1, 900)))
    with opened(browser, address, viewport={"width": 360, "height": 740}) as page:
        settled(page)
        before = page.inner_text(".verdict")
        page.set_input_files("#data", file)
        until(page, "document.querySelector('#command').textContent.includes('--data')")
        settled(page)
        assert "of 899 samples" in page.inner_text("#view-answer")
        assert file.name in page.inner_text("#command") and file.name in page.inner_text("#no-data")
        assert not page.locator("#data").is_visible() and not page.locator("#pins button").count()
        page.focus("#slide-micro-batch")
        page.keyboard.press("End")
        until(page, "location.search.includes('micro-batch=64')")
        settled(page)
        assert "of 899 samples" in page.inner_text("#view-answer")
        page.click("#pins button")
        until(page, "!location.search.includes('micro-batch')")
        settled(page)
        page.fill("#model", "qwen2.5-0.5b")
        page.keyboard.press("Enter")
        until(page, "location.search.includes('qwen')")
        settled(page)
        assert "of 899 samples" in page.inner_text("#view-answer")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.go_back()
        settled(page)
        shared, said = page.url, page.inner_text(".verdict")
    with opened(browser, shared) as page:
        settled(page)
        assert page.inner_text(".verdict") == said
        page.select_option("#task", "classification")  # whose samples have other columns
        page.wait_for_selector(".problem")
        assert "columns" in page.inner_text(".problem")
        page.select_option("#task", "")
        page.wait_for_selector(".verdict")
        page.click("#no-data")
        until(page, "!location.search.includes('data')")
        settled(page)
        assert page.inner_text(".verdict") == before
        page.evaluate(DROP, ["x.csv", "text\nword word word\n"])
        until(page, "document.querySelector('#command').textContent.includes('--data x.csv')")
    with opened(browser, re.sub("data=[^&]+", "data=gone", shared), ".problem") as page:
        assert "not here any more" in page.inner_text(".problem")
        page.click("#no-data")
        page.wait_for_selector(".verdict")
        assert page.inner_text(".verdict") == before


DROP = """([name, text]) => {
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([text], name));
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
}"""


def test_a_dropped_config_is_sent_as_it_is_and_a_broken_one_is_said_to_be_none(browser: Any, address: str) -> None:
    text = CATALOGUE.joinpath("llama-3.1-8b.json").read_text()
    with opened(browser, address) as page:
        settled(page)
        said = page.inner_text(".verdict")
        page.evaluate(DROP, ["config.json", text[:-20]])
        page.wait_for_selector("#view-answer .problem")
        page.evaluate(DROP, ["config.json", text.replace("{", '{"time_step_limit": [0.0, Infinity],', 1)])
        page.wait_for_selector(".verdict")
        settled(page)
        assert "config=" in page.url and page.inner_text(".verdict") == said


def test_the_map_over_cards_and_sharding_is_kept_and_a_click_takes_both(browser: Any, address: str) -> None:
    with opened(browser, f"{address}&method=full") as page:
        page.click("#tab-map")
        settled(page)
        page.select_option("#over", "num-gpus")
        page.wait_for_selector("[data-over='num_gpus=8,shard=parameters']")
        settled(page)
        assert not page.locator("#view-map .problem").count() and page.locator("#cards-by-price table").count()
        shared = page.url
        page.set_viewport_size({"width": 360, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate(
            "(box => box.scrollWidth <= box.clientWidth)(document.querySelector('.wide:has(.priced)'))"
        )
    with opened(browser, shared, "[data-over='num_gpus=8,shard=parameters']") as page:
        assert page.input_value("#over") == "num-gpus"
        page.focus("[data-over='num_gpus=8,shard=parameters']")
        page.keyboard.press("Enter")
        page.wait_for_selector(".verdict")
        settled(page)
        assert "num-gpus=8" in page.url and "shard=parameters" in page.url
        assert "--num-gpus 8" in page.inner_text("#command")


def test_sending_a_file_is_cancelled_by_the_keyboard_and_told_when_it_breaks_off(browser: Any, address: str) -> None:
    log = {"name": "run.log", "mimeType": "text/plain", "buffer": b"CUDA out of memory. Tried to allocate 2.00 GiB"}
    held: list[Any] = []
    with opened(browser, address) as page:
        settled(page)
        page.click("#tab-explain")
        page.route("**/drop?*", lambda route: held.append(route))
        page.set_input_files("#failed-file", log)
        page.focus("#status button")
        page.keyboard.press("Enter")
        until(page, "document.querySelector('#status').textContent === 'cancelled'")
        page.set_input_files("#failed-file", {**log, "name": "again.log"})
        until(page, "document.querySelector('#status').textContent.includes('again.log')")
        held[-1].abort()
        until(page, "!!document.querySelector('#explained .problem')")
        page.unroute("**/drop?*")
        page.set_input_files("#failed-file", log)
        until(page, "!!document.querySelector('#explained .verdict')")
        settled(page)


def test_the_keyboard_alone_asks_another_question(browser: Any, address: str) -> None:
    with opened(browser, address) as page:
        page.keyboard.press("Tab")  # the link past the form
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "model"
        page.keyboard.type("qwen2.5-7b")
        page.keyboard.press("Enter")
        until(page, "document.querySelector('h1').textContent.includes('Qwen2.5-7B')")
        settled(page)
        page.focus("#tab-answer")
        page.keyboard.press("ArrowRight")
        assert page.get_attribute("#tab-timeline", "aria-selected") == "true"
        settled(page)
        page.focus(".plot")
        page.keyboard.press("End")
        assert "reserved" in page.inner_text("#tip")
        page.click("#tab-ladder")
        page.focus("#view-ladder [data-over]")
        page.keyboard.press("Enter")
        settled(page)
        assert "method=full" in page.url


def test_commands_break_between_words_and_are_copied(browser: Any, address: str) -> None:
    words = {"viewport": {"width": 420, "height": 740}, "permissions": ["clipboard-read", "clipboard-write"]}
    with opened(browser, address, **words) as page:
        settled(page)
        broken = "[...document.querySelectorAll('#elsewhere .whole')].filter(w => w.getClientRects().length > 1).length"
        assert page.locator("#next .whole").count() > 5 and page.evaluate(broken) == 0
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.focus("[data-copies=next]")
        page.keyboard.press("Enter")
        until(page, "document.querySelector('[data-copies=next]').textContent === 'copied'")
        said = page.evaluate("navigator.clipboard.readText()")
        assert said == page.evaluate("document.querySelector('#next').textContent") and "\nmemfit estimate" in said


def test_learn_opens_at_a_word_and_keeps_answers(browser: Any, address: str) -> None:
    words = {"viewport": {"width": 360, "height": 740}}
    with opened(browser, f"{address}#learn-term-fragmentation", ".question", **words) as page:
        until(page, "document.activeElement.id === 'learn-term-fragmentation' && scrollY > 0")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        right = page.get_attribute(".question:has([name=weights])", "data-answer")
        for said, score in (("1", "0 of"), (right, "1 of")):
            page.fill("[name=weights]", said)
            page.press("[name=weights]", "Enter")
            assert page.inner_text(".score").startswith(score)
        page.fill("#glossary-filter", "ZeRO-3")
        assert 0 < page.locator(".glossary > div:visible").count() < 9
        page.reload()
        page.wait_for_selector(".question[data-right=true]", timeout=WAIT)
        page.click("#tab-answer")
        page.click(".level.reserved [data-term=term-activations]")
        until(page, "document.activeElement.id === 'learn-term-activations'")
        assert page.url.endswith("#learn-term-activations")


def test_no_view_shows_the_question_before_one_that_has_no_answer(browser: Any, address: str) -> None:
    with opened(browser, address) as page:
        settled(page)
        page.click("#tab-map")
        until(page, "document.querySelector('#cards-by-price table') !== null")
        page.fill("#gpu", "rtx-9999")
        page.click("#ask button[type=submit]")
        for view in ("map", "timeline", "ladder", "answer"):
            page.click(f"#tab-{view}")
            settled(page)
            assert "rtx-9999" in page.inner_text(f"#view-{view}") and not page.locator(f"#view-{view} svg").count()


@pytest.mark.parametrize(
    "name", ["<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>", "\u202ex\u0000"]
)
def test_hostile_names_are_text(browser: Any, address: str, name: str) -> None:
    with opened(browser, address) as page:
        page.on("dialog", lambda dialog: pytest.fail("a script ran"))
        page.fill("#model", name)
        page.click("#ask button[type=submit]")
        page.wait_for_selector(".problem", timeout=WAIT)
        assert page.locator(".problem img, .problem script").count() == 0


def test_a_watched_run_is_laid_over_the_prediction_as_it_goes_on(browser: Any, tmp_path: Path) -> None:
    log, size = tmp_path / "memfit-watch.jsonl", Levels(GIB, GIB, GIB, GIB)
    predicted = Footprint((PhasePeak("step", "", size, ()),), "formula")
    with (
        served("--follow", str(log)) as address,
        opened(browser, address, "#watched h1") as page,
        log.open("ab", buffering=0) as run,
    ):
        run.write(watch_log.line(Header("train.py", "cuda", "NVIDIA L4", 22 * GIB, predicted=predicted)))
        run.write(watch_log.line(Sample(1.0, 1, "step", size, size)))
        until(page, "document.querySelector('#watched .verdict.fits') !== null")
        over = Levels(2 * GIB, 2 * GIB, 2 * GIB, 2 * GIB)
        run.write(watch_log.line(Sample(2.0, 2, "step", over, over)))
        until(page, "document.querySelector('#watched .verdict.misfit') !== null")
        assert page.locator("#watched .predicted").count() == 1
        page.hover("#watched .plot")
        assert page.inner_text("#tip").startswith("sample 2")
        more = Levels(3 * GIB, 3 * GIB, 3 * GIB, 3 * GIB)
        run.write(watch_log.line(Sample(3.0, 3, "step", more, more)))
        until(page, "document.querySelector('#watched').textContent.includes('3 steps')")
        assert page.evaluate("document.querySelector('#watched .cursor').style.visibility") == "visible"
        page.focus("#watched .plot")
        run.write(watch_log.line(Sample(4.0, 4, "step", more, more)))
        until(page, "document.querySelector('#watched').textContent.includes('4 steps')")
        assert page.evaluate("document.activeElement.classList.contains('plot')")


def test_a_file_of_a_plan_opens_without_a_server(browser: Any, tmp_path: Path) -> None:
    made = tmp_path / "plan.html"
    command = [
        sys.executable,
        "-m",
        "memfit",
        "plan",
        "smollm2-135m",
        "--gpu",
        "rtx-4090",
        "--no-trace",
        "--html",
        str(made),
    ]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    context = browser.new_context(offline=True)
    page, wrong = context.new_page(), []
    page.on("console", lambda said: wrong.append(said.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(made.as_uri())
    assert "FITS" in page.inner_text(".verdict")
    page.hover(".plot")
    assert "event" in page.inner_text("#tip")
    page.emulate_media(media="print")
    assert page.is_visible(".verdict") and len(page.pdf()) > 10_000
    folded = "[...document.querySelectorAll('details')].map(d => d.lastElementChild.checkVisibility())"
    assert (said := page.evaluate(folded)) and all(said)  # paper unfolds nothing
    context.close()
    assert not wrong
