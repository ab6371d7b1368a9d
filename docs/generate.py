"""Write the generated parts of README.md and docs/*.md, or with --check fail when one of them is stale.

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`; NAME is a function of this file.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PART = re.compile(r"(<!-- generated: (?P<name>[a-z_]+) -->\n).*?(<!-- end -->)", re.DOTALL)
PAGES = ["README.md", "docs/techniques.md", "docs/vocabulary.md", "docs/cli.md", "docs/extending.md"]


def memfit(*arguments: str, columns: int = 100, terminal: bool = False) -> str:
    """What the command prints, plain and at a fixed width."""
    env = {**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "dumb", "HF_HUB_OFFLINE": "1"}
    if terminal:  # the look of a terminal without its colours
        env |= {"FORCE_COLOR": "1", "LINES": "50"}
    done = subprocess.run(
        [sys.executable, "-m", "memfit", *arguments], capture_output=True, text=True, env=env, cwd=ROOT, check=False
    )
    if done.returncode not in (0, 3, 4):
        raise SystemExit(f"memfit {' '.join(arguments)} failed:\n{done.stderr}")
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()).strip("\n")


def screen() -> str:
    """The first screen of the README."""
    return (
        "```\n$ memfit plan meta-llama/Llama-2-7b-hf --gpu rtx-4090\n"
        + memfit("plan", "meta-llama/Llama-2-7b-hf", "--gpu", "rtx-4090", columns=96, terminal=True)
        + "\n```\n"
    )


def commands() -> str:
    """The table of commands, from their own help."""
    from memfit.cli import app

    rows = ["| command | what it does |", "|---|---|"]
    for name, command in app.commands.items():
        rows.append(f"| `memfit {name}` | {(command.help or '').strip().splitlines()[0]} |")
    return "\n".join(rows) + "\n"


def file_tree() -> str:
    """Every module with the first sentence of its docstring, folder by folder."""
    rows, shown = ["```"], set()
    for folder in ("src/memfit", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py"), key=lambda p: (p.parent.parts, p.name)):
            parent = path.relative_to(ROOT).parent
            if parent not in shown:
                shown.add(parent)
                rows.append(f"{parent}/")
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            rows.append(f"  {path.name:<20} {text.splitlines()[0] if text else ''}"[:150].rstrip())
    return "\n".join([*rows, *REST, "```"]) + "\n"


REST = (  # what is no Python file
    "src/memfit/            also glossary.toml, every word memfit prints, and py.typed",
    "src/memfit/catalogue/  also gpus.toml (a table per card), models.json and models/*.json (published config.json files)",
    "src/memfit/report/     also timeline.html, the page of a timeline",
    "docs/                  the pages below; generate.py writes their generated parts",
    "tests/                 test_X.py tests the module or package X; data/ holds records of real runs",
)


def accuracy() -> str:
    """The summary of docs/accuracy.md."""
    page = (ROOT / "docs" / "accuracy.md").read_text()
    found = re.search(r"<!-- summary -->\n(.*?)<!-- end summary -->", page, re.DOTALL)
    return found.group(1) if found else "not measured yet\n"


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
    from memfit.architecture import Weight
    from memfit.optimizers import OPTIMIZERS

    rows = ["| `--optimizer` | | bytes of state per bf16 weight | needs | |", "|---|---|---:|---|---|"]
    weight = Weight("w", (4096, 4096), "linear")
    for row in OPTIMIZERS.values():
        each = row.state_bytes(weight, 2) / weight.numel
        rows.append(f"| `{row.key}` | {row.title} | {each:.3f} | {row.package} | {row.note} |")
    return "\n".join(rows) + "\n"


def quantizations() -> str:
    """The quantisation table."""
    from memfit.quantization import QUANTIZATIONS

    rows = ["| `--quantization` | | payload B/weight | with scales |", "|---|---|---:|---:|"]
    n = 4096 * 4096
    for row in QUANTIZATIONS.values():
        rows.append(f"| `{row.key}` | {row.title} | {row.payload(n) / n:.3f} | {row.bytes(n, 4096) / n:.4f} |")
    return "\n".join(rows) + "\n"


def help_pages() -> str:
    """--help of every command."""
    from memfit.cli import app

    names = list(app.commands)
    parts = [f"## memfit {name}\n\n```\n{memfit(name, '--help')}\n```\n" for name in names]
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


EXAMPLES = {
    "example_gpu": ("src/memfit/catalogue/gpus.toml", 'name = "L4"', "[[gpu]]"),
    "example_optimizer": ("src/memfit/optimizers.py", 'key="lion-8bit"', "Optimizer("),
    "example_quantization": ("src/memfit/quantization.py", 'key="nf4-double"', 'key="fp4"'),
    "example_family": ("src/memfit/families/rows.py", '"smollm3": replace(', '"phi3"'),
    "example_trainer": ("src/memfit/trainers.py", "# TRL 1.7+", "since=(1, 15)"),
    "example_loss": ("src/memfit/formula/losses.py", "def _full(", "def _fused("),
    "example_rung": ("src/memfit/planner/rungs.py", 'Step("8-bit-optimizer"', 'Step("accumulation"'),
    "example_target": ("src/memfit/export/__init__.py", "TARGETS: dict", "def target("),
}

GENERATORS = {
    f.__name__: f
    for f in (screen, commands, file_tree, accuracy, speed, techniques, optimizers, quantizations, help_pages, glossary)
} | {name: partial(excerpt, *where) for name, where in EXAMPLES.items()}


def filled(text: str) -> str:
    """The page with every generated part made again."""
    return PART.sub(lambda m: m.group(1) + GENERATORS[m.group("name")]() + m.group(3), text)


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
    from memfit.codec import schema_text

    schema = ROOT / "docs" / "schema.json"
    if schema.read_text() != schema_text():
        stale.append("docs/schema.json")
        if not check:
            schema.write_text(schema_text())
    if check and stale:
        raise SystemExit(f"stale: {', '.join(stale)}\nhint: make docs")
    print(f"{len(PAGES)} pages, {len(stale)} {'stale' if check else 'written'}")


if __name__ == "__main__":
    main()
