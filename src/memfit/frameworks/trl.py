"""A train.py for TRL's SFTTrainer, its requirements.txt, and the launcher's files for several cards."""

from __future__ import annotations

import memfit.frameworks.accelerate as accelerate
import memfit.frameworks.names as names
import memfit.frameworks.script as script
from memfit.errors import Unsupported
from memfit.frameworks import process_layout
from memfit.frameworks.text import literal, savings
from memfit.frameworks.transformers import ATTENTION, CHECKPOINTINGS, KEYS, LOSS, MODEL, ON
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Plan
from memfit.tables.combinations import NOT_BY_TRL
from memfit.tables.trainers import trainer

VERSIONS = "trl 1.15-1.16, transformers 5.23, peft 0.21, torch 2.13"
CHECKPOINTING = CHECKPOINTINGS[1]  # the older name, which every TRL has
_FUSED_SINCE = (1, 15)  # the first TRL with the fused loss that memfit's scripts rely on


def export(plan: Plan, how: process_layout.Launch | None = None) -> dict[str, str]:
    """Return train.py, requirements.txt and the launcher's files for several cards. Raises Unsupported."""
    if plan.job.architecture.model_type in NOT_BY_TRL:
        raise Unsupported("TRL's loss does not run this model", hint="--target transformers")
    how = how or process_layout.launch_of(plan.recipe)
    check(plan.recipe, how.backend)
    files = {"train.py": train(plan, how), "requirements.txt": script.requirements(plan.recipe, "trl", how.backend)}
    return files | accelerate.files(plan, how)


def check(recipe: Recipe, kind: process_layout.Backend) -> None:
    """Raise Unsupported for recipes that SFTTrainer cannot run."""
    names.check_method(recipe)
    process_layout.check(recipe, kind)
    if recipe.trainer.startswith("trl==") and trainer(recipe.trainer).since < _FUSED_SINCE:
        raise Unsupported(f"memfit writes scripts for TRL 1.15 and newer, not {recipe.trainer}", hint="--trainer trl")
    if recipe.method != "full" and "lm_head" in recipe.lora_targets:
        raise Unsupported(
            "TRL computes the loss from lm_head itself; an adapter on it would not learn", hint="--target transformers"
        )


def train(plan: Plan, how: process_layout.Launch) -> str:
    """Return the text of train.py."""
    saved, recipe, rejoin = savings(plan), plan.recipe, script.rejoins(plan, how.backend)
    lines = script.opening(plan, how, "TRL", VERSIONS, _imports(recipe), saved)
    lines += ["def build(args: argparse.Namespace) -> SFTTrainer:"]
    lines += script.call("config = SFTConfig(", _config(plan, saved, how.backend))
    widened = _scales_bf16(recipe, how.backend)
    made = "trainer = SFTTrainer(" if widened else "return SFTTrainer("
    if process_layout.quantised_on_host(recipe):  # TRL itself would read it onto the card
        settings = [*_model(recipe, how.backend), ("quantization_config", "QUANTIZATION", ""), process_layout.ON_HOST]
        head, *body = script.call("model = AutoModelForCausalLM.from_pretrained(", settings)
        lines += [head, "        args.model,", *body]
    lines += [*script.samples(plan.job.training), *script.call(made, _trainer(plan))]
    lines += [*_WIDEN.splitlines(), "    return trainer"] if widened else []
    return "\n".join([*lines, *script.ending(plan.job.training, rejoin)])


_WIDEN = """\
    for weight in trainer.model.parameters():
        if weight.requires_grad:  # TRL makes QLoRA adapters bf16, whose gradients fp16's loss scaler cannot take
            weight.data = weight.data.float()
"""


def _scales_bf16(recipe: Recipe, kind: process_layout.Backend) -> bool:
    # trl#4901; DeepSpeed and FSDP2 cast trained weights themselves
    return recipe.quantization != "none" and recipe.precision == "fp16-mixed" and kind in ("plain", "ddp")


def _imports(recipe: Recipe) -> list[str]:
    lines = ["from datasets import Dataset, Features, List, Value, load_dataset"]
    lines += ["from peft import LoraConfig"] if recipe.method != "full" else []
    quantised = ["BitsAndBytesConfig"] if recipe.quantization != "none" else []
    own = ["AutoModelForCausalLM"] if process_layout.quantised_on_host(recipe) else []
    lines += [f"from transformers import {', '.join([*own, 'AutoTokenizer', *quantised, 'PreTrainedTokenizerBase'])}"]
    return [*lines, "from trl import SFTConfig, SFTTrainer"]


def _config(plan: Plan, saved: dict[str, str], kind: process_layout.Backend) -> list[script.Setting]:
    recipe = plan.recipe
    return [
        *script.FIRST,
        (KEYS["sequence_length"].name, "MAX_LENGTH", ""),
        *([(KEYS["padding"].name, "True", "")] if recipe.padding == "packing" else []),
        *script.batch(recipe),
        *_checkpointing(recipe, saved),
        *script.optimizer(recipe, "trl", saved),
        *script.compiled(recipe),
        *_precision(recipe, saved, kind),
        (LOSS, literal("nll"), "through TRL's fused LM head, which never holds the logits"),
        *script.last(plan.job.training),
    ]


def _checkpointing(recipe: Recipe, saved: dict[str, str]) -> list[script.Setting]:
    note = saved.get("checkpointing", "")
    if recipe.checkpointing == "none":
        return [(CHECKPOINTING, "False", note or "TRL's default is True")]
    return script.checkpointing(recipe, CHECKPOINTING, note)


def _precision(recipe: Recipe, saved: dict[str, str], kind: process_layout.Backend) -> list[script.Setting]:
    numbers = process_layout.numbers(recipe, kind)
    autocast: list[script.Setting] = [("bf16", literal(numbers.mixed == "bf16"), "")]
    if numbers.mixed == "fp16":
        autocast.append(("fp16", ON["fp16"], ""))
    if process_layout.quantised_on_host(recipe):
        return autocast
    model = {"dtype": numbers.weights, ATTENTION: names.ATTENTION[recipe.attention]}
    loads = "TRL loads float32 by default" + (f"; {saved['precision']}" if "precision" in saved else "")
    return [*autocast, (MODEL, literal(model), loads)]


def _model(recipe: Recipe, kind: process_layout.Backend) -> list[script.Setting]:
    """Return the arguments of from_pretrained, which TRL otherwise takes as model_init_kwargs."""
    weights = process_layout.numbers(recipe, kind).weights
    return [("dtype", literal(weights), ""), (ATTENTION, literal(names.ATTENTION[recipe.attention]), "")]


def _trainer(plan: Plan) -> list[script.Setting]:
    recipe = plan.recipe
    own = process_layout.quantised_on_host(recipe)
    settings: list[script.Setting] = [
        ("model", "model" if own else "args.model", ""),
        ("args", "config", ""),
        ("train_dataset", "samples", ""),
        ("eval_dataset", script.held_out(plan.job.training), ""),
        ("processing_class", "load_tokenizer(args.model, samples)", ""),
    ]
    if recipe.quantization != "none" and not own:
        settings.append(("quantization_config", "QUANTIZATION", ""))
    if recipe.method != "full":
        settings.append(("peft_config", "LORA", ""))
    return settings
