"""Hold `memfit explain` against real reports: `python benchmarks/oom_cases.py [CSV ...] [--misses]`.

A CSV has one report per row; the default are the two collections of tests/data. The columns repo, framework, model,
hardware, config and oom_message are read as one text. cause_class is the answer: it is looked at after the finding is
made, to score it. Most rows retell a failure in somebody's words, which `memfit explain` does not interpret: it names a
cause where a row quotes a frame, a message, a setting or sizes that show one. Named: the first finding is the cause
(one of them, where the answer has two). Wrong and certain: the first finding is called certain, and is not the cause.
The exit status is 1 if any is.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from memfit.explain import explain, read_text
from memfit.nouns.finding import Cause, Finding

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
DEFAULT = (DATA / "oom_cases.csv", DATA / "oom_cases_later.csv")
COLUMNS = ("repo", "framework", "model", "hardware", "config", "oom_message")

# the collection's class -> memfit's cause
CLASSES: dict[str, Cause] = {
    "logits_ce": "logits", "grpo_batch": "group-batch", "eval_logits": "eval-logits", "eval_generate": "eval-generate",
    "eval_batch_size": "eval-batch", "eval_fragmentation": "eval-leftovers", "fsdp_load_peak": "load-peak",
    "zero3_init_missing": "zero3-init", "zero3_init_gather": "zero3-init", "ddp_replicated": "replicated",
    "fsdp_bnb_not_sharded": "quantized-unsharded", "mxfp4_dequant": "dequantized",
        "quantize_load_peak": "quantize-peak",
    "fsdp_wrap": "fsdp-wrap", "fsdp_regression": "fsdp-wrap", "nccl_buffers": "nccl", "sizing": "capacity",
        "docs_confusion": "capacity",
    "optimizer_state": "optimizer-states", "optimizer_step_spike": "optimizer-step", "fp32_load": "wrong-dtype",
    "kbit_fp32_upcast": "kbit-upcast", "fsdp_fp32_upcast": "fsdp-upcast", "fsdp_full_state_dict": "save-gather",
    "merge_dequant": "merge", "state_dict_dequant": "merge", "resume_optimizer": "resume-states",
    "stale_checkpoint_ref": "stale-checkpoint", "ranks_on_gpu0": "ranks-on-one-gpu", "data_parallel": "data-parallel",
    "fragmentation": "fragmentation", "long_sample": "long-sample", "vlm_image_tokens": "image-tokens",
    "vllm_colocate": "inference-engine", "dpo_ref": "reference-model", "dpo_concat": "pairs",
        "peft_gc_input_grads": "input-grads",
    "bucket_buffers": "buckets", "gradual_growth": "leak", "modules_to_save": "modules-to-save",
    "aux_models_resident": "companion-models", "sysmem_fallback": "spill", "use_cache": "kv-cache",
        "eager_attention": "attention",
    "packing_host_ram": "host-ram", "host_ram": "host-ram", "exception_holds_refs": "exception",
        "other_process": "other-process",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scored:
    """One report: its id, its causes and what was found."""

    id: str
    causes: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def first(self) -> Finding:
        """The finding that is scored."""
        return self.findings[0]

    @property
    def named(self) -> bool:
        """Is the first finding the cause?"""
        return self.first.cause in self.causes

    @property
    def wrong(self) -> bool:
        """Is it certain, and not the cause?"""
        return self.first.confidence == "certain" and not self.named


def text_of(row: dict[str, str]) -> str:
    """Return a row as the text a user would paste."""
    return "\n".join(f"{name}: {row[name]}" for name in COLUMNS if row.get(name))


def scored(path: Path) -> list[Scored]:
    """Explain and score every row of a file."""
    with path.open(newline="", encoding="utf-8") as file:
        return [_score(row) for row in csv.DictReader(file)]


def _score(row: dict[str, str]) -> Scored:
    causes = tuple(CLASSES.get(part.strip(), part.strip()) for part in row["cause_class"].split("+"))
    return Scored(row["id"], causes, explain(read_text(text_of(row))))


def confusion(rows: list[Scored]) -> str:
    """Return a Markdown table: per cause the reports, how many were named, and what was named instead."""
    lines = ["| cause | reports | named | instead |", "|---|---:|---:|---|"]
    for cause, count in sorted(Counter(row.causes[0] for row in rows).items(), key=lambda pair: (-pair[1], pair[0])):
        mine = [row for row in rows if row.causes[0] == cause]
        instead = Counter(row.first.cause for row in mine if not row.named)
        names = ", ".join(f"{name} {n}x" if n > 1 else name for name, n in instead.most_common())
        lines.append(f"| {cause} | {count} | {sum(row.named for row in mine)} | {names} |")
    return "\n".join(lines)


def summary(rows: list[Scored]) -> tuple[float, int, str]:
    """Return the share named, the number wrong and certain, and both in a sentence."""
    named, wrong = sum(row.named for row in rows) / max(len(rows), 1), sum(row.wrong for row in rows)
    among = sum(any(finding.cause in row.causes for finding in row.findings) for row in rows) / max(len(rows), 1)
    unknown = sum(row.first.cause == "not-known" for row in rows)
    certain = sum(row.first.confidence == "certain" for row in rows)
    text = (
        f"{len(rows)} reports: named {named:.1%}, among the causes given {among:.1%}, not known {unknown}, "
        f"certain {certain}, wrong and certain {wrong}"
    )
    return named, wrong, text


def main(arguments: list[str]) -> int:
    """Score files and print the tables."""
    parser = argparse.ArgumentParser(description="Explain real out-of-memory reports and score the causes found.")
    parser.add_argument("csv", nargs="*", type=Path, default=DEFAULT)
    parser.add_argument("--misses", action="store_true", help="print every report whose cause was not named")
    options = parser.parse_args(arguments)
    if missing := [str(path) for path in options.csv if not path.is_file()]:
        print(f"no file {', '.join(missing)}", file=sys.stderr)
        return 2
    wrong = [_print_file(path, options.misses) for path in options.csv]
    return 1 if any(wrong) else 0


def _print_file(path: Path, misses: bool) -> int:
    """Score one file, print it, and return how many findings were wrong and certain."""
    rows = scored(path)
    _, wrong, text = summary(rows)
    print(f"`{path.name}`\n\n{confusion(rows)}\n\n{text}\n")
    for row in rows if misses else ():
        if not row.named:
            found = ", ".join(f"{finding.cause} ({finding.confidence})" for finding in row.findings)
            print(f"{row.id}: {found} for {' + '.join(row.causes)}", file=sys.stderr)
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
