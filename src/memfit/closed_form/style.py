"""Style holds everything about a recipe that changes which tensors a block makes, and nothing that only scales them.

Code holds the functions of a framework's own model code; CODES lists them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from memfit.closed_form.engine import Elements, GraphRecorder, Tensor
from memfit.nouns.architecture import Architecture, Rows
from memfit.nouns.job import Recipe
from memfit.tables.cuda_kernels import SdpaKernel
from memfit.tables.liger_kernels import Liger

Kernel = SdpaKernel | Literal["eager", "flash2"]  # flash2: the flash-attn package
Mask = Literal["none", "shared", "rows"]
# the kernel's mask argument: none (is_causal), [S, S] shared by the rows of the batch, or [B, 1, S, S] with own rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Code:
    """Functions that replace transformers' model code and its libraries; None keeps those of transformers.

    Every trainer of memfit's own table runs transformers. Benchmarks add rows to CODES, under the name in Trainer.code.
    """

    stored: Callable[[Architecture], Architecture] | None = None  # gives the model the framework's weights
    block: Callable[[Any, Tensor], Tensor] | None = None  # (layer, hidden states) -> hidden states
    head: Callable[[Any, Architecture, Recipe, bool], Any] | None = None  # (HeadStyle, ..., train) -> HeadStyle
    quantised: Callable[[GraphRecorder, Tensor, int, Elements, Any], Tensor] | None = None  # see layers.linears
    mask: Callable[[GraphRecorder, Tensor, int], Tensor] | None = None  # (mask, heads) -> the efficient kernel's mask
    softmax: Callable[[GraphRecorder, Tensor, int], Tensor] | None = None


TRANSFORMERS = Code()
CODES: dict[str, Code] = {"transformers": TRANSFORMERS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """The hashable key of a traced block program."""

    weight: int = 2  # bytes per element of the stored base weights that are not quantised
    norm_weight: int = 2  # itemsize of norms and other parameters that prepare_model_for_kbit_training upcasts
    autocast: int = 0  # itemsize of the compute dtype, 0 when there is no autocast
    computed: int = 2  # ... in which products with 4-bit weights are, with autocast or without
    residual: int = 2  # itemsize of the hidden states between blocks
    additive: int = 2  # ... of the mask that is added to scores, as wide as the embedded tokens
    trained: bool = True  # base weights receive gradients
    quantization: str = "none"
    lora_rank: int = 0
    lora_targets: frozenset[str] = frozenset()
    lora_dropout: bool = False
    adapter: int = 4  # itemsize of the adapter weights
    magnitude: int = 0  # itemsize of DoRA's magnitudes; 0: the adapters have none
    kernel: Kernel = "flash"
    mask: Mask = "none"
    checkpointing: Literal["none", "full", "selective", "offload"] = "none"
    dropout: bool = True  # train mode: the model's own dropout is active, but for that of attention
    attention_dropout: bool = True
    grad: bool = True  # False: evaluation under no_grad
    input_grad: bool = True  # the block's input needs a gradient
    holds_input: bool = False  # the model's own code keeps the first block's input until its body returns
    accumulating: bool = False  # gradients of an earlier micro-batch exist
    release_gradients: bool = False  # optimizer in backward
    reentrant: bool = False  # checkpointing runs the whole block again, and holds its output and incoming gradient
    # ids of the block's inputs that the graph, or FSDP1's hook, keeps until the whole backward ends
    unit_holds: tuple[int, ...] = ()
    prefetches: bool = False  # FSDP1 gathers the block before during this one's backward
    repeats_keys: bool = False  # keys and values are copied for every query head, whatever the kernel
    shards: int = 0  # FSDP: ranks over which a block's gradients are reduce-scattered after its backward; 0: none
    shard_gradient: int = 0  # itemsize of the sharded gradients
    unit: int = 0  # bytes of a gathered block
    per_layer: int = 0  # width of all layers' own embeddings together (Gemma 4)
    own_input_grad: bool = False  # the layers' own embeddings need a gradient
    use_cache: bool = False
    holds_output: bool = False  # the loop keeps the model's output, and with it the cache, until the next one
    grouped_product: bool = True  # torch has a product of stacked experts for the card (from compute capability 8.0 on)
    liger: Liger | None = None  # layers that run as Liger's kernels
    exchange: Literal["", "ring", "ulysses"] = ""  # how GPUs that share sequences exchange keys and values
    sequence_shards: int = 1  # GPUs that share each sequence
    widens: bool = False  # the block's output is in fp32 though its input is not
    images: Rows | None = None  # of a tower's block, whose tokens are the patches of images
    windows: tuple[Rows, ...] = ()  # of the tower's images
    hands_weights: bool = False  # see Attention.returns_weights; False too where the graph holds them anyway
    first: bool = False  # of the blocks of an encoder or decoder: the first makes what all share
    last: bool = False  # ... whose backward begins the sums of gradients that all add to
    decodes: bool = False  # the tokens are those of the target; see Dims.decoder
    source: int = 0  # itemsize of what the encoder hands to a decoder
    source_grad: bool = False  # ... which needs a gradient
    source_mask: bool = False  # ... and is padded
    batched: bool = False  # several sequences, of a model with biases of positions
    column: Literal["", "first", "second"] = ""  # of a batch of pairs; gradients of the second wait for the first's
    turned: bool = False  # the hidden states lie channel by channel, as a convolution left them
    half: bool = False  # 16-bit numbers are fp16, not bf16
    fp16: bool = False  # the hidden states are fp16, which T5 and Whisper clamp
    code: Code = TRANSFORMERS
