"""Training files of tasks: what is counted of a sample is what the task's trainer makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
import wave
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import Ran
from memfit.cli.task_flags import sized
from memfit.data.dataset import Dataset, read_dataset
from memfit.data.media import seconds
from memfit.data.samples import CHAT_TOKENS, END, UnusableError
from memfit.data.task_samples import COLUMNS, kind_of, pictured
from memfit.documents import footprint_file
from memfit.errors import BadInput
from memfit.nouns.task import PLAIN
from memfit.tables.tasks import TASKS

KINDS = {key: kind_of(key, row.sample) for key, row in TASKS.items() if key != "sft"}


def read(folder: Path, task: str, *rows: dict[str, Any]) -> Dataset:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_dataset(path, "bytes", kind=KINDS[task])


def test_every_task_has_columns() -> None:
    assert {kind.key for kind in KINDS.values()} == set(COLUMNS)


@pytest.mark.parametrize(
    ("task", "row", "tokens"),
    [
        ("dpo", {"prompt": "aaaa", "chosen": "bb", "rejected": "cccccc"}, 4 + 6 + END),
        ("orpo", {"chosen": "bb", "rejected": "c"}, 2 + END),
        ("reward", {"question": "a", "chosen": [{"role": "user", "content": "bb"}], "rejected": ""}, None),
        ("reward", {"question": "a", "chosen": {"role": "assistant", "content": "bb"}, "rejected": "c"},
         1 + 2 + CHAT_TOKENS + END),
        ("kto", {"prompt": "aa", "completion": "bbb", "label": True}, 5 + END),
        ("classification", {"premise": "aa", "hypothesis": "bbb", "label": 1}, 5 + 1),
        ("token-classification", {"tokens": ["aa", "b"], "ner_tags": [0, 1]}, 4),
        ("embedding", {"query": "aa", "answer": "bbbbb"}, 5),
        ("masked-lm", {"text": "aaa"}, 3 + END),
        ("seq2seq", {"source": "aaaa", "target": "bb"}, 4),
    ],
)  # fmt: skip
def test_tokens_of_a_sample(tmp_path: Path, task: str, row: dict[str, Any], tokens: int | None) -> None:
    if tokens is None:
        with pytest.raises(BadInput, match="columns"):
            read(tmp_path, task, row)
    else:
        assert read(tmp_path, task, row).lengths.counts == ((tokens, 1),)


def test_what_stands_beside_a_text(tmp_path: Path) -> None:
    pairs = read(tmp_path, "seq2seq", {"source": "aaaa", "target": "bb"}, {"source": "a", "target": "bbbb"})
    assert pairs.sizes.targets is not None and pairs.sizes.targets.longest == 4 + END
    asked = read(tmp_path, "grpo", {"question": "aaa", "answer": "1"}, {"question": "a", "answer": "2"})
    assert asked.sizes.prompts is not None and asked.sizes.prompts.longest == 3
    assert asked.lengths.longest == 0
    labelled = read(tmp_path, "classification", *({"text": "a", "label": n % 3} for n in range(9)))
    assert labelled.sizes.labels == 3


def test_sizes_of_images_and_recordings_come_from_their_headers(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("imagesize")
    pytest.importorskip("tinytag")
    for name, size in (("a.png", (40, 30)), ("b.jpg", (64, 50)), ("c.webp", (20, 90))):
        image.new("RGB", size).save(tmp_path / name)
    with wave.open(str(tmp_path / "a.wav"), "wb") as sound:
        sound.setparams((1, 2, 16_000, 0, "NONE", ""))
        sound.writeframes(bytes(2 * 24_000))
    said = {"prompt": "aa", "completion": "b"}
    seen = read(tmp_path, "image-text", {"images": ["a.png", "b.jpg"], **said}, {"images": ["c.webp"], **said},
                {"images": ["https://example.org/d.png"], **said}, {"images": ["a.wav"], **said})  # fmt: skip
    assert (seen.sizes.images, seen.sizes.image, seen.sizes.elsewhere, seen.broken) == (2, (64, 50), 1, 1)
    assert pictured(str(tmp_path / "data.jsonl"))
    heard = read(tmp_path, "speech-ctc", {"audio": "a.wav", "text": "a"}, {"audio": "none.wav", "text": "a"},
                 {"audio": {"array": [0.0] * 32_000, "sampling_rate": 16_000}, "text": "a"})  # fmt: skip
    assert (heard.sizes.seconds, heard.lengths.count, heard.broken) == (2.0, 2, 1)
    assert read_dataset(tmp_path, "bytes", kind=KINDS["image-classification"]).lengths.count == 3


def test_a_plan_takes_its_sizes_from_preferences(ran: Ran, tmp_path: Path) -> None:
    data = tmp_path / "pairs.jsonl"
    row = {"prompt": "a" * 300, "chosen": "b" * 900, "rejected": "c"}
    data.write_text((json.dumps(row) + "\n") * 4)
    words = ("gpt2", "--task", "dpo", "--gpu", "l4", "--data", data, "--tokenizer", "bytes", "--json")
    found = json.loads(ran("plan", *words)[1])
    assert (found["job"]["sequence_length"], found["job"]["longest_sample"]) == (1024, 1201)
    code, _, err = ran("plan", *(word if word != "dpo" else "seq2seq" for word in ("flan-t5-base", *words[1:])))
    assert code == 2 and "hint: a sample has source and target" in err


def test_imports_ahead_of_forks_do_not_bind_to_the_machines_card(tmp_path: Path) -> None:
    """Kernels of a real card in a forked process end it."""
    pytest.importorskip("bitsandbytes")
    code = """\
import sys, torch
torch.cuda.is_available = lambda: True
from memfit import Recipe
from memfit.catalogue import config
from memfit.catalogue.names import find
from memfit.virtual.tracing import import_ahead
import_ahead(Recipe(method="lora", optimizer="adamw-8bit", trainer="transformers"), dict(config(find("smollm2-135m"))))
print("bitsandbytes" in sys.modules, "bitsandbytes.backends.cuda.ops" in sys.modules, torch.cuda.is_available())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-2] == "True False True"


def test_the_recipe_of_a_task_is_a_prediction(ran: Ran, tmp_path: Path) -> None:
    words = ("gpt2", "--task", "dpo", "--gpu", "l4", "--sequence-length", "256", "--json")
    found = json.loads(ran("plan", *words, "--out", tmp_path / "run")[1])
    of_file = footprint_file.read(tmp_path / "run" / "recipe.toml")
    levels = {p.phase: p.levels.reserved for p in of_file.phases}
    assert levels == {p["phase"]: p["levels"]["reserved"] for p in found["phases"]}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from((b"RIFF\x00\x00\x00\x00WAVEfmt ", b"fLaC", b"OggS", b"ID3\x04", b"\x00\x00\x00\x18ftypM4A ")),
       st.binary(max_size=200))  # fmt: skip
def test_a_damaged_recording_is_one_broken_record(head: bytes, rest: bytes) -> None:
    pytest.importorskip("tinytag")
    with suppress(UnusableError):
        assert seconds({"bytes": head + rest}, Path()) > 0


def test_flags_stand_and_an_image_as_text_is_one_broken_record(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("imagesize")
    image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    said = {"prompt": "aa", "completion": "b"}
    found = read(tmp_path, "image-text", {"images": ["a.png"] * 2, **said}, {"images": ["A" * 9000], **said})
    assert (found.sizes.images, found.broken) == (2, 1)
    row, notes = TASKS["image-text"], list[str]()
    assert (
        sized(PLAIN, row, "qwen2.5-vl-3b", found, {"images": 1}, notes) == replace(PLAIN, image=(40, 30))
        and len(notes) == 1
    )
    assert sized(PLAIN, row, "qwen2.5-vl-3b", found, {}, notes) == replace(PLAIN, image=(40, 30), images=2)
