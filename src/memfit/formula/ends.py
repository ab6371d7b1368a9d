"""The two ends of a model as programs: embedding with everything built once per forward, and head with its loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from memfit.architecture import Norm
from memfit.formula import litgpt, ops, shifted
from memfit.formula.engine import Recorder, Tensor
from memfit.formula.modules import norm
from memfit.formula.program import Program, finished
from memfit.formula.size import Basis
from memfit.formula.style import Style


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingStyle:
    """What the embedding end does besides looking rows up."""

    vocabulary: int
    width: int
    rotary_dim: int = 0
    tied: bool = False
    tied_in_place: bool = False  # the head's gradient arrives as a tensor of its own, so the engine adds in place
    positions: int = 0  # rows of a learned position table
    types: bool = False  # BERT's token types
    normed: bool = False  # a norm right after the embedding
    scaled: bool = False  # Gemma
    dropout: float = 0.0
    mask: str = "none"  # none | bool (a padded batch under SDPA) | float (eager)
    trained: bool = True
    itemsize: int = 2  # of the embedding weight


@lru_cache(maxsize=1024)
def embedding_program(e: EmbeddingStyle, style: Style) -> Program:
    """Token (and position, type) embedding, rotary tables and masks; backward makes the embedding's gradient."""
    rec = Recorder(style.autocast, style.grad)
    rec.accumulating, rec.release_gradients = style.accumulating, style.release_gradients
    hidden: dict[Basis, int] = {"T": e.width}
    rec.new({}, 1, "no input").view()  # ids INPUT and GRADIENT mean the same in every program
    gradient = rec.new(hidden, style.residual, "gradient of the embedding output")
    rec.events.clear()
    x = _look_up(rec, e, hidden)
    if e.scaled:
        x = ops.scale(rec, x, "scaled embedding")
    if e.positions:
        x = ops.add(rec, x, _table(rec, e, {"S": e.width}, e.positions, "position embedding"))
    if e.types:
        x = ops.add(rec, x, _table(rec, e, {"S": e.width}, 2, "type embedding"))
    if e.normed:
        x = norm(rec, x, Norm("layer"), e.width, style, "embedding norm")
    x = ops.dropout(rec, x, e.dropout if style.dropout else 0.0)
    x = ops.cast(rec, x, style.residual)
    held = _once_per_forward(rec, e, style)
    output = x.storage.id if x.storage else 0
    forward, rec.events = rec.events, []
    if style.grad and e.trained:
        rec.backward(x, [gradient].pop())
    del gradient, x
    backward = [i for i in rec.events if i != -output]
    rec.events = []
    del held
    exit_events, rec.events = rec.events, []
    if style.grad:  # rotary tables and masks are saved by every block: they outlive the backward of the first one
        backward, exit_events = backward + exit_events, []
    return finished(rec, forward, exit_events, backward, output, 0)


def _look_up(rec: Recorder, e: EmbeddingStyle, hidden: dict[Basis, int]) -> Tensor:
    out = rec.new(hidden, e.itemsize, "embedding output")
    table: dict[Basis, int] = {"1": e.vocabulary * e.width}
    weight = ops.weight(e.vocabulary * e.width, e.itemsize, "embedding", e.trained)

    def backward(g: Tensor, saved: list[Tensor]) -> list[Tensor | None]:
        """embedding_dense_backward; with a tied head both gradients wait and are added into a third tensor."""
        dense = rec.new(table, e.itemsize, "embedding gradient", "gradients")
        rec.buffer({("embed", e.width, e.itemsize): 1}, "embedding sort buffers")
        if e.tied and e.tied_in_place:
            del dense
            return [None]
        if e.tied:
            total = rec.new(table, e.itemsize, "sum of tied gradients", "gradients")
            del dense, total
            return [None]
        return [dense]

    return rec.record(out, [weight], [], backward)


def _table(rec: Recorder, e: EmbeddingStyle, size: dict[Basis, int], rows: int, label: str) -> Tensor:
    out = rec.new(size, e.itemsize, label)
    weight = ops.weight(rows * e.width, e.itemsize, label, e.trained)
    return rec.record(out, [weight], [], lambda g, _: [rec.new({"1": rows * e.width}, e.itemsize, "gradient")])


def _once_per_forward(rec: Recorder, e: EmbeddingStyle, style: Style) -> list[Tensor]:
    """Position ids, cos and sin, masks: made once, used by every block."""
    held = [rec.new({"S": 1}, 8, "position ids", "activations")]
    if e.rotary_dim:
        angles = rec.new({"S": e.rotary_dim // 2}, 4, "angles")
        wide = rec.new({"S": e.rotary_dim}, 4, "fp32 angles")
        del angles
        cos, sin = (_rotary_table(rec, wide) for _ in range(2))
        del wide
        held += [ops.cast(rec, t, style.residual, "rotary table") for t in (cos, sin)]
        del cos, sin
        for t in held:
            if t.storage:
                rec.roles[t.storage.id] = "activations"
    if e.mask == "bool":
        held.append(rec.new({"TS": 1}, 1, "attention mask", "activations"))
    elif e.mask == "float":
        held.append(rec.new({"TS": 1}, style.autocast or style.residual, "attention mask", "activations"))
    return held


def _rotary_table(rec: Recorder, angles: Tensor) -> Tensor:
    wave = ops.scale(rec, angles, "cosine or sine")
    return ops.scale(rec, wave, "scaled table")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadStyle:
    """The last norm, the output projection and the loss."""

    vocabulary: int
    width: int
    norm: Norm | None
    loss: str = "full"  # a row of LOSSES
    tied: bool = False
    trained: bool = True
    itemsize: int = 2  # of the head's weight
    holds_logits: bool = False
    softcap: bool = False
    transform: bool = False  # BERT: dense + activation + norm before the decoder
    bias: bool = False
    label_share: float = 1.0
    labels: bool = True
    upcast: bool = True  # the model's code casts the logits to fp32 before it scores them
    batched: bool = False  # several sequences: dropping the last token of each leaves no view


TILE_VOCABULARY = 32768  # columns of a logits tile in TRL's fused head


@lru_cache(maxsize=1024)
def head_program(h: HeadStyle, style: Style) -> Program:
    """Final norm, head and loss, forward and backward."""
    rec = Recorder(style.autocast, style.grad)
    rec.accumulating, rec.release_gradients = style.accumulating, style.release_gradients
    hidden: dict[Basis, int] = {"T": h.width}
    x = rec.new(hidden, style.residual, "hidden states")
    rec.new({}, 1, "no gradient").view()
    rec.events.clear()
    x.requires_grad = style.grad and style.input_grad
    if h.norm is not None:
        normed = norm(rec, x, h.norm, h.width, style, "final_norm")
    else:
        normed = x
    del x
    if h.transform:
        normed = _transform(rec, h, style, normed)
    loss, held = LOSSES[h.loss](rec, h, style, normed)
    del normed
    forward, rec.events = rec.events, []
    split = rec.returned or len(forward)
    forward, after = forward[:split], forward[split:]
    rec.exit_autocast()
    exit_events, rec.events = rec.events, []
    received = 0
    if style.grad:
        first = rec.new({"1": 1}, 4, "gradient of the loss")
        result = rec.backward(loss, [first].pop()) if loss.grad_fn else None
        del first
        received = result.storage.id if result is not None and result.storage else 0
        held.clear()
        backward = [*after, *rec.events]
        del loss
        rec.events = []
        return finished(rec, forward, exit_events, backward, 0, received)
    del loss
    held.clear()
    exit_events = [*after, *exit_events, *rec.events]
    rec.events = []
    return finished(rec, forward, exit_events, [], 0, 0)


def _transform(rec: Recorder, h: HeadStyle, style: Style, x: Tensor) -> Tensor:
    w = ops.weight(h.width * h.width, style.weight, "transform.weight", h.trained)
    x = ops.linear(rec, x, w, {"T": h.width}, ops.weight(h.width, style.weight, "transform.bias", h.trained))
    x = ops.unary(rec, x, "gelu")
    return norm(rec, x, Norm("layer"), h.width, style, "transform.norm")


def _logits(rec: Recorder, h: HeadStyle, style: Style, x: Tensor) -> Tensor:
    name = "embedding" if h.tied else "head"
    w = ops.weight(h.vocabulary * h.width, h.itemsize, name, h.trained)
    b = ops.weight(h.vocabulary, h.itemsize, "head.bias", h.trained) if h.bias else None
    logits = ops.linear(rec, x, w, {"T": h.vocabulary}, b, "logits")
    if h.softcap:
        scaled = ops.scale(rec, logits, "logits / cap")
        capped = ops.unary(rec, scaled, "tanh", keeps="output")
        del scaled
        logits = ops.scale(rec, capped, "capped logits")
    return logits


def _cross_entropy(rec: Recorder, logits: Tensor, vocabulary: int) -> Tensor:
    """F.cross_entropy: log_softmax is kept, its gradient needs two more of its size."""
    width, elements = logits.itemsize, logits.elements
    log_probabilities = rec.new(elements, width, "log_softmax", "activations")

    def softmax_backward(g: Tensor, saved: list[Tensor]) -> list[Tensor | None]:
        return [rec.new(elements, width, "logits gradient")]

    log_probabilities = rec.record(log_probabilities, [logits], [log_probabilities], softmax_backward)
    loss = rec.new({"1": 1}, 4, "loss")
    return rec.record(loss, [log_probabilities], [], lambda g, _: [rec.new(elements, width, "nll gradient")])


def _full(rec: Recorder, h: HeadStyle, style: Style, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """transformers' ForCausalLMLoss: all logits, an fp32 copy, and their log_softmax at once."""
    logits = _logits(rec, h, style, x)
    held = [logits] if h.holds_logits or not style.grad else []
    wide = ops.cast(rec, logits, 4, "fp32 logits")
    shifted = rec.new({"T": 1}, 8, "shifted labels", "activations")
    loss = _cross_entropy(rec, wide, h.vocabulary)
    del shifted
    return loss, held


def _fused(rec: Recorder, h: HeadStyle, style: Style, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """TRL's fused LM head: one tile of logits at a time, log-sum-exp of every row kept."""
    w = ops.weight(h.vocabulary * h.width, h.itemsize, "head", h.trained)
    compute = rec.autocast or w.itemsize
    vectors = [rec.new({"T": 1}, 4, "row statistics", "activations") for _ in range(7)]
    tile = _tile(rec, h, compute)
    del tile
    loss = rec.new({"1": 1}, 4, "loss")
    elements, width, need = x.elements, x.itemsize, w.requires_grad
    weight_elements, weight_width = w.elements, w.itemsize

    def backward(g: Tensor, saved: list[Tensor]) -> list[Tensor | None]:
        hidden = rec.new(elements, 4, "fp32 gradient of hidden states")
        grad_weight = rec.new(weight_elements, 4, "fp32 gradient of the head") if need else None
        tile = _tile(rec, h, compute)
        del tile
        result = ops.cast(rec, hidden, width, "gradient of hidden states")
        del hidden
        return [
            result,
            None if grad_weight is None else ops.cast(rec, grad_weight, weight_width, "gradient of the head"),
        ]

    return rec.record(loss, [x, w], [x, w, *vectors], backward), []


def _tile(rec: Recorder, h: HeadStyle, itemsize: int) -> Tensor:
    return rec.new({"tile": min(TILE_VOCABULARY, h.vocabulary)}, itemsize, "tile of logits")


def _shifted(rec: Recorder, h: HeadStyle, style: Style, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    logits = [_logits(rec, h, style, x)]
    return shifted.head(rec, h, logits.pop()), []


LOSSES = {"full": _full, "shifted": _shifted, "fused": _fused, **litgpt.LOSSES}
