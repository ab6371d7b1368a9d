"""Units and errors: how bytes are written and read, and how errors speak."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import Ran
from memfit import errors, extras, units
from memfit.errors import BadInput
from memfit.nouns.job import _CHOICES as CHOICES
from memfit.nouns.job import MEANT, Recipe, Samples, check_values
from memfit.report.words import cut_words
from memfit.train import embedded


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("40GiB", 40 << 30),
        ("24 GB", 24 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5gib", 3 << 29),
        ("123", 123),
        ("2 k", 2000),
    ],
)
def test_sizes_are_read_with_their_unit(text: str, size: int) -> None:
    assert units.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-3GiB", "3 apples", "1e9", "nan", "1,5GiB"])
def test_nonsense_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(errors.BadInput) as caught:
        units.parse_size(text)
    assert caught.value.hint


@given(st.integers(0, 1 << 60))
def test_human_text_reads_back_within_half_a_percent(size: int) -> None:
    assert units.parse_size(units.human(size)) == pytest.approx(size, rel=0.0055, abs=1)


@pytest.mark.parametrize(
    ("size", "unit", "digits", "text"),
    [
        (0, "GiB", 2, "0.00"), (48 << 10, "GiB", 2, "<0.01"), (48 << 20, "GiB", 1, "<0.1"), (52 << 20, "GiB", 1, "0.1"),
        (-5, "GiB", 1, "-0.0"), (170, "MiB", 1, "<0.01"), (48 << 10, "MiB", 1, "0.05"), (2 << 30, "MiB", 1, "2,048.0"),
    ],
)  # fmt: skip
def test_a_cell_never_calls_something_nothing(size: int, unit: str, digits: int, text: str) -> None:
    assert units.cell(size, unit, digits) == text


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("2048", 2048), ("2,048", 2048), ("8k", 8192), ("4K", 4096), ("128k", 131072), ("1M", 1 << 20), ("1.5k", 1536),
     (" 8 k ", 8192), ("-4", -4)],
)  # fmt: skip
def test_lengths_are_read_with_k_and_m(text: str, tokens: int) -> None:
    assert units.parse_length(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "8kk", "1.3", "0.1k", "8 tokens", "1e4", "8g", "9" * 400 + "x"])
def test_what_is_no_length_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        units.parse_length(text)
    assert "8192" in caught.value.hint


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_what_is_cut_is_said_with_its_counts(count: int, cut: int, lost: int) -> None:
    samples = Samples(count, max(lost, 1) * 2, min(cut, count), lost)
    said = cut_words(samples)
    assert f"{count:,} sample{'s' * (count > 1)}" in said and f"{samples.tokens:,} tokens" in said
    assert f"{samples.cut:,} of" in said or not samples.cut


def test_negative_sizes_keep_their_sign() -> None:
    assert units.human(-(3 << 30)) == "-3.00 GiB"


@pytest.mark.parametrize(("count", "text"), [(6_738_415_616, "6.74 B"), (134_515_008, "134.5 M"), (512, "512")])
def test_parameter_counts_are_written_as_people_say_them(count: int, text: str) -> None:
    assert units.billions(count) == text


def test_an_unknown_name_says_what_is_near() -> None:
    error = errors.UnknownName("GPU", "rtx-4900", ["rtx-4090", "h100"])
    assert "rtx-4090" in error.hint and error.exit_code == 2


def test_a_missing_extra_says_what_to_install() -> None:
    hint = extras.MissingExtra("reading a tokenizer", "data").hint
    program, verb, flag, named = shlex.split(hint)  # the tests run in a source tree
    assert (program, verb, flag) == ("pip", "install", "-e")
    assert (Path(named.removesuffix("[data]")) / "pyproject.toml").is_file()


@pytest.mark.parametrize(
    ("noted", "named"),
    [
        (None, "memfit[trace]"),
        ({}, "memfit[trace]"),
        ({"url": "file://{here}", "dir_info": {}}, "{here}[trace]"),
        ({"url": "file:///gone/memfit", "dir_info": {}}, "memfit[trace]"),
        ({"url": "https://host/m.git", "vcs_info": {"vcs": "git"}}, "memfit[trace] @ git+https://host/m.git"),
        ({"url": "https://host/m.whl", "archive_info": {}}, "memfit[trace] @ https://host/m.whl"),
    ],
    ids=["unknown", "index", "folder", "folder that is gone", "git", "wheel"],
)
def test_a_hint_installs_from_where_memfit_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: dict[str, Any] | None, named: str
) -> None:
    here = tmp_path / "a folder"
    here.mkdir()

    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if noted is None else json.dumps(noted).replace("{here}", str(here).replace(" ", "%20"))

    monkeypatch.setattr(extras, "FOLDER", f"{tmp_path}/site-packages/memfit/")
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Installed())
    assert shlex.split(extras.install_command("trace")) == ["pip", "install", named.replace("{here}", str(here))]


@pytest.mark.parametrize(
    ("command", "words"),
    [("plan", ("--effective-batch", 1)), ("techniques", ("--effective-batch", 1)), ("estimate", ())],
)
def test_small_runs_are_told_in_mib(ran: Ran, tmp_path: Path, command: str, words: tuple[object, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(embedded.config()))
    _, out, _ = ran(command, tmp_path, "--gpu", "rtx-4090", "--sequence-length", 256, *words)
    sizes = re.findall(r"([\d,.]+) ([GM]iB)", out)
    assert {unit for _, unit in sizes} == {"GiB", "MiB"}  # of the card, and of the run
    assert "0.0" not in [size for size, unit in sizes if unit == "GiB"]
    assert re.search("(peak|reserved) MiB", out)  # the heads of tables


@pytest.mark.parametrize(
    ("share", "said"), [(0.0, "none"), (0.0004, "less than 0.1%"), (0.032, "3.2%"), (1.0, "100.0%")]
)
def test_a_share_of_samples_is_never_zero_percent(share: float, said: str) -> None:
    assert units.share_of_samples(share) == said


def test_gigabytes_of_a_card_are_told_from_gibibytes(ran: Ran) -> None:
    words = ("estimate", "qwen2.5-0.5b", "--method", "lora", "--gpu-memory")
    assert "a card sold as 24 GB has nearly 24GiB" in ran(*words, "24GB")[2]
    assert "sold" not in ran(*words, "24GiB")[2]


@pytest.mark.parametrize("name", sorted(MEANT))
def test_what_other_tools_call_a_choice_is_known(name: str) -> None:
    fields = [field for field, choices in CHOICES.items() if MEANT[name] in choices]
    for field in fields:
        with pytest.raises(errors.BadInput) as caught:
            check_values(Recipe(**{field: name}))
        assert caught.value.hint.startswith(f"--{field} {MEANT[name]}, or choose one of ")
    assert fields


def test_a_choice_that_is_no_text_is_refused() -> None:
    with pytest.raises(errors.BadInput, match="--shard cannot be"):
        check_values(Recipe(shard=["parameters"]))  # type: ignore[arg-type]
