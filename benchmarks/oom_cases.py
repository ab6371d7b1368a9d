"""Hold `memfit explain` against real reports: `python benchmarks/oom_cases.py [CSV ...] [--without-phase] [--misses]`.

A CSV has a report per row; the default are the two collections of tests/data. Read are the columns a user would have
written: repo, framework, model, hardware, config, phase (where it failed; --without-phase leaves it out) and oom_message,
as one text. The columns cause_class, cause, fix and cause_basis are answers: only cause_class is looked at, after the
finding is made, to score it.

A row counts as "enough" where config or message says something beyond that memory ran out. Named: the first finding is
the cause (one of them, where the answer has two). Wrong and confident: the first finding is called certain, and is not the
cause. The exit status is 1 below 85 % named or above 3 % wrong and confident.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from memfit.explain import explain, read_text
from memfit.nouns.finding import Cause, Finding

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
DEFAULT = (DATA / "oom_cases.csv", DATA / "oom_cases_later.csv")
COLUMNS = ("repo", "framework", "model", "hardware", "config", "phase", "oom_message")
EMPTY = re.compile(r"[\W_]*(?:oom|out of memory|same|any|at eval|resume|-|\?)?[\W_]*", re.IGNORECASE)
NAMED, WRONG = 0.85, 0.03

# the collection's class -> memfit's cause
CLASSES: dict[str, Cause] = {
    "logits_ce": "logits", "grpo_batch": "group-batch", "eval_logits": "eval-logits", "eval_generate": "eval-generate",
    "eval_batch_size": "eval-batch", "eval_fragmentation": "eval-leftovers", "fsdp_load_peak": "load-peak",
    "zero3_init_missing": "zero3-init", "zero3_init_gather": "zero3-init", "ddp_replicated": "replicated",
    "fsdp_bnb_not_sharded": "quantized-unsharded", "mxfp4_dequant": "dequantized", "quantize_load_peak": "quantize-peak",
    "fsdp_wrap": "fsdp-wrap", "fsdp_regression": "fsdp-wrap", "nccl_buffers": "nccl", "sizing": "capacity", "docs_confusion": "capacity",
    "optimizer_state": "optimizer-states", "optimizer_step_spike": "optimizer-step", "fp32_load": "wrong-dtype",
    "kbit_fp32_upcast": "kbit-upcast", "fsdp_fp32_upcast": "fsdp-upcast", "fsdp_full_state_dict": "save-gather",
    "merge_dequant": "merge", "state_dict_dequant": "merge", "resume_optimizer": "resume-states",
    "stale_checkpoint_ref": "stale-checkpoint", "ranks_on_gpu0": "ranks-on-one-gpu", "data_parallel": "data-parallel",
    "fragmentation": "fragmentation", "long_sample": "long-sample", "vlm_image_tokens": "image-tokens",
    "vllm_colocate": "inference-engine", "dpo_ref": "reference-model", "dpo_concat": "pairs", "peft_gc_input_grads": "input-grads",
    "bucket_buffers": "buckets", "gradual_growth": "leak", "modules_to_save": "modules-to-save",
    "aux_models_resident": "companion-models", "sysmem_fallback": "spill", "use_cache": "kv-cache", "eager_attention": "attention",
    "packing_host_ram": "host-ram", "host_ram": "host-ram", "exception_holds_refs": "exception", "other_process": "other-process",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scored:
    """One report: its number, the causes it has, what was found first, and whether its text is enough."""

    id: str
    causes: tuple[str, ...]
    finding: Finding
    enough: bool

    @property
    def named(self) -> bool:
        return self.finding.cause in self.causes

    @property
    def wrong(self) -> bool:
        """Said with certainty, and not so."""
        return self.finding.confidence == "certain" and not self.named


def text_of(row: dict[str, str], phase: bool = True) -> str:
    """A row as the text a user would paste."""
    return "\n".join(f"{name}: {row[name]}" for name in COLUMNS if row.get(name) and (phase or name != "phase"))


def scored(path: Path, phase: bool = True) -> list[Scored]:
    """Every row of a file."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [_score(row, phase) for row in rows]


def _score(row: dict[str, str], phase: bool) -> Scored:
    something = not all(EMPTY.fullmatch(row.get(name, "")) for name in ("config", "oom_message"))
    causes = tuple(CLASSES.get(part.strip(), part.strip()) for part in row["cause_class"].split("+"))
    return Scored(row["id"], causes, explain(read_text(text_of(row, phase)))[0], something)


def confusion(rows: list[Scored]) -> str:
    """Per cause: reports, how many were named, and what was said instead, as Markdown."""
    lines = ["| cause | reports | named | instead |", "|---|---:|---:|---|"]
    for cause, count in sorted(Counter(row.causes[0] for row in rows).items(), key=lambda pair: (-pair[1], pair[0])):
        mine = [row for row in rows if row.causes[0] == cause]
        instead = Counter(row.finding.cause for row in mine if not row.named)
        said = ", ".join(f"{name} {n}x" if n > 1 else name for name, n in instead.most_common())
        lines.append(f"| {cause} | {count} | {sum(row.named for row in mine)} | {said} |")
    return "\n".join(lines)


def summary(rows: list[Scored]) -> tuple[float, float, str]:
    """(share named, share wrong and confident, both in words) of the rows whose text is enough."""
    used = [row for row in rows if row.enough]
    named = sum(row.named for row in used) / max(len(used), 1)
    wrong = sum(row.wrong for row in used) / max(len(used), 1)
    certain = sum(row.finding.confidence == "certain" for row in used)
    text = (
        f"{len(used)} of {len(rows)} reports say enough: named {named:.1%}, wrong and confident {wrong:.1%} "
        f"(certain {certain}, not known {sum(row.finding.cause == 'not-known' for row in used)}); "
        f"of all {len(rows)} reports named {sum(row.named for row in rows) / max(len(rows), 1):.1%}"
    )
    return named, wrong, text


def main(arguments: list[str]) -> int:
    """Score a file and print it."""
    parser = argparse.ArgumentParser(description="Explain real out-of-memory reports and score the causes found.")
    parser.add_argument("csv", nargs="*", type=Path, default=DEFAULT)
    parser.add_argument("--without-phase", action="store_true", help="do not read where it failed")
    parser.add_argument("--misses", action="store_true", help="print every report whose cause was not named")
    asked = parser.parse_args(arguments)
    if missing := [str(path) for path in asked.csv if not path.is_file()]:
        print(f"no file {', '.join(missing)}", file=sys.stderr)
        return 2
    good = [_told(path, asked) for path in asked.csv]
    return 0 if all(good) else 1


def _told(path: Path, asked: argparse.Namespace) -> bool:
    """Score one file and print it; is it good enough?"""
    rows = scored(path, not asked.without_phase)
    named, wrong, text = summary(rows)
    print(f"`{path.name}`\n\n{confusion(rows)}\n\n{text}\n")
    if asked.misses:
        for row in rows:
            if not row.named:
                said = f"{row.finding.cause} ({row.finding.confidence})"
                print(f"{row.id}: {said} for {' + '.join(row.causes)}", file=sys.stderr)
    return named >= NAMED and wrong <= WRONG


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
