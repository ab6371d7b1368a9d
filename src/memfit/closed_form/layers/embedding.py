"""Everything before the first block: embeddings, and the masks and rotary tables made once per forward."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from memfit.closed_form import ops
from memfit.closed_form.engine import Elements, GraphRecorder, Tensor
from memfit.closed_form.layers.block import PerLayer, inputs
from memfit.closed_form.layers.elementwise import norm
from memfit.closed_form.layers.program import (
    GRADIENT,
    TIED,
    Program,
    await_others,
    finished,
    recorder,
    sharded,
    waiting_gradients,
)
from memfit.closed_form.style import Style
from memfit.nouns.architecture import Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskStyle:
    """The masks a model makes; `windows` has one entry per mask, True for a sliding window."""

    windows: tuple[bool, ...] = (False,)
    given: bool = True  # the batch carries an attention_mask
    padded: bool = False  # the attention_mask has zeros; without one, positions tell the texts of one row apart
    # itemsize of a float mask (eager attention); 0: a bool mask, which is left out where is_causal suffices
    additive: int = 0
    causal: bool = True
    always: bool = False  # Falcon makes a mask even where is_causal would suffice
    itemsize: int = 2  # of the hidden states
    saved: bool = False  # the attention kernel saves the mask itself and no copy in another dtype
    alibi: int = 0  # heads of a position bias, which Falcon adds to the mask, BLOOM and MPT to the scores


def masks(rec: GraphRecorder, m: MaskStyle) -> list[Tensor]:
    """Build the masks, and return those that live as long as the body of the model."""
    made = [rec.new({"T": m.alibi}, 4, "position bias", "activations")] if m.alibi else []
    made += [mask for mask in (_mask(rec, m, window) for window in m.windows) if mask is not None]
    if m.alibi and m.always:  # FalconModel.forward
        square = made[-1].elements
        if not m.additive:
            made[-1] = rec.new(square, m.itemsize, "mask in the dtype of the model")
        masked = rec.new(square, 1, "is masked")
        made[-1] = rec.new({"TS": m.alibi}, m.itemsize, "mask with position bias", "activations")
        del masked
    return made


def _mask(rec: GraphRecorder, m: MaskStyle, window: bool) -> Tensor | None:
    """sdpa_mask or eager_mask for one kind of layer."""
    if not (m.additive or window or m.always):
        for _ in range((2 if m.padded else 1) if m.given and m.causal else 0):
            rec.new({"T": 1}, 8, "is any token masked?")
        if not m.padded:
            return None
    rows, columns = (_positions(rec) for _ in range(2))
    pattern = _pattern(rec, m, window)
    if m.given:
        for _ in range(2):
            rec.new({"T": 1}, 8, "padding mask")
        pattern = rec.new({"TS": 1}, 1, "causal and padding mask")
    del rows, columns
    if m.additive:
        pattern = rec.new(pattern.elements, m.additive, "attention mask")
    if pattern.storage:
        rec.roles[pattern.storage.id] = "activations"
    return pattern


def _positions(rec: GraphRecorder) -> Tensor:
    plain = rec.new({"S": 1}, 8, "positions")
    shifted = rec.new({"S": 1}, 8, "shifted positions")
    del plain
    return shifted


def _pattern(rec: GraphRecorder, m: MaskStyle, window: bool) -> Tensor:
    """Compare positions to find which attend to which, padding aside."""
    square: Elements = {"SS": 1}
    if m.padded and not m.given:  # packed_sequence_compatibility_function
        together = _and(rec, rec.new({"TS": 1}, 1, "of one text"))
        return _and(rec, together, _earlier(rec, {"TS": 1}, window))
    if m.causal:
        earlier = _earlier(rec, square, window)
        return _and(rec, earlier) if m.given else earlier  # there is no padding to join it with
    if not window:
        return rec.new({"S": 1}, 1, "every position")
    distance = rec.new(square, 8, "distance")
    absolute = rec.new(square, 8, "absolute distance")
    del distance
    near = rec.new(square, 1, "within the window")
    del absolute
    return _and(rec, near)


def _earlier(rec: GraphRecorder, square: Elements, window: bool) -> Tensor:
    """Return which positions are earlier ones, within the window if there is one."""
    if not window:
        return rec.new(square, 1, "causal")
    begins = rec.new({"S": 1}, 8, "window start")
    near = rec.new(square, 1, "within the window")
    del begins
    pattern = _and(rec, near)
    del near
    return _and(rec, pattern, rec.new(square, 1, "causal"))


def _and(rec: GraphRecorder, *masks: Tensor) -> Tensor:
    """Return the conjunction of the masks and of a scalar True, with which transformers begins."""
    return rec.new(masks[0].elements, 1, "mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingStyle:
    """Everything that decides which tensors exist before the first block."""

    vocabulary: int
    width: int  # of the table of tokens
    projected: int = 0  # width of the blocks, where the tokens' embeddings are multiplied by a weight to get it
    rotary: tuple[int, ...] = ()  # rotated width of every pair of cos and sin tables
    wide_tables: bool = False  # the tables stay in fp32
    tied: bool = False
    reduced_with: int = 0  # elements of the head, whose gradients FSDP reduces with those of the tables
    handed_on: bool = False  # ... and to the embedding of the encoder
    source_mask: bool = False  # a decoder makes a mask of its padded source
    awaited: bool = False  # a tied head's gradient is kept and added to that of an earlier micro-batch here
    tied_in_place: bool = False  # a tied head's gradient is no view, so the engine adds to it in place
    positions: int = 0  # rows of a learned position table
    positions_by_sample: bool = False  # looked up for each sample by index, as in Whisper
    types: int = 0  # rows of BERT's token type table
    norm: Norm | None = None  # right after the embedding
    scaled: Literal["none", "module", "model"] = "none"  # see Architecture.embedding_scale
    dropout: float = 0.0
    # the embeddings are a module, whose local variables are freed before the first block
    module: bool = False
    # frozen, but its output requires a gradient: a leaf tensor, which lives as long as the graph, like its .grad
    leaf: bool = False
    checkpointed: bool = False  # blocks keep masks and tables as arguments until they have been recomputed
    per_layer: PerLayer | None = None
    masks: MaskStyle = field(default_factory=MaskStyle)
    alone: bool = False  # images follow, and then masks and tables (layers.tower.join_program)
    trained: bool = True
    itemsize: int = 2  # of the embedding weights

    @property
    def wide(self) -> int:
        """Return the width of the blocks."""
        return self.projected or self.width


@lru_cache(maxsize=1024)
def embedding_program(e: EmbeddingStyle, style: Style) -> Program:
    """Trace everything before the first block; the backward makes the gradients of the tables."""
    rec = recorder(style)
    rec.new({}, 1, "no input")  # takes the id INPUT, so that GRADIENT is the same id in every program
    gradient = [rec.new({"T": e.wide}, style.residual, "gradient of the embedding output")]
    if e.awaited:
        rec.awaited = "embedding"
        table = rec.new({"1": e.vocabulary * e.width}, e.itemsize, "gradient of the head", "gradients")
        rec.gradients[rec.awaited] = table
        del table
    others = {}
    if style.column == "first":
        others = await_others(rec, embedding_program(e, replace(style, column="second")))
    rec.taken()
    x, held, leaf = _embed(rec, e, style)
    own = inputs(rec, e.per_layer, x, e.width, e.itemsize, style) if e.per_layer else None
    x = ops.dropout(rec, x, e.dropout if style.dropout else 0.0)
    x = ops.cast(rec, x, style.residual)
    into_own: list[Tensor | None] = []
    if own and own.requires_grad:
        x = rec.record(x.view(), [x, own], [], lambda g: [g, into_own.pop()])
    made, tables = [], list[Tensor]()
    if not e.alone:
        made = [rec.new({"S": 1}, 8, "position ids", "activations"), *masks(rec, e.masks)]
        made += [rec.new({"TX": 1}, 1, "mask of the source", "activations")] if e.source_mask else []
        made += [rec.new({"T": 1}, 8, "shifted labels", "activations")] if style.decodes else []
        tables = [table for width in e.rotary for table in _rotary_tables(rec, e, style, width)]
    output = x.storage.id if x.storage else 0
    if leaf and leaf.storage:
        rec.lingering |= {leaf.storage.id, GRADIENT if leaf.storage.id == output else 0} - {0}
    forward = rec.taken()
    del held
    if not e.checkpointed:
        del made[: max(len(made) - (e.masks.saved and style.grad), 0)]
    if not style.grad:
        tables.clear()
    leave = [event for event in rec.taken() if event != -output]
    if own and own.requires_grad:  # the sum of its gradients exists from the backward of the last block on
        into_own.append(rec.like(own, "gradient of every layer's input"))
    exits = rec.taken()
    del own
    made.clear()  # blocks save them or get them as arguments until the backward of the first block
    tables.clear()
    if style.grad and (e.trained or x.grad_fn):
        root = Tensor(None, x.elements, x.itemsize, True, x.grad_fn)
        del x
        received = rec.backward(root, gradient)
        rec.lingering |= {received.storage.id} if received and received.storage else set()
        rec.attributes += [t for t in (leaf, received) if t and e.handed_on]  # the encoder's backward is still to come
        del leaf, received
        # the reduction of the first block has ended, and of two large gradients only the last lives through this one
        ended = style.unit + (e.vocabulary * e.width * e.itemsize if e.reduced_with else 0)
        sharded(rec, style, beside=-ended, more=e.reduced_with)
    waited = rec.gradients.pop(rec.awaited, None)
    takes = {TIED: waited.storage.id} if waited and waited.storage else {}
    kept = waited if e.handed_on else None
    del waited
    left = waiting_gradients(rec, style)
    gradient.clear()
    backward = [event for event in rec.taken() if event != -output]
    backward += [-output] if e.alone and e.leaf else []  # the first block frees another tensor
    parts = [forward, leave, exits, backward]
    return finished(rec, parts, output, None, takes=takes | others, hands=(takes if kept else {}) | left)


def _embed(rec: GraphRecorder, e: EmbeddingStyle, style: Style) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Return the sum of all embeddings, the local variables of the model's code, and the leaf tensor, if any."""
    hidden: Elements = {"T": e.width}
    x = _look_up(rec, e, hidden)
    if e.scaled == "module":
        x = ops.scale(rec, x, "scaled embedding")
    leaf = x if e.leaf else None
    x.requires_grad |= e.leaf
    if e.scaled == "model":
        x = ops.scale(rec, x, "scaled embedding")
    if e.projected:
        w = ops.weight(e.width * e.projected, e.itemsize, "project_in", e.trained)
        x, hidden = ops.linear(rec, x, w, {"T": e.projected}, None, "projected embedding"), {"T": e.projected}
    held = [x]
    if e.types:
        held.append(_table(rec, e, hidden, e.types, "type embedding"))
        x = ops.add(rec, x, held[-1], "with types")
    if e.positions:
        held.append(_positions_of_samples(rec, e) if e.positions_by_sample
                    else _table(rec, e, {"S": e.wide}, e.positions, "position embedding"))  # fmt: skip
        x = ops.add(rec, x, held[-1], "with positions")
    if e.norm is not None:
        x = norm(rec, x, e.norm, e.width, style, "embedding norm")
    return x, [] if e.module else held, leaf


def _look_up(rec: GraphRecorder, e: EmbeddingStyle, hidden: Elements) -> Tensor:
    out = rec.new(hidden, e.itemsize, "embedding output")
    table: Elements = {"1": e.vocabulary * e.width}
    weight = ops.weight(e.vocabulary * e.width, e.itemsize, "embedding", e.trained)

    def backward(g: Tensor) -> list[Tensor | None]:
        """embedding_dense_backward: out of place, a tied head's gradient and this one are added into a third tensor."""
        dense = rec.new(table, e.itemsize, "embedding gradient", "gradients")
        rec.buffer({("embed", e.width, e.itemsize): 1}, "embedding sort buffers")
        if e.tied and e.tied_in_place:
            del dense
            return [None]
        if e.tied:
            rec.new(table, e.itemsize, "sum of tied gradients", "gradients")
            del dense
            return [None]
        return [dense]

    return rec.record(out, [weight], [], backward)


def _table(rec: GraphRecorder, e: EmbeddingStyle, size: Elements, rows: int, label: str) -> Tensor:
    out = rec.new(size, e.itemsize, label)
    weight = ops.weight(rows * e.wide, e.itemsize, label, e.trained)
    return rec.record(out, [weight], [], lambda g: [rec.new({"1": rows * e.wide}, e.itemsize, "gradient")])


def _positions_of_samples(rec: GraphRecorder, e: EmbeddingStyle) -> Tensor:
    """weight[position_ids]: its gradient is written into zeros by sorted indices."""
    for _ in range(2):
        rec.new({"S": 1}, 8, "positions")
    places = rec.new({"T": 1}, 8, "positions of samples")
    table: Elements = {"1": e.positions * e.width}
    weight = ops.weight(e.positions * e.width, e.itemsize, "position embedding", e.trained)

    def backward(g: Tensor) -> list[Tensor | None]:
        result = rec.new(table, e.itemsize, "gradient of the positions")
        held = [rec.new({"T": 1}, 8, "sorted positions") for _ in range(4)]
        held.clear()
        return [result]

    return rec.record(rec.new({"T": e.width}, e.itemsize, "position embedding"), [weight], [places], backward)


def _rotary_tables(rec: GraphRecorder, e: EmbeddingStyle, style: Style, width: int) -> list[Tensor]:
    """LlamaRotaryEmbedding.forward: cos and sin of one sequence."""
    angles = rec.new({"S": width // 2}, 4, "angles")
    both = rec.new({"S": width}, 4, "angles twice")
    cos, sin = (ops.scale(rec, ops.scale(rec, both, "cosine or sine"), "scaled table") for _ in range(2))
    tables = [cos, sin] if e.wide_tables else [ops.cast(rec, t, style.residual, "rotary table") for t in (cos, sin)]
    del angles, both, cos, sin
    for table in tables:
        if table.storage:
            rec.roles[table.storage.id] = "activations"
    return tables
