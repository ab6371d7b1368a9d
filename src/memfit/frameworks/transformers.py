"""TrainingArguments, read from JSON or YAML, and a train.py for transformers.Trainer. Keys of transformers 5.23.

A file with keys of TRL's SFTConfig (1.16) is read as TRL's. trl.py writes the train.py for TRL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import memfit.frameworks.accelerate as accelerate
import memfit.frameworks.deepspeed as deepspeed
import memfit.frameworks.names as names
import memfit.frameworks.script as script
from memfit.frameworks import process_layout
from memfit.frameworks.keys import (
    Adopted,
    Key,
    Keys,
    KeyTable,
    Sharding,
    adopted_from,
    module_names,
    saved_modules,
    word,
)
from memfit.frameworks.schemas import MODEL_INIT, TRAINER, TRL_OTHER_TASKS
from memfit.frameworks.script_kinds import kind_of
from memfit.frameworks.text import literal, savings
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Plan
from memfit.nouns.task import Task
from memfit.tables.adapters import adapter
from memfit.tables.trainers import trainer

NAME, VERSIONS = "transformers", "transformers 5.23, peft 0.21, torch 2.13"
EMBEDDINGS = "sentence-transformers"
KEYS = KeyTable(
    *names.KEYS.values(),
    Key("sequence_length", "max_length", 1024),  # from here on TRL's
    Key("padding", "packing", False, {"packing": True, "longest": False}),
    Key("lora_rank", "lora_r", 16),
    Key("lora_alpha", "lora_alpha", 32),
    Key("lora_dropout", "lora_dropout", 0.05),
)
LIGER, ATTENTION, MODEL, LOSS = "use_liger_kernel", "attn_implementation", "model_init_kwargs", "loss_type"
CHECKPOINTINGS = ("activation_checkpointing", "gradient_checkpointing")  # the newer name first
OLDER_LENGTH, MULTIPLE, STORAGE, CAUSAL = "max_seq_length", "pad_to_multiple_of", "bnb_4bit_quant_storage", "CAUSAL_LM"
# keys of SFTConfig that TrainingArguments does not have
_SFT = {
    KEYS["sequence_length"].name, KEYS["padding"].name, KEYS["lora_rank"].name, MODEL, "use_peft",
    "padding_free", "dataset_text_field",
    "loss_type", "completion_only_loss", "assistant_only_loss",
}  # fmt: skip
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_NO_DTYPE = "the file does not say in which dtype the weights are loaded: taken as bf16, transformers' dtype='auto'"
# older options of `fsdp` -> the recipe field they set
_OPTIONS = {
    "full_shard": ("shard", "parameters"), "shard_grad_op": ("shard", "gradients"), "no_shard": ("shard", "none"),
    "offload": ("offload", "parameters"),
}  # fmt: skip
SAVED = "lora_modules_to_save"
COMMAND_LINE = "model_name_or_path"  # a key of TRL's command line, whose file holds how the model is loaded as well
_FLAT = ("dtype", "torch_dtype", ATTENTION, COMMAND_LINE)
# fields whose values are constants of a script
_CONSTANTS = {"sequence_length": "MAX_LENGTH", "micro_batch": "MICRO_BATCH", "accumulation": "ACCUMULATION"}


# ---- reading


def matches(data: dict[str, Any]) -> bool:
    return KEYS["micro_batch"].name in data or "output_dir" in data


def adopt(data: dict[str, Any], path: Path) -> Adopted:
    """Return the recipe of a Trainer or SFTTrainer run, with model and data if the file names them."""
    keys = Keys(data, path.name)
    trl = bool(_SFT & set(data))
    model = _read_model(keys)
    sharding = _read_sharding(keys, path)
    checkpointing = _read_checkpointing(keys, trl)
    checkpointing = sharding.checkpointing or checkpointing
    assumed = sharding.assumed
    changes: dict[str, Any] = {
        "trainer": "trl" if trl else "transformers",
        **KEYS.read(keys, "micro_batch", "accumulation"),
        **names.read_optim(keys, NAME, "adamw_torch_fused"),
        **names.read_attention(keys, model.take(ATTENTION), ATTENTION),
        **names.read_compile(keys),
        **KEYS.read(keys, "padding"),
        "loss": _read_loss(keys, trl),
        "checkpointing": checkpointing,
        **_read_length(keys, trl, assumed),
        **_read_adapter(keys, assumed),
    }
    changes |= sharding.without_precision | accelerate.read_parallelism(keys, sharding)
    changes["precision"] = _read_precision(keys, model, sharding, changes["method"], trl, assumed)
    names.read_evaluation(keys, changes["micro_batch"])
    names.read_reduction(keys, changes, sharding.kind)
    _read_multiple(keys, changes.get("sequence_length", 0))
    _read_storage(keys, changes, sharding)
    # any key of TRL's other configurations, whatever its value, says that it is not SFT
    others = [n for n in keys.data if any(fnmatchcase(n, p) for p in TRL_OTHER_TASKS)]
    keys.inexpressible += [n for n in others if keys.data[n] is not None] or others
    name, data_name = keys.text("model_name_or_path", "model"), keys.text("dataset_name")
    loading = (f"{MODEL}.{n}" for n in model.rest(MODEL_INIT.harmless)[1] if n not in keys)
    return adopted_from(NAME, keys, TRAINER.harmless, changes, sharding, name, data_name, loading)


def _read_model(keys: Keys) -> Keys:
    """Return how the model is loaded: TRL's model_init_kwargs, or the flat keys of its command line."""
    inner = keys.table(MODEL)
    flat = {n: keys.take(n) for n in ("dtype", "torch_dtype", ATTENTION) if keys.data.get(n) is not None}
    return Keys({**flat, **inner.data}, inner.where)


def _read_sharding(keys: Keys, path: Path) -> Sharding:
    on, block = keys.take("fsdp"), keys.take("fsdp_config")
    if not on and not block:
        return deepspeed.read_setting(keys.take("deepspeed"), path)
    found = accelerate.read_fsdp(keys.table("fsdp_config"), version=2)
    if not on:
        return Sharding()
    options = on.split() if isinstance(on, str) else [word(x) for x in on] if isinstance(on, list) else []
    found.changes |= {_OPTIONS[x][0]: _OPTIONS[x][1] for x in options if x in _OPTIONS}
    found.unknown += ["fsdp"] if any(x.startswith("hybrid") for x in options) else []
    return found


def _read_loss(keys: Keys, trl: bool) -> str:
    kind, liger = word(keys.take(LOSS, default="nll")), keys.flag(LIGER)
    if kind not in ("nll", "chunked_nll"):
        keys.not_expressed(LOSS)
    return "fused" if liger or trl else "full"


def _read_checkpointing(keys: Keys, trl: bool) -> str:
    on = keys.flag(*CHECKPOINTINGS, default=trl)
    newer, older = (f"{name}_kwargs" for name in CHECKPOINTINGS)
    settings = keys.table(newer if newer in keys else older)
    keys.take(older)
    offloads = settings.flag("offload") or keys.flag("activation_offloading")
    if settings.take("every_n_layers", default=1) != 1:
        keys.not_expressed(newer, older)
    if not on:
        keys.not_expressed(*(["activation_offloading"] if offloads else []))
        return "none"
    return "offload" if offloads else "selective" if settings.flag("selective") else "full"


def _read_length(keys: Keys, trl: bool, assumed: list[str]) -> dict[str, int]:
    if trl:
        row = KEYS["sequence_length"]
        return {"sequence_length": keys.number(row.name, OLDER_LENGTH, default=int(row.default))}
    if OLDER_LENGTH in keys:
        return {"sequence_length": keys.number(OLDER_LENGTH, default=2048)}
    assumed.append("TrainingArguments do not hold the sequence length: memfit's own default stands")
    return {}


def _read_multiple(keys: Keys, length: int) -> None:
    """Report a multiple to pad to that makes rows longer than the sequence length."""
    multiple = keys.number(MULTIPLE, default=1)
    if multiple < 1 or length % multiple:
        keys.not_expressed(MULTIPLE)


def _read_storage(keys: Keys, changes: Mapping[str, Any], sharding: Sharding) -> None:
    """Report 4-bit weights stored as uint8 under FSDP, which it does not shard: every card holds the whole base."""
    storage = word(keys.take(STORAGE, default="uint8"))
    four_bit = changes.get("quantization", "none") not in ("none", "int8")
    whole = sharding.kind == "fsdp" and four_bit and storage == "uint8"
    keys.inexpressible += [STORAGE] if whole else []


def _read_adapter(keys: Keys, assumed: list[str]) -> dict[str, Any]:
    four, eight = keys.flag("load_in_4bit"), keys.flag("load_in_8bit")
    kind = keys.text("bnb_4bit_quant_type") or "nf4"
    double = keys.flag("use_bnb_nested_quant", "bnb_4bit_use_double_quant")
    if not (keys.flag("use_peft") or KEYS["lora_rank"].name in keys or four or eight):
        keys.take(
            *(KEYS[name].name for name in ("lora_alpha", "lora_dropout")),
            "lora_target_modules",
            "lora_task_type",
            SAVED,
        )
        return {"method": "full"}
    if word(keys.take("lora_task_type", default=CAUSAL)) != CAUSAL:
        keys.not_expressed("lora_task_type")
    modules = keys.take("lora_target_modules")
    if modules is None:
        assumed.append("no LoRA modules are named: PEFT's default for Llama-like models, q_proj and v_proj")
    return {
        "method": "qlora" if four or eight else "lora",
        "quantization": "int8" if eight else names.read_four_bit(kind, double, keys.where) if four else "none",
        **KEYS.read(keys, "lora_rank", "lora_alpha", "lora_dropout"),
        "lora_targets": ("q_proj", "v_proj") if modules is None else module_names(modules, keys.where),
        "modules_to_save": saved_modules(keys.take(SAVED), keys.where),
    }


def _read_precision(keys: Keys, model: Keys, sharding: Sharding, method: str, trl: bool, assumed: list[str]) -> str:
    """Return the precision from the dtype of the weights and from autocast; DeepSpeed adds a master copy."""
    fp16 = keys.flag("fp16")
    bf16 = keys.flag("bf16", default=trl and not fp16)
    keys.half_open = bf16 and keys.data.get("bf16") in (None, "auto")
    dtype = word(model.take("dtype", "torch_dtype", default="float32" if trl else "")).removeprefix("torch.")
    stored = _DTYPES.get(dtype, "bf16")
    if not dtype and (bf16 or fp16):
        assumed.append(_NO_DTYPE)
    if fp16:
        return "fp16-mixed"
    if bf16 and method == "full" and sharding.kind:
        return ("bf16" if sharding.pure else "bf16-master") if sharding.kind == "deepspeed" else "bf16-mixed"
    if bf16:
        return "bf16-mixed" if stored == "fp32" else "bf16"
    return "bf16" if dtype == "bfloat16" else "fp32"


# ---- writing


def settings(recipe: Recipe, kind: process_layout.Backend, by_trl: bool, key: str) -> dict[str, Any]:
    """Return a recipe as keywords of TrainingArguments, or of TRL's SFTConfig, except how the model is loaded.

    `key`: the name for checkpointing, one of CHECKPOINTINGS.
    """
    mixed = process_layout.numbers(recipe, kind).mixed
    chosen = recipe.checkpointing
    return {
        **(KEYS.write(recipe, "sequence_length", "padding") if by_trl else {}),
        **KEYS.write(recipe, "micro_batch", "accumulation"),
        **process_layout.reduction(recipe),
        key: chosen != "none",
        **({f"{key}_kwargs": {chosen: True}} if chosen not in ("none", "full") else {}),
        **names.optim(recipe, "trl" if by_trl else NAME),
        **names.compiled(recipe),
        "bf16": mixed == "bf16",
        **({"fp16": True} if mixed == "fp16" else {}),
        **({LIGER: True} if recipe.loss == "fused" and not by_trl else {}),
    }


def config(plan: Plan, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe in the keys that the file `data` can have. Raises Unsupported.

    What is no key of such a file, as adapters in TrainingArguments, is left out.
    """
    recipe = plan.recipe
    kind = process_layout.backend(recipe)
    by_trl = recipe.trainer.startswith("trl")
    process_layout.check(recipe, kind, "arguments", *(["trl"] if by_trl else []))
    load, flat = loading(recipe, kind), any(name in data for name in _FLAT)
    return {
        **settings(recipe, kind, by_trl, next((name for name in CHECKPOINTINGS if name in data), CHECKPOINTINGS[1])),
        **({MODEL: load} if MODEL in data or (by_trl and not flat) else load if flat else {}),
        **(_adapter(plan, kind) if COMMAND_LINE in data or "use_peft" in data else {}),
        **_sharding(recipe, kind, plan.job.architecture.model_type),
    }


def loading(recipe: Recipe, kind: process_layout.Backend) -> dict[str, str]:
    """Return the keywords of from_pretrained: the dtype of the weights, and the attention kernel."""
    return {"dtype": process_layout.numbers(recipe, kind).weights, ATTENTION: names.ATTENTION[recipe.attention]}


def precision_note(recipe: Recipe, kind: process_layout.Backend, saved: Mapping[str, str]) -> dict[str, str]:
    """Return what 16 bits save, by the keyword that sets them: autocast's where the weights stay in fp32."""
    numbers = process_layout.numbers(recipe, kind)
    key = numbers.mixed if numbers.weights == "float32" else "dtype"
    return {key: saved["precision"]} if "precision" in saved else {}


def _adapter(plan: Plan, kind: process_layout.Backend) -> dict[str, Any]:
    recipe = plan.recipe
    if recipe.method == "full":
        return {}
    bits = names.bitsandbytes(recipe)
    nested = {"use_bnb_nested_quant": True} if bits.pop("bnb_4bit_use_double_quant", False) else {}
    bits.pop("bnb_4bit_compute_dtype", None)
    if kind == "fsdp" and "load_in_4bit" in bits:  # uint8 storage, the default, is not sharded
        bits[STORAGE] = process_layout.numbers(recipe, kind).weights
    return {
        "use_peft": True,
        **KEYS.write(recipe, "lora_rank", "lora_alpha", "lora_dropout"),
        "lora_target_modules": names.targets(recipe, plan.job.architecture),
        **({SAVED: list(recipe.modules_to_save)} if recipe.modules_to_save else {}),
        **bits,
        **nested,
    }


def _sharding(recipe: Recipe, kind: process_layout.Backend, model_type: str) -> dict[str, Any]:
    if kind == "deepspeed":
        return {"deepspeed": process_layout.DEEPSPEED_FILE}
    if kind != "fsdp":
        return {}
    # transformers 5.23 takes true as well, older versions only these words
    return {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"version": recipe.fsdp_version, **accelerate.fsdp(recipe), **accelerate.wrapped(model_type)},
    }


def in_script(
    settings: Mapping[str, Any], saved: Mapping[str, str], notes: Mapping[str, str] | None = None
) -> list[script.Setting]:
    """Return such keywords as source text, with comments on what they save, and `notes` where they save nothing."""
    values = {KEYS[field].name: constant for field, constant in _CONSTANTS.items()}
    values["fp16"] = "not args.cpu"  # accelerate has no fp16 on a CPU
    comments = {names.ACCELERATOR: "no whole gradients between micro-batches", **(notes or {})}
    for field, keys in (("optimizer", ("optim",)), ("loss", (LIGER,)), ("checkpointing", CHECKPOINTINGS)):
        comments |= dict.fromkeys(keys, saved[field]) if field in saved else {}
    return [(name, values.get(name, literal(value)), comments.get(name, "")) for name, value in settings.items()]


def export(plan: Plan, how: process_layout.Launch | None = None) -> dict[str, str]:
    """Return train.py, requirements.txt and the launcher's files for several cards. Raises Unsupported."""
    return scripted(plan, how, NAME, train)


def scripted(plan: Plan, how: process_layout.Launch | None, target: str, train: Callable[..., str]) -> dict[str, str]:
    """Return the files of a target whose train.py `train` writes. Raises Unsupported."""
    how = how or process_layout.launch_of(plan.recipe)
    kind = kind_of(plan.job.task, target)
    process_layout.check(plan.recipe, target, how.backend)
    files = {
        "train.py": train(plan, how, kind),
        "requirements.txt": script.requirements(plan.recipe, target, how.backend, kind.packages),
    }
    return files | accelerate.files(plan, how)


def train(plan: Plan, how: process_layout.Launch, kind: script.ScriptKind) -> str:
    """Return the text of train.py."""
    saved, rejoin = savings(plan), script.rejoins(plan, how.backend)
    lines = script.opening(plan, how, NAME, VERSIONS, kind, _imports(plan, kind), saved)
    lines += [*_load(plan, kind, saved, how.backend), *_build(plan, kind, saved, how.backend)]
    lines += ["", "", *kind.encode.splitlines()] if kind.encode else []
    return "\n".join([*lines, *script.ending(kind, plan.job.training, rejoin)])


def _imports(plan: Plan, kind: script.ScriptKind) -> dict[str, set[str]]:
    recipe = plan.recipe
    row, embeds = script.task_of(plan), _embeds(plan)
    used = set() if embeds else {row.auto, "PreTrainedModel", "Trainer", "TrainingArguments"}
    used |= {kind.collator.partition("(")[0]} if kind.collator[:1].isupper() else set()
    used |= {"BitsAndBytesConfig"} if recipe.quantization != "none" else set()
    used |= {"AutoConfig"} if row.key == "pretrain" else set()
    used |= {"set_seed"} if recipe.method != "full" else set()
    found = {NAME: used} if used else {}
    found |= {"sentence_transformers": {row.trainer, *_classes(row)}} if embeds else {}
    if recipe.method == "full":
        return found
    peft = {adapter(recipe.adapter).config} | (set() if embeds else {"get_peft_model"})
    return found | {"peft": peft | ({"prepare_model_for_kbit_training"} if _prepares(plan) else set())}


def _embeds(plan: Plan) -> bool:
    return script.task_of(plan).package == EMBEDDINGS


def _classes(row: Task) -> tuple[str, str]:
    """Return the names of a task's trainer and of its arguments."""
    prefix = row.trainer if row.package == EMBEDDINGS else ""
    return f"{prefix}Trainer", f"{prefix}TrainingArguments"


def _prepares(plan: Plan) -> bool:
    # sharded weights must keep one dtype, so embeddings and norms are not cast to fp32 there
    recipe = plan.recipe
    kept = recipe.shard != "parameters" and trainer(recipe.trainer).kbit_prepare and not _embeds(plan)
    return recipe.quantization != "none" and kept


def _load(
    plan: Plan, kind: script.ScriptKind, saved: dict[str, str], backend: process_layout.Backend
) -> list[str]:  # fmt: skip
    recipe, row = plan.recipe, script.task_of(plan)
    notes = {"dtype": "", ATTENTION: saved.get("attention", ""), **precision_note(recipe, backend, saved)}
    words = loading(recipe, backend)
    if not row.language and recipe.attention == "sdpa":  # the default where a model has it, and refused where not
        del words[ATTENTION]
    settings = [(name, literal(value), notes[name]) for name, value in words.items()]
    settings += [("quantization_config", "QUANTIZATION", "")] if recipe.quantization != "none" else []
    settings += [process_layout.ON_HOST] if process_layout.quantised_on_host(recipe) else []
    if _embeds(plan):
        return _embedder(plan, settings)
    plain = row.language and recipe.method == "full"
    opening = "return" if plain else "model ="
    made = "from_config(" if row.key == "pretrain" else "from_pretrained("
    head, *body, end = script.call(f"{opening} {row.auto}.{made}", settings)
    more = ", **words: object" if kind.loading else ""
    body += ["        **words,"] if kind.loading else []
    begun = "AutoConfig.from_pretrained(name),  # random weights" if row.key == "pretrain" else "name,"
    lines = [f"def load_model(name: str{more}) -> PreTrainedModel:", head, f"        {begun}", *body, end]
    if _prepares(plan):  # the Trainer turns checkpointing on itself
        lines.append("    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)")
    lines += [_MEAN] if not row.language else []
    adapted = "get_peft_model(model, ADAPTER)" if recipe.method != "full" else "model"
    return [*lines, *([] if plain else [f"    return {adapted}"]), "", ""]


_ADDED = (
    "    model.add_adapter(ADAPTER)",
    "    for weight in model.parameters():",
    "        if weight.requires_grad:",
    "            weight.data = weight.data.float()  # adapters learn in fp32, as get_peft_model makes them",
)


def _embedder(plan: Plan, settings: list[script.Setting]) -> list[str]:
    """Return load_model() of sentence-transformers: the encoder, with a pooling layer where the model has none."""
    words = ", ".join(f"{literal(name)}: {value}" for name, value, _ in settings)
    note = next((note for _, _, note in settings if note), "")
    return [
        "def load_model(name: str, cpu: bool) -> SentenceTransformer:",
        "    model = SentenceTransformer(",
        "        name,",
        '        device="cpu" if cpu else None,',
        *script.with_comment(f"model_kwargs={{{words}}},", note, " " * 8),
        "    )",
        "    model.max_seq_length = MAX_LENGTH",
        *(_ADDED if plan.recipe.method != "full" else ()),
        "    return model",
        "",
        "",
    ]


# the Trainer (5.23) takes the loss of a model whose forward has **kwargs for one that is summed over an accumulation
_MEAN = "    model.accepts_loss_kwargs = False  # its loss is a mean, which the Trainer divides by ACCUMULATION"


_BUILD = """\
def build(args: argparse.Namespace) -> {trainer}:
{config}
{samples}
{seed}\
{prepare}\
{call}
"""
_AFTER = "after TrainingArguments, so that ZeRO-3 can shard it while loading"
_SEED = "    set_seed(config.seed)  # adapters begin at random, before the Trainer seeds\n"


def _build(
    plan: Plan, kind: script.ScriptKind, saved: dict[str, str], backend: process_layout.Backend
) -> list[str]:  # fmt: skip
    training, embeds = plan.job.training, _embeds(plan)
    trainer, arguments = _classes(script.task_of(plan))
    loaded = "model" if embeds else f"load_model(args.model{', ' if kind.loading else ''}{kind.loading})"
    given: list[script.Setting] = [
        ("model", loaded, "" if embeds else _AFTER),
        ("args", "config", ""),
        ("train_dataset", kind.encoded.format("samples"), ""),
        ("eval_dataset", script.held_out(training, kind.encoded), ""),
        *([("data_collator", kind.collator, ""), ("processing_class", kind.processor, "")] if kind.collator else []),
        *kind.given,
    ]
    return _BUILD.format(
        trainer=trainer,
        config="\n".join(script.call(f"config = {arguments}(", _config(plan, kind, saved, backend))),
        samples="\n".join(script.samples(training)),
        prepare=kind.prepare,
        seed=_SEED if plan.recipe.method != "full" else "",
        call="\n".join(script.call(f"return {trainer}(", given)),
    ).splitlines()


def _config(
    plan: Plan, kind: script.ScriptKind, saved: dict[str, str], backend: process_layout.Backend
) -> list[script.Setting]:
    """Return the arguments; checkpointing, off by default, and an unused bf16 are left out."""
    made = settings(plan.recipe, backend, by_trl=False, key=CHECKPOINTINGS[0])
    left_out = [name for name in (CHECKPOINTINGS[0], *(["bf16"] if "fp16" in made else [])) if made[name] is False]
    made = {name: value for name, value in made.items() if name not in left_out}
    last = script.last(plan.job.training)
    noted = in_script(made, saved, precision_note(plan.recipe, backend, saved))
    return [*script.FIRST, *noted, ("logging_steps", "10", ""), *kind.arguments, *last]
