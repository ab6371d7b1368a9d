"""Combinations of recipe values that are impossible, each with the reason; a new rule is one row."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_type_hints

from memfit.errors import BadInput
from memfit.nouns.architecture import Architecture
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Recipe
from memfit.tables.adapters import adapter
from memfit.tables.liger_kernels import LIGER
from memfit.tables.loading import NOT_QUANTISED, choices
from memfit.tables.optimizers import optimizer
from memfit.tables.precisions import backend
from memfit.tables.quantization import QUANTIZATIONS
from memfit.tables.tasks import TASKS
from memfit.tables.trainers import trainer

Rule = Callable[[Recipe, Architecture | None, Gpu | None], bool]
CardRule = Callable[[Recipe, Gpu], bool]
# offload -> the values of `shard` it needs on several GPUs
OFFLOADS = {"optimizer": ("optimizer", "gradients", "parameters"), "parameters": ("parameters",)}

# Models whose router is a linear layer that returns a tuple: with "all-linear" PEFT 0.21 adapts it and the first
# forward pass fails.
ROUTERS = ("llama4_text", "phimoe")
# Models on which TRL 1.16 fails: the config of llama4_text has another name for num_experts, and TRL confuses the head
# of phimoe with its base.
NOT_BY_TRL = ("llama4_text", "phimoe")


@dataclass(frozen=True, slots=True)
class Impossible:
    """A combination that is refused when `when` holds."""

    when: Rule
    why: str
    hint: str


@dataclass(frozen=True, slots=True)
class Absent:
    """Something a kind of card, or its software, cannot do."""

    when: CardRule
    why: str
    hint: str


def _older(g: Gpu, major: int, minor: int) -> bool:
    return bool(g.compute_capability and g.compute_capability < (major, minor))


def _bitsandbytes(r: Recipe) -> bool:
    return optimizer(r.optimizer).package == "bitsandbytes"


# Models whose linear layers are a class of their own, of which transformers 5 quantises none (it asks for
# `type(module) is nn.Linear`)
OWN_LINEARS = ("falcon",)


def _quantised_elsewhere(r: Recipe, a: Architecture | None) -> bool:
    """Return whether the base is stored as SimpleTuner does, and the model is no denoiser of images."""
    row = QUANTIZATIONS.get(r.quantization)
    return a is not None and a.task != "diffusion" and row is not None and row.images


def _nothing_quantised(r: Recipe, a: Architecture | None) -> bool:
    by = trainer(r.trainer)
    before = (by.name == "transformers" and by.since < (5,)) or (by.name == "trl" and by.since < (1, 7))
    return r.method == "qlora" and a is not None and a.model_type in OWN_LINEARS and not before


def _other_task(a: Architecture | None) -> bool:
    """Return whether the model is trained for a task of which SFTTrainer knows nothing."""
    return a is not None and not TASKS[a.trained_for].language and TASKS[a.trained_for].trainer != "SFT"


def _other_trainer(r: Recipe, a: Architecture | None) -> bool:
    """Return whether a trainer of TRL runs the job that is not SFTTrainer."""
    return _other_task(a) and trainer(r.trainer).loop == "trl"


def _new_layer_adapted(a: Architecture) -> bool:
    """Return whether PEFT 0.21 leaves a new layer among all linear ones: it knows `score` and `classifier` of texts."""
    others = any(w.name.startswith("pre_classifier") for w in a.head)
    return a.trained_for == "token-classification" or (a.trained_for == "classification" and others)


def _triton_loss(r: Recipe) -> bool:
    """Return whether the loss needs Triton, as every fused loss but TRL's does."""
    return r.loss == "fused" and trainer(r.trainer).loop == "transformers"


def _adapters_on_fused_experts(r: Recipe, a: Architecture) -> bool:
    """Return whether experts have both adapters and Liger's kernel, which reads what PEFT 0.21's ParamWrapper lacks."""
    fused = (
        r.loss == "fused" and trainer(r.trainer).liger_layers and a.model_type in LIGER and LIGER[a.model_type].experts
    )
    return (
        fused and r.method != "full" and r.lora_targets == ("all-linear",) and any(x.mlp.kind == "moe" for x in a.kinds)
    )


def head_apart(r: Recipe, a: Architecture) -> bool:
    """Return whether FSDP2 leaves the head sharded while a fused loss multiplies with it.

    accelerate 1.15 groups norm and head, but looks for the norm in the attribute that base_model_prefix names
    (fsdp_utils.py, _find_final_norm): of a PeftModel `model` is the whole language model, while `gpt_neox` and
    `transformer` are found within it. A fused loss never calls the head, so without the norm nothing gathers it; a tied
    one is gathered with the embedding. TRL 1.16 gathers
    it by itself (trainer/utils.py, `weight.full_tensor()`), on the CPU where it is offloaded. Liger does not, and fails
    in the first forward. axolotl's own code leaves the head to the root's group.
    """
    by = trainer(r.trainer)
    fused = by.name in ("trl", "transformers", "llamafactory") and by.head(r.loss) in ("fused", "liger")
    with_norm = any(not w.name.startswith("model.") for w in a.final)
    return fused and r.method != "full" and backend(r) == "fsdp" and not a.tied and not with_norm


IMPOSSIBLE: tuple[Impossible, ...] = (
    Impossible(lambda r, a, g: r.method == "qlora" and r.quantization == "none",
               "QLoRA needs a quantised base", "take --quantization nf4-double, or --method lora"),
    Impossible(lambda r, a, g: r.checkpoint_interval > 1 and a is not None and a.task != "diffusion",
               "no trainer of language models checkpoints groups of blocks", "take --checkpoint-interval 1"),
    Impossible(lambda r, a, g: r.keep_gradients and a is not None and a.task != "diffusion",
               "trainers of language models free gradients after each step", "take --no-keep-gradients"),
    Impossible(lambda r, a, g: r.checkpoint_interval > 1 and r.checkpointing == "none",
               "no block is checkpointed, so none are in groups",
               "take --checkpointing full, or --checkpoint-interval 1"),
    Impossible(lambda r, a, g: r.checkpoint_stride > 0 and r.checkpoint_interval == 1,
               "a stride is the distance between groups of checkpointed blocks, and there are no groups",
               "take --checkpoint-stride 0"),
    Impossible(lambda r, a, g: 0 < r.checkpoint_stride < r.checkpoint_interval,
               "groups of checkpointed blocks overlap where one begins before the last ends",
               "take --checkpoint-stride 0"),
    Impossible(lambda r, a, g: r.method == "full" and r.quantization != "none",
               "quantised weights cannot be trained by full fine-tuning",
               "take --method qlora, or --quantization none"),
    Impossible(lambda r, a, g: r.method == "lora" and r.quantization != "none",
               "LoRA on a quantised base is QLoRA", "take --method qlora"),
    Impossible(lambda r, a, g: _quantised_elsewhere(r, a),
               "no trainer of language models stores a base like this",
               "take --quantization nf4-double or int8"),
    Impossible(lambda r, a, g: optimizer(r.optimizer).images and a is not None and a.task != "diffusion",
               "no trainer of language models has SimpleTuner's optimizer", "take --optimizer adamw or adamw-8bit"),
    Impossible(lambda r, a, g: _nothing_quantised(r, a),
               "transformers 5 quantises no layer of this model, whose linear layers are a class of its own",
               "take --method lora --quantization none"),
    Impossible(lambda r, a, g: r.method == "qlora" and not adapter(r.adapter).on_4bit
               and (a is None or a.task != "diffusion"),  # whose LoKr is LyCORIS'
               "PEFT does not put this adapter on quantised layers",
               "take --method lora --quantization none, or --adapter lora"),
    Impossible(lambda r, a, g: r.method != "full" and bool(adapter(r.adapter).trainer)
               and trainer(r.trainer).loop != adapter(r.adapter).trainer,
               "TRL's loss does not run this adapter", "take --trainer transformers"),
    Impossible(lambda r, a, g: bool(r.modules_to_save) and r.method == "full",
               "full fine-tuning trains every module", "take --method lora, or leave --modules-to-save out"),
    Impossible(lambda r, a, g: bool(r.modules_to_save) and (r.shard != "none" or r.zero),
               "modules trained whole beside adapters are planned on cards that share nothing out",
               "take --shard none --offload none, or memfit trace train.py runs your own script"),
    Impossible(lambda r, a, g: r.attention == "flash" and r.precision == "fp32",
               "FlashAttention works in 16 bits only", "take --precision bf16-mixed or --attention sdpa"),
    Impossible(lambda r, a, g: r.attention == "sdpa" and a is not None and not all(x.attention.sdpa for x in a.kinds),
               "transformers refuses SDPA for this model", "take --attention eager"),
    Impossible(lambda r, a, g: r.loss == "fused" and trainer(r.trainer).liger_layers and a is not None
               and a.model_type not in LIGER,
               "Liger fuses no loss of this model: use_liger_kernel would leave it as it is",
               "take --loss full, or --trainer trl"),
    Impossible(lambda r, a, g: a is not None and _adapters_on_fused_experts(r, a),
               "Liger's kernel for experts does not run with PEFT's adapters on them",
               "take --lora-targets attention, --loss full or --trainer trl"),
    Impossible(lambda r, a, g: a is not None and a.model_type in ROUTERS and r.method != "full"
               and r.lora_targets == ("all-linear",),
               "PEFT's adapter on the router of this model fails in the first forward pass",
               "take --lora-targets attention"),
    Impossible(lambda r, a, g: a is not None and a.model_type in NOT_BY_TRL and r.trainer == "trl",
               "TRL's loss does not run this model", "take --trainer transformers"),
    Impossible(lambda r, a, g: r.shard != "none" and r.num_gpus == 1,
               "sharding needs more than one GPU", "take --num-gpus 2, or --shard none (one GPU can --offload)"),
    Impossible(lambda r, a, g: bool(r.num_gpus % r.context_parallel),
               "GPUs that share sequences come in equal groups", "take --context-parallel 1"),
    Impossible(lambda r, a, g: r.context_parallel > 1 and r.shard != "parameters",
               "accelerate shares sequences under FSDP2 or ZeRO-3 only", "add --shard parameters"),
    Impossible(lambda r, a, g: r.context_parallel > 1 and (r.attention == "eager" or r.padding == "packing"
                                                           or (r.attention == "flash" and not r.zero)),
               "context parallelism takes SDPA (Ulysses also flash) over unpacked samples",
               "take --attention sdpa --padding longest, or --context-parallel 1"),
    Impossible(lambda r, a, g: r.context_parallel > 1 and a is not None and any(
                   x.attention.kind == "linear" or x.attention.window or x.attention.code or not x.attention.sdpa
                   for x in a.kinds),
               "context parallelism runs plain causal attention only, which this model does not have",
               "take --context-parallel 1"),
    Impossible(lambda r, a, g: r.zero and r.precision == "bf16-mixed",
               "DeepSpeed keeps 16-bit weights with an fp32 master copy, not fp32 weights under autocast",
               "take --precision bf16-master, or --precision bf16, or --shard parameters --offload none"),
    Impossible(lambda r, a, g: r.offload != "none" and r.num_gpus > 1 and r.shard not in OFFLOADS[r.offload],
               "on several GPUs DeepSpeed offloads what ZeRO has shared out",
               "take --shard gradients --offload optimizer, or --shard parameters --offload parameters"),
    Impossible(lambda r, a, g: r.method == "qlora" and r.offload == "parameters" and not r.offloaded_by_fsdp,
               "only FSDP2 offloads bitsandbytes weights to the host, and it needs several GPUs",
               "take --shard parameters --num-gpus 2, --offload optimizer, or --method lora"),
    Impossible(lambda r, a, g: r.offload != "none" and optimizer(r.optimizer).key not in ("adamw", "adamw-foreach"),
               "the step over offloaded states is AdamW on the CPU", "take --optimizer adamw, or --offload none"),
    Impossible(lambda r, a, g: r.offload != "none" and r.method == "full" and r.precision == "bf16",
               "DeepSpeed's CPU Adam keeps fp32 weights and states", "take --precision bf16-master, or --offload none"),
    Impossible(lambda r, a, g: r.shard == "parameters" and _bitsandbytes(r) and r.zero,
               "memfit does not know what states bitsandbytes optimizers have on ZeRO-3's flat shards",
               "take --optimizer adamw, or --shard gradients"),
    Impossible(lambda r, a, g: r.shard == "parameters" and _bitsandbytes(r) and r.method != "full",
               "adapters on sharded weights are counted as FSDP2 shards them, those under ZeRO-3 too, and bitsandbytes "
               "optimizers do not run on FSDP2's shards",
               "take --optimizer adamw-8bit-torchao, or --shard gradients"),
    Impossible(lambda r, a, g: r.shard == "parameters" and _bitsandbytes(r),
               "bitsandbytes optimizers do not run on FSDP2's sharded weights",
               "take --optimizer adamw-8bit-torchao, or --shard gradients"),
    Impossible(lambda r, a, g: a is not None and trainer(r.trainer).head(r.loss) == "liger" and head_apart(r, a),
               "accelerate shards the head of an adapted model alone, and Liger's fused loss reads its weight as it is",
               "take --loss full, --trainer trl, or --shard gradients"),
    Impossible(lambda r, a, g: r.shard != "none" and bool(optimizer(r.optimizer).rank_of),
               "low-rank optimizers need whole matrices, sharding cuts them",
               "take --optimizer adamw-8bit-torchao, or --shard none"),
    Impossible(lambda r, a, g: r.shard == "parameters" and r.quantization == "int8",
               "int8 weights cannot be sharded", "take --quantization nf4-double, or --shard none"),
    Impossible(lambda r, a, g: r.loading == "sharded" and bool(choices(r)) and r.method == "qlora",
               f"quantised weights are not sharded while they are loaded: {NOT_QUANTISED}", "take --loading host"),
    Impossible(lambda r, a, g: r.loading == "whole" and bool(choices(r)) and r.method != "qlora",
               "FSDP2 never has weights that are not quantised whole on a card", "take --loading host, or sharded"),
    Impossible(lambda r, a, g: optimizer(r.optimizer).in_backward and (r.accumulation > 1 or r.num_gpus > 1),
               "an optimizer in the backward pass sees one micro-batch on one GPU",
               "take --accumulation 1 --num-gpus 1 --shard none"),
    Impossible(lambda r, a, g: optimizer(r.optimizer).in_backward and trainer(r.trainer).name != "torch",
               "only a hand-written loop can step in the backward pass", "take --trainer torch, or --optimizer adamw"),
    Impossible(lambda r, a, g: bool(optimizer(r.optimizer).rank_of) and r.method != "full",
               "low-rank optimizers project full gradients; LoRA has none",
               "take --optimizer adamw, or --method full --quantization none"),
    Impossible(lambda r, a, g: r.precision == "bf16-master" and r.method != "full",
               "master weights belong to trained weights; a frozen base has none", "take --precision bf16"),
    Impossible(lambda r, a, g: r.method == "qlora" and r.precision == "bf16-mixed" and r.quantization == "int8",
               "LLM.int8() computes in 16 bits", "take --precision bf16"),
    Impossible(lambda r, a, g: r.method != "full" and r.lora_targets == ("all-linear",) and a is not None
               and _new_layer_adapted(a),
               "PEFT's \"all-linear\" adapts the new classifier too, which is trained whole",
               "take --lora-targets attention, or --method full"),
    Impossible(lambda r, a, g: r.method == "lora" and r.precision == "fp16-mixed" and a is not None
               and bool(TASKS[a.trained_for].new_modules),
               "the new head beside a base in fp16 has fp16 gradients, which PyTorch's loss scaler refuses",
               "take --method full, or a card with bf16 units"),
    Impossible(lambda r, a, g: a is not None and a.recording is not None and a.shape.target > a.recording.longest,
               "the model writes no more than {a.recording.longest:,} tokens",
               "take --target-length {a.recording.longest} or less"),
    # TRL 1.16: `packing` is a field of SFTConfig alone, only SFTTrainer reads `selective`, and `loss_type` names
    # another thing in each of the other trainers
    Impossible(lambda r, a, g: r.padding == "packing" and _other_task(a),
               "only TRL's SFTTrainer packs samples", "take --padding longest"),
    Impossible(lambda r, a, g: r.checkpointing == "selective" and _other_task(a),
               "only TRL's SFTTrainer checkpoints selectively: the others compute the whole block again",
               "take --checkpointing full"),
    # TRL 1.16, models/utils.py, disable_gradient_checkpointing; the trainer had taken `offload` out of the keywords
    Impossible(lambda r, a, g: r.checkpointing == "offload" and _other_trainer(r, a) and a is not None
               and a.trained_for in ("dpo", "kto", "grpo", "rloo"),
               "TRL switches checkpointing off for a pass of the reference, and on again without the offloading",
               "take --checkpointing full"),
    Impossible(lambda r, a, g: r.loss != "full" and _other_trainer(r, a),
               "the trainer of this task has a loss of its own", "take --loss full"),
    Impossible(lambda r, a, g: a is not None and bool(a.max_positions) and a.learned_positions
               and r.sequence_length > a.max_positions,
               "the model has {a.max_positions:,} positions", "take --sequence-length {a.max_positions}"),
)  # fmt: skip

# What cards cannot do. Sources: the support table of bitsandbytes 0.50, its backends/hpu (nf4 alone is dequantised
# there) and its CUDA requirements; flash-attn's (CUDA and ROCm); Triton's back ends (CUDA, ROCm, XPU).
ABSENT: tuple[Absent, ...] = (
    Absent(lambda r, g: not g.bf16 and r.precision.startswith("bf16"),
           "this card has no bf16 units (compute capability below 8.0)", "take --precision fp16-mixed"),
    Absent(lambda r, g: _older(g, 8, 0) and r.attention == "flash",
           "FlashAttention-2 needs compute capability 8.0", "take --attention sdpa"),
    Absent(lambda r, g: g.platform not in ("cuda", "rocm") and r.attention == "flash",
           "FlashAttention-2 is written for CUDA and ROCm", "take --attention sdpa"),
    Absent(lambda r, g: _older(g, 7, 5) and r.quantization == "int8",
           "LLM.int8() needs compute capability 7.5", "take --quantization nf4-double"),
    Absent(lambda r, g: g.platform in ("hpu", "mps") and _bitsandbytes(r),
           "bitsandbytes has no optimizers for Gaudi and Apple GPUs", "take --optimizer adamw, or adafactor"),
    Absent(lambda r, g: g.platform == "hpu" and r.quantization == "fp4",
           "bitsandbytes computes with nf4 alone on Gaudi", "take --quantization nf4-double"),
    Absent(lambda r, g: g.platform in ("hpu", "mps") and _triton_loss(r),
           "Liger's fused loss needs Triton, which has no Gaudi or Apple back end",
           "take --loss chunked, or --trainer trl"),
    Absent(lambda r, g: g.unified and (r.offload != "none" or r.checkpointing == "offload"),
           "this card shares the host's memory: offloading frees nothing",
           "take --offload none and --checkpointing full"),
    Absent(lambda r, g: g.platform == "mps" and r.num_gpus > 1,
           "a Mac has one GPU", "take --num-gpus 1"),
)  # fmt: skip


def check(recipe: Recipe, architecture: Architecture | None = None, gpu: Gpu | None = None) -> Recipe:
    """Return the recipe unchanged. Raises BadInput with the reason if it is impossible."""
    reason = refusal(recipe, architecture, gpu)
    if reason is not None:
        why = reason.why.format(a=architecture)
        raise BadInput(why, hint=_hint(reason, recipe, architecture, gpu))
    return recipe


def refusal(
    recipe: Recipe, architecture: Architecture | None = None, gpu: Gpu | None = None
) -> Impossible | Absent | None:
    """Return the first rule a recipe breaks, or None."""
    broken = next((rule for rule in IMPOSSIBLE if rule.when(recipe, architecture, gpu)), None)
    return broken or (absent(recipe, gpu) if gpu else None)


def absent(recipe: Recipe, gpu: Gpu) -> Absent | None:
    """Return the first thing a recipe needs that the card does not have, or None."""
    return next((rule for rule in ABSENT if rule.when(recipe, gpu)), None)


# ---- hints that work ----

_FLAG = re.compile(r"(?<!-)(--[a-z-]+) ([\w-]+)")
_KINDS = get_type_hints(Recipe)
MOST_CHANGES = 12  # in a hint


def _hint(rule: Impossible | Absent, recipe: Recipe, a: Architecture | None, gpu: Gpu | None) -> str:
    """Return the ways out of a refusal that a rule names, each with all else that it needs; those without are left out.

    Where no way leads out, it is the rule's own hint.
    """
    text, found = rule.hint.format(a=a), []
    for way, changes in _ways(text, a):
        if not changes:  # words for the reader, which stand with what they follow
            return text
        needed = _followed(recipe, changes, a, gpu)
        if needed == changes:
            found.append(way)
        elif needed:
            flags = (f"--{name.replace('_', '-')} {value}" for name, value in needed.items())
            found.append(" ".join(flags))
    return f"take {', or '.join(dict.fromkeys(found)).removeprefix('take ')}" if found else text


def _ways(hint: str, a: Architecture | None) -> list[tuple[str, dict[str, str]]]:
    """Return the ways of a hint, each with the fields that its flags set, less trainers that do not run the task."""
    found = [(way, _changes(way)) for way in re.split(r",? or (?=--)|, (?=--)", hint)]
    if a is None or not _other_task(a):
        return found
    by = TASKS[a.trained_for].by
    return [(way, changes) for way, changes in found if trainer(changes.get("trainer", by)).loop == by]


def _changes(way: str) -> dict[str, str]:
    pairs = {flag.removeprefix("--").replace("-", "_"): value for flag, value in _FLAG.findall(way)}
    return {name: value for name, value in pairs.items() if name in _KINDS}


def _typed(name: str, value: str) -> object:
    kind = _KINDS[name]
    return int(value) if kind is int else tuple(value.split(",")) if name == "lora_targets" else value


def _followed(recipe: Recipe, changes: dict[str, str], a: Architecture | None, gpu: Gpu | None) -> dict[str, str]:
    """Return the changes with those that they need in turn, preferably none that is taken back; {} if none works."""
    done = dict(changes)
    for _ in range(MOST_CHANGES):
        tried = recipe.but(**{name: _typed(name, value) for name, value in done.items()})
        reason = refusal(tried, a, gpu)
        if reason is None:
            return done
        ways = [found for _, found in _ways(reason.hint.format(a=a), a) if found]
        done |= next((way for way in ways if not any(done.get(n, v) != v for n, v in way.items())), (*ways, {})[0])
    return {}
