"""Explain logs as they are: longer than memory, with several failures in them, and with names that steer terminals."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import BinaryIO

import pytest

from memfit import cli
from memfit.cli import logs
from memfit.cli.logs import read_log
from memfit.explain.oom_message import BEGINS, WORDS
from memfit.explain.text.failures import split
from memfit.units import MIB

Captured = pytest.CaptureFixture[str]
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} GiB. "
    "GPU {} has a total capacity of 79.11 GiB of which 6.75 GiB is free."
)
LOSS = (
    'Traceback (most recent call last):\n  File "/home/u/train.py", line 118, in <module>\n    trainer.train()\n'
    '  File "/v/site-packages/transformers/loss/loss_utils.py", line 36, in ForCausalLMLoss\n'
    "    logits = logits.float()\n"
)
RESUME = (
    'Traceback (most recent call last):\n  File "/home/u/train.py", line 31, in <module>\n'
    '    ckpt = torch.load("out/step400.pt", map_location="cuda")\n'
    '  File "/v/site-packages/torch/serialization.py", line 1422, in _load\n    result = unpickler.load()\n'
)
NOISE = b"[rank1] watchdog teardown line " + b"x" * 40 + b"\n"
FAILED = (LOSS + OOM.format("9.27", 2)).encode()


def run(capsys: Captured, *words: str) -> tuple[int, str, str]:
    code = cli.main(["explain", *words])
    return code, *capsys.readouterr()


# ---- length ----------------------------------------------------------------------------------------------------------


def noise(size: int) -> bytes:
    return NOISE * (size // len(NOISE))


@pytest.mark.parametrize(("before", "after"), [(0, 20 * MIB), (20 * MIB, 0), (11 * MIB, 11 * MIB), (3 * MIB, 2 * MIB)])
@pytest.mark.parametrize("piped", [True, False])
def test_a_failure_is_found_wherever_in_a_log_it_stands(
    before: int, after: int, piped: bool, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = noise(before) + FAILED + b"\n" + noise(after)
    path = tmp_path / "train.log"
    path.write_bytes(content)
    stream = io.BytesIO(content)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(stream))
    code, out, err = run(capsys, "-" if piped else str(path), "--json")
    told = json.loads(out)
    assert code == 0 and told["findings"][0]["cause"] == "logits" and told["findings"][0]["line"] == "train.py:118"
    assert told["messages"][0]["tried"] == int(9.27 * (1 << 30))
    assert (told["left_out"] > 0) == ("only searched for messages" in err) == (before + after > logs.WHOLE)
    assert not piped or stream.tell() == len(content)  # else the program that writes would be ended


def kept(chunks: int, message: bytes, at: int) -> logs.Log:
    content = bytearray(b"." * (chunks * logs.CHUNK))
    content[at : at + len(message)] = message
    return read_log(io.BytesIO(bytes(content)))


@pytest.mark.parametrize("off", [-40, -20, -1, 0, 1])
def test_a_message_across_two_chunks_is_whole(off: int) -> None:
    message = b"\n" + OOM.format("9.27", 2).encode() + b"\n"
    log = kept(20, message, 10 * logs.CHUNK + off)
    assert message in log.content and log.left_out > 0
    assert log.left_out + len(log.content) - 20 * logs.CHUNK in (1, 2)  # a line's end where something is missing


class Endless:
    """A pipe of a given length that is made as it is read."""

    def __init__(self, size: int) -> None:
        self.left, self.most = size, 0

    def read(self, size: int = -1) -> bytes:
        assert size > 0
        self.most = max(self.most, size)
        made = min(size, self.left)
        self.left -= made
        return (b"CUDA out of memory. Tried to allocate 2 GiB. " + b"y" * 9955)[:made].ljust(made, b"z")


def test_a_pipe_is_read_to_its_end_a_piece_at_a_time() -> None:
    pipe = Endless(200 * MIB)
    stream: BinaryIO = pipe  # type: ignore[assignment]
    log = read_log(stream)
    assert pipe.left == 0 and pipe.most <= logs.WHOLE + 1
    assert len(log.content) < logs.WHOLE and log.left_out > 180 * MIB


def test_windows_logs_are_read_at_any_length() -> None:
    text = "step 1\n" * 700_000 + FAILED.decode() + "\nend\n"
    log = read_log(io.BytesIO(text.encode("utf-16")))
    assert FAILED in log.content and log.left_out > 0 and b"\0" not in log.content


@pytest.mark.parametrize("said", [
    "no available memory for the cache blocks", "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed", "failed to cuda calloc async", "error out of memory at line 90 in file",
    "hip out of memory", "cudaerrormemoryallocation", "cuda_error_out_of_memory", "tried to allocate",
    "defaultcpuallocator: can't allocate memory", "unable to allocate 3.1 gib for an array", "memoryerror", "oom-kill",
    "killed", "sigkill", "exit code -9", "exitcode: 137", "signal 9 ", "return code = -9", "cannot allocate memory",
    "warming up sampler with", "free memory on device 0 (1 gib) on startup is less than",
    "larger than the maximum number of tokens that can be stored in kv cache",
    "to serve at least one request with the model's max seq len",
    "allocating 64.00 mib on device 0: cudamalloc failed", "out of resource: shared memory",
])  # fmt: skip
def test_whatever_begins_a_message_has_a_word_that_is_looked_for(said: str) -> None:
    import re

    assert any(re.search(words, said) for _, words in BEGINS) and any(word in said.encode() for word in WORDS)


# ---- several failures ------------------------------------------------------------------------------------------------


def ranked(rank: int, text: str) -> str:
    return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())


EVAL = LOSS + OOM.format("6.10", 0) + "\n"
AGAIN = "=== restarting ===\nResuming from checkpoint out/step400.pt\n" + RESUME + OOM.format("0.50", 0) + "\n"
CHAINED = "During handling of the above exception, another exception occurred:\n\n" + RESUME + "RuntimeError: wrapped\n"
RANKS = "".join(ranked(n, LOSS + OOM.format(size, n)) for n, size in enumerate(("9.27", "9.27", "8.11", "9.27")))
WOVEN = "".join(
    f"[rank{n}]: {line}\n"
    for lines in zip(*((LOSS + OOM.format("9.27", n)).splitlines() for n in range(4)), strict=True)
    for n, line in enumerate(lines)
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (EVAL, 1),
        (EVAL + AGAIN, 2),
        (RANKS, 1),
        (WOVEN, 1),
        (WOVEN.replace("]: ", "]:").replace("[rank", "default"), 1),
        (RANKS + AGAIN, 2),
        (RANKS + "Restarting\n" + RANKS.replace("9.27", "7.03").replace("8.11", "7.01"), 2),
        (EVAL + EVAL, 1),  # printed again by the launcher
        (EVAL + "rank 1 exited with exit code -9\n", 1),
        (EVAL + "During handling of the above exception, another exception occurred:\n\n" + RESUME
         + OOM.format("0.50", 0), 1),
        (EVAL + CHAINED, 1),
        (EVAL + CHAINED + "restarting, attempt 2\nstep 1 loss 2\n" + RESUME + OOM.format("0.50", 0), 2),
        (EVAL + "restarting, attempt 2\nstep 1 loss 2\n"
         "slurmstepd: error: Detected 1 oom_kill event in StepId=5.0.\nKilled\n", 2),
        # stdout comes after stderr
        (EVAL + "step 1 loss 2\nstep 2 loss 2\nSignal 9 (SIGKILL) received by PID 102\n", 1),
        (ranked(0, EVAL) + "  5%|x  | 10/200 [00:10<00:20, 1.2it/s]\n" + ranked(1, RESUME + OOM.format("0.50", 1)), 1),
        ("İ" * 900 + EVAL + AGAIN, 2),
        ("step 1 loss 2.0\n", 1),
    ],
)  # fmt: skip
def test_a_log_is_split_at_its_failures(text: str, count: int) -> None:
    assert len(split(text)) == count


def test_each_failure_is_explained_on_its_own(tmp_path: Path, capsys: Captured) -> None:
    log = tmp_path / "two.log"
    log.write_text("method: full, adamw\n" + EVAL + AGAIN)
    _, out, _ = run(capsys, str(log))
    assert "2 failures in this log" in out and "1. logits (certain) · at train.py:118" in out
    head = next(line for line in out.splitlines() if line.startswith("STALE-CHECKPOINT"))
    assert "train.py:31" in head and "requested 512 MiB" in out and "6.10" not in out
    told = json.loads(run(capsys, str(log), "--json")[1])
    assert [f["cause"] for f in told["earlier"]] == ["logits"] and len(told["messages"]) == 1
    log.write_text(RANKS)
    told = json.loads(run(capsys, str(log), "--json")[1])
    assert told["earlier"] == [] and len(told["messages"]) == 2


def test_what_a_log_begins_with_is_told_to_every_failure() -> None:
    first, second = split("optim=adamw_torch\n" + EVAL + AGAIN)
    assert "optim=adamw_torch" in first and "optim=adamw_torch" in second
    assert "logits" in first and "logits" not in second and "map_location" not in first


# ---- what is priced --------------------------------------------------------------------------------------------------


def priced(capsys: Captured, tmp_path: Path, head: str, *flags: str) -> tuple[str, str]:
    (tmp_path / "log").write_text(head + LOSS + OOM.format("9.27", 2))
    code, out, err = run(
        capsys, str(tmp_path / "log"), "--model", "qwen2.5-3b", "--gpu", "4xa100-80gb", "--method", "full", *flags
    )
    assert code == 0
    return out, " ".join(err.split())


@pytest.mark.parametrize(
    ("head", "flags", "said"),
    [
        ("", (), "micro-batch 8 x 1 on 4 GPUs · sequence 2,048"),
        ("", ("--sequence-length", "4096"), "micro-batch 4 x 1 on 4 GPUs · sequence 4,096"),
        ("", ("--micro-batch", "2"), "micro-batch 2 x 1 on 4 GPUs · sequence 8,192"),
        ("", ("--micro-batch", "1", "--sequence-length", "512"), "micro-batch 1 x 1 on 4 GPUs · sequence 512"),
        ("per_device_train_batch_size=4,\n", (), "micro-batch 4 x 1 on 4 GPUs · sequence 4,096"),
        ("--per_device_train_batch_size 4 --max_length 4096\n", (), "micro-batch 4 x 1 on 4 GPUs · sequence 4,096"),
        (
            "gradient_checkpointing=True,\noptim=OptimizerNames.ADAFACTOR,\n",
            (),
            "Adafactor (transformers) · checkpointing",
        ),
        ("gradient_checkpointing=True,\n", ("--checkpointing", "none"), "no checkpointing"),
        ("gradient_checkpointing=False,\n", (), "no checkpointing"),
        ("attn_implementation: eager\n", (), "eager attention"),
    ],
)
def test_the_run_that_is_priced_is_the_one_the_log_shows(
    head: str, flags: tuple[str, ...], said: str, tmp_path: Path, capsys: Captured
) -> None:
    assert said in priced(capsys, tmp_path, head, *flags)[1].replace("checkpointed", "checkpointing")


def test_prices_do_not_contradict_the_evidence(tmp_path: Path, capsys: Captured) -> None:
    out, err = priced(capsys, tmp_path, "")
    assert "16,384 tokens" in out and "saves nothing" not in out
    assert "--micro-batch 8 --sequence-length 2048: the request that failed" in err


def test_the_planner_may_change_what_the_log_shows(tmp_path: Path, capsys: Captured) -> None:
    assert "planner: micro-batch" in priced(capsys, tmp_path, "")[0]


@pytest.mark.parametrize(
    "flags", [("--gpu", "nosuch"), ("--gpu", "h100"), ("--micro-batch", "4"), ("--compile",), ("--reserve", "1GiB")]
)
def test_flags_of_a_run_need_its_model(flags: tuple[str, ...], tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "log").write_text(EVAL)
    code, out, err = run(capsys, str(tmp_path / "log"), *flags)
    assert (code, out) == (2, "") and f"error: {flags[0]}" in err and "hint: --model MODEL" in err


# ---- names that steer a terminal -------------------------------------------------------------------------------------

EVIL = "/x/\x1b[31mevil\x1b]0;pwn\x07\x9b2J\u202e.py"
STEERS = "\x1b\x07\x9b\u202e\r\b"


def steered(*outputs: str) -> list[str]:
    return [c for out in outputs for c in STEERS if c in out]


def test_no_name_in_a_log_steers_the_terminal(tmp_path: Path, capsys: Captured) -> None:
    log = tmp_path / "log"
    evil = LOSS.replace("/home/u/train.py", EVIL)
    log.write_text(f"--optim \x1b[31mx\n{evil}{OOM.format('9.27', 2)}\n" + AGAIN.replace("/home/u/train.py", EVIL))
    for flags in ((), ("--json",), ("--model", "qwen2.5-0.5b", "--gpu", "rtx-4090")):
        _, *outputs = run(capsys, str(log), *flags)
        assert steered(*outputs) == [] and any("evil" in out for out in outputs)


def test_no_name_in_a_snapshot_steers_the_terminal_or_the_page(tmp_path: Path, capsys: Captured) -> None:
    frames = [{"name": "f\x1b]0;pwn\x07", "filename": EVIL, "line": 7}]
    sizes = {"size": 20 * MIB, "stream": 0}
    events = [
        {"action": action, "addr": 32 * n * MIB, "frames": frames} | sizes
        for n in range(1, 9)
        for action in ("segment_alloc", "alloc")
    ]
    block = {"size": 20 * MIB, "requested_size": 20 * MIB, "state": "active_allocated"}
    segments = [
        {"address": 32 * n * MIB, "total_size": 20 * MIB, "stream": 0, "segment_type": "large", "blocks": [block]}
        for n in range(1, 9)
    ]
    path, page = tmp_path / "oom\x1b.pickle", tmp_path / "page.html"
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [events]}))
    _, *outputs = run(capsys, str(path), "--html", str(page))
    assert page.is_file() and any("evil" in out for out in outputs)
    assert steered(*outputs, page.read_text("utf-8")) == []
