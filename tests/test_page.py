"""The page as a server: who may ask it, what it answers, and that it ends what nobody waits for."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import active_children
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from memfit.cli.page import shell_of
from memfit.cli.page_answers import answered
from memfit.cli.page_question import LARGEST_CONFIG
from memfit.cli.web_files import page_files
from memfit.documents import tape_file, watch_log
from memfit.nouns.footprint import Footprint, Levels, PhasePeak
from memfit.nouns.sample import Alarm, Header, Sample, Watched
from memfit.nouns.tape import Alloc, Mark, Phase, Tape
from memfit.units import GIB, rough
from page_server import TOKEN, Served, served, stub  # type: ignore[import-not-found]

LLAMA = {"model": "llama-3.1-8b", "gpu": "rtx-4090"}


def ask(kind: str, **question: str) -> dict[str, Any]:
    return answered(kind, {name.replace("_", "-"): value for name, value in question.items()}, lambda text, share: None)


@pytest.fixture(scope="module")
def page() -> Iterator[Served]:
    with served(stub) as found:
        yield found


# ---- who may ask ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"X_Memfit_Token": ""}, 403),
        ({"X_Memfit_Token": TOKEN[:-1]}, 403),
        ({"X_Memfit_Token": "\xff"}, 403),
        ({"Host": "memfit.example"}, 421),
        ({"Host": "127.0.0.1:1"}, 421),
        ({"Host": ""}, 400),
        ({"Origin": "https://memfit.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
    ],
)
def test_only_the_own_page_may_ask(page: Served, headers: dict[str, str], status: int) -> None:
    found, said, _ = page.ask("/ask/plan?model=x", **headers)
    assert found == status
    if "Host" not in headers or headers["Host"]:  # an address without a host is refused by the server itself
        assert "default-src 'none'" in said["content-security-policy"]
        assert "unsafe" not in said["content-security-policy"]


@pytest.mark.parametrize(
    "path", ["/static/../app.py", "/static/..%2fapp.py", "/static//etc/passwd", "/static/%2e%2e/%2e%2e/etc/passwd"]
)
def test_only_the_pages_own_files_are_served(page: Served, path: str) -> None:
    status, _, body = page.ask(path)
    assert status in (403, 404)
    assert b"root:" not in body and b"import" not in body


def test_a_token_in_an_address_opens_and_does_not_save(page: Served) -> None:
    assert page.ask(f"/?token={TOKEN}", X_Memfit_Token="")[0] == 200
    assert page.ask("/", X_Memfit_Token="")[0] == 403
    assert page.ask(f"/save?token={TOKEN}", "POST", b"{}", X_Memfit_Token="")[0] == 403
    assert page.ask("/save", "POST", b"{}")[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("PUT", "/save", b"{}", 405),
        ("POST", "/save", b"x" * (1 << 21), 413),
        ("POST", "/save", b"[1]", 400),
        ("POST", "/save", b"\xff{", 400),
        ("GET", "/ask/nothing", None, 404),
        ("GET", "/ask/plan?x=" + "y" * 70_000, None, 414),
    ],
)
def test_bad_requests_are_refused(page: Served, method: str, path: str, body: bytes | None, status: int) -> None:
    try:
        found = page.ask(path, method, body)[0]
    except (BrokenPipeError, ConnectionResetError):  # the server closed before the whole body was sent
        found = 413
    assert found in (status, 400) if status == 414 else found == status


def test_a_question_is_answered_once_for_all_who_ask(page: Served, tmp_path: Path) -> None:
    marks = tmp_path / "asked"
    path = f"/ask/plan?steps=3&mark={marks}"
    with ThreadPoolExecutor(20) as many:
        found = list(many.map(lambda _: page.json(path), range(20)))
    assert len({json.dumps(x) for x in found}) == 1
    assert marks.read_text() == "done\n"


def test_a_trace_tells_its_progress_and_ends_with_whoever_waits(page: Served, tmp_path: Path) -> None:
    import http.client

    lines = page.ask("/long/trace?steps=2")[2].splitlines()
    assert ["progress" in json.loads(line) for line in lines] == [True, True, False]
    marks = tmp_path / "ended"
    wire = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)
    wire.request("GET", f"/long/trace?steps=30&mark={marks}", headers={"X-Memfit-Token": TOKEN})
    answer = wire.getresponse()
    assert b"progress" in answer.readline()
    answer.close()
    wire.close()
    time.sleep(4)
    assert not marks.exists()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="asks Linux for the processes")
def test_a_page_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    server = tmp_path / "server.py"
    server.write_text(
        "from page_server import served, stub\n"
        "import time\n"
        "if __name__ == '__main__':\n"
        "    with served(stub) as page:\n"
        "        page.json('/ask/plan?model=a')\n"
        "        print('ready', flush=True)\n"
        "        page.ask('/long/trace?steps=600')\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with subprocess.Popen(
        [sys.executable, server], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as page:
        assert page.stdout is not None and page.stdout.readline() == "ready\n"
        tasks = Path(f"/proc/{page.pid}/task")

        def children() -> set[str]:
            return {child for task in tasks.glob("*/children") for child in task.read_text().split()}

        assert waited(lambda: len(children()) > 2)  # the pool, the long question and multiprocessing's own
        left = children()
        page.kill()
    assert waited(lambda: not any(Path(f"/proc/{child}/exe").exists() for child in left))


def waited(done: Callable[[], bool]) -> bool:
    """Return whether something comes true within 20 seconds."""
    end = time.monotonic() + 20
    while not (found := done()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def test_a_dropped_file_is_read_and_gone_with_the_page(tmp_path: Path) -> None:
    log = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB"
    with served(answered) as page:
        key = json.loads(page.ask("/drop?name=..%2F..%2Ftrain%1b.log", "POST", log)[2])["file"]
        last = json.loads(page.ask(f"/long/explain?file={key}")[2].splitlines()[-1])
        assert "verdict" in last["html"] and "\x1b" not in last["html"]
        for other in ("/etc/passwd", "x", "../" + key):
            assert "error" in json.loads(page.ask(f"/long/explain?file={other}")[2])
        empty = json.loads(page.ask("/drop?name=empty.log", "POST", b"")[2])["file"]
        refused = json.loads(page.ask(f"/long/explain?file={empty}")[2].splitlines()[-1])
        assert "empty.log" in refused["error"] and tempfile.gettempdir() not in json.dumps(refused)
        folders = [p for p in Path(tempfile.gettempdir()).glob("memfit-page-*") if (p / key).exists()]
        assert len(folders) == 1
    assert not folders[0].exists()


def test_a_large_snapshot_is_read_while_it_is_sent(page: Served) -> None:
    def dropped(content: bytes) -> str:
        return str(json.loads(page.ask("/drop?name=run.pickle", "POST", content)[2])["file"])

    def explained(*keys: str) -> dict[str, str]:
        query = "&".join(f"file={key}" for key in keys)
        return dict(json.loads(page.ask(f"/long/explain?{query}")[2].splitlines()[-1]))

    large = b"\x80\x04" + bytes(9 << 20)
    other, first = dropped(large), dropped(large)
    found = explained(first)
    assert found["ahead"] == found["file"] and not Path(found["file"] + ".part").exists()
    for again in (
        explained(first),
        explained(other),
        explained(dropped(b"\x80\x04")),
        explained(dropped(b"x" * (9 << 20))),
    ):
        assert not again["ahead"]
    last = dropped(large)
    assert not explained(first, last)["ahead"] and not explained(last)["ahead"]


def test_nothing_stays_of_a_snapshot_that_breaks_off_or_that_nobody_asks_about(
    page: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memfit.page.workers.PATIENCE", 0.2)
    begun, before = b"\x80\x04" + bytes(9 << 20), {process.pid for process in active_children()}

    def started() -> bool:
        return any(process.pid not in before for process in active_children())

    with socket.create_connection(("127.0.0.1", page.port)) as wire:
        head = f"POST /drop?name=a.pickle HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\nX-Memfit-Token: {TOKEN}\r\n"
        wire.sendall(f"{head}Content-Length: {64 << 20}\r\n\r\n".encode() + begun)
        assert waited(started)
    assert waited(lambda: not started())
    key = json.loads(page.ask("/drop?name=b.pickle", "POST", begun)[2])["file"]
    assert waited(lambda: not started())
    found = json.loads(page.ask(f"/long/explain?file={key}")[2].splitlines()[-1])
    assert found["file"].endswith("b.pickle") and not found["ahead"]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux limits what a process may take")
def test_what_a_dropped_file_may_take_is_bounded(page: Served) -> None:
    assert json.loads(page.ask(f"/long/explain?take={1 << 20}")[2])["taken"] == 1 << 20
    assert "taken" not in json.loads(page.ask(f"/long/explain?take={1 << 30}")[2])


def test_slow_broken_and_large_uploads_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio
    from collections.abc import AsyncIterator

    from memfit.page.drops import DropError, Drops

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    drops = Drops(largest=1000, slowest=0.05)

    async def pieces(*sizes: int, pause: float = 0.0) -> AsyncIterator[bytes]:
        for size in sizes:
            await asyncio.sleep(pause)
            yield b"x" * size

    for given in (pieces(600, 600), pieces(1, 1, pause=0.5)):
        with pytest.raises(DropError):
            asyncio.run(drops.take("a.log", given, print))
    (folder,) = tmp_path.iterdir()
    assert not list(folder.iterdir())
    key = asyncio.run(drops.take("a.log", pieces(600, 400), print))
    assert drops.path(key) and drops.path(key + "x") is None
    drops.close()
    assert not list(tmp_path.iterdir())


def test_a_packed_bomb_is_one_line(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.tape.gz"
    bomb.write_bytes(gzip.compress(gzip.compress(b'{"format"' + b" " * (64 << 20))))
    for kind in ("explain", "lanes", "compare"):
        found = ask(kind, file=str(bomb), **(LLAMA if kind == "compare" else {}))
        assert "error" in found and "bug" not in found["error"]


def _run(path: Path, reserved: dict[Phase, int], predicted: Footprint | None = None, *more: Alarm) -> Path:
    """Write the log of a watched run with one sample a phase."""
    sizes = {phase: Levels(size, size, size, size + GIB) for phase, size in reserved.items()}
    header = Header("<b>train.py", "cuda", "NVIDIA L4", 22 * GIB, predicted=predicted)
    samples = [Sample(float(n), n, phase, size, size) for n, (phase, size) in enumerate(sizes.items())]
    path.write_bytes(b"".join(map(watch_log.line, (header, *samples, *more))))
    return path


def test_a_watched_run_lies_over_the_prediction_of_the_recipe_or_its_own(tmp_path: Path) -> None:
    named = {**LLAMA, **ask("plan", **LLAMA)["recipe"]}
    need = {"load": 14 * GIB, "step": 25 * GIB}
    log = _run(tmp_path / "run.jsonl", need)  # type: ignore[arg-type]
    alone, over = ask("watched", file=str(log))["html"], ask("watched", file=str(log), **named)["html"]
    assert 'class="predicted"' not in alone and over.count('class="predicted"') == 2
    assert '"verdict misfit"' in over and "<b>above</b> the predicted" in over and "<b>train" not in over
    own = Footprint((PhasePeak("step", "", Levels(1, 1, 24 * GIB, 25 * GIB), ()),), "formula")
    log = _run(tmp_path / "own.jsonl", need, own, Alarm("card", 1, "step", 25 * GIB, 20 * GIB, "nearly full"))  # type: ignore[arg-type]
    html = ask("watched", file=str(log))["html"]
    assert html.count('class="predicted"') == 1 and html.count('class="alarm"') == 1 and "nearly full" in html
    assert "error" not in ask("watched", file=str(tmp_path / "not-yet.jsonl"))
    assert "error" in ask("watched", file=__file__)


def test_a_run_without_a_card_shows_its_tensors_between_counts(tmp_path: Path) -> None:
    counted, rest = Levels(40 << 20, 40 << 20, 40 << 20, 900 << 20), Levels(0, 0, 0, 900 << 20)
    samples = [Sample(float(n), n, "step", *(2 * (rest if n else counted,)), counted=not n) for n in range(4)]
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(map(watch_log.line, (Header("train.py", "tensors"), *samples))))
    html = ask("watched", file=str(path))["html"]
    legend = html[html.index('class="legend"') : html.index("</ul>")]
    assert "other tensors <b>40.0 MiB" in legend and "resident, no tensor" in legend and "reserved" not in legend
    assert '<th class="number">tensors</th>' in html and "counted in 1 of 4" in html


def test_a_page_follows_the_log_that_it_was_started_with_and_no_other(page: Served, tmp_path: Path) -> None:
    assert page.ask("/follow")[0] == 404
    log = tmp_path / "memfit-watch.jsonl"
    with served(answered, followed=log) as following:
        first = following.json("/follow")
        assert "error" not in first and following.ask(f"/follow?seen={first['seen']}")[0] == 204
        _run(log, {"step": 3 * GIB})
        found = following.json(f"/follow?seen={first['seen']}&file={tmp_path / 'other'}")
        assert "NVIDIA L4" in found["html"] and following.ask(f"/follow?seen={found['seen']}")[0] == 204


def test_tapes_of_ranks_share_a_scale_and_histories_stand_side_by_side(tmp_path: Path) -> None:
    files = []
    for rank, size in ((0, 40), (3, 90)):
        events = (
            Mark("step", "s"),
            Alloc(1, size << 20, role="activations", label=f"forward of <{rank}> (train.py:1)"),
        )
        files.append(tmp_path / f"rank-{rank}.tape.gz")
        files[-1].write_bytes(tape_file.dumps(Tape(events, "traced")))
    both = "\n".join(map(str, files))
    html = ask("lanes", file=both)["html"]
    assert html.count('"plot lane"') == 2 and html.index("rank 3") < html.index("rank 0") and "<3>" not in html
    assert ask("lanes", file=str(files[0]))["html"].count("lane") == 0
    side = ask("explain", file=both)["html"]
    assert side.count("<h2>Timeline</h2>") == 2 and "+50" in side
    assert "error" in ask("lanes", file="\n".join([both] * 20)) and "error" in ask("lanes", file=__file__)


def test_savings_are_those_of_the_run_that_was_asked_for(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 23.64 "
        "GiB of which 1.21 GiB is free. Of the allocated memory 20.55 GiB is allocated by PyTorch, and 1.40 GiB is "
        "reserved by PyTorch but unallocated."
    )
    html = ask("explain", **LLAMA, method="lora", micro_batch="4", effective_batch="8", file=str(log))["html"]
    assert "LoRA r16" in html and "micro-batch 4" in html
    remedies = html.split("Saves nothing")[0].replace("<wbr>", "")
    assert "expandable_segments" in remedies  # it saves no tensor, and is the remedy


def test_no_question_names_a_file_of_this_machine(tmp_path: Path) -> None:
    """A path is only ever that of a dropped file, and a model none."""
    secret = tmp_path / "config.json"
    secret.write_text(json.dumps({"model_type": "llama", "canary": "dont-tell"}))
    tape = tmp_path / "run.tape.gz"  # which a comparison could read
    tape.write_bytes(tape_file.dumps(Tape((Mark("step", "forward"), Alloc(1, 1 << 30, "activations")), "traced")))
    with served(answered) as page:
        key = json.loads(page.ask("/drop?name=x.log", "POST", b"CUDA out of memory. Tried to allocate 2.00 GiB")[2])[
            "file"
        ]
        toml = json.loads(page.ask("/drop?name=recipe.toml", "POST", b"schema = 1")[2])["file"]
        asked = "model=llama-3.1-8b&gpu=rtx-4090"
        for path in (
            f"/ask/plan?{asked}&data={secret}", f"/long/data?{asked}&data={secret}", f"/files?{asked}&data={secret}",
            f"/ask/compare?{asked}&against=model=llama-3.1-8b%26data={secret}",
            f"/ask/compare?{asked}&file={tape}", f"/long/compare?{asked}&file={tape}", f"/ask/plan?model={secret}",
            f"/ask/compare?{asked}&against=model={secret}",
            f"/long/explain?file={key}&model={secret}", f"/long/explain?file={secret}", "/long/explain",
            f"/long/compare?{asked}&file={toml}",
        ):  # fmt: skip
            last = json.loads(page.ask(path)[2].splitlines()[-1])
            assert last["error"] and last["hint"] and "dont-tell" not in str(last), path
            assert "bug" not in last["error"], path


# ---- dropped data --------------------------------------------------------------------------------------------------


def _dropped(page: Served, name: str, rows: list[dict[str, Any]] | bytes) -> str:
    content = rows if isinstance(rows, bytes) else b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    return str(json.loads(page.ask(f"/drop?{urlencode({'name': name})}", "POST", content)[2])["file"])


def _last(page: Served, kind: str, **question: str) -> dict[str, Any]:
    found = json.loads(page.ask(f"/{kind}?{urlencode(question)}")[2].splitlines()[-1])
    assert isinstance(found, dict) and tempfile.gettempdir() not in str(found)
    return found


def test_data_are_planned_for_as_the_command_does(tmp_path: Path) -> None:
    rows = [{"text": "word " * n} for n in range(1, 1300, 7)]
    with served(answered) as page:
        asked = {**LLAMA, "data": _dropped(page, "my $(data).jsonl", rows), "data-name": "my $(data).jsonl"}
        assert _last(page, "ask/plan", **asked)["unread"]  # which takes longer than a slider may
        assert "error" not in _last(page, "long/data", **asked)
        found = _last(page, "ask/plan", **asked)
        words = shlex.split(found["command"])
        assert words[-2:] == ["--data", "my $(data).jsonl"]
        (tmp_path / words[-1]).write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        typed = [sys.executable, "-m", *words, "--json", "--no-trace"]
        plan = json.loads(subprocess.run(typed, cwd=tmp_path, capture_output=True, check=False).stdout)
        assert str(plan["job"]["longest_sample"]) in found["html"].replace(",", "")
        assert found["recipe"]["sequence-length"] == str(plan["recipe"]["sequence_length"])
        assert plan["recipe"]["sequence_length"] < 2048 and "of 186 samples" in found["html"]
        same = _last(page, "ask/estimate", **asked | found["recipe"])
        assert same["recipe"] == found["recipe"] and _verdict(same["html"]) == _verdict(found["html"])
        for kind in ("timeline", "sweep", "cards", "learn", "compare"):
            kept = {"against": urlencode(asked)} if kind == "compare" else {}
            assert "error" not in _last(page, f"ask/{kind}", **asked | kept | found["recipe"])
        packed = page.ask(f"/files?{urlencode(asked)}")[2]
        with zipfile.ZipFile(io.BytesIO(packed)) as files:
            texts = [files.read(name).decode() for name in files.namelist()]
        assert any('"my $(data).jsonl"' in text for text in texts)
        assert not any(tempfile.gettempdir() in text for text in texts)


def test_data_of_a_task_give_the_sizes_of_its_samples() -> None:
    with served(answered) as page:
        key = _dropped(page, "p.jsonl", [{"prompt": "word " * n, "answer": "x"} for n in range(1, 250)])
        asked = {"model": "qwen2.5-0.5b", "gpu": "rtx-4090", "task": "grpo", "data": key}
        assert "error" not in _last(page, "long/data", **asked)
        found = _last(page, "ask/plan", **asked)
        assert 256 < int(found["recipe"]["prompt-length"]) < 512
        same = _last(page, "ask/estimate", **asked | found["recipe"])
        assert _verdict(same["html"]) == _verdict(found["html"])
        assert "columns" in _last(page, "long/data", **asked | {"task": "classification"})["error"]


@pytest.mark.parametrize(
    ("model", "task", "row"),
    [
        ("llama-3.1-8b", "dpo", {"prompt": "word " * 900, "chosen": "a", "rejected": "b"}),
        ("qwen2.5-vl-7b", "", {"question": "word " * 6000, "answer": "A cat.", "image": "x.png"}),
        ("qwen2.5-vl-7b", "", {"text": "word " * 900}),
        ("qwen2.5-0.5b", "pretrain", {"text": "word " * 900}),
    ],
)  # fmt: skip
def test_a_slider_over_data_of_any_task_says_what_the_plan_says(model: str, task: str, row: dict[str, Any]) -> None:
    with served(answered) as page:
        asked = {"model": model, "gpu": "h100", "task": task, "data": _dropped(page, "x.jsonl", [row])}
        assert "error" not in _last(page, "long/data", **asked)
        found = _last(page, "ask/plan", **asked)
        same = _last(page, "ask/estimate", **found["recipe"] | {name: word for name, word in asked.items() if word})
        assert _verdict(same["html"]) == _verdict(found["html"])


def test_data_that_are_gone_bad_or_hostile_are_one_line_with_a_hint(tmp_path: Path) -> None:
    with served(answered) as page:
        gone = _last(page, "ask/plan", **LLAMA | {"data": "x" * 16, "data-name": "\x1b[31mtrain/.jsonl"})
        assert "not here any more" in gone["error"] and gone["hint"] and "\x1b" not in gone["error"]
        saved = page.ask(
            "/save", "POST", json.dumps({**LLAMA, "data": "gone", "folder": str(tmp_path / "run")}).encode()
        )
        assert saved[0] == 422 and not (tmp_path / "run").exists()
        for name, content in (
            ("x.jsonl", b""), ("x.jsonl", b"{"), ("\x1b]0;x\x07.jsonl", b'{"\\u001b[2J": 1}'), ("x.exe", b"x"),
            ("x.parquet", b"PAR1"), ("x.jsonl", b"\0" * 99), ("x.json", b"[" * 100_000),
        ):  # fmt: skip
            found = _last(page, "long/data", **LLAMA, data=_dropped(page, name, content))
            assert found["error"] and found["hint"] and "bug" not in found["error"] and found["error"].isprintable()


def test_data_name_no_other_file_of_this_machine(tmp_path: Path) -> None:
    """Images that a dropped file names by a path are not looked for, whether they exist or not."""
    picture = tmp_path / "secret.png"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (1234).to_bytes(4, "big") + (567).to_bytes(4, "big"))
    row = {"question": "What is it?", "answer": "A cat.", "image": str(picture)}
    with served(answered) as page:
        asked = {"model": "qwen2.5-vl-7b", "gpu": "h100", "data": _dropped(page, "vqa.jsonl", [row])}
        assert "error" not in _last(page, "long/data", **asked)
        found = _last(page, "ask/plan", **asked)
        assert "are not known" in found["html"] and "1234" not in found["html"]


# ---- what it answers -----------------------------------------------------------------------------------------------


def test_the_answer_is_that_of_the_command() -> None:
    from memfit import Job, find_gpu, make_plan, resolve_model

    job = Job(
        architecture=resolve_model(LLAMA["model"]), gpu=find_gpu(LLAMA["gpu"]), num_gpus=1, sequence_length=2048,
        effective_batch=16,
    )  # fmt: skip
    plan, found = make_plan(job), ask("plan", **LLAMA)
    assert found["verdict"] == plan.judgement.verdict
    assert found["recipe"]["micro-batch"] == str(plan.recipe.micro_batch)
    same = ask("estimate", **LLAMA, **found["recipe"])
    assert same["verdict"] == found["verdict"] and same["recipe"] == found["recipe"]
    assert _verdict(same["html"]) == _verdict(found["html"])


def _verdict(html: str) -> str:
    return html[html.index('class="verdict') : html.index("<section")].strip()


def test_a_click_on_a_rung_asks_for_its_recipe() -> None:
    found = ask("plan", **LLAMA)
    rungs = [json.loads(x) for x in _attributes(found["ladder"], "data-over")]
    assert len(rungs) > 2
    again = ask("plan", **LLAMA, **rungs[1])
    assert {name: again["recipe"].get(name) for name in rungs[1] if name in again["recipe"]}.items() <= rungs[1].items()


def test_the_same_recipe_stands_on_priced_cards_and_on_the_smallest() -> None:
    found = ask("plan", **LLAMA)
    html = ask("cards", **{**LLAMA, "gpu": "h100"}, **found["recipe"])["html"]
    assert _attributes(html, "data-over")[-1] != "gpu=h100" and "gpu=h100" in _attributes(html, "data-over")
    smallest = _attributes(html, "data-over")[-1].removeprefix("gpu=")
    assert ask("estimate", **{**LLAMA, "gpu": smallest}, **found["recipe"])["verdict"] == "fits"


def test_what_was_kept_is_compared_with_what_is_asked() -> None:
    found = ask("plan", **LLAMA)
    kept = urlencode({**LLAMA, **found["recipe"]})
    same = ask("compare", **LLAMA, **found["recipe"], against=kept)["html"]
    longer = ask("compare", **LLAMA, **found["recipe"] | {"sequence-length": "4096"}, against=kept)["html"]
    assert "nothing" in same and "sequence 4,096" in longer
    assert "error" in ask("compare", **LLAMA) and "error" in ask("compare", **LLAMA, against="model=/etc/passwd")


def _attributes(html: str, name: str) -> list[str]:
    from html import unescape

    return [unescape(part.split('"')[0]) for part in html.split(f'{name}="')[1:]]


def test_a_changed_micro_batch_keeps_the_effective_batch() -> None:
    found = ask("plan", **LLAMA)
    moved = ask(
        "estimate", **LLAMA, **found["recipe"] | {"micro-batch": "2"}, effective_batch="16", changed="micro-batch"
    )
    assert (moved["recipe"]["micro-batch"], moved["recipe"]["accumulation"]) == ("2", "8")


@pytest.mark.parametrize(
    "question",
    [
        {"model": "/etc/passwd"}, {"model": "../x"}, {"model": "no-such-model-of-any-kind"}, {},
        {"model": "llama-3.1-8b", "gpu": "no-card"}, {"model": "llama-3.1-8b", "micro-batch": "many"},
        {"model": "llama-3.1-8b", "out": "/tmp/x"}, {"model": "llama-3.1-8b", "from": "/etc/passwd"},
        {"model": "llama-3.1-8b", "task": "flying"}, {"config": "AAAA"}, {"config": "%%%"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["plan", "estimate", "files", "save"])
def test_bad_questions_have_one_line_and_a_hint(kind: str, question: dict[str, str], tmp_path: Path) -> None:
    found = answered(kind, {**question, **({"folder": str(tmp_path / "run")} if kind == "save" else {})}, print)
    assert found["error"] and "\n" not in found["error"] and "bug" not in found["error"]
    assert not (tmp_path / "run").exists()


def _packed(config: Any) -> str:
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(config).encode())).decode().rstrip("=")


def test_a_dropped_config_travels_in_the_address() -> None:
    from memfit.catalogue import config, names

    entry = names.find("llama-3.1-8b")
    assert entry is not None
    dropped = ask("plan", config=_packed(dict(config(entry))), config_name="<script>../../x", gpu="rtx-4090")
    named = ask("plan", **LLAMA)
    assert dropped["verdict"] == named["verdict"] and dropped["recipe"] == named["recipe"]
    assert "<script>" not in dropped["html"]
    assert "error" in ask("plan", config=_packed({"x": "y" * LARGEST_CONFIG}))
    assert "error" in ask("plan", config=_packed([1]))
    refused = ask("plan", config=_packed({"model_type": "llama"}), config_name="mine", gpu="rtx-4090")
    assert refused["error"].startswith("mine")


def test_files_are_those_of_out_and_nothing_is_overwritten(tmp_path: Path) -> None:
    packed = ask("files", **LLAMA)["zip"]
    names = zipfile.ZipFile(io.BytesIO(base64.b64decode(packed))).namelist()
    folder = tmp_path / "run"
    written = ask("save", **LLAMA, folder=str(folder))["written"]
    assert {f"memfit-run/{Path(path).relative_to(folder)}" for path in written} == set(names)
    assert (folder / "recipe.toml").is_file()
    assert "error" in ask("save", **LLAMA, folder=str(folder))


def test_learn_has_every_word_and_its_answers_are_memfits() -> None:
    from memfit import Job, Recipe, find_gpu, resolve_model
    from memfit.cli.glossary import load
    from memfit.closed_form.rule_of_thumb import attention_scores, checkpointed_activations, static_lines
    from memfit.planner import techniques
    from memfit.report.document_html import slug

    plan, model = ask("plan", **LLAMA), resolve_model(LLAMA["model"])
    html = ask("learn", **LLAMA, recipe=json.dumps(plan["recipe"]))["html"]
    ids = _attributes(html, " id")
    assert len(ids) == len({*ids}) and {f"learn-term-{slug(term.name)}" for term in load()} <= {*ids}
    assert {link.removeprefix("#") for link in _attributes(html, " href")} <= {*ids}
    assert "term-activations" in (linked := _attributes(plan["html"], "data-term"))
    assert {f"learn-{name}" for name in linked} <= {*ids}

    forms = html.split('<form class="question"')[1:]
    answers = {_attributes(form, " name")[0]: _attributes(form, "data-answer")[0] for form in forms}
    batch, length = int(plan["recipe"]["micro-batch"]), 2048
    static = sum(line.bytes for line in static_lines(model.parameters, Recipe(precision="bf16-master")))
    right = {
        "weights": 2 * model.parameters / 1e9, "static": static / 1e9, "sharded": static / 8e9,
        "checkpointed": checkpointed_activations(model, batch, length) / 2**20,
        "scores": attention_scores(model, batch, length) / 2**20,
        "logits": 6 * model.vocabulary * batch * length / 2**20,
    }  # fmt: skip
    for name, number in right.items():
        assert float(answers[name]) == pytest.approx(number, rel=1e-6), name
    job = Job(
        architecture=model, gpu=find_gpu(LLAMA["gpu"]), num_gpus=1, sequence_length=length, effective_batch=16
    )  # fmt: skip
    assert answers["first"] == next(r.title for r in techniques(job) if r.judgement.verdict == "fits")
    assert answers["instant"] in plan["html"].replace("&#x27;", "'")

    qlora = next(rung for rung in techniques(job) if rung.recipe.method == "qlora")
    assert f"{rough(qlora.judgement.need)} for this model" in html and html.count("arXiv:") > 5

    hostile = ask("learn", model="<img src=x onerror=alert(1)>\u202e")["html"]
    assert "<img" not in hostile and "\u202e" not in hostile and "&lt;img" in hostile


def test_the_file_of_several_cards_says_why_it_has_no_timeline() -> None:
    from memfit import Job, find_gpu, make_plan, resolve_model
    from memfit.cli.html_answer import plan_page, recipe_page

    model, card = resolve_model("smollm2-135m"), find_gpu("rtx-4090")
    job = Job(architecture=model, gpu=card, num_gpus=2, sequence_length=512, effective_batch=4)
    plan = make_plan(job)
    said = recipe_page(job.architecture, plan.recipe, job.gpu, plan.footprint, plan.judgement)
    for page in (plan_page(plan), said):
        assert b"There is no timeline" in page and b"memfit trace" in page and b"NCCL" in page


def test_a_notebook_shows_the_same_views(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace
    from html import unescape

    from memfit import Job, compare, find_gpu, make_plan, resolve_model
    from memfit.cli import notebook
    from memfit.documents import traced_answers

    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    notebook.install()
    job = Job(
        architecture=resolve_model("smollm2-135m"), gpu=find_gpu("rtx-4090"), num_gpus=1, sequence_length=512,
        effective_batch=4,
    )  # fmt: skip
    plan: Any = make_plan(job)
    shown = unescape(plan._repr_html_())
    assert (
        ask("plan", model="smollm2-135m", gpu="rtx-4090", sequence_length="512", effective_batch="4")["html"][:400]
        in shown
    )
    assert "<iframe" in plan.footprint._repr_html_()
    tape: Any = Tape((Mark("step", "s"), Alloc(1, GIB, label="<b>")), "traced")
    traced: Any = replace(plan, footprint=replace(plan.footprint, source="traced"))
    assert "memfit trace --html" in traced._repr_html_()  # nothing is kept of this trace
    traced_answers.write_tape(traced.recipe, traced.footprint, tape)
    assert "\\u003cb>" in unescape(traced._repr_html_())
    compared: Any = compare(plan.footprint, plan.footprint)
    for noun, said in ((tape, "\\u003cb>"), (compared, "phase"), (Watched(Header("<b>.py", "rss"), ()), "&lt;b&gt;")):
        assert said in unescape(noun._repr_html_())


@pytest.mark.parametrize(
    ("typed", "flag", "wanted"),
    [("llama-3.1", "model", "llama-3.1-8b"), ("rtx-40", "gpu", "rtx-4090"), ("8xh1", "gpu", "8xh100"),
     ("q", "method", "qlora"), ("dp", "task", "dpo"), ("adamw-8", "optimizer", "adamw-8bit"),
     ("do", "adapter", "dora")],
)  # fmt: skip
def test_a_shell_completes_values(typed: str, flag: str, wanted: str) -> None:
    from memfit.cli.tree import app

    plan: Any = app.get_command(None, "plan")  # type: ignore[arg-type]
    parameter = next(p for p in plan.params if p.name == flag)
    assert wanted in [
        item.value for item in parameter.shell_complete(plan.make_context("plan", [], resilient_parsing=True), typed)
    ]


@pytest.mark.parametrize(
    ("command", "name", "wanted"),
    [("plan", "data", "file"), ("plan", "out", "dir"), ("trace", "what", "file"), ("plan", "model", "file"),
     ("explain", "what", "file"), ("plan", "micro_batch", None), ("plan", "gpu", None)],
)  # fmt: skip
def test_a_shell_completes_paths_where_one_may_stand(command: str, name: str, wanted: str | None) -> None:
    from memfit.cli.tree import app

    made: Any = app.get_command(None, command)  # type: ignore[arg-type]
    parameter = next(p for p in made.params if p.name == name)
    found = parameter.shell_complete(made.make_context(command, ["x"], resilient_parsing=True), "./my")
    assert [item.type for item in found] == ([wanted] if wanted else [])


def test_the_whole_page_is_small() -> None:
    shell, static = page_files()
    assert sum(map(len, (shell_of(shell), *static.values()))) < 100_000
    assert "http" not in "".join(static.values())


def test_lengths_of_sampled_answers_have_sliders_and_the_map_varies_nothing_that_decides_nothing() -> None:
    question = {"model": "qwen2.5-0.5b", "gpu": "rtx-4090", "task": "grpo"}
    plan = ask("plan", **question)
    sliders = {row["name"]: row for row in plan["sliders"]}
    assert {"prompt-length", "completion-length"} < set(sliders) and "sequence-length" not in sliders
    assert not sliders["prompt-length"]["quick"]  # the estimate has the sum of both in its recipe
    moved = ask("plan", **question, **{"completion-length": str(sliders["completion-length"]["values"][-1])})
    assert "error" not in moved and moved["recipe"] != plan["recipe"]
    drawn = ask("sweep", **question, **plan["recipe"])["html"]
    assert "micro_batch=2" in drawn and "sequence_length" not in drawn


def test_the_map_goes_over_cards_and_sharding_too() -> None:
    question = {**LLAMA, "method": "full", "gpu": "h100"}
    plan = ask("plan", **question)
    cells = _attributes(ask("sweep", **question, **plan["recipe"], over="num-gpus")["html"], "data-over")
    assert "num_gpus=8,shard=parameters" in cells
    cell = dict(pair.split("=") for pair in ["num_gpus=8", "shard=parameters"])
    taken = ask("plan", **question, **cell)
    assert taken["recipe"]["num-gpus"] == "8" and taken["recipe"]["shard"] == "parameters"
    assert ask("sweep", **question, over="x")["hint"]
