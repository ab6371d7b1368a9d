"""The adapters of --adapter: one row each of PEFT's methods, with what --lora-rank and --lora-targets set of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from memfit.errors import BadInput, UnknownName
from memfit.nouns.job import Recipe

_RANKS = ("r", "init_r", "effective_rank")
# the modules of LayerNorm tuning, as models name them: input_layernorm, norm, LayerNorm, ln_1, q_norm
NORMS = r".*([nN]orm\w*|ln_\w+)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One row: how PEFT configures a method. `size` names the argument that --lora-rank sets."""

    key: str  # value of --adapter
    title: str
    config: str = "LoraConfig"  # PEFT's class
    size: str = "r"  # "": it has no size
    usual: int = 16  # of the size: PEFT's default, or of its examples where it has none
    targets: Literal["modules", "norms", "none"] = "modules"  # what it adapts: --lora-targets, all norms, or no module
    layers: str = ""  # the argument that takes the model's number of layers
    scale: str = ""  # the argument that --lora-alpha sets
    dropout: str = ""  # the argument that --lora-dropout sets
    arguments: Mapping[str, Any] = field(default_factory=dict)  # what makes it this method
    by_formula: bool = False  # the closed form of LoRA counts it
    on_4bit: bool = True  # PEFT adapts quantised layers with it
    trainer: str = ""  # the only one that runs it; "": each
    refused: tuple[str, str] = ("", "")  # why memfit cannot run it, and what to do instead
    caveat: str = ""  # what the user must know of the figure

    def named(self, size: int) -> str:
        """Return the title with the size: 'DoRA r16', 'prompt tuning (num_virtual_tokens 20)'."""
        if not self.size:
            return self.title
        return f"{self.title} r{size}" if self.size in _RANKS else f"{self.title} ({self.size} {size})"

    def words(
        self, size: int, alpha: int, dropout: float, targets: str | Sequence[str], layers: int = 0
    ) -> dict[str, Any]:  # fmt: skip
        """Return the arguments of PEFT's class apart from the task and whole modules; a range stands for its list.

        targets: names of modules or "all-linear". layers: blocks of the model, for adapters with a number of them.
        """
        found: dict[str, Any] = {self.size: range(size) if self.size == "token_indices" else size} if self.size else {}
        found |= {self.layers: layers} if self.layers else {}
        found |= {self.scale: alpha} if self.scale else {}
        found |= {self.dropout: dropout} if self.dropout else {}
        if self.targets == "norms":
            found["target_modules"] = NORMS
        elif self.targets == "modules":
            found["target_modules"] = targets if isinstance(targets, str) else list(targets)
        return {**found, **self.arguments}


def _lora(key: str, title: str, **words: Any) -> Adapter:
    return Adapter(key=key, title=title, scale="lora_alpha", dropout="lora_dropout", **words)


def _dense(key: str, title: str, config: str, **words: Any) -> Adapter:
    return Adapter(key=key, title=title, config=config, on_4bit=False, **words)


def _prompt(key: str, title: str, config: str, caveat: str = "", **words: Any) -> Adapter:
    said = f"--lora-rank virtual tokens before each text{caveat}"
    return Adapter(key=key, title=title, config=config, size="num_virtual_tokens", usual=20, targets="none",
                   caveat=said, **words)  # fmt: skip


_SCRIPT = "memfit trace train.py --gpu l4 runs your own script"
_FORWARD = ("its forward needs arguments that a trainer does not pass", _SCRIPT)
_VALUES = ("it clusters the values of the weights, which a trace does not have", "take another, for example dora")
_SPARSE = ("it computes with sparse tensors, whose temporaries memfit does not know", "take another, for example dora")

ADAPTERS: dict[str, Adapter] = {row.key: row for row in (
    _lora("lora", "LoRA", by_formula=True),
    _lora("rslora", "rsLoRA", arguments={"use_rslora": True}, by_formula=True),  # another scale, the same tensors
    _lora("dora", "DoRA", arguments={"use_dora": True}, by_formula=True),
    _lora("pissa", "PiSSA", arguments={"init_lora_weights": "pissa"}, on_4bit=False),
    _lora("olora", "OLoRA", arguments={"init_lora_weights": "olora"}),
    Adapter(key="adalora", title="AdaLoRA", config="AdaLoraConfig", size="init_r", usual=12, scale="lora_alpha",
            dropout="lora_dropout", arguments={"total_step": 1000},
            caveat="the trainer never calls update_and_allocate, whose scores take three more copies of the adapters"),
    _dense("adamss", "AdaMSS", "AdamssConfig", usual=100, refused=_VALUES),
    Adapter(key="adaption-prompt", title="LLaMA-Adapter", config="AdaptionPromptConfig", size="adapter_len", usual=10,
            targets="none", layers="adapter_layers", trainer="transformers"),
    Adapter(key="beft", title="BEFT", config="BeftConfig", size=""),
    Adapter(key="boft", title="BOFT", config="BOFTConfig", size="boft_block_size", usual=4, dropout="boft_dropout"),
    _dense("c3a", "C3A", "C3AConfig", size="block_size", usual=256),
    _prompt("cartridge", "Cartridge", "CartridgeConfig"),
    Adapter(key="cpt", title="CPT", config="CPTConfig", size="", targets="none", refused=_FORWARD),
    _dense("deft", "DEFT", "DeftConfig", usual=8, dropout="deft_dropout"),
    _dense("delora", "DeLoRA", "DeloraConfig", usual=8, dropout="module_dropout"),
    _dense("fourierft", "FourierFT", "FourierFTConfig", size="n_frequency", usual=1000),
    Adapter(key="frod", title="FROD", config="FrodConfig", size="", dropout="frod_dropout", refused=_SPARSE),
    _dense("glora", "GLoRA", "GloraConfig", usual=8),
    _dense("gralora", "GraLoRA", "GraloraConfig", usual=32, scale="alpha", dropout="gralora_dropout"),
    Adapter(key="hira", title="HiRA", config="HiraConfig", usual=32, dropout="hira_dropout"),
    _dense("hra", "HRA", "HRAConfig", usual=8),
    Adapter(key="ia3", title="(IA)3", config="IA3Config", size="", arguments={"feedforward_modules": ()}),
    Adapter(key="lily", title="LiLY", config="LilyConfig", usual=32),
    Adapter(key="ln-tuning", title="LayerNorm tuning", config="LNTuningConfig", size="", targets="norms"),
    _dense("loha", "LoHa", "LoHaConfig", usual=8, scale="alpha", dropout="rank_dropout"),
    _dense("lokr", "LoKr", "LoKrConfig", usual=8, scale="alpha", dropout="rank_dropout"),
    Adapter(key="miss", title="MiSS", config="MissConfig", usual=64, dropout="miss_dropout"),
    Adapter(key="multitask-prompt-tuning", title="multitask prompt tuning", config="MultitaskPromptTuningConfig",
            size="num_virtual_tokens", targets="none", refused=_FORWARD),
    Adapter(key="oft", title="OFT", config="OFTConfig", size="oft_block_size", usual=32, dropout="module_dropout"),
    _dense("osf", "OSF", "OSFConfig", size="effective_rank", usual=16,
           caveat="PEFT before 0.21 also keeps every adapted weight it rebuilds, in each forward: a trace runs the "
           "release that is installed"),
    _prompt("p-tuning", "P-tuning", "PromptEncoderConfig", ", by an encoder"),
    _dense("peanut", "PEANuT", "PeanutConfig", usual=32),
    Adapter(key="poly", title="Poly", config="PolyConfig", usual=8, refused=_FORWARD),
    _prompt("prefix-tuning", "prefix tuning", "PrefixTuningConfig", ", in every layer"),
    _prompt("prompt-tuning", "prompt tuning", "PromptTuningConfig"),
    _dense("psoft", "PSOFT", "PsoftConfig", usual=32, scale="psoft_alpha", dropout="psoft_dropout"),
    Adapter(key="pvera", title="PVeRA", config="PveraConfig", usual=256, dropout="pvera_dropout"),
    _dense("randlora", "RandLoRA", "RandLoraConfig", usual=32, dropout="randlora_dropout"),
    Adapter(key="road", title="RoAd", config="RoadConfig", size="group_size", usual=64),
    Adapter(key="shadow", title="Shadow", config="ShadowConfig", usual=8, targets="none", dropout="shadow_dropout"),
    Adapter(key="shira", title="SHiRA", config="ShiraConfig", usual=32, refused=_SPARSE),
    _dense("supertuning", "Supertuning", "SupertuningConfig", size=""),
    _dense("tinylora", "TinyLoRA", "TinyLoraConfig", usual=2, dropout="tinylora_dropout"),
    Adapter(key="trainable-tokens", title="trainable tokens", config="TrainableTokensConfig", size="token_indices",
            usual=16, targets="none", caveat="--lora-rank rows of the embedding are trained"),
    _dense("unilora", "Uni-LoRA", "UniLoraConfig", usual=4, dropout="unilora_dropout"),
    _dense("vblora", "VB-LoRA", "VBLoRAConfig", usual=4, dropout="vblora_dropout"),
    Adapter(key="vera", title="VeRA", config="VeraConfig", usual=256, dropout="vera_dropout"),
    _dense("waveft", "WaveFT", "WaveFTConfig", size="n_frequency", usual=2592),
    Adapter(key="xlora", title="X-LoRA", config="XLoraConfig", size="",
            refused=("it mixes adapters that were trained before", _SCRIPT)),
)}  # fmt: skip

_CALLED = {
    "prompt": "prompt-tuning", "prefix": "prefix-tuning", "ptuning": "p-tuning", "bone": "miss", "ln": "ln-tuning",
    "layernorm-tuning": "ln-tuning", "tokens": "trainable-tokens", "llama-adapter": "adaption-prompt",
}  # fmt: skip


def key_of(name: str) -> str:
    """Return the key of an adapter by its name here, in PEFT, or in common use; an unknown name stays as it is."""
    found = name.strip().lower().replace("_", "-")
    return _CALLED.get(found, found)


def adapter(key: str) -> Adapter:
    """Return a row. Raises UnknownName, and BadInput for one that cannot be run."""
    if key not in ADAPTERS:
        raise UnknownName("adapter", key, list(ADAPTERS), hint=f"PEFT has {', '.join(ADAPTERS)}")
    row = ADAPTERS[key]
    why, hint = row.refused
    if why:
        raise BadInput(f"--adapter {key} cannot be planned: {why}", hint=hint)
    return row


def method_title(recipe: Recipe) -> str:
    """Return 'full fine-tuning', 'LoRA r16', 'QLoRA r16' or 'DoRA r16 on a quantised base'."""
    if recipe.method == "full":
        return "full fine-tuning"
    row = adapter(recipe.adapter)
    if recipe.method == "qlora" and row.key == "lora":
        return f"QLoRA r{recipe.lora_rank}"
    return row.named(recipe.lora_rank) + (" on a quantised base" if recipe.method == "qlora" else "")
