"""The trainer table: name and version -> what a training loop keeps alive and the defaults it sets.

Every field is a fact about the framework's code; the source is named in the row's comment.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from memfit.errors import BadInput, UnknownName
from memfit.nouns.job import AttentionKernel, Checkpointing, Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The properties of a training loop that change memory."""

    name: str
    since: tuple[int, ...] = (0,)  # first version of the framework this row describes
    runs_as: str = ""  # the trainer whose loop it runs, which traces and exported scripts take; "": its own
    autocast: bool = False  # bf16/fp16 precision runs under torch.autocast even when the weights are 16-bit
    holds_logits: bool = False  # the model output lives through backward (hand-written loops that keep `outputs`)
    logits_to_fp32: bool = False  # accelerate casts outputs.logits to fp32 after the forward
    default_loss: str = "full"
    adapter_fp32: bool = True  # PEFT autocast_adapter_dtype for LoRA
    qlora_adapter_fp32: bool = True
    trained_fp32: bool = False  # casts all that is trained beside a frozen base to fp32, also whole modules
    kbit_prepare: bool = True  # prepare_model_for_kbit_training: embeddings, norms and head become fp32
    packs_into_one_row: bool = False  # packed sequences lie end to end in one row, whose mask is as wide as all of them
    packs_unpadded: bool = False  # packed rows end with their last sample, so their lengths differ by some tokens
    embeddings_32bit: bool = False  # 8-bit bnb optimizers keep embedding states in 32 bits
    warms_cache: bool = True  # transformers 5 allocates and frees a model's bytes before loading it onto the card
    selective_adapters: bool = True  # selective checkpointing works on a PEFT model
    zeroes_gradients: bool = False  # zero_grad(set_to_none=False), torch's default before 2.0: they stay allocated
    optimizer_in_backward: bool = False  # torchtune's optimizer_in_bwd: each gradient is used and freed as it appears
    keeps_loss: bool = False  # the loop's `loss` keeps the graph of a step alive until the next forward is over
    code: str = "transformers"  # the model code that runs: a row of closed_form.style.CODES
    decayed_first: bool = False  # weights with decay are one group of the optimizer, norms and biases the next
    quantised_head: bool = False  # the output head is quantised like every other linear layer
    liger_layers: bool = False  # a fused loss is `use_liger_kernel`, which replaces norms, gated products and RoPE too
    ends_in_root: bool = False  # accelerate before 1.14: embedding and head are in FSDP2's root group (share.Gathered)
    reentrant: bool = False  # checkpointing is reentrant: a block is run again whole, and its output is held
    checkpoints_units: bool = False  # the checkpoint lies around the call of a block, and of the FSDP1 unit around it
    repeats_keys: tuple[AttentionKernel, ...] = ()  # kernels that get keys and values copied for every query head
    rotary_caches: bool = False  # every layer stores cosines and sines of all positions
    heads: tuple[tuple[str, str], ...] = (
        ("full", "full"),
        ("chunked", "chunked"),
        ("fused", "liger"),
    )  # --loss -> code

    @property
    def loop(self) -> str:
        """Return the name of the trainer whose loop runs."""
        return self.runs_as or self.name

    def head(self, loss: str) -> str:
        """Return the row of closed_form.layers.head.LOSSES that this trainer runs for a value of --loss."""
        return dict(self.heads)[loss]

    @property
    def one_loss(self) -> bool:
        """Return whether the trainer computes the loss in the same way for every value of --loss."""
        return len({code for _, code in self.heads}) == 1


_TRANSFORMERS: dict[str, Any] = dict.fromkeys(
    ("autocast", "decayed_first", "logits_to_fp32", "embeddings_32bit", "liger_layers"), True
)
_REENTRANT = _TRANSFORMERS | {"reentrant": True}
_UNITS = _REENTRANT | {"checkpoints_units": True}


def _heads(full: str) -> tuple[tuple[str, str], ...]:
    return (("full", full), ("chunked", "chunked"), ("fused", "liger"))


_TRL_HEADS = (("full", "fused"), ("chunked", "fused"), ("fused", "fused"))  # add_fused_lm_head() for every loss_type

TRAINERS: tuple[Trainer, ...] = (
    # a hand-written loop: `loss = model(**batch).loss; loss.backward()`
    Trainer(name="torch", keeps_loss=True),
    # transformers.Trainer 4.x. gradient_checkpointing_enable() takes the reentrant checkpoint (modeling_utils.py); 4.52
    # moved it into the block (modeling_layers.py). Keys are repeated in every attention class before 4.48, and in
    # sdpa_attention_forward until use_gqa_in_sdpa. Rotary caches of each layer went between 4.41 and 4.43. The loss
    # left the models in 4.46, and pads labels from 4.51 on, where it shifted logits. Read in 4.39.3, 4.40.2, 4.41.2,
    # 4.42.4, 4.45.2, 4.48.1, 4.51.3, 4.52.4, 4.53.3 and 4.57.1
    Trainer(name="transformers", since=(4,), **_UNITS, warms_cache=False, repeats_keys=("flash", "sdpa"),
            rotary_caches=True, heads=_heads("transformers<4.46")),
    Trainer(name="transformers", since=(4, 43), **_UNITS, warms_cache=False, repeats_keys=("flash", "sdpa"),
            heads=_heads("transformers<4.46")),
    Trainer(name="transformers", since=(4, 46), **_UNITS, warms_cache=False, repeats_keys=("flash", "sdpa"),
            heads=_heads("transformers<4.51")),
    Trainer(name="transformers", since=(4, 48), **_UNITS, warms_cache=False, repeats_keys=("sdpa",),
            heads=_heads("transformers<4.51")),
    Trainer(name="transformers", since=(4, 51), **_UNITS, repeats_keys=("sdpa",)),
    Trainer(name="transformers", since=(4, 52), **_REENTRANT, repeats_keys=("sdpa",)),
    Trainer(name="transformers", since=(4, 57), **_REENTRANT),
    # transformers.Trainer 5.x: bf16=True means autocast; trainer.py registers embeddings for 32-bit bnb states
    Trainer(name="transformers", since=(5,), **_TRANSFORMERS),
    # axolotl's subclass of it. loaders/model.py of 0.18 (_configure_embedding_dtypes) prepares a k-bit model as PEFT
    # does, then converts norms, embeddings and head back to torch_dtype: fp32 copies pass while it loads, uncounted.
    # Liger's layers have switches of their own, which memfit writes with Liger's loss
    Trainer(name="axolotl", runs_as="transformers", autocast=True, decayed_first=True, logits_to_fp32=True,
            embeddings_32bit=True, kbit_prepare=False, liger_layers=True),
    # axolotl with Liger's or Apple's fused loss alone
    Trainer(name="axolotl-loss", runs_as="transformers", autocast=True, decayed_first=True, logits_to_fp32=True,
            embeddings_32bit=True, kbit_prepare=False),
    # LLaMA-Factory's subclass. model/model_utils/checkpointing.py (prepare_model_for_training) of 0.9.6.dev0 takes the
    # place of PEFT's preparation and widens nothing unless upcast_layernorm says so; model/adapter.py (init_adapter)
    # casts adapters to fp32, also of a quantised base; train/trainer_utils.py leaves the optimizer to transformers;
    # model_utils/liger_kernel.py calls Liger's function for the model with its defaults, as use_liger_kernel does
    Trainer(name="llamafactory", runs_as="transformers", autocast=True, decayed_first=True, logits_to_fp32=True,
            embeddings_32bit=True, kbit_prepare=False, liger_layers=True, trained_fp32=True),
    # ms-swift 4's subclass. trainers/mixin.py (_fix_gradient_checkpointing) makes checkpoints reentrant, except under
    # DDP, where the input of a block is held as here and its output is not; PEFT casts adapters to fp32 as it does by
    # default (tuners/peft.py), and nothing prepares a quantised base. What it scores is at most every token:
    # prepare_logits_to_keep leaves out prompts. Version 3 of early 2025 ran on transformers 4.48 to 4.52
    Trainer(name="ms-swift", since=(3,), runs_as="transformers", **_UNITS, kbit_prepare=False, warms_cache=False,
            packs_unpadded=True, repeats_keys=("sdpa",), heads=_heads("transformers<4.51")),
    Trainer(name="ms-swift", since=(4,), runs_as="transformers", **_REENTRANT, kbit_prepare=False, packs_unpadded=True),
    # TRL before 1.7: full logits as in transformers.Trainer
    Trainer(name="trl", autocast=True, decayed_first=True, logits_to_fp32=True, embeddings_32bit=True,
            packs_unpadded=True),
    # TRL 1.7+: chunked_nll by default; 1.15+: fused LM head for all trainers. For selective checkpointing TRL wraps a
    # method of the model that transformers 5.23 does not call on models with adapters
    Trainer(name="trl", since=(1, 7), autocast=True, decayed_first=True, default_loss="chunked", embeddings_32bit=True,
            qlora_adapter_fp32=False, kbit_prepare=False, packs_into_one_row=True,
            packs_unpadded=True, selective_adapters=False),
    Trainer(name="trl", since=(1, 15), autocast=True, decayed_first=True, default_loss="fused", embeddings_32bit=True,
            heads=_TRL_HEADS,
            qlora_adapter_fp32=False, kbit_prepare=False, packs_into_one_row=True,
            packs_unpadded=True, selective_adapters=False),
)  # fmt: skip

CURRENT = {
    "trl": (1, 16), "transformers": (5, 23), "axolotl": (0, 19), "axolotl-loss": (0, 19), "llamafactory": (0, 9),
    "ms-swift": (4, 6), "torch": (2, 13),
}  # fmt: skip
_LOOPS = {row.name: row.loop for row in TRAINERS}
_SPEC = re.compile(r"^(?P<name>[a-z][a-z0-9_-]*)(?:==(?P<version>\d+(?:\.\d+)*))?$")


@lru_cache(maxsize=256)
def trainer(spec: str) -> Trainer:
    """Return the row of 'trl', 'trl==1.3' or 'transformers'; without a version, of the current one."""
    found = _SPEC.match(spec.strip().lower())
    if found is None:
        raise BadInput(f"'{spec[:80]}' is not a trainer", hint="write it as trl, trl==1.3 or transformers")
    rows = [t for t in TRAINERS if t.name == found["name"]]
    if not rows:
        raise UnknownName("trainer", found["name"], {t.name for t in TRAINERS}, hint="see: memfit glossary trainer")
    version = _numbers(found["version"]) if found["version"] else CURRENT[rows[0].name]
    fitting = [t for t in rows if t.since <= version]
    if not fitting:
        raise BadInput(
            f"{spec} is older than every version in memfit's table",
            hint=f"the oldest row is {rows[0].name}>={rows[0].since}",
        )
    return fitting[-1]


def checkpointing_of(recipe: Recipe) -> Checkpointing:
    """Return the checkpointing that runs: selective becomes full where the trainer's does not work with adapters."""
    plain = recipe.method != "full" and not trainer(recipe.trainer).selective_adapters
    return "full" if recipe.checkpointing == "selective" and plain else recipe.checkpointing


def holds_unit_inputs(recipe: Recipe) -> bool:
    """Return whether FSDP1 keeps the input of every block and its gradient until the backward ends.

    The hook by which FSDP1 reshards a unit without trained weights (torch 2.2 to 2.13, _runtime_utils.py,
    _register_post_backward_reshard_only_hook) holds the unit's inputs until the end of the backward. Where the
    checkpoint lies around the unit these are leaves, which hold their gradients.
    """
    if recipe.fsdp_version != 1 or recipe.method == "full" or recipe.shard != "parameters" or recipe.zero:
        return False
    return trainer(recipe.trainer).checkpoints_units and checkpointing_of(recipe) == "full"


def script_of(spec: str) -> str:
    """Return the export target, trl or transformers, whose script runs a recipe of this trainer."""
    return "transformers" if _LOOPS.get(spec.partition("==")[0]) == "transformers" else "trl"


def target_of(spec: str) -> str:
    """Return the export target that runs a recipe of this trainer: its own framework's, else the script's."""
    name = spec.partition("==")[0]
    return name if name in ("axolotl", "llamafactory") else script_of(spec)


def taken_as(spec: str) -> str:
    """Return the version whose row stands in for the one in `spec`; "" if that has a row of its own.

    A version stands in for newer ones, and for those of an older major version.
    """
    name, _, version = spec.partition("==")
    if not version or trainer(spec) is not trainer(name):
        return ""
    known = CURRENT[name]
    wanted = _numbers(version)
    return ".".join(map(str, known)) if wanted[: len(known)] > known or wanted[0] < known[0] else ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
