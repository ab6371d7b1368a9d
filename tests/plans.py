"""Plans made by hand, and grids of recipes that reach every value of every field; shared by the tests of files."""

from __future__ import annotations

from itertools import product
from typing import Any, get_args, get_type_hints

from memfit.models.families import architecture
from memfit.nouns.footprint import Footprint, Levels, PhasePeak
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Job, Recipe
from memfit.nouns.plan import Judgement, Plan, Rung
from memfit.tables.optimizers import OPTIMIZERS
from memfit.tables.quantization import QUANTIZATIONS
from memfit.units import GIB

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257,
    "max_position_embeddings": 256, "hidden_act": "silu", "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
CARD = Gpu(name="RTX 4090", short="rtx-4090", sold_bytes=24 * 10**9, total_bytes=24 * GIB, context_bytes=GIB)
FITS = Judgement("fits", 23 * GIB, 14 * GIB, 0, 9 * GIB)
FOOTPRINT = Footprint(phases=(PhasePeak("step", "loss", Levels(1, 1, 1, 1), ()),), source="formula")
Steps = tuple[tuple[str, Recipe, int], ...]


def make_plan(recipe: Recipe, steps: Steps = (), model: str = "org/tiny-llama", dataset: str = "") -> Plan:
    job = Job(
        architecture=architecture(LLAMA, model), gpu=CARD, num_gpus=recipe.num_gpus, dataset=dataset, effective_batch=16
    )
    ladder = tuple(Rung(title, title, r, FOOTPRINT, FITS, saved, 1.0) for title, r, saved in steps)
    return Plan(job=job, recipe=recipe, footprint=FOOTPRINT, judgement=FITS, ladder=ladder)


def changed(field: str, value: Any) -> Recipe:
    """A recipe that holds `value` and is otherwise as plain as that value allows."""
    recipe = Recipe(micro_batch=2, accumulation=2).but(**{field: value})
    if field == "quantization" and value != "none":
        return recipe.but(method="qlora")
    if value == "qlora":
        return recipe.but(quantization="nf4-double")
    if field == "offload":
        return recipe.but(precision="bf16-master")
    if field == "loading":
        base = Recipe(method="qlora", quantization="nf4-double") if value == "whole" else Recipe()
        return base.but(loading=value, shard="parameters", num_gpus=2)
    return recipe.but(num_gpus=2) if field == "shard" else recipe


HINTS = {f: get_args(hint) for f, hint in get_type_hints(Recipe).items()}
CHOICES = {f: words for f, words in HINTS.items() if words and isinstance(words[0], str)}
# what SimpleTuner's denoisers alone are stored in
IMAGES = tuple(key for key, row in QUANTIZATIONS.items() if row.images)
CHOICES["quantization"] = tuple(word for word in CHOICES["quantization"] if word not in IMAGES)
SINGLES = [changed(f, value) for f, values in CHOICES.items() for value in values] + [
    *(Recipe(optimizer=key) for key in OPTIMIZERS),
    Recipe(compile=True),
]
GRID = [
    Recipe(method=m, quantization="nf4-double" if m == "qlora" else "none", precision=p, shard=s, offload=o, num_gpus=n,
           checkpointing=c, lora_targets=("attention",), lora_dropout=0.05, alloc_conf="expandable_segments:True")
    for m, p, s, o, n, c in product(
        ("full", "lora", "qlora"), CHOICES["precision"], CHOICES["shard"], CHOICES["offload"], (1, 2), ("none", "full"))
]  # fmt: skip
