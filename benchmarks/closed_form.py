"""Hold the closed form against the trace over a grid of models and recipes.

usage: python benchmarks/closed_form.py [--only TEXT]

With --all-families the models are the smallest of every family in the catalogue, under FAMILY_RECIPES; with --tasks the
tasks that the closed form answers, under TASK_RECIPES; with --drawn jobs at random (measure/drawn.py), of which whole
runs are compared. --write makes the part of docs/closed-form.md of each. Prints a row for every case: requested and
reserved bytes of the worst phase by both, and the roles that differ most. Exits 1 if a case is out of BAND.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from itertools import product
from pathlib import Path
from statistics import mean, median

from measure import drawn
from memfit import Recipe, catalogue, estimate, find_gpu
from memfit.allocator.replay import replay
from memfit.closed_form.task_runs import by_formula
from memfit.errors import MemfitError, Unsupported
from memfit.footprints.footprint_of_trace import footprint_of
from memfit.models.families import architecture, trained_for
from memfit.models.hub import resolve_config
from memfit.nouns.alloc_settings import parse_alloc_conf
from memfit.nouns.architecture import Architecture
from memfit.nouns.footprint import Footprint, PhasePeak
from memfit.nouns.gpu import Gpu
from memfit.nouns.task import Shape
from memfit.tables import combinations
from memfit.tables.tasks import TASKS
from memfit.virtual.tracing import trace_recipe

PAGE = Path(__file__).resolve().parents[1] / "docs" / "closed-form.md"
BAND = {"requested": 0.02, "reserved": 0.10}  # how far the closed form may be from the trace
BOUNDS = ", ".join(f"{level} {band:.0%}" for level, band in BAND.items())
MODELS = ("smollm2-135m", "gpt2", "pythia-410m", "qwen3-0.6b", "qwen2.5-0.5b", "gemma-3-1b", "llama-3.2-1b", "opt-1.3b")
RECIPES = (
    Recipe(trainer="trl", loss="fused", sequence_length=1024),
    Recipe(trainer="trl", loss="fused", sequence_length=1024, checkpointing="full", micro_batch=2, accumulation=4),
    Recipe(trainer="trl", loss="fused", sequence_length=512, precision="bf16-mixed", optimizer="adamw-foreach"),
    Recipe(trainer="transformers", sequence_length=512, micro_batch=2),
    Recipe(trainer="transformers", sequence_length=1024, precision="bf16-mixed", checkpointing="full"),
    Recipe(trainer="torch", sequence_length=512, optimizer="adamw-8bit"),
    Recipe(trainer="torch", sequence_length=512, precision="fp32", optimizer="sgd-momentum"),
    Recipe(trainer="trl", loss="fused", method="lora", sequence_length=1024, checkpointing="full"),
    Recipe(trainer="transformers", method="lora", sequence_length=512, lora_rank=64, lora_dropout=0.05),
    Recipe(trainer="trl", loss="fused", method="qlora", quantization="nf4-double", sequence_length=2048,
           checkpointing="full"),
    Recipe(trainer="transformers", method="qlora", quantization="nf4", sequence_length=1024, micro_batch=2,
           checkpointing="full"),
)  # fmt: skip
FULL = Recipe(trainer="transformers", sequence_length=512)
LORA = Recipe(trainer="trl", loss="fused", method="lora", sequence_length=1024, checkpointing="full")
FAMILY_RECIPES = (FULL, LORA)
DECODERS, ENCODERS = ("smollm2-135m", "qwen2.5-0.5b"), ("bert-base-uncased", "answerdotai/ModernBERT-base")
TASK_MODELS = {
    "reward": DECODERS, "classification": (*DECODERS, *ENCODERS), "dpo": DECODERS, "kto": DECODERS, "orpo": DECODERS,
    "masked-lm": ENCODERS, "token-classification": ENCODERS, "grpo": DECODERS, "rloo": DECODERS[:1],
    "embedding": (*DECODERS, *ENCODERS), "image-text": ("qwen2-vl-2b",),
    "image-classification": ("vit-base-patch16-224",), "seq2seq": ("t5-small", "google/flan-t5-base"),
    "speech": ("whisper-tiny",),
}  # fmt: skip
SHAPE = Shape(generations=2)
PICTURES = Shape(image=(448, 448))  # of a text, whose rows have room for one of 256 tokens
TASK_RECIPES = (
    Recipe(sequence_length=512, micro_batch=2, method="lora"),
    Recipe(sequence_length=1024, micro_batch=4, method="lora", checkpointing="full", accumulation=2),
    Recipe(sequence_length=512, micro_batch=2, method="lora", precision="fp32", lora_targets=("attention",)),
    Recipe(sequence_length=1024, micro_batch=2, method="qlora", quantization="nf4-double", checkpointing="full"),
    Recipe(sequence_length=512, micro_batch=2, precision="bf16-mixed"),
    Recipe(sequence_length=1024, micro_batch=4, precision="bf16-mixed", checkpointing="full", accumulation=2),
    Recipe(sequence_length=256, micro_batch=8, optimizer="adamw-8bit"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Compared:
    """One case, by both roads."""

    model: str
    family: str
    recipe: Recipe
    formula: PhasePeak
    traced: PhasePeak
    seconds: float
    task: str = "sft"

    def off(self, level: str) -> float:
        """(formula - traced) / traced of a level."""
        traced = getattr(self.traced.levels, level)
        return float((getattr(self.formula.levels, level) - traced) / traced)

    @property
    def good(self) -> bool:
        return all(abs(self.off(level)) <= band for level, band in BAND.items())

    @property
    def row(self) -> str:
        """A line of the page."""
        r = self.recipe
        what = (
            f"{r.method}, {r.micro_batch} x {r.sequence_length}"
            f"{', checkpointing' if r.checkpointing != 'none' else ''}, {r.trainer}"
        )
        off = " | ".join(f"{self.off(level):+.2%}" for level in BAND)
        return (
            f"| {self.family} | {self.model} | {what} | {off} | {'' if self.good else 'out of band: '}{self._roles()} |"
        )

    def __str__(self) -> str:
        r = self.recipe
        what = f"{self.task} " if self.task != "sft" else ""
        what += f"{self.model} {r.trainer} {r.method} {r.precision} {r.optimizer} {r.micro_batch}x{r.sequence_length}"
        what += " checkpointing" if r.checkpointing != "none" else ""
        levels = ", ".join(f"{name} {self.off(name):+.2%}" for name in BAND)
        return (
            f"{what}: {levels} at {self.formula.instant} / {self.traced.instant}; "
            f"{self._roles()} ({self.seconds:.1f} s)"
        )

    def _roles(self) -> str:
        """Roles whose bytes differ, in MiB. What lives for a moment is one thing: the two roads name it differently."""
        merged = {
            "activations": "moving",
            "temporaries": "moving",
            "gradients": "moving",
            "context": "",
            "fragmentation": "",
        }
        sums: dict[str, int] = {}
        for sign, peak in ((1, self.formula), (-1, self.traced)):
            for role, size in peak.by_role.items():
                name = merged.get(role, role)
                sums[name] = sums.get(name, 0) + sign * size
        shown = [f"{name} {size / 2**20:+.1f}" for name, size in sums.items() if name and abs(size) >= 2**20]
        return ", ".join(shown) or "roles agree"


def compared(
    model: str, recipe: Recipe, gpu: Gpu, task: str, shape: Shape, of: Callable[[Footprint], PhasePeak]
) -> Compared:
    """Estimate and trace one case; `of`: what is compared of a footprint."""
    config = resolve_config(model)
    found = architecture(config, model) if task == "sft" else trained_for(config, model, TASKS[task], shape)
    if found.model_type in combinations.NOT_BY_TRL:  # nor has PEFT an adapter for its router
        recipe = recipe.but(trainer="transformers", loss="full", lora_targets=("attention",))
    formula = estimate(found, recipe, gpu)
    began = time.perf_counter()
    tape, _ = trace_recipe(recipe, config, gpu, task="" if task == "sft" else task, shape=shape)
    timeline = replay(tape.events, settings=parse_alloc_conf(recipe.alloc_conf))
    traced = footprint_of(tape, timeline, (), (), gpu.context_bytes)
    gc.collect()
    seconds = time.perf_counter() - began
    return Compared(model, found.model_type, recipe, of(formula), of(traced), seconds, task)


def shape_of(task: str) -> Shape:
    """The size of a sample."""
    return PICTURES if task == "image-text" else SHAPE


def _worst(footprint: Footprint) -> PhasePeak:
    """The training step that needs most tensors' bytes; loading and evaluating are compared by themselves elsewhere."""
    steps = [p for p in footprint.phases if p.phase in ("first_step", "step")]
    return max(steps, key=lambda p: p.levels.requested)


def _highest(footprint: Footprint) -> PhasePeak:
    """The peak of a run, with the highest of each level in all phases that every run has."""
    highest = {x: max(getattr(p.levels, x) for p in footprint.needed) for x in ("requested", "allocated", "reserved")}
    return replace(footprint.peak, levels=replace(footprint.peak.levels, **highest))


def families() -> list[str]:
    """The smallest model of every causal-lm family in the catalogue, from small to large."""
    smallest: dict[str, Architecture] = {}
    for entry in catalogue.entries():
        try:
            found = architecture(catalogue.config(entry), entry.id)
        except Unsupported:
            continue
        best = smallest.get(found.model_type)
        if found.task == "causal-lm" and (best is None or found.parameters < best.parameters):
            smallest[found.model_type] = found
    return [a.name for a in sorted(smallest.values(), key=lambda a: a.parameters)]


def cases(only: str = "", every_family: bool = False, tasks: bool = False) -> Iterator[tuple[str, Recipe, str, Shape]]:
    """The grid."""
    for model, recipe, task in of_tasks() if tasks else of_models(every_family):
        if only in f"{task} {model} {recipe.trainer} {recipe.method} {recipe.precision} {recipe.optimizer}":
            yield model, recipe, task, shape_of(task)


def of_models(every_family: bool) -> Iterator[tuple[str, Recipe, str]]:
    """The cases of language models."""
    for model, recipe in product(families(), FAMILY_RECIPES) if every_family else product(MODELS, RECIPES):
        yield model, recipe, "sft"


def of_tasks() -> Iterator[tuple[str, Recipe, str]]:
    """The cases of other tasks, by the trainers that run them."""
    for task, models in TASK_MODELS.items():
        by = TASKS[task].by
        for model, recipe in product(models, TASK_RECIPES):
            length = min(recipe.sequence_length, 512) if model == ENCODERS[0] else recipe.sequence_length
            length = max(length, 512) if task == "image-text" else length
            length = SHAPE.prompt + SHAPE.completion if TASKS[task].sample == "prompt" else length
            made = recipe.but(trainer=by, loss="full", sequence_length=length)
            found = trained_for(resolve_config(model), model, TASKS[task], shape_of(task))
            if by_formula(TASKS[task], found, made) and combinations.refusal(made, found) is None:
                yield model, made, task


def of_drawn(count: int, seed: int) -> Iterator[tuple[str, Recipe, str, Shape]]:
    """So many jobs at random; batches are padded, as a formula counts those of every task."""
    for row in drawn.drawn(count, seed):
        yield row["model"], drawn.recipe_of(row), row["task"] or "sft", replace(drawn.shape_of(row), padded=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--all-families", action="store_true")
    parser.add_argument("--tasks", action="store_true")
    parser.add_argument("--drawn", type=int, metavar="N", help="so many jobs at random in place of a grid")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="docs/closed-form.md, but for the plain grid")
    parser.add_argument("--gpu", default="a100-80gb")
    options = parser.parse_args()
    gpu = find_gpu(options.gpu)
    found: list[Compared] = []
    refused: list[str] = []
    grid = cases(options.only, options.all_families, options.tasks)
    of = _highest if options.drawn else _worst
    for model, recipe, task, shape in of_drawn(options.drawn, options.seed) if options.drawn else grid:
        try:
            found.append(compared(model, recipe, gpu, task, shape, of))
        except MemfitError as error:
            refused.append(f"{task} {model} {recipe.trainer} {recipe.method}: {error.message}")
            print(refused[-1], flush=True)
            continue
        print(("   " if found[-1].good else "!! ") + str(found[-1]), flush=True)
    good = sum(case.good for case in found)
    print(f"{good} of {len(found)} within {BOUNDS}, {len(refused)} not compared")
    if options.drawn:
        print(summary(found))
    if options.write:
        counted, _, rest = PAGE.read_text(encoding="utf-8").partition(MODELS_TITLE)
        models, _, others = rest.partition(TASKS_TITLE)
        tasks, _, jobs = others.partition(DRAWN_TITLE)
        if options.drawn:
            jobs = of_drawn_page(found, options.drawn, options.seed, gpu)
        elif options.tasks:
            tasks = of_task_page(found, gpu)
        else:
            models = page(found, refused, gpu)
        PAGE.write_text(f"{counted}{MODELS_TITLE}{models}{TASKS_TITLE}{tasks}{DRAWN_TITLE}{jobs}", encoding="utf-8")
    return 1 if good < len(found) + len(refused) else 0


MODELS_TITLE, TASKS_TITLE, DRAWN_TITLE = "\n## Every family\n", "\n## Other tasks\n", "\n## Jobs at random\n"


def of_task_page(found: list[Compared], gpu: Gpu) -> str:
    """The part of docs/closed-form.md on other tasks: a line for each task and model."""
    good = sum(case.good for case in found)
    rows, outside = [], []
    for task, models in TASK_MODELS.items():
        for model in models:
            own = [case for case in found if (case.task, case.model) == (task, model)]
            off = [f"{min(c.off(x) for c in own):+.2%} to {max(c.off(x) for c in own):+.2%}" for x in BAND]
            rows.append(f"| `{task}` | {model} | {len(own)} | {' | '.join(off)} |")
            outside += [f"- {case}" for case in own if not case.good]
    return "\n".join([
        "",
        f"Whole models on the {gpu.name} under {len(TASK_RECIPES)} recipes, both roads as above: all weights, LoRA and",
        "QLoRA, with and without checkpointing, in bf16, fp32 and mixed precision, 2 to 8 samples of 256 to 1,024",
        "tokens, padded. What a trainer refuses is left out, and what a task leaves to the trace (docs/tasks.md).",
        f"{good} of {len(found)} are in the band. `python benchmarks/closed_form.py --tasks --write` makes this part.",
        "",
        "| task | model | recipes | requested | reserved |", "|---|---|---:|---:|---:|", *rows, "",
        *(["Out of band:", "", *outside, ""] if outside else []),
    ])  # fmt: skip


def of_drawn_page(found: list[Compared], count: int, seed: int, gpu: Gpu) -> str:
    """The part of docs/closed-form.md on jobs at random."""
    told = [case for case in found if abs(case.off("requested")) > 0.02 or not -0.03 < case.off("reserved") < 0.05]
    return "\n".join([
        "",
        f"{len(found)} of {count} jobs on the {gpu.name}, each a model, a task, a trainer and a recipe at random (both",
        "roads answer these): the highest",
        f"level of a whole run by both roads, as both were on {date.today()}.",
        f"`python benchmarks/closed_form.py --drawn {count} --seed {seed} --gpu {gpu.short} --write` makes this",
        "part; what is drawn (`benchmarks/measure/drawn.py`) may be wider since. Another seed draws jobs that nobody",
        "has looked at.",
        "", summary(found), "",
        *(["Furthest off:", "", *(f"- {case}" for case in told), ""] if told else []),
    ])  # fmt: skip


def summary(found: list[Compared]) -> str:
    """A table of how far the closed form is from the traces."""
    rows = ["| bytes | mean | median | most under | most over | within 1 % |", "|---|---:|---:|---:|---:|---:|"]
    for level in ("requested", "allocated", "reserved"):
        off = sorted(case.off(level) for case in found)
        sizes = [abs(share) for share in off]
        near = f"{sum(size <= 0.01 for size in sizes)} of {len(sizes)}"
        rows.append(f"| {level} | {mean(sizes):.2%} | {median(sizes):.2%} | {off[0]:+.2%} | {off[-1]:+.2%} | {near} |")
    return "\n".join(rows)


def page(found: list[Compared], refused: list[str], gpu: Gpu) -> str:
    """The part of docs/closed-form.md on families of language models."""
    worst = {level: (min(c.off(level) for c in found), max(c.off(level) for c in found)) for level in BAND}
    told = "; ".join(f"{level} bytes from {low:+.1%} to {high:+.1%}" for level, (low, high) in worst.items())
    good = sum(case.good for case in found)
    return "\n".join([
        "",
        f"The smallest model of every family in the catalogue, as a whole, on the {gpu.name}, under two recipes: "
        "what `memfit estimate` says",
        "of the training step's peak beside what `memfit trace` found, "
        "where PyTorch's, transformers', TRL's and PEFT's own code ran.",
        f"The band is {BOUNDS}: {good} of {len(found)} are in it ({told}). What differs is told role by role, in MiB;",
        "`moving` are activations, gradients and temporaries together, which the two roads tell apart differently.",
        "`python benchmarks/closed_form.py --all-families --write` makes this part; "
        "`tests/test_closed_form.py` holds a grid of recipes to",
        "bands of their own.", "",
        "| family | model | recipe | requested | reserved | roles that differ |",
        "|---|---|---|---:|---:|---|", *(case.row for case in found), "",
        "Not compared:", "", *(f"- {line}" for line in refused), "",
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
