"""Write the generated parts of README.md and docs/*.md, or with --check fail when one of them is stale.

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`; NAME is a function of this file.
docs/schema.json and docs/api.ipynb are generated whole.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
PART = re.compile(r"(<!-- generated: (?P<name>[a-z_]+) -->\n).*?(<!-- end -->)", re.DOTALL)
PAGES = [
    "README.md",
    "docs/how-it-works.md",
    "docs/techniques.md",
    "docs/tasks.md",
    "docs/vocabulary.md",
    "docs/cli.md",
    "docs/explain.md",
    "docs/extending.md",
]


def memfit(*arguments: str, columns: int = 100, terminal: bool = False) -> str:
    """What the command prints, plain and at a fixed width. It runs here: a process each would import for a second."""
    from memfit.cli import main

    for name in ("FORCE_COLOR", "LINES"):
        os.environ.pop(name, None)
    os.environ.update(COLUMNS=str(columns), NO_COLOR="1", TERM="dumb", HF_HUB_OFFLINE="1")
    if terminal:  # the look of a terminal without its colours
        os.environ.update(FORCE_COLOR="1", LINES="50")
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = main(list(arguments))
    if code not in (0, 3, 4):
        raise SystemExit(f"memfit {' '.join(arguments)} failed:\n{err.getvalue()}")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def screen() -> str:
    """The first screen of the README."""
    return (
        "```\n$ memfit plan meta-llama/Llama-2-7b-hf --gpu rtx-4090\n"
        + memfit("plan", "meta-llama/Llama-2-7b-hf", "--gpu", "rtx-4090", columns=96, terminal=True)
        + "\n```\n"
    )


def commands() -> str:
    """The table of commands."""
    from memfit.cli.tree import COMMANDS

    rows = ["| command | what it does |", "|---|---|"]
    rows += [f"| `memfit {name}` | {does} |" for name, does in COMMANDS.items()]
    return "\n".join(rows) + "\n"


def file_tree() -> str:
    """The rooms of the package, one line each: the first sentence of every docstring at the top level."""
    package = ROOT / "src" / "memfit"
    rooms = [(f"{path.parent.name}/", path) for path in sorted(package.glob("*/__init__.py"))]
    modules = [(path.name, path) for path in sorted(package.glob("[!_]*.py"))]
    rows = ["```", "src/memfit/"]
    for name, path in rooms + modules:
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        rows.append(f"  {name:<14} {text.splitlines()[0]}".rstrip())
    return "\n".join([*rows, *REST, "```"]) + "\n"


REST = (  # what is no part of the package
    "benchmarks/      accuracy, speed and the virtual GPU against recorded runs; measure/ runs on a real card",
    "docs/            the pages named above; generate.py writes their generated parts",
    "tests/           test_X.py tests the module or room X; data/ holds records of real runs",
)


def accuracy() -> str:
    """The summary of docs/accuracy.md, and where every row is."""
    page = (ROOT / "docs" / "accuracy.md").read_text()
    found = re.search(r"<!-- summary -->\n(.*?)<!-- end summary -->", page, re.DOTALL)
    return f"{found.group(1)}Every row: [docs/accuracy.md](docs/accuracy.md).\n" if found else "not measured yet\n"


def speed() -> str:
    """The summary of docs/performance.md."""
    page = (ROOT / "docs" / "performance.md").read_text()
    found = re.search(r"<!-- summary -->\n(.*?)<!-- end summary -->", page, re.DOTALL)
    return found.group(1) if found else "not measured yet\n"


def techniques() -> str:
    """The ladder computed for one run."""
    return "```\n" + memfit("techniques", "meta-llama/Llama-2-7b-hf", "--gpu", "rtx-4090") + "\n```\n"


def optimizers() -> str:
    """The optimizer table with bytes per trained bf16 parameter."""
    from memfit.nouns.architecture import Weight
    from memfit.tables.optimizers import OPTIMIZERS

    rows = ["| `--optimizer` | | bytes of state per bf16 weight | needs | |", "|---|---|---:|---|---|"]
    weight = Weight("w", (4096, 4096), "linear")
    for row in OPTIMIZERS.values():
        each = row.state_bytes(weight, 2) / weight.numel
        rows.append(f"| `{row.key}` | {row.title} | {each:.3f} | {row.package} | {row.note} |")
    return "\n".join(rows) + "\n"


def tasks() -> str:
    """The table of tasks."""
    from memfit.closed_form.task_runs import TASK_RUNS
    from memfit.tables.tasks import TASKS

    rows = ["| `--task` | | trainer | a batch counts | beside the model |", "|---|---|---|---|---|"]
    for row in TASKS.values():
        by = f"TRL's `{row.trainer}Trainer`"
        if row.trainer == "transformers" or row.package:
            by = "transformers' `Trainer`" if not row.package else f"{row.package}'s `{row.trainer}Trainer`"
        beside = f"{row.beside}, where all weights are trained" if row.beside else ""
        how = " (by formula)" if row.language or row.key in TASK_RUNS else ""
        rows.append(f"| `{row.key}` | {row.title}{how} | {by} | {row.unit} | {beside} |")
    return "\n".join(rows) + "\n"


def adapters() -> str:
    """The table of adapters."""
    from memfit.tables.adapters import ADAPTERS

    rows = ["| `--adapter` | | PEFT's class | `--lora-rank` sets | on a 4-bit base | |", "|---|---|---|---|---|---|"]
    for row in ADAPTERS.values():
        size = f"`{row.size}`, {row.usual} by default" if row.size else ""
        note = row.refused[0] or row.caveat or ("by formula" if row.by_formula else "")
        base = "" if row.refused[0] else "yes" if row.on_4bit else "no"
        rows.append(f"| `{row.key}` | {row.title} | `{row.config}` | {size} | {base} | {note} |")
    return "\n".join(rows) + "\n"


def quantizations() -> str:
    """The quantisation table."""
    from memfit.tables.quantization import QUANTIZATIONS

    rows = ["| `--quantization` | | payload B/weight | with scales |", "|---|---|---:|---:|"]
    n = 4096 * 4096
    for row in QUANTIZATIONS.values():
        rows.append(f"| `{row.key}` | {row.title} | {row.payload(n) / n:.3f} | {row.bytes(n, 4096) / n:.4f} |")
    return "\n".join(rows) + "\n"


# what articles print, and what is right; the figures are computed below
ARTICLES = (
    ("AdamW takes 8, 12 or 16 bytes per parameter.",
     "All three exist: {pure:g} when weights, gradients and states are bf16 (`--precision bf16`); {wide:g} with fp32 "
     "states beside them (`--optimizer adamw-32bit`); {master:g} with an fp32 copy of the weights (`bf16-master`) or "
     "fp32 weights under autocast (`bf16-mixed`)."),
    ("An 8-bit optimizer stores 1 byte per parameter.",
     "That is one of two states. Both with their scales are {eight:.2f} bytes."),
    ("Mixed precision halves weights and gradients.",
     "Autocast (`bf16=True` in a trainer) leaves weights, gradients and states as they are and halves activations "
     "only. What halves the rest is to load the weights in 16 bits."),
    ("Activations are batch x sequence x width x layers x 2 bytes.",
     "That is the input of each block, {inputs:.2f} GiB for Llama-2-7B at 2,048 tokens: what checkpointing leaves. "
     "Without it a block keeps its other tensors too, {kept:.1f} GiB in all."),
    ("Checkpointing brings activations from O(layers) to O(√layers).",
     "If one block in √layers is a checkpoint. "
     "The frameworks keep the input of every block: O(layers) with a small factor."),
    ("Attention, and so a longer sequence, is quadratic in memory.",
     "Only where the score matrix is made (`--attention eager`, or SDPA's math fallback). Fused kernels keep one "
     "number per row and head: linear."),
    ("7B parameters in 4 bits are 3.5 GB.",
     "The payload, if every weight were packed. Embeddings, norms and head stay in 16 bits, and scales come on top: "
     "{packed:.2f} GB for Llama-2-7B."),
    ("LoRA costs the base plus gradients and states of the adapter.",
     "And the adapter itself. Its activations do not shrink at all."),
    ("QLoRA of a 7B model takes about 6 GB (rank 16 on attention, 4 x 2,048 tokens, checkpointing, paged 8-bit AdamW).",
     "{qlora:.1f} GiB reserved with today's TRL. More than half of it is neither weights nor states, so micro-batch "
     "and sequence decide."),
    ("LoRA of a 70B model fits one card of 80 GB, QLoRA one of 40 GB.",
     "The frozen 16-bit base alone is {base70:.0f} GiB. "
     "QLoRA reserves {qlora70:.1f} GiB at 2,048 tokens: a card of 48 GB."),
    ("Frameworks add up to 30 % of overhead.",
     "There is no such constant. Fragmentation depends on the order of allocations, so it is replayed; the CUDA "
     "context is 0.2 to 0.6 GiB."),
    ("Emptying the cache saves memory.",
     "PyTorch gives back every cached block by itself before it fails. "
     "It helps other processes on the card, not this one."),
)  # fmt: skip


def articles() -> str:
    """What articles print about memory, with what the code says of it."""
    from memfit import resolve_model
    from memfit.closed_form.rule_of_thumb import checkpointed_activations

    checkpointed = ("--gpu", "rtx-4090", "--method", "qlora", "--checkpointing", "full")
    plain = estimated("llama-2-7b", "--gpu", "rtx-4090", "--why")
    small = estimated(
        "llama-2-7b", *checkpointed, "--micro-batch", "4", "--accumulation", "4", "--optimizer", "paged-adamw-8bit",
        "--lora-targets", "q_proj,k_proj,v_proj,o_proj", "--lora-dropout", "0.05",
    )  # fmt: skip
    large, base = (
        estimated("llama-3.1-70b", *checkpointed),
        estimated("llama-3.1-70b", "--gpu", "b200", "--method", "lora"),
    )
    figures = {
        "pure": _static(precision="bf16"), "wide": _static(optimizer="adamw-32bit"),
        "master": _static(precision="bf16-master"),
        "eight": _static(precision="bf16-master", optimizer="adamw-8bit") - 8,
        "inputs": checkpointed_activations(resolve_model("llama-2-7b"), 1, 2048) / GIB,
        "kept": sum(k["bytes"] * k["count"] for k in plain["kept"]) / GIB,
        "packed": _weights(small) / 10**9, "qlora": small["peak"]["reserved"] / GIB,
        "base70": _weights(base) / GIB, "qlora70": large["peak"]["reserved"] / GIB,
    }  # fmt: skip
    rows = ["| articles say | what is right |", "|---|---|"]
    return "\n".join([*rows, *(f"| {said} | {right.format(**figures)} |" for said, right in ARTICLES)]) + "\n"


def estimated(*arguments: str) -> dict[str, Any]:
    """The document of one estimate."""
    return json.loads(memfit("estimate", *arguments, "--json"))


def _static(**recipe: str) -> float:
    from memfit import Recipe, static_lines

    return sum(line.bytes for line in static_lines(10**9, Recipe(**recipe))) / 10**9


def _weights(document: dict[str, Any]) -> int:
    worst = max(document["phases"], key=lambda p: p["levels"]["reserved"])
    return sum(line["bytes"] for line in worst["lines"] if line["label"] in ("base weights", "quantisation scales"))


def help_pages() -> str:
    """--help of every command."""
    from memfit.cli.tree import COMMANDS

    parts = [f"## memfit {name}\n\n```\n{memfit(name, '--help')}\n```\n" for name in COMMANDS]
    return "\n".join(parts)


def glossary() -> str:
    """Every term of `memfit glossary`."""
    return "```\n" + memfit("glossary") + "\n```\n"


def excerpt(path: str, start: str, stop: str) -> str:
    """Lines of a source file from the one that contains `start` up to the one before that with `stop`."""
    lines = (ROOT / path).read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if start in line)
    last = next(i for i in range(first + 1, len(lines) + 1) if i == len(lines) or stop in lines[i])
    language = "toml" if path.endswith("toml") else "python"
    text = "\n".join(line.rstrip() for line in lines[first:last]).rstrip()
    return f"```{language}\n{text}\n```\n"


def causes() -> str:
    """Every cause memfit explain knows, with its first remedy."""
    from memfit.explain.remedies import REMEDIES
    from memfit.nouns.finding import CAUSES

    rows = ["| cause | what happened | first remedy |", "|---|---|---|"]
    rows += [f"| `{cause}` | {title} | {REMEDIES[cause][0].text} |" for cause, title in CAUSES.items()]
    return "\n".join(rows) + "\n"


def oom_cases() -> str:
    """What benchmarks/oom_cases.py prints for the reports in tests/data."""
    sys.path.append(str(ROOT / "benchmarks"))
    import oom_cases

    with redirect_stdout(StringIO()) as out:
        oom_cases.main([])
    return out.getvalue().strip() + "\n"


EXAMPLES = {
    "example_gpu": ("src/memfit/catalogue/gpus.toml", 'name = "L4"', "[[gpu]]"),
    "example_optimizer": ("src/memfit/tables/optimizers.py", 'key="lion-8bit"', "Optimizer("),
    "example_quantization": ("src/memfit/tables/quantization.py", 'key="nf4-double"', 'key="fp4"'),
    "example_family": ("src/memfit/models/families/llama_like.py", '"smollm3": replace(', '"phi3"'),
    "example_trainer": ("src/memfit/tables/trainers.py", "# TRL 1.7+", "since=(1, 15)"),
    "example_loss": ("src/memfit/closed_form/layers/head.py", "def _full(", "TILE_VOCABULARY"),
    "example_rung": ("src/memfit/planner/rungs.py", 'LadderStep("8-bit-optimizer"', 'LadderStep("accumulation"'),
    "example_target": ("src/memfit/frameworks/targets.py", "TARGETS: dict", "def target("),
}

GENERATORS = {
    f.__name__: f
    for f in (
        screen,
        commands,
        file_tree,
        accuracy,
        speed,
        techniques,
        tasks,
        adapters,
        optimizers,
        quantizations,
        articles,
        help_pages,
        glossary,
        causes,
        oom_cases,
    )
} | {name: partial(excerpt, *where) for name, where in EXAMPLES.items()}


def filled(text: str) -> str:
    """The page with every generated part made again."""
    return PART.sub(lambda m: m.group(1) + GENERATORS[m.group("name")]() + m.group(3), text)


def notebook() -> str:
    """docs/api.md as a notebook: its code blocks are the code cells, without outputs."""
    cells: list[dict[str, Any]] = []
    page = (ROOT / "docs" / "api.md").read_text()
    for number, text in enumerate(re.split(r"```python\n(.*?)```", page, flags=re.DOTALL)):
        if text := text.strip():
            code = {"execution_count": None, "outputs": []} if number % 2 else {}
            kind = "code" if number % 2 else "markdown"
            lines = text.splitlines(keepends=True)
            cells.append({"cell_type": kind, "id": f"{kind}-{number}", "metadata": {}, "source": lines, **code})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    made = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write the pages, or check them."""
    check = "--check" in sys.argv[1:]
    stale = []
    for name in PAGES:
        path = ROOT / name
        before = path.read_text()
        after = filled(before)
        if before != after:
            stale.append(name)
            if not check:
                path.write_text(after)
    from memfit.documents.codec import schema_text

    for name, made in (("docs/schema.json", schema_text()), ("docs/api.ipynb", notebook())):
        path = ROOT / name
        if not path.exists() or path.read_text() != made:
            stale.append(name)
            if not check:
                path.write_text(made)
    if check and stale:
        raise SystemExit(f"stale: {', '.join(stale)}\nhint: make docs")
    print(f"{len(PAGES)} pages, {len(stale)} {'stale' if check else 'written'}")


if __name__ == "__main__":
    main()
