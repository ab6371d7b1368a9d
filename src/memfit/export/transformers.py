"""Export target transformers: train.py for transformers.Trainer, requirements.txt, and the launcher's files."""

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

VERSIONS = "transformers 5.23, peft 0.21, torch 2.13"

_TOKENIZE = '''\
def tokenize(rows: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Token ids and labels; the prompt of a prompt/completion pair is read but not learned."""

    def encode(row: dict) -> dict:
        if row.get("messages"):
            prompt, answer = "", tokenizer.apply_chat_template(row["messages"], tokenize=False)
        else:
            prompt, answer = row.get("prompt") or "", (row.get("text") or row["completion"]) + tokenizer.eos_token
        ids = tokenizer(prompt + answer, truncation=True, max_length=MAX_LENGTH).input_ids
        learned_from = min(len(tokenizer(prompt).input_ids), len(ids)) if prompt else 0
        return {"input_ids": ids, "labels": [-100] * learned_from + ids[learned_from:]}

    return rows.map(encode, remove_columns=rows.column_names)


'''


def export(plan: Plan) -> dict[str, str]:
    """train.py, requirements.txt and, where the recipe needs them, accelerate.yaml and ds_config.json."""
    check(plan.recipe)
    files = {"train.py": train(plan), "requirements.txt": requirements(plan.recipe, "transformers")}
    if launch.backend(plan.recipe) != "plain":
        files |= accelerate.files(plan)
    return files


def check(recipe: Recipe) -> None:
    """Refuse what transformers.Trainer cannot be told. Raises Unsupported."""
    names.check_method(recipe)
    launch.check(recipe)
    if recipe.loss == "chunked":
        raise Unsupported("transformers.Trainer has no chunked loss", hint="--loss fused (Liger), or --export trl")
    if recipe.padding == "packing":
        raise Unsupported("transformers.Trainer does not pack sequences", hint="--padding longest, or --export trl")
    if recipe.checkpointing == "selective":
        raise Unsupported(
            "transformers.Trainer has no selective checkpointing", hint="--checkpointing full, or --export trl"
        )


def train(plan: Plan) -> str:
    """The text of train.py."""
    saved, recipe = savings(plan), plan.recipe
    lines = script.head(plan, "transformers", VERSIONS)
    lines += script.imports(plan, ("argparse", "from pathlib import Path"), _imports(recipe), saved)
    lines += [*script.constants(script.batch(plan, saved)), *script.adapters(plan, saved), "", ""]
    lines += [*script.pieces(), *_TOKENIZE.splitlines(), *_load(recipe, saved), *_main(recipe, saved)]
    return "\n".join([*lines, *script.ending()])


def _imports(recipe: Recipe) -> list[str]:
    peft = ["LoraConfig", "get_peft_model"] if recipe.method != "full" else []
    peft += ["prepare_model_for_kbit_training"] if _prepares(recipe) else []
    used = [
        "AutoModelForCausalLM",
        "AutoTokenizer",
        "DataCollatorForSeq2Seq",
        "PreTrainedModel",
        "PreTrainedTokenizerBase",
    ]
    used += ["Trainer", "TrainingArguments"]
    used += ["BitsAndBytesConfig"] if recipe.quantization != "none" else []
    return [
        "from datasets import Dataset, load_dataset",
        *([f"from peft import {', '.join(peft)}"] if peft else []),
        "from transformers import (",
        *(f"    {name}," for name in sorted(used)),
        ")",
    ]


def _prepares(recipe: Recipe) -> bool:
    # sharded weights must keep one dtype, so the fp32 copy of embeddings and norms is left out there
    return recipe.quantization != "none" and recipe.shard != "parameters"


def _load(recipe: Recipe, saved: dict[str, str]) -> list[str]:
    note = saved.get("precision", "") or saved.get("attention", "")
    settings: list[script.Setting] = [
        ("dtype", literal(launch.numbers(recipe).weights), note),
        ("attn_implementation", literal(names.ATTENTION[recipe.attention]), ""),
    ]
    settings += [("quantization_config", "QUANTIZATION", "")] if recipe.quantization != "none" else []
    opening = "return" if recipe.method == "full" else "model ="
    head, *body = script.call(f"{opening} AutoModelForCausalLM.from_pretrained(", settings)
    lines = ["def build(name: str) -> PreTrainedModel:", head, "        name,", *body]
    if _prepares(recipe):  # the Trainer turns checkpointing on itself
        lines.append("    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)")
    return [*lines, *(["    return get_peft_model(model, LORA)"] if recipe.method != "full" else []), "", ""]


def _main(recipe: Recipe, saved: dict[str, str]) -> list[str]:
    return [
        "def main() -> None:",
        "    args = arguments()",
        *script.call("config = TrainingArguments(", _config(recipe, saved)),
        "    tokenizer = AutoTokenizer.from_pretrained(args.model)",
        "    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token",
        *script.call(
            "trainer = Trainer(",
            [
                ("model", "build(args.model)", "after TrainingArguments, so that ZeRO-3 can shard it while loading"),
                ("args", "config", ""),
                ("train_dataset", "tokenize(load(args.data), tokenizer)", ""),
                ("data_collator", "DataCollatorForSeq2Seq(tokenizer)", ""),
                ("processing_class", "tokenizer", ""),
            ],
        ),
        "    trainer.train(resume_from_checkpoint=args.resume)",
        "    trainer.save_model()",
    ]


def _config(recipe: Recipe, saved: dict[str, str]) -> list[script.Setting]:
    numbers = launch.numbers(recipe)
    spelled = names.optim(recipe, "transformers")
    autocast: script.Setting = (numbers.mixed if numbers.mixed != "no" else "bf16", literal(numbers.mixed != "no"), "")
    return [
        ("output_dir", "args.output", ""),
        ("max_steps", "args.max_steps", ""),
        ("num_train_epochs", "EPOCHS", ""),
        ("learning_rate", "LEARNING_RATE", ""),
        ("per_device_train_batch_size", "MICRO_BATCH", ""),
        ("gradient_accumulation_steps", "ACCUMULATION", ""),
        *(
            (key, literal(value), "no whole gradients between micro-batches")
            for key, value in launch.reduction(recipe).items()
        ),
        *_checkpointing(recipe, saved.get("checkpointing", "")),
        ("optim", literal(spelled.optim), saved.get("optimizer", "")),
        *((name, literal(value), "") for name, value in spelled.extra.items()),
        autocast,
        *([("use_liger_kernel", "True", saved.get("loss", ""))] if recipe.loss == "fused" else []),
        ("logging_steps", "10", ""),
        ("save_total_limit", "2", ""),
        ("use_cpu", "args.cpu", ""),
    ]


def _checkpointing(recipe: Recipe, note: str) -> list[script.Setting]:
    if recipe.checkpointing == "none":
        return []
    on: list[script.Setting] = [("activation_checkpointing", "True", note)]
    offloads = recipe.checkpointing == "offload"
    return [*on, ("activation_checkpointing_kwargs", literal({"offload": True}), "")] if offloads else on
