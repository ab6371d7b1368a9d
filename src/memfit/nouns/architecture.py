"""The noun Architecture: a model's dimensions and every weight it stores, read from its config.json.

Dimension letters, one legend for the whole project: B micro-batch, S tokens, D width, N query heads, K key/value heads,
H head width, F feed-forward width, L layers, V vocabulary, E experts, T tokens in a micro-batch, R adapter rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Literal

from memfit.nouns.task import PLAIN, Shape

WeightKind = Literal["linear", "embedding", "norm", "bias", "experts", "conv", "other"]
TaskKind = Literal[
    "causal-lm", "masked-lm", "seq2seq-lm", "classification", "token-classification", "vision", "multimodal", "speech",
    "ctc", "encoder", "diffusion",
]  # fmt: skip


LANGUAGE = "sft"  # the task of a model that learns its own tokens


@lru_cache(maxsize=4096)
def module_of(name: str) -> str:
    """Return the last module in the name of a weight."""
    parts = name.split(".")
    return parts[-2] if len(parts) > 1 and parts[-1] in ("weight", "bias") else parts[-1]


@dataclass(frozen=True, slots=True)
class Weight:
    """One stored parameter: its name inside its part of the model and its shape as PyTorch stores it."""

    name: str  # as in named_parameters(), without the layer prefix: "self_attn.q_proj.weight"
    shape: tuple[int, ...]  # nn.Linear: (out, in); fused experts: (E, ...)
    kind: WeightKind
    whole: bool = False  # never quantised: transformers loads it in fp32 where others have fp16
    fixed: bool = False  # never trained: the model's own code switches its gradient off

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def module(self) -> str:
        """Return the last module name, which LoRA targets match: 'q_proj'."""
        return module_of(self.name)


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation layer as the model's code computes it."""

    kind: Literal["rms", "rms_gemma", "rms_t5", "layer", "layer_fp32", "layer_bare"]
    # rms: computed in fp32, weight multiplied after the cast back
    # rms_t5: an fp32 copy of the input for the mean alone; only 16-bit weights narrow the product
    # rms_gemma: weight multiplied in fp32 (Gemma, OLMo-2, gpt-oss)
    # layer: nn.LayerNorm
    # layer_fp32: LayerNorm written out in fp32 (Cohere)
    # layer_bare: LayerNorm of an fp32 copy of the input, without weight (OLMo)


@dataclass(frozen=True, slots=True)
class Attention:
    """The token mixer of one layer."""

    kind: Literal["softmax", "mla", "linear", "none"]
    heads: int  # N
    kv_heads: int  # K
    head_dim: int  # H
    value_dim: int  # width of one value head (= head_dim except for MLA and linear attention)
    rotary_dim: int = 0  # part of each head that is rotated; 0: no rotary embedding
    rotary: str = "half"  # how rotation is coded: a row of closed_form.layers.elementwise.ROTARY
    qk_norm: Literal["none", "head", "full"] = "none"  # head: over H; full: over N*H
    fused_qkv: bool = False
    bias: bool = False  # on the q, k, v projections
    out_bias: bool = False
    window: int | None = None  # sliding window in tokens
    softcap: bool = False
    causal: bool = True
    alibi: bool = False
    dropout: float = 0.0
    q_lora_rank: int = 0  # MLA
    kv_lora_rank: int = 0  # MLA
    sinks: bool = False
    sdpa: bool = True  # False: transformers has no SDPA for the class and falls back to eager attention
    upcast: bool = True  # eager attention computes its softmax in fp32
    returns_weights: bool = False  # blocks return what its softmax made, which the loop over them holds for one more
    code: str = ""  # a row of closed_form.layers.attention.MIXERS, for model classes with their own attention code
    gated: bool = False  # output multiplied by the sigmoid of a gate that doubles q_proj (Qwen3-Next)
    shared_kv: bool = False  # keys and values come from an earlier layer (Gemma 3n, 4)
    position_bias: bool = False  # added to the scores, learned by the first block for all (T5)
    conv: int = 0  # kernel of the short causal convolution, linear attention only (K: key heads, N: value heads)


@dataclass(frozen=True, slots=True)
class Mlp:
    """The feed-forward part of one layer: dense, or a mixture of experts."""

    kind: Literal["gated", "plain", "moe", "none"]
    width: int  # F; of one expert, when moe
    activation: str = "silu"
    fused_gate_up: bool = False
    bias: bool = False
    dropout: float = 0.0
    experts: int = 0  # E
    experts_per_token: int = 0
    shared_width: int = 0  # F of the shared experts, or of the dense part, which process every token
    every_token: bool = False  # each expert computes every token, whatever the router chooses (Llama 4)
    router: str = "softmax"  # a row of closed_form.layers.moe.ROUTERS


@dataclass(frozen=True, slots=True)
class Layer:
    """One block: what it computes (for activations) and what it stores (for everything else)."""

    attention: Attention
    mlp: Mlp
    norm: Norm
    placement: Literal["pre", "post", "sandwich", "parallel", "post_inner"]
    # pre: Llama; post: BERT; sandwich: Gemma-2/3; parallel: NeoX, Falcon, Phi; post_inner: OLMo-2, norm after each part
    weights: tuple[Weight, ...]
    dropout: float = 0.0  # on the residual branches
    norms: int = 2  # norms on the residual stream of this layer
    cross: Attention | None = None  # of a decoder to what its encoder has read

    @property
    def parameters(self) -> int:
        return sum(w.numel for w in self.weights)


@dataclass(frozen=True, slots=True)
class Rows:
    """Sequences of one length, so many in every sample: the images of a tower, or the windows they are cut into."""

    count: int
    length: int

    @property
    def tokens(self) -> int:
        return self.count * self.length


@dataclass(frozen=True, slots=True)
class Tower:
    """A vision tower as it runs on the images of one sample, which all have one size."""

    code: str  # a row of closed_form.layers.tower.TOWERS
    width: int
    layers: tuple[Layer, ...]
    rows: Rows  # the patches of each image
    tokens: int  # of each image in the text
    size: tuple[int, ...]  # of an image as the convolution takes it, or of one patch where that takes them one by one
    kernel: tuple[int, ...]
    out: int  # width of the decoder
    merger: Layer  # what makes tokens of patches
    windows: tuple[Rows, ...] = ()  # what layers with a window attend within, from short to long
    channels: int = 3

    @property
    def pixels(self) -> int:
        """Return the numbers that the images of a sample are."""
        convolutions = self.rows.tokens if self.size == self.kernel else self.rows.count
        return convolutions * self.channels * prod(self.size)


@dataclass(frozen=True, slots=True)
class Recording:
    """The sound of a sample as an encoder takes it: log-mel features, padded or cut to a fixed number of frames."""

    mels: int
    frames: int
    stride: int  # frames of a position of the encoder
    longest: int  # tokens of its text

    @property
    def positions(self) -> int:
        return self.frames // self.stride

    @property
    def numbers(self) -> int:
        return self.mels * self.frames


@dataclass(frozen=True, eq=False)
class Architecture:
    """A model: its dimensions and stored weights. Compared by identity, as it is the key of many caches.

    `layers` has one entry per block; equal blocks share one Layer object.
    """

    name: str  # Hugging Face id or path, as shown to the user
    model_type: str  # as in config.json
    family: str  # row of the family table that was used
    task: TaskKind
    width: int  # D
    vocabulary: int  # V
    layers: tuple[Layer, ...]
    embedding: tuple[Weight, ...]  # token, position, type embeddings and their norm
    final: tuple[Weight, ...]  # final norm, and other weights between the last block and the head
    head: tuple[Weight, ...]  # empty when tied to the embedding
    tied: bool
    tower: tuple[Weight, ...] = ()  # vision or audio tower and projector, when present
    vision: Tower | None = None  # how the tower runs, for a model that is trained with images
    recording: Recording | None = None  # what the encoder reads, where that is sound
    embedding_scale: Literal["none", "module", "model"] = "none"  # what scales the embedding's output
    logits_softcap: bool = False
    learned_positions: bool = False
    max_positions: int = 0  # longest sequence the positions allow; 0: unknown
    final_norm: Norm | None = None
    trained_for: str = LANGUAGE  # a row of tables/tasks.py, whose head it has
    shape: Shape = PLAIN  # of one sample of it
    trainable_memory: str = ""  # why training memory is not modelled; "" when it is
    checkpoint_parameters: int | None = None  # the total that the checkpoint declares, when known
    encoder_layers: int = 0  # the first of `layers` are those of an encoder, the others of its decoder
    layer_names: tuple[str, ...] = ()  # module of each entry of `layers`: "model.layers.0"
    embedding_dropout: float = 0.0
    head_dropout: float = 0.0  # on the output of the final norms (T5)
    states_scaled: bool = False  # the hidden states are multiplied by a number before the head (T5)
    logits_upcast: bool = True  # the model's own loss converts the logits to fp32
    buffers: tuple[int, ...] = ()  # bytes of each large buffer of its modules: causal masks, tables
    rotary_tables: int = 1  # pairs of cos and sin made per forward: one for each kind of layer where they differ
    packed_masks: bool = True  # create_causal_mask is given positions, which tell the texts of a packed row apart
    stored_stacked: bool = False  # experts are saved stacked, not one by one (conversion_mapping.py)

    @cached_property
    def named(self) -> tuple[tuple[str, Weight], ...]:
        """Return every stored weight and its name, in the model's order; tied ones once."""
        stacks = zip(self.layer_names, self.layers, strict=True)
        blocks = [(f"{module}.{w.name}", w) for module, layer in stacks for w in layer.weights]
        below = [(w.name, w) for w in self.embedding]
        every = [*below, *blocks, *((w.name, w) for w in (*self.final, *self.head, *self.tower))]
        return tuple(sorted(every, key=lambda item: "decoder." in item[0]) if self.encoder_layers else every)

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """Return every stored weight, in the model's order; tied ones once."""
        return tuple(w for _, w in self.named)

    @cached_property
    def kinds(self) -> tuple[Layer, ...]:
        """Return the distinct layers, in the order in which they first appear."""
        return tuple(dict.fromkeys(self.layers))

    @cached_property
    def parameters(self) -> int:
        """Count the stored parameters, tied ones once."""
        return sum(w.numel for w in self.weights)

    @property
    def fixed_length(self) -> int:
        """Return the positions of a sample that is an image or a recording of one size; 0: samples are texts."""
        if self.task == "vision" and self.vision:
            return self.vision.rows.length
        return self.recording.positions if self.recording else 0

    @property
    def inputs(self) -> int:
        """Return the fp32 numbers of a sample's images or recording."""
        if self.vision:
            return self.vision.pixels
        return self.recording.numbers if self.recording else 0

    @property
    def title(self) -> str:
        """Return the name without the folder of this machine that it lies in, for files that are shared."""
        if not self.name.startswith(("/", "~", ".")):
            return self.name
        parts = [part for part in self.name.split("/") if part not in ("", "config.json")]
        return parts[-1] if parts else self.name
