"""What a recipe stores in how many bytes per element, which weights get an adapter, and which attention kernel runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memfit.closed_form.style import Kernel
from memfit.errors import TRACE_HINT, Unsupported
from memfit.nouns.architecture import Architecture, Attention, Weight
from memfit.nouns.job import Recipe
from memfit.tables.cuda_kernels import Capability, SdpaCall, sdpa_kernel
from memfit.tables.precisions import BYTES, Meaning, backend, meaning
from memfit.tables.trainers import Trainer, trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Widths in bytes per element."""

    weight: int  # stored base weights
    autocast: int  # compute dtype under autocast, 0 when off
    # embeddings, norms and head beside a quantised base: FSDP2 requires one dtype in a group, so nothing is upcast
    # there, and DeepSpeed casts the fp32 copies back (runtime/engine.py, _configure_distributed_model)
    other: int
    residual: int  # hidden states between blocks
    adapter: int
    saved: int  # modules that PEFT trains whole beside the adapters, in copies of the dtype of the originals
    master: int  # extra fp32 copy of trained weights, 0 when none
    gradient: int
    state: int  # states of an optimizer that keeps them as wide as the parameter
    made: int = 0  # of adapters that PEFT makes wider than the trainer keeps them; 0: they stay as they are made
    adapts_on_card: bool = False  # PEFT makes adapters of weights that are on the card already
    magnitude: int = 0  # of DoRA's magnitudes, which PEFT and TRL leave in fp32; 0: the adapters have none
    whole: int = 2  # weights that are never quantised (Weight.whole), as they are loaded
    quantised_head: bool = False  # the head is stored like the linear layers of the blocks


DORA, MAGNITUDE = "dora", "lora_magnitude_vector"


def numerics(recipe: Recipe, trainer: Trainer) -> Numerics:
    """Return the widths of a recipe under a trainer."""
    meant, quantised = meaning(recipe), recipe.method == "qlora"
    weight = BYTES[meant.stored]
    autocast = meant.autocast == "always" or (meant.autocast == "if the trainer does" and trainer.autocast)
    adapter = _adapter_width(meant, trainer, quantised)
    other = 4 if quantised and trainer.kbit_prepare and backend(recipe) in ("plain", "ddp") else weight
    saved = 4 if trainer.trained_fp32 else min(adapter, other) if quantised else other
    embedding = any("emb" in name or name == "wte" for name in recipe.modules_to_save)
    return Numerics(
        weight=weight, autocast=BYTES[meant.computed] * autocast, other=other,
        residual=max(saved, other) if embedding else other, adapter=adapter, saved=saved,
        master=4 * meant.master, gradient=weight, made=4 * (quantised and adapter < 4 and trainer.adapter_fp32),
        adapts_on_card=quantised or trainer.loop == "torch", state=4 if meant.master else weight,
        magnitude=4 * (recipe.method != "full" and recipe.adapter == DORA),
        whole=4 if meant.stored == "fp16" else weight, quantised_head=quantised and trainer.quantised_head,
    )  # fmt: skip


def _adapter_width(meant: Meaning, trainer: Trainer, quantised: bool) -> int:
    """Return the bytes per element of adapters. TRL's QLoRA adapters are bf16 even where the base is fp32."""
    if meant.adapters == "fp32" and trainer.autocast:
        return 4
    if meant.adapters != "stored" and (trainer.qlora_adapter_fp32 if quantised else trainer.adapter_fp32):
        return 4
    return 2 if quantised and trainer.autocast else BYTES[meant.stored]


def within_passes(n: Numerics, r: Recipe, t: Trainer) -> Numerics:
    """Return the widths inside forward and backward, in which gathered weights have the compute dtype.

    Under FSDP2 the casts of its MixedPrecisionPolicy are all there are: accelerate 1.15 wraps no forward in autocast
    there (accelerator.py, _prepare_fsdp2), as it does for FSDP1 (prepare_model), and DeepSpeed switches autocast off
    (0.19, runtime/torch_autocast.py). A hand-written loop has its own.
    """
    if not n.autocast:
        return n
    if r.shard == "parameters" or r.offload == "parameters":
        compute = n.autocast
        n = replace(n, weight=compute, other=compute, residual=compute, adapter=compute, saved=compute)
    by = backend(r)
    autocasts = by in ("plain", "ddp") or (by == "fsdp" and (r.fsdp_version == 1 or t.loop == "torch"))
    return n if autocasts else replace(n, autocast=0)


def kernel_width(r: Recipe, n: Numerics) -> int:
    """Return the itemsize of the queries, keys and values that reach the attention kernel."""
    return n.autocast or (n.residual if r.method == "qlora" else n.weight)


def attention_kernel(
    a: Attention, recipe: Recipe, width: int, capability: Capability | None, masked: bool, train: bool = True,
    dropout: bool = True,
) -> Kernel:  # fmt: skip
    """Return the kernel an attention layer runs.

    width: itemsize of queries, keys and values. dropout: the layer's is active in training.
    """
    if recipe.attention == "eager" or not a.sdpa:
        return "eager"
    if recipe.attention == "flash":
        return "flash2"
    masked = masked or a.position_bias  # which is passed as a mask
    one_key_head = a.code == "falcon" and a.kv_heads == 1  # FalconAttention leaves it to be broadcast
    # transformers repeats keys and values itself where there is a mask or a head wider than 256 (use_gqa_in_sdpa)
    repeats = recipe.attention in trainer(recipe.trainer).repeats_keys
    grouped = a.heads != a.kv_heads and not repeats and not masked and a.head_dim <= 256 and a.code != "falcon"
    return sdpa_kernel(SdpaCall(
        capability=capability or (8, 0), dtype="fp32" if width == 4 else meaning(recipe).computed,
        head_dim=a.head_dim, value_dim=a.value_dim, masked=masked, grouped=grouped, broadcast=one_key_head,
        dropout=a.dropout if train and dropout else 0.0, needs_grad=train,
    ))  # fmt: skip


def seen(architecture: Architecture) -> list[tuple[Weight, ...]]:
    """Return the weights of the tower of a model that is trained with images, which adapters and quantisation reach."""
    return [architecture.tower] if architecture.vision and architecture.tower else []


def lora_modules(architecture: Architecture, targets: tuple[str, ...]) -> frozenset[str]:
    """Return the names of modules that get an adapter; "all-linear" is every linear layer but the head, as in PEFT."""
    parts = [architecture.embedding, *(layer.weights for layer in architecture.kinds), *seen(architecture)]
    linears = {w.module for weights in parts for w in weights if w.kind == "linear"}
    if targets == ("all-linear",):
        return frozenset(linears - {"router"})
    if targets == ("attention",):
        weights = (w for layer in architecture.kinds for w in layer.weights)
        return frozenset({w.module for w in weights if w.kind == "linear" and "attn" in w.name} or linears)
    return frozenset(targets)


# PEFT 0.21 adapts experts stacked in one parameter, and the router, in place of linear layers of these names
# (peft/utils/transformers_weight_conversion.py); dense layers of the same names then get nothing
_QWEN_EXPERTS = {
    "gate": "gate.weight", "gate_proj": "experts.gate_up_proj", "up_proj": "experts.gate_up_proj",
    "down_proj": "experts.down_proj",
}  # fmt: skip
_MIXTRAL_EXPERTS = {
    "gate": "gate.weight", "w1": "experts.gate_up_proj", "w3": "experts.gate_up_proj", "w2": "experts.down_proj",
}  # fmt: skip
STACKED_EXPERTS = {
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), _MIXTRAL_EXPERTS),
    **dict.fromkeys((
        "afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo",
        "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash", "mellum", "olmoe", "qwen3_moe",
        "qwen3_next", "solar_open",
    ), _QWEN_EXPERTS),
}  # fmt: skip


def adapted(architecture: Architecture, targets: tuple[str, ...]) -> frozenset[str]:
    """Return the names of modules with an adapter, and of stacked parameters as suffixes ("experts.down_proj")."""
    modules, renamed = lora_modules(architecture, targets), STACKED_EXPERTS.get(architecture.model_type, {})
    if targets == ("all-linear",):
        modules |= renamed.keys()
    return frozenset(renamed.get(name, name) for name in modules)


def has_adapter(w: Weight, names: frozenset[str]) -> bool:
    """Return whether a weight gets an adapter; `names` comes from `adapted`."""
    return (w.kind == "linear" and w.module in names) or any("." in n and w.name.endswith(n) for n in names)


def adapter_rank(w: Weight, rank: int) -> int:
    """Return the rank of a weight's adapter; stacked experts sum theirs, doubled where two layers became one."""
    if w.kind != "experts":
        return rank
    return rank * w.shape[0] * (2 if w.module == "gate_up_proj" else 1)


def saved_ends(architecture: Architecture, names: tuple[str, ...]) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    """Return the weights of embedding and head that are trained whole, in copies: PEFT's modules_to_save.

    A tied head is copied apart from the embedding, and the two copies are no longer tied. Raises Unsupported.
    """
    tokens = tuple(w for w in architecture.embedding if w.kind == "embedding" and "position" not in w.name)[:1]
    heads = tuple(w for w in architecture.head if len(w.shape) == 2)
    if architecture.tied:
        heads = tuple(Weight("lm_head.weight", w.shape, "linear") for w in tokens)
    ends = [tuple(w for w in part if w.module in names) for part in (tokens, heads)]
    found = {w.module for part in ends for w in part}
    if left := [name for name in names if name not in found]:
        known = ", ".join(w.module for w in (*tokens, *heads))
        raise Unsupported(f"no formula counts {', '.join(left)} among the modules to save, only {known}",
                          hint=TRACE_HINT)  # fmt: skip
    return ends[0], ends[1]


def adapter_weights(
    weights: Sequence[Weight], names: frozenset[str], rank: int, magnitudes: bool = False
) -> list[Weight]:
    """Return lora_A [rank, in] and lora_B [out, rank] of every adapted weight in `weights`, and DoRA's magnitudes."""
    found = []
    for w in weights:
        if has_adapter(w, names):
            (out, ins), r = w.shape[-2:], adapter_rank(w, rank)
            found += [
                Weight(f"{w.module}.lora_A", (r, ins), "linear"),
                Weight(f"{w.module}.lora_B", (out, r), "linear"),
                *([Weight(f"{w.module}.{MAGNITUDE}", (out,), "other")] if magnitudes else []),
            ]
    return found
