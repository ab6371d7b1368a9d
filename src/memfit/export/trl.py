"""Export target trl: train.py for TRL's SFTTrainer, requirements.txt, and the launcher's files for several cards."""

from __future__ import annotations

import memfit.export.accelerate as accelerate
import memfit.export.launch as launch
import memfit.export.script as script
import memfit.framework_names as names
from memfit.errors import Unsupported
from memfit.export.requirements import requirements
from memfit.export.text import literal, savings
from memfit.job import Recipe
from memfit.plan import Plan
from memfit.trainers import trainer

VERSIONS = "trl 1.15-1.16, transformers 5.23, peft 0.21, torch 2.13"
_FUSED_SINCE = (1, 15)  # the first TRL whose loss memfit's scripts count on


def export(plan: Plan) -> dict[str, str]:
    """train.py, requirements.txt and, where the recipe needs them, accelerate.yaml and ds_config.json."""
    check(plan.recipe)
    files = {"train.py": train(plan), "requirements.txt": requirements(plan.recipe, "trl")}
    if launch.backend(plan.recipe) != "plain":
        files |= accelerate.files(plan)
    return files


def check(recipe: Recipe) -> None:
    """Refuse what SFTTrainer cannot be told. Raises Unsupported."""
    names.check_method(recipe)
    launch.check(recipe)
    if recipe.trainer.startswith("trl==") and trainer(recipe.trainer).since < _FUSED_SINCE:
        raise Unsupported(f"memfit writes scripts for TRL 1.15 and newer, not {recipe.trainer}", hint="--trainer trl")
    if recipe.method != "full" and "lm_head" in recipe.lora_targets:
        raise Unsupported(
            "TRL computes the loss from lm_head itself, an adapter on it would not learn", hint="--export transformers"
        )
    if recipe.quantization != "none" and recipe.precision == "fp16-mixed":
        # the scaler cannot unscale bf16 gradients (trl#4901)
        raise Unsupported(
            "TRL holds QLoRA adapters in bf16, which fp16 training cannot scale",
            hint="--precision bf16, or --export transformers",
        )


def train(plan: Plan) -> str:
    """The text of train.py."""
    saved = savings(plan)
    recipe = plan.recipe
    lines = script.head(plan, "TRL", VERSIONS)
    lines += script.imports(plan, ("argparse", "from pathlib import Path"), _imports(recipe), saved)
    lines += [*script.constants(script.batch(plan, saved)), *script.adapters(plan, saved), "", ""]
    lines += [*script.pieces(), "def main() -> None:", "    args = arguments()"]
    lines += script.call("config = SFTConfig(", _config(recipe, saved))
    lines += script.call("trainer = SFTTrainer(", _trainer(recipe))
    lines += ["    trainer.train(resume_from_checkpoint=args.resume)", "    trainer.save_model()", *script.ending()]
    return "\n".join(lines)


def _imports(recipe: Recipe) -> list[str]:
    lines = ["from datasets import Dataset, load_dataset"]
    lines += ["from peft import LoraConfig"] if recipe.method != "full" else []
    lines += ["from transformers import BitsAndBytesConfig"] if recipe.quantization != "none" else []
    return [*lines, "from trl import SFTConfig, SFTTrainer"]


def _config(recipe: Recipe, saved: dict[str, str]) -> list[script.Setting]:
    settings: list[script.Setting] = [
        ("output_dir", "args.output", ""),
        ("max_steps", "args.max_steps", ""),
        ("num_train_epochs", "EPOCHS", ""),
        ("learning_rate", "LEARNING_RATE", ""),
        ("max_length", "MAX_LENGTH", ""),
    ]
    if recipe.padding == "packing":
        settings.append(("packing", "True", saved.get("padding", "")))
    settings += [
        ("per_device_train_batch_size", "MICRO_BATCH", ""),
        ("gradient_accumulation_steps", "ACCUMULATION", ""),
        *(
            (key, literal(value), "no whole gradients between micro-batches")
            for key, value in launch.reduction(recipe).items()
        ),
        *_checkpointing(recipe, saved),
        *_optimizer(recipe, saved),
        *_precision(recipe, saved),
        ("loss_type", literal("nll"), saved.get("loss", "through TRL's fused LM head, which never holds the logits")),
        ("save_total_limit", "2", ""),
        ("use_cpu", "args.cpu", ""),
    ]
    return settings


def _checkpointing(recipe: Recipe, saved: dict[str, str]) -> list[script.Setting]:
    note = saved.get("checkpointing", "")
    if recipe.checkpointing == "none":
        return [("gradient_checkpointing", "False", note or "TRL's default is True")]
    on: script.Setting = ("gradient_checkpointing", "True", note)
    if recipe.checkpointing == "full":
        return [on]
    return [on, ("gradient_checkpointing_kwargs", literal({recipe.checkpointing: True}), "")]


def _optimizer(recipe: Recipe, saved: dict[str, str]) -> list[script.Setting]:
    spelled = names.optim(recipe, "trl")
    extra: list[script.Setting] = [(name, literal(value), "") for name, value in spelled.extra.items()]
    return [("optim", literal(spelled.optim), saved.get("optimizer", "")), *extra]


def _precision(recipe: Recipe, saved: dict[str, str]) -> list[script.Setting]:
    numbers = launch.numbers(recipe)
    model = {"dtype": numbers.weights, "attn_implementation": names.ATTENTION[recipe.attention]}
    autocast = {"bf16": ("bf16", "True"), "fp16": ("fp16", "True"), "no": ("bf16", "False")}[numbers.mixed]
    loads = saved.get("precision", "") or saved.get("attention", "") or "TRL loads float32 unless told"
    return [(*autocast, ""), ("model_init_kwargs", literal(model), loads)]


def _trainer(recipe: Recipe) -> list[script.Setting]:
    settings: list[script.Setting] = [
        ("model", "args.model", ""),
        ("args", "config", ""),
        ("train_dataset", "load(args.data)", ""),
    ]
    if recipe.quantization != "none":
        settings.append(("quantization_config", "QUANTIZATION", ""))
    if recipe.method != "full":
        settings.append(("peft_config", "LORA", ""))
    return settings
