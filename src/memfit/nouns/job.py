"""The nouns Job (what the user requested), Recipe (what the planner may choose) and Training (no effect on memory)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from memfit.errors import BadInput
from memfit.nouns.architecture import Architecture
from memfit.nouns.gpu import Gpu
from memfit.nouns.task import PLAIN, Shape
from memfit.nouns.zero_settings import parse_zero_conf

Method = Literal["full", "lora", "qlora"]
Precision = Literal["bf16", "bf16-mixed", "bf16-master", "fp16-mixed", "fp32"]
Quantization = Literal["none", "nf4", "nf4-double", "fp4", "int8", "fp8-torchao", "fp8w-torchao", "int8-sdnq"]
Checkpointing = Literal["none", "full", "selective", "offload"]
AttentionKernel = Literal["eager", "sdpa", "flash"]
Loss = Literal["full", "chunked", "fused"]
Offload = Literal["none", "optimizer", "parameters"]
Shard = Literal["none", "optimizer", "gradients", "parameters"]
Loading = Literal["auto", "whole", "host", "sharded"]  # see tables/loading.py
Padding = Literal["longest", "packing"]
Interval = Literal["", "steps", "epoch", "no"]

METHODS = get_args(Method)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a job is trained. Field names are the flag names (with '-') and the keys of recipe.toml.

    precision: what is stored and computed, because "bf16 AdamW" is ambiguous by 2x:
      bf16         weights, gradients and optimizer states in bf16          2+2+4 = 8 B per parameter with AdamW
      bf16-mixed   fp32 weights, bf16 compute under autocast                4+4+8 = 16 B (+ a bf16 copy while in use)
      bf16-master  bf16 weights and gradients, fp32 master copy and states  2+2+4+8 = 16 B, DeepSpeed's; FSDP2 shards
                   fp32 weights and gathers them in bf16, which is bf16-mixed
      fp16-mixed   as bf16-mixed with fp16 and a loss scaler
      fp32         everything in fp32                                       4+4+8 = 16 B
    With LoRA or QLoRA it names the dtype of the frozen base (fp16-mixed: an fp16 base under fp16 autocast); adapters
    follow the trainer (see tables/trainers.py).
    """

    method: Method = "full"
    precision: Precision = "bf16"
    quantization: Quantization = "none"
    adapter: str = "lora"  # a row of tables/adapters.py, where the method has adapters
    lora_rank: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] = ("all-linear",)  # module names, or "all-linear", or "attention"
    modules_to_save: tuple[str, ...] = ()  # modules that PEFT trains whole, in copies, beside the adapters
    optimizer: str = "adamw"  # a row of tables/optimizers.py
    micro_batch: int = 1
    accumulation: int = 1
    sequence_length: int = 2048
    padding: Padding = "longest"
    checkpointing: Checkpointing = "none"
    checkpoint_interval: int = 1  # blocks of a denoiser that SimpleTuner recomputes together
    checkpoint_stride: int = 0  # blocks from the first of such a group to the first of the next; 0: the interval
    keep_gradients: bool = False  # zero them between steps instead of freeing them, as SimpleTuner does
    attention: AttentionKernel = "sdpa"
    compile: bool = False  # torch.compile with Inductor in its default mode
    loss: Loss = "full"
    offload: Offload = "none"
    shard: Shard = "none"
    loading: Loading = "auto"  # where weights are whole before FSDP2 shards them
    fsdp_version: int = 2  # of PyTorch's FSDP, 1 or 2
    num_gpus: int = 1
    context_parallel: int = 1  # GPUs that share each sequence: ring attention, under DeepSpeed Ulysses
    trainer: str = "trl"  # a row of tables/trainers.py, with a version if it matters: "trl==1.3"
    alloc_conf: str = ""  # PYTORCH_ALLOC_CONF: "expandable_segments:True"
    zero_conf: str = ""  # sizes of DeepSpeed's configuration that differ from ZeroSettings: "sub_group_size:0"

    @property
    def tokens(self) -> int:
        """Return T, the tokens in one micro-batch of one GPU, or of the GPUs that share its sequences."""
        return self.micro_batch * self.sequence_length

    @property
    def tokens_each(self) -> int:
        """Return the tokens of a micro-batch on each GPU."""
        return -(-self.tokens // self.context_parallel)

    @property
    def replicas(self) -> int:
        """Return how many micro-batches run at once: one on each GPU, or on the GPUs that share its sequences."""
        return max(self.num_gpus // self.context_parallel, 1)

    @property
    def effective_batch(self) -> int:
        """Return the sequences per optimizer step over all GPUs."""
        return self.micro_batch * self.accumulation * self.replicas

    @property
    def zero(self) -> bool:
        """Return whether DeepSpeed runs it: offloading, ZeRO-1, ZeRO-2 and master copies. Otherwise FSDP2 shards."""
        master = self.precision == "bf16-master" and self.method == "full"
        offloaded = self.offload != "none" and not self.offloaded_by_fsdp
        return master or offloaded or self.shard in ("optimizer", "gradients")

    @property
    def offloaded_by_fsdp(self) -> bool:
        """Return whether FSDP2 keeps the shards in host RAM, as it can of a 4-bit base and DeepSpeed cannot."""
        return self.method == "qlora" and self.offload == "parameters" and self.shard == "parameters"

    def but(self, **changes: Any) -> Recipe:
        """Return the same recipe with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of a sample and, where the first holds messages, the names of a message's keys and roles."""

    fields: tuple[str, ...]  # ("messages",), ("prompt", "completion"), ("instruction", "input", "output") ...
    chat: bool = False  # the first field holds messages
    role: str = "role"
    content: str = "content"
    user: str = "user"
    assistant: str = "assistant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Rate, schedule, length, evaluation and checkpoints. None of it changes memory; the planner only passes it on.

    Field names are the flag names (with '-') and the keys of [training] in recipe.toml.
    """

    learning_rate: float = 0.0  # 0: the method's default, 2e-5, and 2e-4 for adapters
    epochs: float = 1.0
    max_steps: int = -1  # optimizer steps, which override `epochs`; -1: not set
    lr_scheduler: str = ""  # transformers' lr_scheduler_type; "": the framework's default
    warmup: float = -1.0  # optimizer steps; below 1: a share of all; -1: the framework's default
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    seed: int = 42
    save_strategy: Interval = ""  # "": "steps"
    save_steps: float = 0.0  # between checkpoints; below 1: a share; 0: 500 in train.py, 0.1 in memfit train
    save_total_limit: int = 0  # checkpoints that are kept; 0: 2 in train.py
    eval_data: str = ""
    eval_share: float = 0.0  # of the training data, held out for evaluation; from 1: a number of samples
    eval_strategy: Interval = ""  # "": as checkpoints are saved
    eval_steps: float = 0.0  # between evaluations; below 1: a share; 0: as save_steps
    pad_token: str = ""  # "": the tokenizer's own
    eos_token: str = ""
    bos_token: str = ""
    columns: Columns | None = None  # of the data; None: read from the data


AS_USUAL = Training()


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a training file, and what the sequence length cuts off them."""

    count: int
    tokens: int  # of all of them, before cutting
    cut: int  # samples that are longer than the sequence length
    lost: int  # tokens that are cut off


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the user requested. `wanted` holds the recipe fields set by flags, which the planner never changes."""

    architecture: Architecture
    gpu: Gpu
    num_gpus: int = 1
    sequence_length: int = 2048
    effective_batch: int = 16
    method: Literal["auto", "full", "lora", "qlora"] = "auto"
    trainer: str = "trl"
    task: str = "sft"  # a row of tables/tasks.py
    shape: Shape = PLAIN  # of one sample, apart from `sequence_length`
    wanted: tuple[tuple[str, Any], ...] = ()
    stated: tuple[str, ...] = ()  # recipe fields set by the user's file: the ladder starts from their values
    reserve: int = 0  # bytes of the card kept free on purpose
    host_memory: int = 0  # bytes of host RAM of one node; 0: not given
    workers: int = 0  # processes of the DataLoader for each card
    longest_sample: int | None = None  # tokens, from the user's data
    truncated: float | None = None  # share of the user's samples that are longer than `sequence_length`
    samples: Samples | None = None  # of the user's data
    dataset: str = ""
    training: Training = AS_USUAL


_POSITIVE = (
    "lora_rank",
    "lora_alpha",
    "micro_batch",
    "accumulation",
    "sequence_length",
    "num_gpus",
    "context_parallel",
    "checkpoint_interval",
)
_LIMIT = 1 << 24
TRAINING_RANGES: dict[str, tuple[float, float]] = {
    "learning_rate": (1e-12, 100), "epochs": (1e-6, 1e6), "max_steps": (1, 1e9), "save_steps": (1e-6, 1e9),
}  # fmt: skip
# of the fields that no flag sets
FILE_RANGES: dict[str, tuple[float, float]] = {
    "warmup": (0, 1e9), "weight_decay": (1e-9, 100), "max_grad_norm": (0, 1e6), "adam_beta1": (0, 0.999999),
    "adam_beta2": (0, 0.999999), "adam_epsilon": (1e-30, 1), "seed": (0, 2**32 - 1), "save_total_limit": (1, 1e6),
    "eval_share": (1e-6, 1e9), "eval_steps": (1e-6, 1e9),
}  # fmt: skip
SHARES = ("save_steps", "eval_steps", "eval_share")  # below 1 a share of all, from 1 a whole number
_LARGE = (0, 1 << 60)
JOB_RANGES: dict[str, tuple[int, int]] = {  # of the other numbers of a recipe.toml; 0: not known
    "gpu_memory": _LARGE, "reserve": _LARGE, "host_memory": _LARGE, "effective_batch": _LARGE,
    "longest_sample": (0, 1 << 40), "workers": (0, 1 << 16),
}  # fmt: skip
JOB_SIZES = dict.fromkeys(("num_gpus", "sequence_length", "effective_batch"), (1, _LIMIT))  # of a Job
SHAPE_RANGES: dict[str, tuple[float, float]] = {
    "images": (0, _LIMIT), "audio_seconds": (0, 1e6), "target": (1, _LIMIT), "classes": (1, _LIMIT),
    "prompt": (1, _LIMIT), "completion": (1, _LIMIT), "generations": (1, _LIMIT),
}  # fmt: skip
_CHOICES: dict[str, tuple[str, ...]] = {name: get_args(choice) for name, choice in (
    ("method", Method), ("precision", Precision), ("quantization", Quantization), ("checkpointing", Checkpointing),
    ("attention", AttentionKernel), ("loss", Loss), ("offload", Offload), ("shard", Shard), ("loading", Loading),
    ("padding", Padding),
)}  # fmt: skip
MEANT = {  # another tool's name of a choice -> memfit's
    "ddp": "none", "zero1": "optimizer", "zero2": "gradients", "zero3": "parameters", "fsdp": "parameters",
    "fsdp2": "parameters", "flash_attention_2": "flash", "flash2": "flash", "fa2": "flash", "bfloat16": "bf16",
    "float32": "fp32", "4bit": "nf4", "8bit": "int8", "cpu": "optimizer", "liger": "fused",
}  # fmt: skip


def check_values(recipe: Recipe) -> Recipe:
    """Refuse values of a wrong type, choice or range; combinations are checked in tables/combinations.py."""
    for name in _POSITIVE:
        value = getattr(recipe, name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LIMIT:
            flag = "--" + name.replace("_", "-")
            raise BadInput(
                f"{flag} must be a whole number from 1 to {_LIMIT}, not {value!r}", hint=f"for example {flag} 1"
            )
    for name, choices in _CHOICES.items():
        value = getattr(recipe, name)
        if value not in choices:
            flag = "--" + name.replace("_", "-")
            meant = f"{flag} {MEANT[str(value)]}, or " if MEANT.get(str(value)) in choices else ""
            raise BadInput(f"{flag} cannot be {value!r}", hint=f"{meant}choose one of {', '.join(choices)}")
    parse_zero_conf(recipe.zero_conf)
    if not isinstance(recipe.checkpoint_stride, int) or not 0 <= recipe.checkpoint_stride <= _LIMIT:
        raise BadInput(
            f"--checkpoint-stride must be a whole number from 0 to {_LIMIT}, not {recipe.checkpoint_stride!r}",
            hint="twice the interval leaves every second group of blocks as it is",
        )
    if recipe.fsdp_version not in (1, 2) or isinstance(recipe.fsdp_version, bool):
        raise BadInput(f"--fsdp-version must be 1 or 2, not {recipe.fsdp_version!r}", hint="2 is usual")
    for name in ("compile", "keep_gradients"):
        if not isinstance(value := getattr(recipe, name), bool):
            flag = name.replace("_", "-")
            raise BadInput(f"{name} must be true or false, not {value!r}", hint=f"--{flag}, or --no-{flag}")
    for name in ("lora_targets", "modules_to_save"):
        value = getattr(recipe, name)
        if not isinstance(value, tuple) or not all(isinstance(module, str) for module in value):
            raise BadInput(f"{name} must be a tuple of names, not {value!r}", hint=f'{name}=("q_proj", "v_proj")')
    if recipe.method != "full" and not recipe.lora_targets:
        raise BadInput("--lora-targets names no module", hint="all-linear is usual")
    if not 0.0 <= recipe.lora_dropout < 1.0:
        raise BadInput(f"--lora-dropout must be from 0 to below 1, not {recipe.lora_dropout}", hint="0.05 is usual")
    return recipe


def check_training(training: Training) -> Training:
    """Refuse numbers outside TRAINING_RANGES and FILE_RANGES, unless they are the default."""
    for name, (low, high) in (TRAINING_RANGES | FILE_RANGES).items():
        value = getattr(training, name)
        if value == getattr(AS_USUAL, name):
            continue
        if name in TRAINING_RANGES:
            check_range(name, value, low, high)
        elif not low <= value <= high:
            usual = getattr(AS_USUAL, name)
            raise BadInput(f"`{name}` must be from {low:g} to {high:g}, not {value:g}", hint=f"{usual:g} is usual")
    for name in SHARES:
        value = getattr(training, name)
        if value > 1 and value % 1:
            raise BadInput(
                f"`{name}` must be a whole number, or a share of all below 1, not {value:g}", hint=f"{value // 1:g}"
            )
    if training.columns is not None and not training.columns.fields:
        raise BadInput("`columns` names no field", hint='fields = ["messages"]')
    return training


def check_numbers(noun: Any, ranges: dict[str, tuple[int, int]] | dict[str, tuple[float, float]]) -> None:
    """Refuse numbers of a noun outside their ranges; nan is always refused."""
    for name, (low, high) in ranges.items():
        value = getattr(noun, name)
        if not low <= value <= high:
            raise BadInput(f"`{name}` must be from {low:,} to {high:,}, not {value:.9g}", hint="leave it out if unsure")


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Refuse a flag's value outside `low` to `high`; nan is always refused."""
    if not low <= value <= high:
        flag = "--" + name.replace("_", "-")
        raise BadInput(f"{flag} must be from {low:g} to {high:g}, not {value:g}", hint="see: memfit train --help")
    if name in SHARES and value > 1 and value % 1:
        raise BadInput(
            f"--save-steps must be a whole number of steps, or a share of all below 1, not {value:g}",
            hint="--save-steps 0.1",
        )


RECIPE_FIELDS: tuple[str, ...] = tuple(f.name for f in fields(Recipe))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeFile:
    """The contents of recipe.toml. `gpu` and `data` are as the user typed them; "" is unknown.

    `gpu_memory`: bytes of a card whose memory differs from the table, or of which only the memory is known; 0: as in
    the table.
    """

    model: str
    recipe: Recipe
    gpu: str = ""
    gpu_memory: int = 0
    data: str = ""
    effective_batch: int = 0  # requested sequences per optimizer step; 0: the product of the recipe's fields
    longest_sample: int = 0  # tokens, from the user's data; 0: unknown
    reserve: int = 0  # bytes of the card to keep free
    host_memory: int = 0  # bytes of host RAM of one node; 0: not given
    workers: int = 0  # processes of the DataLoader for each card
    not_understood: tuple[str, ...] = ()  # settings of the file it was made from for which no verdict was given
    task: str = "sft"  # a row of tables/tasks.py
    shape: Shape = PLAIN  # of one sample, apart from the recipe's sequence length
    training: Training = AS_USUAL
