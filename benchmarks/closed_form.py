"""Hold the closed form against the trace over a grid of models and recipes.

usage: python benchmarks/closed_form.py [--only TEXT]

With --all-families the models are the smallest of every family in the catalogue, under FAMILY_RECIPES; --write makes
docs/closed-form.md of them. Prints a row for every case: requested and reserved bytes of the worst phase by both, and
the roles that differ most.
Exits 1 if a case is out of BAND.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from memfit import Recipe, catalogue, estimate, find_gpu
from memfit.allocator.replay import replay
from memfit.errors import MemfitError, Unsupported
from memfit.footprints.footprint_of_trace import footprint_of
from memfit.models.families import architecture
from memfit.models.hub import resolve_config
from memfit.nouns.architecture import Architecture
from memfit.nouns.footprint import Footprint, PhasePeak
from memfit.nouns.gpu import Gpu
from memfit.tables import combinations
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


@dataclass(frozen=True, slots=True)
class Compared:
    """One case, by both roads."""

    model: str
    family: str
    recipe: Recipe
    formula: PhasePeak
    traced: PhasePeak
    seconds: float

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
        what = f"{self.model} {r.trainer} {r.method} {r.precision} {r.optimizer} {r.micro_batch}x{r.sequence_length}"
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


def compared(model: str, recipe: Recipe, gpu: Gpu, **changes: Any) -> Compared:
    """Estimate and trace one case; `changes` to the model's config, such as fewer layers."""
    config = {**resolve_config(model), **changes}
    found = architecture(config, model)
    if found.model_type in combinations.NOT_BY_TRL:  # nor has PEFT an adapter for its router
        recipe = recipe.but(trainer="transformers", loss="full", lora_targets=("attention",))
    formula = estimate(found, recipe, gpu)
    began = time.perf_counter()
    tape, _ = trace_recipe(recipe, config, gpu)
    traced = footprint_of(tape, replay(tape.events), (), (), gpu.context_bytes)
    gc.collect()
    return Compared(model, found.model_type, recipe, _worst(formula), _worst(traced), time.perf_counter() - began)


def _worst(footprint: Footprint) -> PhasePeak:
    """The training step that needs most tensors' bytes; loading and evaluating are compared by themselves elsewhere."""
    steps = [p for p in footprint.phases if p.phase in ("first_step", "step")]
    return max(steps, key=lambda p: p.levels.requested)


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


def cases(only: str = "", every_family: bool = False) -> Iterator[tuple[str, Recipe]]:
    """The grid."""
    for model, recipe in product(families(), FAMILY_RECIPES) if every_family else product(MODELS, RECIPES):
        if only in f"{model} {recipe.trainer} {recipe.method} {recipe.precision} {recipe.optimizer}":
            yield model, recipe


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--all-families", action="store_true")
    parser.add_argument("--write", action="store_true", help="docs/closed-form.md, with --all-families")
    parser.add_argument("--gpu", default="a100-80gb")
    options = parser.parse_args()
    gpu = find_gpu(options.gpu)
    found: list[Compared] = []
    refused: list[str] = []
    for model, recipe in cases(options.only, options.all_families):
        try:
            found.append(compared(model, recipe, gpu))
        except MemfitError as error:
            refused.append(f"{model} {recipe.trainer} {recipe.method}: {error.message}")
            print(refused[-1], flush=True)
            continue
        print(("   " if found[-1].good else "!! ") + str(found[-1]), flush=True)
    good = sum(case.good for case in found)
    print(f"{good} of {len(found)} within {BOUNDS}, {len(refused)} not compared")
    if options.write:
        PAGE.write_text(page(found, refused, gpu), encoding="utf-8")
    return 1 if good < len(found) + len(refused) else 0


def page(found: list[Compared], refused: list[str], gpu: Gpu) -> str:
    """docs/closed-form.md."""
    worst = {level: (min(c.off(level) for c in found), max(c.off(level) for c in found)) for level in BAND}
    told = "; ".join(f"{level} bytes from {low:+.1%} to {high:+.1%}" for level, (low, high) in worst.items())
    good = sum(case.good for case in found)
    return "\n".join([
        "# The closed form against the trace", "",
        f"The smallest model of every family in the catalogue, as a whole, on the {gpu.name}, under two recipes: "
        "what `memfit estimate` says",
        "of the training step's peak beside what `memfit trace` found, "
        "where PyTorch's, transformers', TRL's and PEFT's own code ran.",
        f"The band is {BOUNDS}: {good} of {len(found)} are in it ({told}). What differs is told role by role, in MiB;",
        "`moving` are activations, gradients and temporaries together, which the two roads tell apart differently.",
        "`python benchmarks/closed_form.py --all-families --write` makes this page; "
        "`tests/test_closed_form.py` holds a grid of recipes to",
        "bands of their own.", "",
        "| family | model | recipe | requested | reserved | roles that differ |",
        "|---|---|---|---:|---:|---|", *(case.row for case in found), "",
        "Not compared:", "", *(f"- {line}" for line in refused), "",
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
