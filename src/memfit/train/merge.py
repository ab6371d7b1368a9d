"""Merge adapters into their base on the CPU, in a process of its own, so that no GPU memory is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from memfit.errors import BadInput
from memfit.train.folder import Run
from memfit.train.model_card import card

MERGED = "merged"  # of the run's folder


def merged(run: Run) -> Path:
    """Write the merged model into `merged/` of the run's folder and return that folder. Raises BadInput on failure."""
    target, half = run.path / MERGED, run.path / ".merged"
    before = run.path / ".merged-before"
    for leftover in (half, before):  # of an interrupted merge
        shutil.rmtree(leftover, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-m", "memfit.train.merge", run.plan.job.architecture.name, str(run.output), str(half)],
        capture_output=True, text=True, check=False, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise BadInput(f"the adapters could not be merged: {why[:200]}", hint=f"the adapters are in {run.output}")
    if (outcome := run.outcome) is not None:
        (half / "README.md").write_text(card(run, outcome, merged=True), encoding="utf-8")
    if target.exists():
        old = target.replace(before)
        half.replace(target)
        shutil.rmtree(old)
    else:
        half.replace(target)
    return target


def main(base: str, adapters: str, target: str) -> None:
    """Load the unquantised base in its stored dtype, merge the adapters, and save it with the tokenizer."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", device_map=None)
    PeftModel.from_pretrained(model, adapters).merge_and_unload(safe_merge=True).save_pretrained(target)
    AutoTokenizer.from_pretrained(adapters).save_pretrained(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
