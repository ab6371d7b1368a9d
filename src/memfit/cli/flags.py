"""The flags as a table, one row each, shared by all commands; recipe flags are the fields of Recipe.

A second table maps other tools' option names to memfit's flags, for the hint at an unknown option.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from keyword import iskeyword
from typing import Any, get_args, get_type_hints

from memfit.errors import BadInput
from memfit.nouns.job import METHODS, TRAINING_RANGES, Recipe, Training, check_range
from memfit.tables.adapters import key_of
from memfit.units import parse_length

Command = Callable[..., int]


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. `kind` parses the text of its value; `recipe_values` reads choices and lists from text."""

    name: str  # parameter name; the flag is the same with dashes
    kind: Callable[[str], Any]
    help: str
    metavar: str = ""
    default: Any = None  # None: not given
    many: bool = False  # may be given more than once; its value is a tuple

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def off(self) -> str:
        """Return the flag that switches it off."""
        return "--no-" + self.name.replace("_", "-")

    @property
    def parameter(self) -> str:
        """Return the Python name; a keyword gets an underscore."""
        return f"{self.name}_" if iskeyword(self.name) else self.name


@dataclass(frozen=True, slots=True)
class Argument:
    """The positional argument of a command. command: the words after `--` come by themselves, as `command`."""

    name: str
    help: str
    metavar: str
    required: bool = False
    many: bool = False
    command: bool = False


MODEL = Argument(
    "model", "a name from 'memfit models', an org/name on Hugging Face, a model folder or a config.json", "MODEL"
)

_HELP = {
    "method": "What to train: all weights, adapters, or adapters on a quantised base.",
    "adapter": "One of PEFT's adapters, for LoRA and QLoRA; those but lora, rslora and dora need memfit[trace].",
    "precision": "Dtypes of weights, optimizer states and computation; see 'memfit glossary precision'.",
    "quantization": "How the frozen base of QLoRA is stored.",
    "lora_rank": "Rank of the adapters, or what stands for it: blocks, frequencies, virtual tokens.",
    "lora_alpha": "Scale of the adapters; does not change memory.",
    "lora_dropout": "Dropout before the adapters.",
    "lora_targets": "Modules with adapters: names, 'all-linear' or 'attention'.",
    "modules_to_save": "Modules that are trained whole beside the adapters: embed_tokens,lm_head.",
    "optimizer": "A name from 'memfit glossary optimizer', or transformers' `optim`.",
    "micro_batch": "Sequences per forward pass on one GPU.",
    "accumulation": "Forward and backward passes per optimizer step.",
    "sequence_length": "Tokens per sequence; 8k is 8192, 1M is 1048576.",
    "padding": "Pad samples to the longest in the batch, or pack them into full sequences.",
    "checkpointing": "Recompute activations in the backward pass instead of keeping them.",
    "checkpoint_interval": "Blocks of a denoiser that SimpleTuner recomputes together, or one in so many.",
    "checkpoint_stride": "Blocks from one such group to the next; those between keep their activations.",
    "keep_gradients": "Zero gradients between steps and keep them, as SimpleTuner does with a denoiser's.",
    "attention": "The attention kernel.",
    "compile": "Run the model through torch.compile.",
    "loss": "Compute all logits at once, in chunks, or fused with the loss.",
    "offload": "What to keep in host memory.",
    "shard": "What to shard across GPUs: optimizer is ZeRO-1, gradients ZeRO-2, parameters FSDP2 or ZeRO-3.",
    "loading": "Where weights are whole before FSDP2 shards them: on every card, in host RAM, or one at a time.",
    "fsdp_version": "Version of PyTorch's FSDP: 2, or 1 as older files and accelerate's default have it.",
    "num_gpus": "Number of GPUs; --gpu 8xh100 sets it as well.",
    "context_parallel": "GPUs that share each sequence; under DeepSpeed by Ulysses.",
    "trainer": "The training loop, with a version for older ones: trl==1.3.",
    "alloc_conf": "PYTORCH_ALLOC_CONF, for example expandable_segments:True.",
    "zero_conf": "Sizes of DeepSpeed's configuration, for example reduce_bucket_size:500000000.",
}
_METAVAR = {
    "lora_targets": "A,B,C",
    "modules_to_save": "A,B,C",
    "trainer": "trl|transformers|axolotl|llamafactory|ms-swift|torch[==VERSION]",
    "optimizer": "NAME",
    "adapter": "NAME",
    "alloc_conf": "TEXT",
}
_HINTS = get_type_hints(Recipe)
LENGTHS = ("sequence_length",)  # flags that count tokens


def _recipe_flag(name: str) -> Flag:
    hint = _HINTS[name]
    choices = [c for c in get_args(hint) if isinstance(c, str)]
    if choices:
        return Flag(name, str, _HELP[name], "|".join(choices))
    kind = hint if hint in (bool, int, float) else str
    if name in LENGTHS:
        return Flag(name, parse_length, _HELP[name], "TOKENS")
    metavar = {bool: "", int: "N", float: "SHARE"}.get(kind, "TEXT")
    return Flag(name, kind, _HELP[name], _METAVAR.get(name, metavar))


RECIPE: tuple[Flag, ...] = tuple(_recipe_flag(f.name) for f in fields(Recipe))
_AUTO_HELP = "What to train; auto takes the first of full, LoRA and QLoRA that fits."
AUTO: tuple[Flag, ...] = tuple(
    replace(row, help=_AUTO_HELP, metavar=f"auto|{row.metavar}") if row.name == "method" else row for row in RECIPE
)
CARD: tuple[Flag, ...] = (
    Flag("gpu", str, "A card from 'memfit gpus', several (8xh100), or 'local'. Default: this machine's card.", "NAME"),
    Flag("gpu_memory", str, "The card's memory as CUDA reports it, for cards missing from 'memfit gpus'.", "40GiB"),
    Flag("reserve", str, "Memory to leave free on the card.", "1GiB"),
)
HOST: tuple[Flag, ...] = (
    Flag("host_memory", str, "RAM of one machine, for a second verdict. Default with --gpu local: this machine's.",
         "64GiB"),
    Flag("workers", int, "DataLoader processes for each GPU, which take host RAM. Default: 0.", "N"),
)  # fmt: skip
FROM = Flag(
    "from",
    str,
    "Start from a recipe.toml, axolotl, LLaMA-Factory, ms-swift, Trainer, accelerate or DeepSpeed file.",
    "FILE",
)
IGNORE = Flag("ignore", str, "Judge without a key of the file that is not understood; repeatable.", "KEY", many=True)
TASK: tuple[Flag, ...] = (
    Flag("task", str, "What is trained. Default: what the model is usually trained for.", "NAME"),
    Flag("images", int, "Images beside each text, for a vision-language model. Default: 1; 0 is text alone.", "N"),
    Flag("image_size", str, "Width and height of an image. Default: the model's own.", "WxH"),
    Flag("resolution", str, "Width and height of a text-to-image model's images. Default: the model's own.", "WxH"),
    Flag(
        "cache_latents",
        bool,
        "Make latents and text embeddings before the training, without VAE and encoders.",
        default=False,
    ),
    Flag("audio_seconds", float, "Length of a recording, for models without a fixed one. Default: 10.", "N"),
    Flag("target_length", int, "Tokens that a sequence-to-sequence or speech model writes. Default: 128.", "N"),
    Flag("prompt_length", int, "Tokens of a prompt whose answers are sampled. Default: 512.", "N"),
    Flag("completion_length", int, "Tokens of a sampled answer. Default: 512.", "N"),
    Flag("generations", int, "Answers that are sampled for each prompt. Default: 8.", "N"),
    Flag("reference", bool, "Keep a reference model: GRPO's beta above 0, which is 0 by default.", default=False),
)
BATCH = Flag("effective_batch", int, "Sequences per optimizer step over all GPUs.", "N")
DATA: tuple[Flag, ...] = (
    Flag("data", str, "A training file; memory is planned for its longest sample.", "FILE"),
    Flag("tokenizer", str, "A tokenizer.json or its folder, to count tokens exactly, or 'bytes'.", "PATH"),
)
TARGET = Flag(
    "target", str, "The tool that runs the files. Default: that of --from, else trl.",
    "trl|transformers|axolotl|llamafactory|accelerate|deepspeed",
)  # fmt: skip
OUT: tuple[Flag, ...] = (
    Flag("out", str, "Write the files that run the recipe into this folder.", "DIR"),
    TARGET,
    Flag("force", bool, "Overwrite files, and write a recipe even if it does not fit.", default=False),
)
TRAINING: tuple[Flag, ...] = (
    Flag("eval_data", str, "A file to evaluate on at every checkpoint.", "FILE"),
    Flag("epochs", float, "Passes over the data. Default: 1.", "N"),
    Flag("learning_rate", float, "Learning rate. Default: 2e-5, and 2e-4 for adapters.", "RATE"),
    Flag("max_steps", int, "Stop after this many optimizer steps.", "N"),
)
SAVE = Flag("save_tape", str, "Write the run's memory events to this file, for memfit replay.", "FILE")
DEVICE = Flag(
    "device", int, "The GPU of a snapshot. Default: the last that ran out of memory, else the longest history.", "N"
)
COMMON: tuple[Flag, ...] = (
    Flag("json", bool, "Print JSON; sizes are whole bytes.", default=False),
    Flag("debug", bool, "Show tracebacks.", default=False),
)


def takes(*rows: Flag, argument: Argument | None = None) -> Callable[[Command], Command]:
    """Declare a command's flags and argument. The command receives each by name; a flag not given is its default."""

    def mark(function: Command) -> Command:
        TAKEN[function] = (rows, argument)
        return function

    return mark


TAKEN: dict[Command, tuple[tuple[Flag, ...], Argument | None]] = {}


def recipe_values(flags: Mapping[str, Any], auto: bool = False) -> dict[str, Any]:
    """Return the recipe fields among the given flags, as Recipe stores them; --method auto is left out.

    auto: the command accepts `--method auto`, so the error for a wrong method lists it.
    """
    method = flags.get("method")
    if auto and method is not None and method not in ("auto", *METHODS):
        raise BadInput(f"--method cannot be {method!r}", hint=f"choose one of auto, {', '.join(METHODS)}")
    found = {row.name: flags[row.name] for row in RECIPE if flags.get(row.name) is not None}
    if found.get("method") == "auto":
        del found["method"]
    if "adapter" in found:
        found["adapter"] = key_of(found["adapter"])
    for name, usual in (("lora_targets", "q_proj,v_proj"), ("modules_to_save", "embed_tokens,lm_head")):
        if name in found:
            found[name] = tuple(part.strip() for part in found[name].split(",") if part.strip())
            if not found[name]:
                flag = "--" + name.replace("_", "-")
                raise BadInput(f"{flag} names no module", hint=f"for example {flag} {usual}")
    return found


def check_ranges(flags: Mapping[str, Any], ranges: Mapping[str, tuple[float, float]] = TRAINING_RANGES) -> None:
    """Refuse given numbers outside their ranges."""
    for name, (low, high) in ranges.items():
        if flags.get(name) is not None:
            check_range(name, flags[name], low, high)


def training_of(flags: Mapping[str, Any], base: Training) -> Training:
    """Return `base` with the given flags; --epochs also resets the number of steps, --save-steps how it saves."""
    given = {f.name: flags[f.name] for f in fields(Training) if flags.get(f.name) is not None}
    steps = {"max_steps": -1} if "epochs" in given else {}
    saves = {"save_strategy": ""} if "save_steps" in given else {}
    return replace(base, **steps | saves | given)


def typed(flags: Mapping[str, Any], rows: Iterable[Flag]) -> list[str]:
    """Return the flags among `rows` that were given, as they are typed."""
    words: list[str] = []
    for row in rows:
        value = flags.get(row.parameter)
        if value is not None and value != row.default:
            if row.kind is bool:
                words.append(row.flag if value else row.off)
            else:
                words += [word for one in (value if row.many else [value]) for word in (row.flag, str(one))]
    return words


def as_flags(recipe: Recipe) -> list[str]:
    """Return the flags that make this recipe from the defaults: ['--method', 'lora', ...]."""
    words: list[str] = []
    for field in fields(Recipe):
        value = getattr(recipe, field.name)
        if value == field.default:
            continue
        if isinstance(value, bool):
            words.append(("--" if value else "--no-") + field.name.replace("_", "-"))
            continue
        text = ",".join(value) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else str(value)
        words += ["--" + field.name.replace("_", "-"), text]
    return words


# memfit's flag -> names in transformers, TRL, PEFT, axolotl, LLaMA-Factory, DeepSpeed and torchrun, and common guesses
_NAMES = {
    "--micro-batch": "batch batch-size bs per-device-train-batch-size per-device-batch-size micro-batch-size"
    " train-batch-size",
    "--accumulation": "gradient-accumulation-steps gradient-accumulation grad-accum grad-accumulation"
    " accumulation-steps grad-acc",
    "--effective-batch": "global-batch-size global-batch total-batch-size",
    "--sequence-length": "seq seq-len seq-length sequence-len max-length max-seq-length max-seq-len cutoff-len"
    " context-length context ctx model-max-length block-size",
    "--checkpointing full": "gradient-checkpointing grad-checkpointing activation-checkpointing recompute",
    "--lora-rank": "rank lora-r r lora-dim",
    "--lora-targets": "target-modules lora-target lora-target-modules lora-target-linear",
    "--learning-rate": "lr",
    "--epochs": "num-train-epochs num-epochs",
    "--precision": "dtype torch-dtype mixed-precision amp bf16",
    "--precision fp16-mixed": "fp16",
    "--precision fp32": "fp32 float32",
    "--quantization": "quant quantize bits quantization-bit",
    "--quantization nf4": "load-in-4bit 4bit",
    "--quantization int8": "load-in-8bit 8bit",
    "--method lora": "lora use-lora peft use-peft",
    "--adapter": "tuner peft-type adapter-type",
    "--adapter dora": "use-dora dora",
    "--adapter rslora": "use-rslora rslora",
    "--method qlora": "qlora",
    "--method full": "full full-finetune",
    "--attention": "attn attn-implementation",
    "--attention flash": "flash-attn flash-attention use-flash-attn flash-attn-2",
    "--optimizer": "optim",
    "--loss fused": "liger use-liger-kernel",
    "--padding packing": "packing sample-packing",
    "--shard": "zero zero-stage deepspeed ds-config strategy",
    "--shard parameters": "fsdp",
    "--offload": "cpu-offload offload-optimizer fsdp-offload-params",
    "--num-gpus": "gpus n-gpus ngpus world-size num-processes nproc-per-node nproc",
    "--gpu-memory": "vram gpu-mem memory",
    "--host-memory": "ram host-ram cpu-memory cpu-ram system-memory",
    "--workers": "dataloader-num-workers num-workers dataloader-workers",
    "--compile": "torch-compile",
    "--data": "dataset train-file data-path train-data train-dataset",
    "--eval-data": "eval-dataset eval-file val-data validation-file",
    "--out": "output-dir output output-path",
    "--resume": "resume-from-checkpoint",
    "--report": "sarif junit markdown",
}
MEANT_FLAGS: dict[str, str] = {f"--{name}": flag for flag, names in _NAMES.items() for name in names.split()}


def meant_flag(option: str) -> str:
    """Return memfit's flag (with a value where the name implies one) for another tool's option; "" if unknown."""
    return MEANT_FLAGS.get(option.replace("_", "-").lower(), "")
