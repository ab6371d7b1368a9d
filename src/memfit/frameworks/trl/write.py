"""Export target trl: train.py for TRL's SFTTrainer, requirements.txt, and the launcher's files for several cards."""

from __future__ import annotations

import memfit.frameworks.accelerate.write as accelerate
import memfit.frameworks.names as names
import memfit.frameworks.process_layout as launch
import memfit.frameworks.script as script
from memfit.errors import Unsupported
from memfit.frameworks.requirements import requirements
from memfit.frameworks.savings import savings
from memfit.frameworks.text import literal
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Plan
from memfit.tables.combinations import NOT_BY_TRL
from memfit.tables.trainers import trainer

VERSIONS = "trl 1.15-1.16, transformers 5.23, peft 0.21, torch 2.13"
_FUSED_SINCE = (1, 15)  # the first TRL whose loss memfit's scripts count on


def export(plan: Plan, how: launch.Launch | None = None) -> dict[str, str]:
    """train.py, requirements.txt and, where the launch needs them, accelerate.yaml and ds_config.json. Raises Unsupported."""
    if plan.job.architecture.model_type in NOT_BY_TRL:
        raise Unsupported("TRL's loss does not run this model", hint="--target transformers")
    how = how or launch.launch_of(plan.recipe)
    check(plan.recipe, how.backend)
    files = {"train.py": train(plan, how), "requirements.txt": requirements(plan.recipe, "trl", how.backend)}
    return files | accelerate.files(plan, how)


def check(recipe: Recipe, kind: launch.Backend) -> None:
    """Refuse what SFTTrainer cannot be told. Raises Unsupported."""
    names.check_method(recipe)
    launch.check(recipe, kind)
    if recipe.trainer.startswith("trl==") and trainer(recipe.trainer).since < _FUSED_SINCE:
        raise Unsupported(f"memfit writes scripts for TRL 1.15 and newer, not {recipe.trainer}", hint="--trainer trl")
    if recipe.method != "full" and "lm_head" in recipe.lora_targets:
        raise Unsupported(
            "TRL computes the loss from lm_head itself, an adapter on it would not learn", hint="--target transformers"
        )


def train(plan: Plan, how: launch.Launch) -> str:
    """The text of train.py."""
    saved, recipe, rejoin = savings(plan), plan.recipe, script.rejoins(plan, how.backend)
    lines = script.opening(plan, how, "TRL", VERSIONS, _imports(recipe), saved)
    lines += ["def build(args: argparse.Namespace) -> SFTTrainer:"]
    lines += script.call("config = SFTConfig(", _config(recipe, saved, how.backend))
    widened = _scales_bf16(recipe, how.backend)
    made = "trainer = SFTTrainer(" if widened else "return SFTTrainer("
    lines += ["    samples = load(args.data)", *script.call(made, _trainer(recipe))]
    lines += [*_WIDEN.splitlines(), "    return trainer"] if widened else []
    return "\n".join([*lines, *script.ending(rejoin)])


_WIDEN = """\
    for weight in trainer.model.parameters():
        if weight.requires_grad:  # TRL makes QLoRA adapters bf16, whose gradients fp16's loss scaler cannot take
            weight.data = weight.data.float()
"""


def _scales_bf16(recipe: Recipe, kind: launch.Backend) -> bool:
    # trl#4901; DeepSpeed and FSDP2 cast what is trained themselves
    return recipe.quantization != "none" and recipe.precision == "fp16-mixed" and kind in ("plain", "ddp")


def _imports(recipe: Recipe) -> list[str]:
    lines = ["from datasets import Dataset, Features, List, Value, load_dataset"]
    lines += ["from peft import LoraConfig"] if recipe.method != "full" else []
    quantised = ["BitsAndBytesConfig"] if recipe.quantization != "none" else []
    lines += [f"from transformers import {', '.join(['AutoTokenizer', *quantised, 'PreTrainedTokenizerBase'])}"]
    return [*lines, "from trl import SFTConfig, SFTTrainer"]


def _config(recipe: Recipe, saved: dict[str, str], kind: launch.Backend) -> list[script.Setting]:
    settings: list[script.Setting] = [*script.FIRST, ("max_length", "MAX_LENGTH", "")]
    if recipe.padding == "packing":
        settings.append(("packing", "True", ""))
    settings += [
        ("per_device_train_batch_size", "MICRO_BATCH", ""),
        ("gradient_accumulation_steps", "ACCUMULATION", ""),
        *(
            (key, literal(value), "no whole gradients between micro-batches")
            for key, value in launch.reduction(recipe).items()
        ),
        *_checkpointing(recipe, saved),
        *_optimizer(recipe, saved),
        *script.compiled(recipe),
        *_precision(recipe, saved, kind),
        ("loss_type", literal("nll"), "through TRL's fused LM head, which never holds the logits"),
        *script.EVALUATION,
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


def _precision(recipe: Recipe, saved: dict[str, str], kind: launch.Backend) -> list[script.Setting]:
    numbers = launch.numbers(recipe, kind)
    model = {"dtype": numbers.weights, "attn_implementation": names.ATTENTION[recipe.attention]}
    autocast: list[script.Setting] = [("bf16", literal(numbers.mixed == "bf16"), "")]
    if numbers.mixed == "fp16":  # accelerate knows no fp16 on a CPU
        autocast.append(("fp16", "not args.cpu", ""))
    loads = script.also("TRL loads float32 unless told", saved, "precision")
    return [*autocast, ("model_init_kwargs", literal(model), loads)]


def _trainer(recipe: Recipe) -> list[script.Setting]:
    settings: list[script.Setting] = [
        ("model", "args.model", ""),
        ("args", "config", ""),
        ("train_dataset", "samples", ""),
        ("eval_dataset", "load(args.eval_data) if args.eval_data else None", ""),
        ("processing_class", "load_tokenizer(args.model, samples)", ""),
    ]
    if recipe.quantization != "none":
        settings.append(("quantization_config", "QUANTIZATION", ""))
    if recipe.method != "full":
        settings.append(("peft_config", "LORA", ""))
    return settings
