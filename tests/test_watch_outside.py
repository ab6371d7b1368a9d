"""See memfit watch from outside: exit code, signals and memory of the child; a recorded NVML driver; a log shown."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memfit.documents import codec, watch_log
from memfit.errors import BadInput
from memfit.extras import install_command
from memfit.live.outside.command import run
from memfit.live.outside.processes import NvmlMeter, RssMeter, family
from memfit.live.watch.outputs import Quiet
from memfit.live.watch.recorder import Recorder
from memfit.nouns.footprint import Levels
from memfit.nouns.sample import Header, Sample
from memfit.units import GIB, MIB

Ran = Callable[..., tuple[int, str, str]]


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


@pytest.mark.parametrize("code", [0, 1, 7, 137])
def test_the_exit_code_is_the_command_s(ran: Ran, tmp_path: Path, code: int) -> None:
    got, out, _ = ran(
        "watch", "--measure", "rss", "--log", tmp_path / "x.jsonl", "--", *python(f"raise SystemExit({code})")
    )
    assert (got, out) == (code, "")


def test_a_child_killed_by_a_signal_has_the_exit_code_of_shells(ran: Ran, tmp_path: Path) -> None:
    code = "import os; os.kill(os.getpid(), 9)"
    got, _, said = ran("watch", "--measure", "rss", "--log", tmp_path / "x.jsonl", "--", *python(code))
    assert got == 128 + 9 and "SIGKILL" in said


def test_a_peak_between_two_looks_is_seen_and_what_is_printed_is_no_part_of_the_document(tmp_path: Path) -> None:
    code = "import time; time.sleep(0.2); x = bytes([1]) * (900 << 20); del x; print('a line')"
    line = [
        sys.executable,
        "-m",
        "memfit",
        "watch",
        "--json",
        "--measure",
        "rss",
        "--every",
        "60",
        "--log",
        str(tmp_path / "x.jsonl"),
    ]
    done = subprocess.run([*line, "--", *python(code)], capture_output=True, text=True, check=True)
    assert codec.loads(done.stdout).peak.device > 900 * MIB and "a line" in done.stderr


def test_resident_memory_of_the_whole_family(ran: Ran, tmp_path: Path) -> None:
    grandchild = "x = bytearray(120 << 20); import time; time.sleep(0.5)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {grandchild!r}])"
    got, out, _ = ran(
        "watch", "--json", "--measure", "rss", "--every", "0.05", "--log", tmp_path / "x.jsonl", "--", *python(code)
    )  # fmt: skip
    found = codec.loads(out)
    assert got == found.exit_code == 0
    assert 120 * MIB < found.peak.device < 400 * MIB
    assert found.header.meter == "rss"
    seen = watch_log.loads((tmp_path / "x.jsonl").read_bytes())
    assert max(s.now.device for s in seen.samples) == found.peak.device


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_reach_the_command(tmp_path: Path, number: signal.Signals) -> None:
    ready = tmp_path / "ready"
    code = (
        "import signal, sys, time, pathlib\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(42))\n"
        f"pathlib.Path({str(ready)!r}).touch()\ntime.sleep(60)"
    )
    command = [sys.executable, "-m", "memfit", "watch", "--measure", "rss", "--log", str(tmp_path / "x.jsonl"), "--"]
    watch = subprocess.Popen([*command, *python(code)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not ready.exists() and watch.poll() is None:
        time.sleep(0.02)
    watch.send_signal(number)
    assert watch.wait(30) == 42


@pytest.mark.parametrize("words", [(), ("--measure", "rss"), ("--json",)])
def test_a_command_that_is_watched_runs_whoever_reads(tmp_path: Path, words: tuple[str, ...]) -> None:
    """stderr, and stdout for --json, are pipes whose reader has gone: only notes, warnings and the summary are lost."""
    done = tmp_path / "done"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "memfit", "watch", *words, "--log", str(tmp_path / "x.jsonl"), "--"]
    code = f"open({str(done)!r}, 'w'); raise SystemExit(5)"
    watch = subprocess.run([*command, *python(code)], stderr=writer, stdout=writer, check=False)
    os.close(writer)
    assert watch.returncode == 5 and done.exists()
    assert watch_log.loads((tmp_path / "x.jsonl").read_bytes()).samples


# counts what reaches it: a second one, passed on, would come at once
COUNTS = """
import signal, sys, time
from pathlib import Path
got = []
signal.signal(signal.SIGINT, lambda *_: got.append(1))
Path(sys.argv[1]).touch()
for _ in range(1200):
    if got:
        time.sleep(0.5)
        break
    time.sleep(0.05)
sys.exit(40 + len(got))
"""

# the first terminal that the leader of a session opens is its controlling one
BEGINS = """
import os, sys
terminal = os.open(sys.argv[1], os.O_RDWR)
for number, name in enumerate((sys.argv[2], sys.argv[1], sys.argv[1])):
    os.dup2(os.open(name, os.O_RDWR), number)
os.execv(sys.argv[3], sys.argv[3:])
"""


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="only Linux records who sent a signal")
@pytest.mark.parametrize("sent", ["by the terminal", "by kill"])
@pytest.mark.parametrize("stdin", ["the terminal", "a file"])
def test_an_interrupt_reaches_the_command_once(tmp_path: Path, sent: str, stdin: str) -> None:
    ready, file = tmp_path / "ready", tmp_path / "nothing"
    file.touch()
    mine, theirs = os.openpty()
    name = os.ttyname(theirs)
    command = [sys.executable, "-m", "memfit", "watch", "--measure", "rss", "--log", str(tmp_path / "x.jsonl"), "--"]
    words = [*python(BEGINS), name, str(file) if stdin == "a file" else name, *command, *python(COUNTS), str(ready)]
    watch = subprocess.Popen(words, start_new_session=True)
    os.close(theirs)
    for _ in range(1200):
        if ready.exists() or watch.poll() is not None:
            break
        time.sleep(0.05)
    if sent == "by kill":
        watch.send_signal(signal.SIGINT)
    else:
        os.write(mine, b"\x03")
    with suppress(OSError):  # a terminal that everybody has left
        while os.read(mine, 4096):
            pass
    os.close(mine)
    assert watch.wait() == 41


@pytest.mark.parametrize("content", ["import os\n", '{"hello": 1}\n', "hello"])
@pytest.mark.parametrize("way", ["outside", "inside"])
def test_nothing_is_appended_to_what_is_no_log(ran: Ran, tmp_path: Path, content: str, way: str) -> None:
    file, ran_too = tmp_path / "train.py", tmp_path / "ran"
    file.write_text(content)
    if way == "outside":
        command = python(f"open({str(ran_too)!r}, 'w')")
        code, _, err = ran("watch", "--measure", "rss", "--log", file, "--to", "prometheus:seven", "--", *command)
        assert code == 2 and f"{file} is no log of memfit watch" in " ".join(err.split()) and "hint: " in err
    else:
        with pytest.raises(BadInput, match="is no log of memfit watch"):
            Recorder(Header("x", "rss"), file, (), Quiet())
    assert file.read_text() == content and not ran_too.exists()


def test_a_log_is_continued_and_an_empty_file_begun(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    file.touch()
    for _ in range(2):
        Recorder(Header("x", "rss"), file, (), Quiet()).close()
    assert len(list(watch_log.runs_of(file.read_bytes()))) == 2


@pytest.mark.parametrize("content", ["hello\n\n", "", '{"type":"sample"}\n'])
def test_a_log_that_cannot_be_read_is_named(ran: Ran, tmp_path: Path, content: str) -> None:
    file = tmp_path / "bad\x1b.jsonl"
    file.write_text(content)
    code, out, err = ran("watch", file)
    assert (code, out) == (2, "")
    assert "bad\N{REPLACEMENT CHARACTER}.jsonl: " in err and "\x1b" not in err and "hint: " in err


def test_output_goes_through_a_relay_line_by_line(tmp_path: Path) -> None:
    lines: list[str] = []
    recorder = Recorder(Header("x", "rss"), None, (), Quiet())
    code, watched = run(python("print('one'); print('two')"), recorder, RssMeter(), 0.1, lines.append)
    assert (code, lines) == (0, ["one", "two"])
    assert watched.samples


def test_output_that_another_process_holds_open_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon of the command's, with its stdout; all lines of the command's own are there."""
    lines: list[str] = []
    daemon = "import time; time.sleep(600)"
    code = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-S', '-c', {daemon!r}]).pid)\n"
        "for number in range(5000): print(number, 'ä' * 9, end='\\r' if number % 2 else '\\n')\n"
        "sys.stdout.write('the last, unfinished'); sys.stdout.flush()"
    )
    recorder = Recorder(Header("x", "rss"), None, (), Quiet())
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8")
    code_found, _ = run(python(code), recorder, RssMeter(), 0.1, lines.append)
    assert code_found == 0
    os.kill(int(lines[0]), signal.SIGKILL)  # it was still there
    assert lines[1:-1] == [f"{number} {'ä' * 9}" for number in range(5000)] and lines[-1] == "the last, unfinished"


def test_a_family_is_a_process_and_its_descendants() -> None:
    child = subprocess.Popen(python("import time; time.sleep(30)"))
    try:
        assert {os.getpid(), child.pid} <= family(os.getpid())
        assert family(child.pid) == {child.pid}
    finally:
        child.kill()
        child.wait()


# --- NVML -----------------------------------------------------------------------------------------------------------


class Driver:
    """What nvidia-ml-py answers, with two cards of 24 GiB; `running` is {card: {pid: bytes}}."""

    def __init__(self) -> None:
        self.running: list[dict[int, int | None]] = [{}, {}]
        self.other = [GIB, 0]  # bytes of processes that are not listed

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, card: int) -> str:  # noqa: N802
        return f"NVIDIA Card {card}"

    def nvmlDeviceGetMemoryInfo(self, card: int) -> Any:  # noqa: N802
        size = self.other[card] + sum(v or 0 for v in self.running[card].values())
        return SimpleNamespace(total=24 * GIB, used=size)

    def nvmlDeviceGetComputeRunningProcesses(self, card: int) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.running[card].items()]


def test_nvml_counts_the_command_and_its_children() -> None:
    driver = Driver()
    meter = NvmlMeter(driver, lambda pid: {pid, 8})
    assert meter.read(7).device == 0
    driver.running = [{99: 5 * GIB, 7: GIB}, {7: 2 * GIB, 8: 3 * GIB, 5: GIB}]
    assert meter.read(7).device == 5 * GIB
    assert (meter.card, meter.total, meter.whole_card) == ("NVIDIA Card 1", 24 * GIB, False)


def test_nvml_in_a_container_takes_what_came_onto_the_card() -> None:
    driver = Driver()
    meter = NvmlMeter(driver, lambda pid: {pid}, numbered=False)
    driver.running = [{4242: 6 * GIB}, {}]
    assert meter.read(7).device == 6 * GIB
    assert meter.whole_card


def test_nvml_outside_of_a_container_never_counts_other_processes() -> None:
    driver = Driver()
    meter = NvmlMeter(driver, lambda pid: {pid}, numbered=True)
    driver.running = [{4242: 6 * GIB}, {}]
    assert (meter.read(7).device, meter.whole_card) == (0, False)
    driver.running = [{4242: 9 * GIB, 7: GIB}, {}]
    assert (meter.read(7).device, meter.whole_card) == (GIB, False)


@pytest.mark.parametrize("listed", ["never", "later"])
def test_the_whole_card_is_called_so(ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str) -> None:
    """In a container, in text, log and JSON; looks at which the driver listed the command are not of it."""
    from memfit.live.outside import processes

    driver, log = Driver(), tmp_path / "x.jsonl"

    def begun() -> NvmlMeter:
        looks = iter(range(3 if listed == "later" else 10**6))
        driver.running, driver.other = [{}, {}], [GIB, 0]
        meter = NvmlMeter(driver, lambda pid: {pid, 4242} if next(looks, None) is None else {pid}, numbered=False)
        driver.running, driver.other = [{4242: 6 * GIB}, {}], [2 * GIB, 0]
        return meter

    monkeypatch.setattr(processes, "nvml", begun)
    words = ("--every", "0.02", "--log", log, "--", *python("import time; time.sleep(0.5)"))
    _, _, err = ran("watch", *words)
    said = {
        "never": r"measured: the card's driver \(NVML\), the growth of the whole card, other processes included",
        "later": r"measured: the card's driver \(NVML\), this command .*; "
        r"at 3 of \d+ looks the whole card, others included",
    }[listed]
    assert re.search(said, err)
    samples = watch_log.loads(log.read_bytes()).samples
    assert [s.whole_card for s in samples] == [listed == "never" or at < 3 for at in range(len(samples))]
    assert all((s.now.device == 7 * GIB) == s.whole_card for s in samples)
    assert b'"whole_card":false' not in log.read_bytes()
    assert re.search(said, ran("watch", log)[1])
    found = json.loads(ran("watch", "--json", *words)[1])
    assert found["whole_card"] is True and json.loads(ran("watch", log, "--json")[1])["whole_card"] is True
    ran("watch", "--measure", "rss", "--log", log, "--", *python("pass"))
    assert json.loads(ran("watch", log, "--json")[1])["whole_card"] is False


def test_nvml_s_numbers_that_are_not_available_are_nothing() -> None:
    driver = Driver()
    meter = NvmlMeter(driver, lambda pid: {pid})
    driver.running = [{7: None}, {}]
    assert meter.read(7).device == 0


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):  # noqa: N801
    pass


@pytest.mark.parametrize("question", ["nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMemoryInfo"])
@pytest.mark.parametrize("words", [(), ("--json",)])
def test_a_card_that_is_lost_takes_nothing_of_the_command(
    ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: str, words: tuple[str, ...]
) -> None:
    from memfit.live.outside import processes

    driver = Driver()
    looks = iter(range(3))
    meter = NvmlMeter(driver, lambda pid: {pid})
    asked = getattr(driver, question)

    def lost(card: int) -> Any:
        if next(looks, None) is None:
            raise NVMLError("GPU is lost")
        return asked(card)

    monkeypatch.setattr(driver, question, lost)
    monkeypatch.setattr(processes, "nvml", lambda: meter)
    done, log = tmp_path / "done", tmp_path / "x.jsonl"
    code = f"import time; time.sleep(0.5); open({str(done)!r}, 'w'); raise SystemExit(5)"
    got, out, err = ran("watch", *words, "--every", "0.02", "--log", log, "--", *python(code))
    assert got == 5 and done.exists()
    said = "nothing is measured from here on: NVMLError: GPU is lost"
    assert [alarm.text for alarm in watch_log.loads(log.read_bytes()).alarms] == [said]
    if words:
        assert [alarm.text for alarm in codec.loads(out).alarms] == [said] and codec.loads(out).exit_code == 5
    else:
        assert f"memfit watch: warning: {said}" in err


def test_a_card_that_lists_no_processes_is_taken_whole() -> None:
    driver: Any = Driver()

    def refuse(card: int) -> list[Any]:
        raise NVMLError_NotSupported("Not Supported")

    driver.NVMLError_NotSupported, driver.nvmlDeviceGetComputeRunningProcesses = NVMLError_NotSupported, refuse
    meter = NvmlMeter(driver, lambda pid: {pid})
    driver.running = [{}, {7: 2 * GIB}]
    assert meter.read(7).device == 2 * GIB and meter.whole_card


def test_a_driver_that_fails_is_reported_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from memfit.live.outside import processes

    driver: Any = Driver()

    def refuse(card: int) -> list[Any]:
        raise NVMLError("Unknown Error")

    driver.nvmlDeviceGetComputeRunningProcesses, driver.NVMLError, driver.nvmlInit = refuse, NVMLError, lambda: None
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    meter, note = processes.outside_meter("auto")
    assert isinstance(meter, RssMeter) and "does not answer: Unknown Error: resident memory" in note
    with pytest.raises(BadInput, match="Unknown Error"):
        processes.outside_meter("nvml")


def test_a_card_filled_from_outside_raises_an_alarm(ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memfit.live.outside import processes

    driver = Driver()
    meter = NvmlMeter(driver, lambda pid: {pid, 1})
    driver.running[0][1] = 23 * GIB
    monkeypatch.setattr(processes, "nvml", lambda: meter)
    expected = tmp_path / "first.jsonl"
    levels = Levels(1, 1, 19 * GIB, 20 * GIB)
    sample = Sample(1.0, 2, "step", levels, levels)
    expected.write_bytes(watch_log.line(Header("x", "cuda")) + watch_log.line(sample))
    log = ("--log", tmp_path / "x.jsonl")
    code, out, err = ran("watch", "--every", "0.1", "--predicted", expected, *log, "--", *python("pass"))
    assert (code, out) == (0, "")
    assert "warning: 96% of the card in use: 23.0 GiB of 24.0 GiB, 1.00 GiB left" in err
    assert "left the predicted band: 23.0 GiB device, predicted 19.0 GiB to 21.0 GiB" in err


# --- the command line -----------------------------------------------------------------------------------------------

MISTAKES = {
    "there is no command 'no-such-program'": ("--measure", "rss", "--", "no-such-program"),
    "./job.py cannot be run as it is": ("--measure", "rss", "--", "./job.py"),
    "--every must be from 0.01 to 3600": ("--every", "0", "--", "true"),
    "--measure cannot be 'magic'": ("--measure", "magic", "--", "true"),
    "unknown sink 'carrier-pigeon'": ("--measure", "rss", "--to", "carrier-pigeon", "--", "true"),
    "--live is for a command": ("--live", "run.jsonl"),
    "cannot read missing.jsonl": ("missing.jsonl",),
    "missing argument": (),
    "there is no folder nowhere/at/all for the log": (
        "--measure",
        "rss",
        "--log",
        "nowhere/at/all/x.jsonl",
        "--",
        "true",
    ),
    "cannot read nothing.toml": ("--predicted", "nothing.toml", "--", "true"),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_line_and_a_hint(
    ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    (tmp_path / "job.py").write_text("print()")
    monkeypatch.chdir(tmp_path)
    code, out, err = ran("watch", *MISTAKES[message])
    error, hint = err.splitlines()[-2:]
    assert (code, out) == (2, "")
    assert error.startswith("error: ") and message in error
    assert hint.startswith("hint: ")


@pytest.mark.parametrize(
    ("driver", "why", "hint"),
    [
        (False, "there is no NVIDIA driver in this machine", "hint: without a card: "),
        (True, "needs the package nvidia-ml-py", f"hint: {install_command('watch')}"),
    ],
)
def test_without_a_driver_the_process_is_measured_with_a_note(
    ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: bool, why: str, hint: str
) -> None:
    from memfit.live.outside import processes

    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]
    monkeypatch.setattr(processes, "DRIVER", tmp_path if driver else tmp_path / "none")
    which = shutil.which
    monkeypatch.setattr("shutil.which", lambda name, *rest: None if name == "nvidia-smi" else which(name, *rest))
    log = ("--log", tmp_path / "x.jsonl")
    code, _, err = ran("watch", *log, "--", *python("pass"))
    assert code == 0
    assert f"{why}: resident memory of the processes is measured instead" in err
    code, _, err = ran("watch", "--measure", "nvml", *log, "--", *python("pass"))
    assert code == 2 and hint in err


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from memfit.live.outside import processes

    class NVMLError(Exception):
        pass

    def init() -> None:
        raise NVMLError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=init, NVMLError=NVMLError))
    with pytest.raises(BadInput, match="does not answer: Driver Not Loaded"):
        processes.nvml()


def test_a_log_is_shown_again(ran: Ran, tmp_path: Path) -> None:
    log = tmp_path / "x.jsonl"
    ran("watch", "--measure", "rss", "--log", log, "--", *python("pass"))
    code, out, err = ran("watch", log)
    assert (code, err) == (0, "")
    assert out.startswith("memfit watch · ") and "resident memory of the command and its children" in out
    code, out, _ = ran("watch", log, "--json")
    assert code == 0 and json.loads(out)["schema"] == "memfit.watched/1"
