"""Draw jobs at random over what the closed form describes: `python benchmarks/measure/drawn.py --write`.

The jobs lie in drawn.jsonl, a line each, so that what was measured does not change with the code that drew it. The jobs
of cases.py were chosen; these show what nobody thought of.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "src")]
FILE = HERE / "drawn.jsonl"
LARGEST = 11 << 30  # bytes reserved by one job: six share a card of 80 GB
SMALLEST = 1 << 30
CARD = "h100"

# a field and its values; one that stands twice is drawn twice as often
FIELDS: dict[str, tuple[Any, ...]] = {
    "method": ("full", "full", "lora", "lora", "qlora"),
    "adapter": ("lora", "lora", "lora", "dora", "rslora"),
    "lora_rank": (4, 8, 16, 32, 64, 128),
    "lora_dropout": (0.0, 0.0, 0.05),
    "lora_targets": (("all-linear",), ("all-linear",), ("attention",), ("q_proj", "v_proj")),
    "precision": ("bf16", "bf16", "bf16-mixed", "bf16-mixed", "fp16-mixed", "fp32"),
    "optimizer": (
        "adamw", "adamw", "adamw-foreach", "adamw-forloop", "adamw-32bit", "adamw-8bit", "paged-adamw-8bit",
        "paged-adamw-32bit", "adafactor", "lion", "lion-8bit", "sgd", "sgd-momentum",
    ),
    "micro_batch": (1, 1, 2, 2, 3, 4, 6, 8, 12, 16),
    "accumulation": (1, 1, 1, 2, 4),
    "sequence_length": (128, 256, 384, 512, 777, 1024, 1536, 2048, 3072, 4096, 8192),
    "padding": ("longest", "longest", "longest", "packing"),
    "checkpointing": ("none", "none", "full", "full", "selective", "offload"),
    "attention": ("sdpa", "sdpa", "sdpa", "eager"),
    "loss": ("full", "full", "chunked", "fused"),
    "trainer": ("trl", "trl", "transformers", "transformers", "torch"),
    "alloc_conf": ("", "", "", "expandable_segments:True", "max_split_size_mb:256", "garbage_collection_threshold:0.8"),
}  # fmt: skip
SHARDED: dict[str, tuple[Any, ...]] = {"num_gpus": (2, 8, 16), "shard": ("parameters", "parameters", "none")}
PREFERENCES = ("dpo", "kto", "orpo", "reward")  # whose trainers have a loss of their own and pack nothing
SAMPLED = ("grpo", "rloo")  # whose sequence is a prompt and the answer that is sampled
TASKS = (
    "", "", "", "", *PREFERENCES, *SAMPLED, "classification", "token-classification", "masked-lm", "seq2seq", "speech",
    "image-text", "image-classification",
)  # fmt: skip
# the usual tasks of the models that other tasks train
USUAL = {
    **dict.fromkeys(("", *PREFERENCES, *SAMPLED), ("sft",)), "classification": ("sft", "sft", "masked-lm"),
    "token-classification": ("masked-lm",),
}  # fmt: skip
PARAMETERS = 8.3e9  # the largest model, of which QLoRA is below LARGEST
LISTED = ("lora_targets", "image")  # fields of JSON lists that are tuples

# what `plan` traces: fields that differ from those above, and the sizes of one sample
TRACED: dict[str, tuple[Any, ...]] = {
    "method": ("full", "full", "lora"),
    "optimizer": (*FIELDS["optimizer"], "muon", "galore", "apollo", "adamw-8bit-torchao", "adamw-in-backward"),
    "micro_batch": (1, 2, 3, 4, 8, 16),
    "sequence_length": (128, 256, 512, 1024, 1536),
    "checkpointing": ("none", "none", "full"),
    "compile": (*(False,) * 20, True),
}
SHAPES: dict[str, tuple[Any, ...]] = {
    "images": (1, 1, 2), "image": ((0, 0), (640, 480), (1024, 768)), "audio_seconds": (0.0, 5.0, 20.0),
    "target": (64, 128, 200), "classes": (2, 10, 1000), "padded": (True, False), "prompt": (64, 256, 512),
    "completion": (64, 128, 256), "generations": (2, 4, 8), "reference": (False, False, True),
}  # fmt: skip


def models() -> dict[str, list[str]]:
    """Return the catalogue's names of models that are not too large, by the task that each is usually trained for."""
    from memfit.catalogue import entries
    from memfit.errors import MemfitError
    from memfit.tables.tasks import usual

    found: dict[str, list[str]] = {}
    for entry in entries():
        try:
            if (entry.parameters or PARAMETERS) < PARAMETERS:
                found.setdefault(usual(model_of({"model": entry.stem, "task": ""})).key, []).append(entry.stem)
        except MemfitError:
            continue
    return found


def recipe_of(row: dict[str, Any]) -> Any:
    """Return the Recipe of a line."""
    from memfit import Recipe

    return Recipe(**{k: tuple(v) if k in LISTED else v for k, v in row["recipe"].items()})


def draw(dice: random.Random, names: dict[str, list[str]]) -> dict[str, Any]:
    """Return a job at random, which may be impossible."""
    from memfit import Recipe

    words = {name: dice.choice(values) for name, values in FIELDS.items()}
    shape = {name: dice.choice(values) for name, values in SHAPES.items()}
    task = dice.choice(TASKS)
    if dice.random() < 0.2 and not task:
        words |= {name: dice.choice(values) for name, values in SHARDED.items()}
    if words["method"] == "qlora":
        words["quantization"] = dice.choice(("nf4", "nf4-double", "fp4"))
    if words["method"] == "full":
        for name in ("adapter", "lora_rank", "lora_dropout", "lora_targets"):
            del words[name]
    if task in (*PREFERENCES, *SAMPLED):
        words |= {"loss": "full", "padding": "longest"}
    if task in SAMPLED:
        words["sequence_length"] = shape["prompt"] + shape["completion"]
    if task:
        words["trainer"] = "trl" if task in (*PREFERENCES, *SAMPLED) else "transformers"
    plain = asdict(Recipe())
    return {
        "model": dice.choice([name for usual in USUAL.get(task, (task,)) for name in names[usual]]),
        "task": task,
        "shape": shape if task else {},
        "recipe": {name: value for name, value in words.items() if value != plain[name]},
    }


# models without a description, of which a trace knows what they take
SEEN = ("clip-vit-base-patch32", "deberta-v3-base", "stable-diffusion-v1-5", "stable-diffusion-2-1",
        "stable-diffusion-3-medium", "stable-diffusion-xl-base-1.0", "vit-base-patch16-224")  # fmt: skip


def shape_of(row: dict[str, Any]) -> Any:
    """Return the Shape of a line."""
    from memfit.nouns.task import Shape

    return Shape(**{k: tuple(v) if k in LISTED else v for k, v in row.get("shape", {}).items()})


def model_of(row: dict[str, Any]) -> Any:
    """Return the Architecture of a line, as its task trains it."""
    from memfit.models.families import architecture, trained_for
    from memfit.models.hub import resolve_config
    from memfit.tables.tasks import TASKS as KNOWN

    config, task = resolve_config(row["model"]), row["task"]
    return trained_for(config, row["model"], KNOWN[task], shape_of(row)) if task else architecture(config, row["model"])


def draw_traced(dice: random.Random, names: list[str]) -> dict[str, Any]:
    """Return a job at random of those that no formula counts, which may be impossible."""
    from memfit import Recipe
    from memfit.nouns.task import PLAIN
    from memfit.tables.adapters import ADAPTERS
    from memfit.tables.tasks import TASKS as KNOWN

    words = {name: dice.choice(values) for name, values in (FIELDS | TRACED).items()}
    known = dice.choice(list(KNOWN.values()))
    words |= {"trainer": known.by, "padding": "longest", "loss": "full"}
    if words["method"] == "full":
        for name in ("adapter", "lora_rank", "lora_dropout", "lora_targets"):
            del words[name]
    elif dice.random() < 0.5:
        words["adapter"] = adapter = dice.choice([k for k, a in ADAPTERS.items() if not a.refused[0]])
        words |= {"lora_targets": ("all-linear",), "lora_rank": ADAPTERS[adapter].usual, "lora_dropout": 0.0}
    usual, plain = asdict(Recipe()), asdict(PLAIN)
    shape = {name: dice.choice(values) for name, values in SHAPES.items()}
    return {
        "model": dice.choice(names),
        "task": "" if known.key == "sft" else known.key,
        "recipe": {name: value for name, value in words.items() if value != usual[name]},
        "shape": {name: value for name, value in shape.items() if value != plain[name]},
        "traced": True,
    }


def traceable(row: dict[str, Any]) -> bool:
    """Return whether a job that no formula counts can be traced; its size is not known."""
    from memfit import find_gpu
    from memfit.catalogue import config
    from memfit.catalogue.names import find
    from memfit.closed_form.task_runs import by_formula
    from memfit.errors import MemfitError
    from memfit.models.families import trained_for
    from memfit.models.hub import resolve_config
    from memfit.tables.combinations import check
    from memfit.tables.tasks import TASKS as KNOWN
    from memfit.virtual.jobs.recipe import setup_of
    from memfit.virtual.jobs.tasks import can

    entry, recipe, known = find(row["model"]), recipe_of(row), KNOWN[row["task"] or "sft"]
    assert entry is not None
    if not can(known, entry.family) or recipe.micro_batch < known.least:
        return False
    model = None  # of most that see or hear there is no description
    with suppress(MemfitError):
        model = trained_for(resolve_config(row["model"]), row["model"], known)
    try:
        check(recipe, model, find_gpu(CARD))
        setup_of(recipe, dict(config(entry)), row["task"], shape_of(row))
        return model is None or recipe.compile or not by_formula(known, model, recipe)
    except MemfitError:
        return False


def possible(row: dict[str, Any]) -> bool:
    """Return whether the closed form and the trace both take a job, and it is of a size to be measured."""
    from memfit import estimate, find_gpu
    from memfit.closed_form.numerics import lora_modules
    from memfit.closed_form.task_runs import by_formula
    from memfit.errors import MemfitError
    from memfit.models.hub import resolve_config
    from memfit.tables.combinations import check
    from memfit.tables.tasks import TASKS as KNOWN
    from memfit.virtual.jobs.recipe import setup_of

    recipe, known = recipe_of(row), KNOWN[row["task"] or "sft"]
    try:
        model = model_of(row)
        check(recipe, model, find_gpu(CARD))
        named = {*recipe.lora_targets} - {"all-linear", "attention"}
        if recipe.method != "full" and not named <= lora_modules(model, ("all-linear",)):
            return False
        setup_of(recipe, resolve_config(row["model"]), row["task"], shape_of(row))
        if recipe.micro_batch < known.least or not by_formula(known, model, recipe):
            return False
        if row["task"] in SAMPLED and recipe.micro_batch * recipe.accumulation % shape_of(row).generations:
            return False  # TRL asks for whole groups of answers
        found = estimate(model, recipe, find_gpu(CARD), at_capacity=False)
    except MemfitError:
        return False
    return SMALLEST < max(p.levels.reserved for p in found.phases) < LARGEST


def drawn(count: int, seed: int, traced: bool = False) -> Iterator[dict[str, Any]]:
    """Yield so many jobs; traced: of those that no formula counts."""
    dice, names = random.Random(seed), models()
    every = sorted({name for listed in names.values() for name in listed} | {*SEEN})
    while count:
        row = draw_traced(dice, every) if traced else draw(dice, names)
        if (traceable if traced else possible)(row):
            count -= 1
            yield row


def rows() -> list[dict[str, Any]]:
    """Return the jobs that were drawn."""
    return [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=20261127)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}; otherwise the jobs are printed")
    parser.add_argument("--traced", action="store_true", help="of the jobs that no formula counts; sizes are not known")
    asked = parser.parse_args()
    lines = [json.dumps(row) for row in drawn(asked.count, asked.seed, asked.traced)]
    if asked.write:
        FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
