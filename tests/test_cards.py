"""Cards: every row of gpus.toml is sound and found by its names, and what drivers print is understood."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import fields
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.catalogue import cards
from memfit.catalogue.cards import (
    CUSTOM,
    Seen,
    custom_gpu,
    described,
    find_gpu,
    list_gpus,
    local_gpu,
    memory_to_say,
    parse_gpu,
    planned,
    reading,
    recognise,
)
from memfit.errors import BadInput, MemfitError, UnknownName
from memfit.nouns.gpu import Gpu
from memfit.units import GB, GIB, MIB

GPUS = list_gpus()
each_gpu = pytest.mark.parametrize("gpu", GPUS, ids=lambda g: g.short)


@each_gpu
def test_row_is_sound(gpu: Gpu) -> None:
    assert 0 < gpu.context_bytes < gpu.total_bytes <= gpu.sold_bytes * 1.08
    assert gpu.total_bytes > gpu.sold_bytes * 0.7
    assert gpu.context_bytes < 0.1 * gpu.sold_bytes
    assert gpu.bandwidth > 0
    assert gpu.pcie_bandwidth > 0
    assert gpu.bf16_flops >= 0
    assert gpu.fp8_flops >= gpu.bf16_flops or gpu.fp8_flops == 0
    assert gpu.link_bandwidth == 0 or gpu.link_bandwidth > gpu.pcie_bandwidth
    assert set(gpu.unverified) <= {f.name for f in fields(Gpu)}
    assert gpu.note.strip() == gpu.note


@each_gpu
def test_short_names_can_be_typed(gpu: Gpu) -> None:
    for name in (gpu.short, *gpu.aliases):
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)


@each_gpu
def test_prices_say_where_they_are_from(gpu: Gpu) -> None:
    assert bool(gpu.price_source) == (gpu.price_per_hour is not None or gpu.spot_per_hour is not None)
    if gpu.price_per_hour is not None:
        assert 0 < (gpu.spot_per_hour or gpu.price_per_hour) <= gpu.price_per_hour < 20


@each_gpu
def test_nvidia_cards_have_sms_and_a_capability(gpu: Gpu) -> None:
    nvidia = gpu.vendor == "NVIDIA"
    assert (gpu.sm_count > 0) == nvidia
    assert (gpu.compute_capability is not None) == nvidia
    if nvidia and gpu.compute_capability and gpu.compute_capability < (8, 0):
        assert gpu.bf16_flops == 0
        assert 15e12 < gpu.fp16_flops == gpu.half_flops
    elif nvidia:
        assert gpu.half_flops == gpu.bf16_flops > 0


@each_gpu
def test_unknown_bf16_rate_is_flagged(gpu: Gpu) -> None:
    without_bf16_units = gpu.compute_capability is not None and gpu.compute_capability < (8, 0)
    assert gpu.bf16_flops > 0 or without_bf16_units or "bf16_flops" in gpu.unverified


@each_gpu
def test_every_name_leads_back(gpu: Gpu) -> None:
    for name in (gpu.short, gpu.name, *gpu.aliases):
        for spelt in (
            name,
            name.upper(),
            name.replace("-", " "),
            name.replace("-", ""),
            f"NVIDIA {name}",
            f" {name}\n",
        ):
            assert find_gpu(spelt) is gpu


def test_names_are_unique() -> None:
    names = [n for g in GPUS for n in {g.short, g.name, *g.aliases}]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("RTX 4090", "rtx-4090"),
        ("4070 super", "rtx-4070-super"),
        ("4060ti", "rtx-4060-ti-16gb"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("a10", "a10"),
        ("A10G 24GB", "a10g"),
        ("t4", "t4"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("a100 sxm 40gb", "a100-40gb"),
        ("h100", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("AMD Instinct MI300X", "mi300x"),
        ("m3-max", "m3-max-36gb"),
        ("M3 Max 128 GB", "m3-max-128gb"),
    ],
)
def test_what_people_type(text: str, short: str) -> None:
    assert find_gpu(text).short == short


@pytest.mark.parametrize(
    ("text", "candidates"),
    [
        ("a100", ["a100-40gb", "a100-80gb", "a100-pcie-40gb", "a100-pcie-80gb"]),
        ("v100", ["v100-16gb", "v100-32gb"]),
        ("rtx 6000", ["rtx-a6000", "rtx-6000-ada", "rtx-pro-6000"]),
    ],
)
def test_several_cards_are_listed_not_guessed(text: str, candidates: list[str]) -> None:
    with pytest.raises(BadInput, match=f"could be {len(candidates)} GPUs") as caught:
        find_gpu(text)
    assert all(c in caught.value.hint for c in candidates)


@pytest.mark.parametrize(
    "text", ["", "  ", "\U0001f4a5", "gpu", "a1", "h10", "GeForce RTX 4090 Laptop GPU", "4090 48gb"]
)
def test_unknown_cards(text: str) -> None:
    with pytest.raises(UnknownName) as caught:
        find_gpu(text)
    assert "--gpu-memory" in caught.value.hint


def test_unknown_card_says_what_is_near() -> None:
    with pytest.raises(UnknownName) as caught:
        find_gpu("rtx-409")
    assert "rtx-4090" in caught.value.hint


@given(st.text(max_size=300))
def test_any_text_is_a_card_or_a_memfit_error(text: str) -> None:
    try:
        gpu, count = parse_gpu(text)
    except MemfitError as error:
        assert error.hint
    else:
        assert gpu in GPUS
        assert count > 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h100", "'h100' read as H100 SXM (80 GB), not h100-pcie or h100-nvl"),
        ("m1", "'m1' read as Apple M1 8 GB, not m1-16gb"),
        ("rtx 3080", "'rtx 3080' read as GeForce RTX 3080 (10 GB), not rtx-3080-12gb"),
        ("H100 PCIe", ""),
        ("4090", ""),
        ("rtx-4070-ti", ""),
        ("A100 SXM4 80 GB", ""),
    ],
)
def test_what_was_assumed_is_said(text: str, said: str) -> None:
    assert reading(text, find_gpu(text)) == said


@pytest.mark.parametrize(
    ("text", "short", "count"),
    [
        ("8xh100", "h100", 8),
        ("h100:8", "h100", 8),
        ("2 x rtx 4090", "rtx-4090", 2),
        ("8x4090", "rtx-4090", 8),
        ("4 × a10g", "a10g", 4),
        ("2*t4", "t4", 2),
        ("4090", "rtx-4090", 1),
        ("2080 ti", "rtx-2080-ti", 1),
        ("mi300x : 16", "mi300x", 16),
    ],
)
def test_counts(text: str, short: str, count: int) -> None:
    gpu, found = parse_gpu(text)
    assert (gpu.short, found) == (short, count)


@pytest.mark.parametrize("text", ["0xh100", "99999999xh100", "h100:0", "8x", "x8", "8xa100"])
def test_bad_counts(text: str) -> None:
    with pytest.raises(BadInput):
        parse_gpu(text)


# ---- custom and local cards ----------------------------------------------------------------------------------------


def test_custom_card() -> None:
    gpu = custom_gpu(40 * GIB)
    assert gpu.total_bytes == gpu.sold_bytes == 40 * GIB
    assert gpu.usable_bytes() == 40 * GIB - gpu.context_bytes
    assert "context_bytes" in gpu.unverified
    assert "40.0 GiB" in gpu.name


@each_gpu
def test_custom_card_like_another(gpu: Gpu) -> None:
    half = custom_gpu(gpu.total_bytes // 2, gpu)
    assert (half.total_bytes, half.bandwidth, half.compute_capability) == (
        gpu.total_bytes // 2,
        gpu.bandwidth,
        gpu.compute_capability,
    )
    assert half.price_per_hour is None
    assert gpu.name in half.name


@pytest.mark.parametrize("card", [custom_gpu(40 * GIB), custom_gpu(20 * GIB, find_gpu("rtx-4090")), find_gpu("h100")])
def test_a_recipe_names_its_card_whatever_it_is(card: Gpu) -> None:
    memory = memory_to_say(card)
    assert planned(card.short, memory) == card
    assert planned("" if card.short == CUSTOM else card.short, memory) == card
    assert planned("", 0) is planned(CUSTOM, 0) is None  # of recipes from before


@pytest.mark.parametrize("memory", [-1, 0, 24, 100 * MIB])
def test_custom_card_needs_room_for_the_context(memory: int) -> None:
    with pytest.raises(BadInput, match="CUDA context"):
        custom_gpu(memory)


@pytest.mark.parametrize(
    ("line", "short", "total"),
    [
        ("NVIDIA GeForce RTX 4090, 24564, 354, 8.9", "rtx-4090", 24210),
        ("NVIDIA H100 80GB HBM3, 81559, 551, 9.0", "h100", 81008),
        ("NVIDIA A100-SXM4-40GB, 40960, 424, 8.0", "a100-40gb", 40536),
        ("NVIDIA GeForce RTX 3080, 12288, 330, 8.6", "rtx-3080-12gb", 11958),  # the driver calls both sizes RTX 3080
        ("Tesla T4, 15360, 265, 7.5", "t4", 15095),
    ],
)
def test_local_card_keeps_its_row_and_measured_memory(line: str, short: str, total: int) -> None:
    seen = cards.read_smi(line + "\n")
    assert seen
    gpu = recognise(seen)
    assert (gpu.short, gpu.total_bytes) == (short, total * MIB)
    assert "total_bytes" not in gpu.unverified


def test_unified_memory_is_taken_from_the_row() -> None:
    seen = cards.read_smi("NVIDIA GB10, [N/A], [N/A], 12.1")
    assert seen == Seen("NVIDIA GB10", 0, 0, (12, 1))
    assert recognise(seen) is find_gpu("gb10")


@pytest.mark.parametrize(
    "seen",
    [
        Seen("NVIDIA GeForce RTX 4090 Laptop GPU", 16376 * MIB, 300 * MIB, (8, 9)),
        Seen("NVIDIA GeForce RTX 4060 Ti", 8188 * MIB, 382 * MIB, (8, 9)),  # the row has 16 GB
        Seen("NVIDIA A100", 20 * GIB, 0, (8, 0)),  # half a card
    ],
    ids=lambda s: s.name,
)
def test_a_card_that_is_in_no_row_keeps_its_own_name(seen: Seen) -> None:
    gpu = recognise(seen)
    assert (gpu.name, gpu.total_bytes, gpu.compute_capability) == (
        seen.name,
        seen.total - seen.reserved,
        seen.capability,
    )
    assert gpu.sold_bytes % GB == 0
    assert "context_bytes" in gpu.unverified


def test_a_card_without_row_or_memory_is_refused() -> None:
    with pytest.raises(BadInput, match="how much memory"):
        recognise(Seen("NVIDIA Something", 0, 0, None))


@pytest.mark.parametrize("output", ["", "\n", "No devices were found", "a,b", ", 1, 2, 3"])
def test_odd_answers_of_nvidia_smi(output: str) -> None:
    assert cards.read_smi(output) is None


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without NVML whose only programs are those put into the returned folder."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def put_smi(folder: Path, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_local_card_through_nvidia_smi(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_smi(machine, '[ "$1" = --id=3 ] && echo "NVIDIA L4, 23034, 471, 8.9"')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert local_gpu().short == "l4"


@pytest.mark.parametrize("script", ["exit 9", "echo", "printf '\\377\\376'", "echo No devices were found"])
def test_failing_nvidia_smi(machine: Path, script: str) -> None:
    put_smi(machine, script)
    with pytest.raises(BadInput, match="no NVIDIA GPU") as caught:
        local_gpu()
    assert "--gpu" in caught.value.hint


def test_hanging_nvidia_smi(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_smi(machine, "")

    def hang(*args: object, timeout: float, **rest: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(BadInput, match="no NVIDIA GPU"):
        local_gpu()


def test_no_driver(machine: Path) -> None:
    with pytest.raises(BadInput, match="no NVIDIA GPU"):
        local_gpu()


@pytest.mark.parametrize("hidden", ["", "-1", " "])
def test_hidden_cards(machine: Path, monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    with pytest.raises(BadInput, match="CUDA_VISIBLE_DEVICES"):
        local_gpu()


class FakeNvmlError(Exception):
    """Stands for pynvml.NVMLError."""


def fake_nvml(name: object, total: int, reserved: int) -> types.SimpleNamespace:
    """The part of pynvml that is called, for a machine with one card."""

    def by_index(index: int) -> str:
        if index != 0:
            raise FakeNvmlError
        return "handle"

    return types.SimpleNamespace(
        NVMLError=FakeNvmlError,
        nvmlMemory_v2=2,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=by_index,
        nvmlDeviceGetHandleByUUID=lambda uuid: "handle",
        nvmlDeviceGetName=lambda handle: name,
        nvmlDeviceGetMemoryInfo=lambda handle, version: types.SimpleNamespace(total=total, reserved=reserved),
        nvmlDeviceGetCudaComputeCapability=lambda handle: (9, 0),
    )


@pytest.mark.parametrize("name", ["NVIDIA H200", b"NVIDIA H200"])
@pytest.mark.parametrize("visible", ["0", "GPU-5f2e"])
def test_local_card_through_nvml(machine: Path, monkeypatch: pytest.MonkeyPatch, name: object, visible: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(name, 143771 * MIB, 615 * MIB))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpu = local_gpu()
    assert (gpu.short, gpu.total_bytes) == ("h200", 143156 * MIB)


def test_nvml_without_that_card_falls_back(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml("NVIDIA H200", 1, 0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    put_smi(machine, 'echo "Tesla T4, 15360, 265, 7.5"')
    assert local_gpu().short == "t4"


# ---- words for cards -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["mac", "mps", "apple", "macbook", "MacBook Pro", "metal"])
def test_words_for_a_mac_point_to_apples_chips(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        find_gpu(text)
    chips = {g.short.rsplit("-", 1)[0] for g in GPUS if g.vendor == "Apple"}
    assert chips == set(re.findall(r"\bm\d[a-z-]*\b", caught.value.hint.partition(";")[0]))
    assert find_gpu(caught.value.hint.rsplit(maxsplit=1)[-1]).vendor == "Apple"


@pytest.mark.parametrize(
    ("text", "short"),
    [("m3 max", "m3-max-36gb"), ("MacBook Pro M3 Max 64GB", "m3-max-64gb"), ("macbook air m4", "m4-16gb"),
     ("mac studio m2 ultra 192 GB", "m2-ultra-192gb"), ("mac 512gb", "m3-ultra-512gb")],
)  # fmt: skip
def test_a_mac_is_known_by_its_chip(text: str, short: str) -> None:
    assert find_gpu(text).short == short


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("ada", lambda g: g.arch == "Ada"),
        ("apple", lambda g: g.vendor == "Apple"),
        ("nvidia 24gb", lambda g: g.vendor == "NVIDIA" and g.sold_bytes == 24 * GB),
        ("80 GB hopper", lambda g: g.arch == "Hopper" and g.sold_bytes == 80 * GB),
        ("geforce 16gb", lambda g: g.name.startswith("GeForce") and g.sold_bytes == 16 * GB),
    ],
)
def test_cards_are_found_by_vendor_architecture_and_memory(text: str, holds: Callable[[Gpu], bool]) -> None:
    assert described(text) == [g for g in GPUS if holds(g)]


@each_gpu
def test_each_name_describes_its_card(gpu: Gpu) -> None:
    assert described(gpu.short) == described(gpu.name) == [gpu]


def test_a_hint_that_would_be_long_names_a_command_that_lists_the_cards() -> None:
    with pytest.raises(BadInput) as caught:
        find_gpu("rtx")
    assert "memfit gpus rtx" in caught.value.hint
    assert len(described("rtx")) > 24


def test_prices_have_a_day() -> None:
    assert date(2026, 1, 1) < date.fromisoformat(cards.prices_read()) <= date.today()
