"""The other estimators, asked the same question: how each is installed, run as a process, and called in process."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

MODEL, CARD = "meta-llama/Llama-3.1-8B", "rtx-4090"  # the question: QLoRA r16 of all linear layers, 4 x 2048 tokens
BATCH, SEQUENCE, RANK = 4, 2048, 16
REVISION = "0" * 40

# accelerate first asks the Hub whether the model exists; here the answer comes from this line, and the config from disk
ACCELERATE = """
import sys
from types import SimpleNamespace
import accelerate.commands.estimate as command
command.verify_on_hub = lambda *_, **__: SimpleNamespace(library_name="transformers", config={})
"""


@dataclass(frozen=True, slots=True)
class Peer:
    """One row. `process` are the arguments of Python for one answer, `setup` and `once` the same inside a process."""

    name: str
    package: str  # as pip installs it
    module: str  # as it is imported
    process: tuple[str, ...]
    setup: str
    once: str
    answers: str  # what the process does for one answer, to read the times by
    call: str  # and what the call does


PEERS = (
    Peer(
        "ftuneai", "ftuneai[cli]", "ftuneai",
        ("-m", "ftuneai", "estimate", "-m", MODEL, "--method", "qlora", "-q", "4bit", "-b", str(BATCH),
         "-s", str(SEQUENCE), "-r", str(RANK), "--lora-target", "all_linear"),
        "from ftuneai import Estimator",
        f"Estimator('{MODEL}', method='qlora', quantization='4bit', batch_size={BATCH}, seq_length={SEQUENCE}, "
        f"lora_rank={RANK}, lora_target='all_linear').estimate_memory()",
        "one recipe by closed form, times and prices on every card",
        "one recipe by closed form, memory alone",
    ),
    Peer(
        "fitcheck", "fitcheck-llm", "fitcheck",
        ("-m", "fitcheck", MODEL, "--qlora", "--double-quant", "--lora-r", str(RANK), "--lora-targets", "full",
         "--batch-size", str(BATCH), "--seq-len", str(SEQUENCE), "--flash-attn", "--gpu", "4090"),
        "from fitcheck.config_parser import fetch_model_config\n"
        "from fitcheck.estimator import TrainingConfig, estimate\n"
        "from fitcheck.gpu_db import get_gpu\n"
        "from fitcheck.memory.lora import LORA_TARGETS_FULL\n"
        f"model, card = fetch_model_config('{MODEL}'), get_gpu('4090')",
        f"estimate(model, TrainingConfig(quantization='nf4', double_quant=True, lora_rank={RANK}, batch_size={BATCH}, "
        f"lora_targets=list(LORA_TARGETS_FULL), seq_len={SEQUENCE}, grad_checkpoint=True, flash_attn=True), card)",
        "one recipe by closed form, and whether it fits",
        "one recipe by closed form, and the largest batch; the config is read before",
    ),
    Peer(
        "accelerate estimate-memory", "accelerate transformers torch", "accelerate",
        ("-c", ACCELERATE + "command.main()", "CONFIG", "--library_name", "transformers"),
        ACCELERATE + "args = SimpleNamespace(model_name=sys.argv[-1], library_name='transformers',\n"
        "    trust_remote_code=False, dtypes=['float32', 'float16', 'int8', 'int4'])\n"
        "import contextlib, io",
        "with contextlib.redirect_stdout(io.StringIO()): command.gather_data(args)",
        "the size of weights, and four times it; nothing of batch, sequence or activations",
        "the model built on the meta device and its weights added up",
    ),
)  # fmt: skip


def python_with(module: str, candidates: list[str]) -> str | None:
    """The first interpreter that has the module."""
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{module}') is None)"
    return next((p for p in candidates if subprocess.run([p, "-c", look], check=False).returncode == 0), None)


def version(peer: Peer, python: str) -> str:
    """The installed version of a peer."""
    name = peer.package.split()[0].split("[")[0]
    code = f"from importlib.metadata import version; print(version('{name}'))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def offline_hub(folder: Path, config: Path) -> dict[str, str]:
    """Put the model's config.json where huggingface_hub caches it and beside, and say so to child processes.

    No network is used: HF_HUB_OFFLINE holds for every child.
    """
    cached = folder / "hub" / ("models--" + MODEL.replace("/", "--"))
    for place in (cached / "snapshots" / REVISION, folder / "model"):
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(json.loads(config.read_text())))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(REVISION)
    return {**os.environ, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "COLUMNS": "100"}
