"""A train.py for TRL's trainers, its requirements.txt, and the launcher's files for several cards."""

from __future__ import annotations

import memfit.frameworks.script as script
from memfit.errors import Unsupported
from memfit.frameworks import process_layout
from memfit.frameworks.text import literal, savings
from memfit.frameworks.transformers import (
    CHECKPOINTINGS,
    KEYS,
    LOSS,
    MODEL,
    in_script,
    loading,
    precision_note,
    scripted,
    settings,
)
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Plan
from memfit.nouns.task import Task
from memfit.tables.adapters import adapter
from memfit.tables.combinations import NOT_BY_TRL

VERSIONS = "trl 1.15-1.16, transformers 5.23, peft 0.21, torch 2.13"

NAME = "trl"
CHECKPOINTING = CHECKPOINTINGS[1]  # the older name, which every TRL has


def export(plan: Plan, how: process_layout.Launch | None = None) -> dict[str, str]:
    """Return train.py, requirements.txt and the launcher's files for several cards. Raises Unsupported."""
    if plan.job.architecture.model_type in NOT_BY_TRL:
        raise Unsupported("TRL's loss does not run this model", hint="--target transformers")
    return scripted(plan, how, NAME, train)


def train(plan: Plan, how: process_layout.Launch, kind: script.ScriptKind) -> str:
    """Return the text of train.py."""
    saved, recipe, rejoin = savings(plan), plan.recipe, script.rejoins(plan, how.backend)
    row = script.task_of(plan)
    lines = script.opening(plan, how, "TRL", VERSIONS, kind, _imports(recipe, row), saved)
    lines += [f"def build(args: argparse.Namespace) -> {row.trainer}Trainer:"]
    lines += script.call(f"config = {row.trainer}Config(", _config(plan, saved, how.backend, kind))
    widened = _scales_bf16(recipe, how.backend)
    made = f"{'trainer =' if widened else 'return'} {row.trainer}Trainer("
    if _loads(recipe, row):
        settings = [(name, literal(value), "") for name, value in loading(recipe, how.backend).items()]
        settings += [("quantization_config", "QUANTIZATION", "")] if recipe.quantization != "none" else []
        settings += [process_layout.ON_HOST] if process_layout.quantised_on_host(recipe) else []
        head, *body = script.call(f"model = {row.auto}.from_pretrained(", settings)
        lines += [head, "        args.model,", *body]
    lines += [*script.samples(plan.job.training), *kind.prepare.splitlines(), *script.call(made, _trainer(plan, kind))]
    lines += [*_WIDEN.splitlines(), "    return trainer"] if widened else []
    lines += ["", "", *kind.encode.splitlines()] if kind.encode else []
    return "\n".join([*lines, *script.ending(kind, plan.job.training, rejoin)])


_WIDEN = """\
    for weight in trainer.model.parameters():
        if weight.requires_grad:  # TRL makes QLoRA adapters bf16, whose gradients fp16's loss scaler cannot take
            weight.data = weight.data.float()
"""


def _loads(recipe: Recipe, row: Task) -> bool:
    """Return whether the script loads the model itself: onto the host, or for a trainer that does not quantise."""
    return process_layout.quantised_on_host(recipe) or row.module != NAME


def _scales_bf16(recipe: Recipe, kind: process_layout.Backend) -> bool:
    # trl#4901; DeepSpeed and FSDP2 cast trained weights themselves
    return recipe.quantization != "none" and recipe.precision == "fp16-mixed" and kind in ("plain", "ddp")


def _imports(recipe: Recipe, row: Task) -> dict[str, list[str]]:
    quantised = ["BitsAndBytesConfig"] if recipe.quantization != "none" else []
    own = [row.auto] if _loads(recipe, row) else []
    return {
        "transformers": [*own, *quantised],
        row.module: [f"{row.trainer}Config", f"{row.trainer}Trainer"],
        **({"peft": [adapter(recipe.adapter).config]} if recipe.method != "full" else {}),
    }


def _config(
    plan: Plan, saved: dict[str, str], backend: process_layout.Backend, kind: script.ScriptKind
) -> list[script.Setting]:  # fmt: skip
    recipe, row = plan.recipe, script.task_of(plan)
    made = settings(recipe, backend, by_trl=True, key=CHECKPOINTING)
    if recipe.padding != "packing" or plan.job.task != "sft":
        del made[KEYS["padding"].name]
    if row.sample == "prompt":  # whose lengths are two
        del made[KEYS["sequence_length"].name]
    if not _loads(recipe, row):
        made[MODEL] = loading(recipe, backend)
    notes = precision_note(recipe, backend, saved)
    notes[MODEL] = "; ".join(["TRL loads float32 by default", *([notes["dtype"]] if "dtype" in notes else [])])
    if recipe.checkpointing == "none":
        notes[CHECKPOINTING] = "TRL's default is True"
    return [
        *script.FIRST,
        *in_script(made, saved, notes),
        *([_NLL] if row.trainer == "SFT" else []),
        *kind.arguments,
        *script.last(plan.job.training),
    ]


_NLL: script.Setting = (LOSS, literal("nll"), "through TRL's fused LM head, which never holds the logits")


def _trainer(plan: Plan, kind: script.ScriptKind) -> list[script.Setting]:
    recipe = plan.recipe
    own = _loads(recipe, script.task_of(plan))
    settings: list[script.Setting] = [
        ("model", "model" if own else "args.model", ""),
        ("args", "config", ""),
        ("train_dataset", kind.encoded.format("samples"), ""),
        ("eval_dataset", script.held_out(plan.job.training, kind.encoded), ""),
        ("processing_class", kind.processor, ""),
        *kind.given,
    ]
    if recipe.quantization != "none" and not own:
        settings.append(("quantization_config", "QUANTIZATION", ""))
    if recipe.method != "full":
        settings.append(("peft_config", "ADAPTER", ""))
    return settings
