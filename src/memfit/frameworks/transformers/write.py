"""Export target transformers: train.py for transformers.Trainer, requirements.txt, and the launcher's files."""

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

VERSIONS = "transformers 5.23, peft 0.21, torch 2.13"

_TOKENIZE = '''\
def tokenize(samples: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Token ids and labels, cut to MAX_LENGTH; the prompt of a completion is read but not learned."""

    def ids_of(text: list | str, row: dict, prompt: bool = False) -> list[int]:
        if isinstance(text, list):  # the template writes the special tokens itself
            tools = row.get("tools")
            tools = json.loads(tools) if isinstance(tools, str) else tools
            words = {"tools": tools, "return_dict": True, **(row.get("chat_template_kwargs") or {})}
            return tokenizer.apply_chat_template(text, add_generation_prompt=prompt, **words)["input_ids"]
        end = "" if prompt or text.endswith(tokenizer.eos_token) else tokenizer.eos_token
        return tokenizer(text + end).input_ids

    def encode(row: dict) -> dict:
        read = 0
        if "completion" in row:
            asked, ids = ids_of(row["prompt"], row, prompt=True), ids_of(row["prompt"] + row["completion"], row)
            same = [one == other for one, other in zip(asked, ids, strict=False)]
            read = same.index(False) if False in same else len(same)  # tokens may merge where the completion begins
        elif "input_ids" in row:
            ids = row["input_ids"]
        else:
            ids = ids_of(row.get("text") or row["messages"], row)
        labels = row.get("labels") or [-100] * read + ids[read:]
        return {"input_ids": ids[:MAX_LENGTH], "labels": labels[:MAX_LENGTH]}

    rows = samples.map(encode, remove_columns=samples.column_names)
    return rows.filter(lambda row: any(label != -100 for label in row["labels"]))  # a cut prompt teaches nothing
'''


def export(plan: Plan, how: launch.Launch | None = None) -> dict[str, str]:
    """train.py, requirements.txt and, where the launch needs them, accelerate.yaml and ds_config.json."""
    how = how or launch.launch_of(plan.recipe)
    check(plan.recipe, how.backend)
    files = {"train.py": train(plan, how), "requirements.txt": requirements(plan.recipe, "transformers", how.backend)}
    return files | accelerate.files(plan, how)


def check(recipe: Recipe, kind: launch.Backend) -> None:
    """Refuse what transformers.Trainer cannot be told. Raises Unsupported."""
    names.check_method(recipe)
    launch.check(recipe, kind)
    if recipe.loss == "chunked":
        raise Unsupported("transformers.Trainer has no chunked loss", hint="--loss fused (Liger), or --target trl")
    if recipe.padding == "packing":
        raise Unsupported("transformers.Trainer does not pack sequences", hint="--padding longest, or --target trl")
    if recipe.checkpointing == "selective":
        raise Unsupported(
            "transformers.Trainer has no selective checkpointing", hint="--checkpointing full, or --target trl"
        )


def train(plan: Plan, how: launch.Launch) -> str:
    """The text of train.py."""
    saved, recipe, rejoin = savings(plan), plan.recipe, script.rejoins(plan, how.backend)
    lines = script.opening(plan, how, "transformers", VERSIONS, _imports(recipe), saved)
    lines += [*_load(recipe, saved, how.backend), *_main(recipe, saved, how.backend), "", "", *_TOKENIZE.splitlines()]
    return "\n".join([*lines, *script.ending(rejoin)])


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
        "from datasets import Dataset, Features, List, Value, load_dataset",
        *([f"from peft import {', '.join(peft)}"] if peft else []),
        "from transformers import (",
        *(f"    {name}," for name in [*sorted(used), *(["set_seed"] if recipe.method != "full" else [])]),
        ")",
    ]


def _prepares(recipe: Recipe) -> bool:
    # sharded weights must keep one dtype, so the fp32 copy of embeddings and norms is left out there
    return recipe.quantization != "none" and recipe.shard != "parameters"


def _load(recipe: Recipe, saved: dict[str, str], kind: launch.Backend) -> list[str]:
    settings: list[script.Setting] = [
        ("dtype", literal(launch.numbers(recipe, kind).weights), saved.get("precision", "")),
        ("attn_implementation", literal(names.ATTENTION[recipe.attention]), saved.get("attention", "")),
    ]
    settings += [("quantization_config", "QUANTIZATION", "")] if recipe.quantization != "none" else []
    opening = "return" if recipe.method == "full" else "model ="
    head, *body = script.call(f"{opening} AutoModelForCausalLM.from_pretrained(", settings)
    lines = ["def load_model(name: str) -> PreTrainedModel:", head, "        name,", *body]
    if _prepares(recipe):  # the Trainer turns checkpointing on itself
        lines.append("    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)")
    return [*lines, *(["    return get_peft_model(model, LORA)"] if recipe.method != "full" else []), "", ""]


def _main(recipe: Recipe, saved: dict[str, str], kind: launch.Backend) -> list[str]:
    return [
        "def build(args: argparse.Namespace) -> Trainer:",
        *script.call("config = TrainingArguments(", _config(recipe, saved, kind)),
        "    samples = load(args.data)",
        "    tokenizer = load_tokenizer(args.model, samples)",
        "    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token",
        *(
            ["    set_seed(config.seed)  # adapters begin at random, before the Trainer seeds"]
            * (recipe.method != "full")
        ),
        *script.call(
            "return Trainer(",
            [
                (
                    "model",
                    "load_model(args.model)",
                    "after TrainingArguments, so that ZeRO-3 can shard it while loading",
                ),
                ("args", "config", ""),
                ("train_dataset", "tokenize(samples, tokenizer)", ""),
                ("eval_dataset", "tokenize(load(args.eval_data), tokenizer) if args.eval_data else None", ""),
                ("data_collator", "DataCollatorForSeq2Seq(tokenizer)", ""),
                ("processing_class", "tokenizer", ""),
            ],
        ),
    ]


def _config(recipe: Recipe, saved: dict[str, str], kind: launch.Backend) -> list[script.Setting]:
    numbers = launch.numbers(recipe, kind)
    spelled = names.optim(recipe, "transformers")
    # accelerate knows no fp16 on a CPU
    on = {"bf16": "True", "fp16": "not args.cpu", "no": "False"}[numbers.mixed]
    autocast: script.Setting = (numbers.mixed if numbers.mixed != "no" else "bf16", on, "")
    return [
        *script.FIRST,
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
        *script.compiled(recipe),
        *([("use_liger_kernel", "True", saved.get("loss", ""))] if recipe.loss == "fused" else []),
        ("logging_steps", "10", ""),
        *script.EVALUATION,
        ("save_total_limit", "2", ""),
        ("use_cpu", "args.cpu", ""),
    ]


def _checkpointing(recipe: Recipe, note: str) -> list[script.Setting]:
    if recipe.checkpointing == "none":
        return []
    on: list[script.Setting] = [("activation_checkpointing", "True", note)]
    offloads = recipe.checkpointing == "offload"
    return [*on, ("activation_checkpointing_kwargs", literal({"offload": True}), "")] if offloads else on
