"""Hold a written plan against the printed one: recipe.toml and every printed command give the same answer."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from memfit.cli import flags, plan
from memfit.closed_form.host_memory import WORKER

MODEL = "qwen2.5-0.5b"
ASKED: dict[str, tuple[str, ...]] = {
    "host": ("--gpu", "4xt4", "--host-memory", "12GiB", "--workers", "6"),
    "memory": ("--gpu-memory", "7000MiB", "--method", "lora", "--trainer", "transformers"),
    "larger card": ("--gpu", "h100", "--gpu-memory", "9GiB", "--effective-batch", "12", "--sequence-length", "768"),
    "data": ("--gpu", "t4", "--data", "rows.jsonl", "--tokenizer", "bytes"),
    "file": ("--gpu", "2xrtx-3060-12gb", "--from", "axolotl.yaml", "--ignore", "rl", "--target", "trl"),
    "any": ("--any-gpu", "--method", "full"),
    "deepspeed": ("--gpu", "2xt4", "--target", "deepspeed", "--reserve", "4GiB"),
    "axolotl": ("--gpu", "rtx-3060-12gb", "--target", "axolotl", "--workers", "2"),
    "fewer cards": ("--gpu", "8xt4", "--gpu-memory", "2200MiB", "--effective-batch", "64"),
}
WORKERS = 3
AXOLOTL = {
    "base_model": MODEL, "adapter": "lora", "lora_r": 8, "micro_batch_size": 2, "gradient_accumulation_steps": 2,
    "sequence_len": 512, "rl": "dpo", "dataloader_num_workers": WORKERS,
}  # fmt: skip
# flags that change neither the recipe nor its verdict, and those of tasks for which no files are written
ELSEWHERE = {
    "model", "out", "force", "json", "debug", "save_tape", "html", "trace", "no_trace",
    *(row.name for row in flags.TASK),
}  # fmt: skip


def answer(document: dict[str, Any]) -> dict[str, Any]:
    return {name: document[name] for name in ("recipe", "verdict", "need", "usable", "host")}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [json.dumps({"text": "word " * length}) for length in (20, 50, 90)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "axolotl.yaml").write_text(json.dumps(AXOLOTL))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_what_is_written_and_printed_gives_the_printed_answer(ran: Any, folder: Path, asked: tuple[str, ...]) -> None:
    named = () if "--from" in asked else (MODEL,)
    target = () if "--target" in asked or "--from" in asked else ("--target", "trl")
    command = ("plan", *named, *asked, *target, "--out", "run")
    planned = json.loads(ran(*command, "--json", "--force")[1])
    read = json.loads(ran("estimate", "--from", "run", "--json")[1])
    assert answer(read) == answer(planned)
    printed = ran(*command, "--force")[1].split("next:")[1].splitlines()
    for line in filter(None, map(str.strip, printed)):
        again = shlex.split(line)
        if again[1] == "train":
            continue
        found = json.loads(ran(*again[1:], "--json")[1])
        assert (found["recipe"], found["verdict"], found["need"]) == tuple(
            planned[name] for name in ("recipe", "verdict", "need")
        ), line


def test_every_flag_that_changes_an_answer_is_asked_somewhere() -> None:
    rows, _ = flags.TAKEN[plan.run]
    recipe = {row.name for row in flags.RECIPE}  # a recipe.toml holds every field
    asked = {word[2:].replace("-", "_") for words in ASKED.values() for word in words if word.startswith("--")}
    assert {row.name for row in rows} - recipe - ELSEWHERE <= asked


def test_the_workers_of_a_file_take_host_memory(ran: Any, folder: Path) -> None:
    command = ("estimate", "--from", "axolotl.yaml", "--ignore", "rl", "--gpu", "h100", "--json")
    read, none = (json.loads(ran(*command, *more)[1])["host"]["need"] for more in ((), ("--workers", "0")))
    assert read - none == WORKERS * WORKER
