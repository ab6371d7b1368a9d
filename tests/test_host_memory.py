"""Host RAM as a second verdict: what each mechanism takes, what the real libraries take, and one pool for two."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit import Job, Recipe, find_gpu, make_plan, resolve_model
from memfit.catalogue import cards
from memfit.cli import main
from memfit.closed_form.host_memory import PROCESS, WORKER, judge_host, needed, pinned
from memfit.documents import codec
from memfit.errors import EXIT_FITS, EXIT_MISFIT
from memfit.nouns.gpu import Gpu
from memfit.nouns.plan import HostNeed
from memfit.planner import techniques
from memfit.units import GIB, rough

LLAMA, H100, RTX = resolve_model("llama-3.1-8b"), find_gpu("h100"), find_gpu("rtx-4090")
MASTER = Recipe(precision="bf16-master")
P = LLAMA.parameters


def sizes(recipe: Recipe, gpu: Gpu = H100) -> dict[str, int]:
    return {line.label: line.bytes for line in needed(LLAMA, recipe, gpu).lines}


@given(st.integers(1, 1 << 50))
def test_pinned_memory_is_the_next_power_of_two(size: int) -> None:
    found = pinned(size)
    assert size <= found < 2 * size and found & (found - 1) == 0


def test_zero_2_offload_rounds_what_it_pins() -> None:
    """8.03 B weights: 29.9 GiB in fp32 are pinned as 32, twice; 15.0 GiB in 16 bits as 16; states are not pinned."""
    found = sizes(MASTER.but(offload="optimizer"))
    assert found["fp32 master weights"] // GIB == found["fp32 gradients"] // GIB == 32
    assert found["16-bit weights on their way back"] // GIB == 16
    assert found["optimizer states"] == 8 * P
    more = sizes(MASTER.but(offload="optimizer", accumulation=2))
    assert more["gradients of earlier micro-batches"] > 2 * P  # a second set of gradients from two micro-batches on


def test_zero_3_offload_is_within_deepspeeds_own_estimates() -> None:
    """estimate_zero{2,3}_model_states_mem_needs: 16 and 18 bytes a parameter, times 1.5 for buffers."""
    for offload, low, high in (("optimizer", 16, 24), ("parameters", 18, 27)):
        total = sum(sizes(MASTER.but(offload=offload)).values()) - PROCESS
        assert low * P < total < high * P


def test_each_node_has_its_share() -> None:
    one, two = MASTER.but(offload="optimizer", shard="parameters", num_gpus=8), 16
    assert sizes(one.but(num_gpus=two))["optimizer states"] * 2 == pytest.approx(sizes(one)["optimizer states"], 1e-3)
    assert needed(LLAMA, one, H100, per_node=4).bytes < needed(LLAMA, one, H100).bytes


def test_only_copies_of_weights_count() -> None:
    """16-bit weights are pages of their file; fp32 ones are a copy in every process (transformers 5.23)."""
    assert "weights as loaded" not in sizes(Recipe(method="lora", num_gpus=2))
    wide = needed(LLAMA, Recipe(precision="fp32", num_gpus=4), H100)
    assert wide.phase == "load" and {line.label: line.bytes for line in wide.lines}["weights as loaded"] == 4 * 4 * P
    assert "weights as loaded" not in sizes(Recipe(precision="fp32"))  # TRL reads onto a single card


def test_what_is_kept_between_the_passes_is_pinned() -> None:
    kept = sizes(Recipe(checkpointing="offload", micro_batch=3, sequence_length=4096))["inputs of the blocks"]
    assert kept == 32 * pinned(2 * 3 * 4096 * 4096) > 32 * 2 * 3 * 4096 * 4096


def test_workers_and_paged_states_count() -> None:
    more = needed(LLAMA, Recipe(), H100, workers=4).bytes - needed(LLAMA, Recipe(), H100).bytes
    assert more == 4 * WORKER
    assert sizes(Recipe(optimizer="paged-adamw-8bit"))["paged optimizer states"] == pytest.approx(2 * P, rel=0.001)


# ---- against the real libraries

LOAD = """
import re, sys, torch
from transformers import AutoModelForCausalLM
def own():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)  # imports what it needs
read = sum(p.sum().item() for p in model.parameters())
for dtype in (torch.bfloat16, torch.float32):
    del model
    before = own()
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=dtype)
    read = sum(p.sum().item() for p in model.parameters())  # touches every page
    print(own() - before, sum(p.numel() * p.element_size() for p in model.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_transformers_maps_weights_of_the_files_dtype_and_copies_others(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=8, vocab_size=32000, num_attention_heads=8
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    del model
    done = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, check=True)
    for line, copies in zip(done.stdout.splitlines(), (0, 1), strict=True):
        own, weights = map(int, line.split())
        assert own == pytest.approx(copies * weights, abs=0.15 * weights)


# ---- the verdict


def job(gpu: Gpu, host_memory: int = 0) -> Job:
    return Job(architecture=LLAMA, gpu=gpu, method="full", host_memory=host_memory)


def test_a_run_that_fits_the_card_and_not_the_host_is_a_misfit() -> None:
    offloaded = (("offload", "parameters"), ("precision", "bf16-master"), ("optimizer", "adamw"))
    small = make_plan(replace(job(RTX, 64 * GIB), wanted=offloaded))
    assert small.judgement.verdict == "misfit" and small.judgement.headroom > 0 and small.judgement.host_over
    large = make_plan(replace(job(RTX, 256 * GIB), wanted=offloaded))
    assert large.judgement.verdict == "fits" and large.judgement.host and large.judgement.host.verdict == "fits"
    unknown = make_plan(replace(job(RTX), wanted=offloaded))
    assert unknown.judgement.verdict == "fits"
    assert unknown.judgement.host and unknown.judgement.host.verdict == "not given" and unknown.judgement.host.need > 0


def test_the_search_leaves_out_what_the_host_cannot_hold() -> None:
    """Offloading would make full fine-tuning fit the card; with 64 GiB of RAM LoRA is the answer."""
    rungs = techniques(job(RTX, 64 * GIB))
    offloading = [r for r in rungs if r.recipe.offload != "none"]
    assert offloading and all(r.judgement.host_over for r in offloading)
    plan = make_plan(Job(architecture=LLAMA, gpu=RTX, host_memory=64 * GIB))
    assert plan.judgement.verdict == "fits" and plan.recipe.offload == "none"


def test_estimate_says_it_in_headline_json_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["estimate", "llama-3.1-8b", "--gpu", "rtx-4090", "--precision", "bf16-master", "--offload", "parameters",
               "--checkpointing", "full", "--host-memory"]  # fmt: skip
    assert main([*command, "64GiB"]) == EXIT_MISFIT
    assert re.search(r"DOES NOT FIT .*GiB of host RAM on 64\.0 GiB", capsys.readouterr().out)
    assert main([*command, "512GiB"]) == EXIT_FITS
    capsys.readouterr()
    assert main([*command, "64GiB", "--json"]) == EXIT_MISFIT
    found = codec.loads(capsys.readouterr().out)
    assert found.verdict == "misfit" and found.host.need == sum(x.bytes for x in found.host.lines) > found.host.given


def test_local_means_this_machines_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    total = cards.local_host_memory()
    assert total > GIB
    limit = tmp_path / "memory.max"
    limit.write_text(f"{GIB}\n")
    monkeypatch.setattr(cards, "CGROUP", limit)
    assert cards.local_host_memory() == GIB


# ---- one pool


@pytest.mark.parametrize(
    ("name", "pool"), [("m4-max-128gb", 128), ("m1-8gb", 8), ("ai-max-395", 128), ("gb10", 119.6), ("rtx-4090", 0)]
)
def test_unified_memory_is_one_pool(name: str, pool: float) -> None:
    assert find_gpu(name).pool_bytes == pytest.approx(pool * GIB, rel=1e-3)


def test_host_and_card_are_added_against_the_pool() -> None:
    gpu, need = find_gpu("m4-16gb"), HostNeed("train", ())
    assert judge_host(need, gpu, 0, 15 * GIB).verdict == "fits"
    more = needed(LLAMA, Recipe(), gpu)
    found = judge_host(more, gpu, 0, 15 * GIB)
    assert found.shared and found.need == more.bytes + 15 * GIB and found.given == 16 * GIB
    assert found.verdict == "misfit"


def test_a_verdict_that_leaves_host_memory_open_says_how_much_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", "llama-3.1-8b", "--gpu", "h100", "--precision", "bf16-master", "--offload", "optimizer"]
    said = []
    for more in ([], ["--host-memory", "512GiB"], ["--host-memory", "64GiB"]):
        main([*words, *more])
        said.append(capsys.readouterr().out)
    assert [("which is not judged" in text) for text in said] == [True, False, False]
    need = needed(LLAMA, MASTER.but(offload="optimizer"), H100)
    assert rough(sum(line.bytes for line in need.lines)) in next(t for t in said[0].splitlines() if "not judged" in t)
