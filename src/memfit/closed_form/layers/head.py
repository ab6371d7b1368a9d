"""Everything after the last block: final norm, output projection, and the loss of each training framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from memfit.closed_form import ops
from memfit.closed_form.engine import Elements, GraphRecorder, Tensor
from memfit.closed_form.layers.elementwise import activation, norm
from memfit.closed_form.layers.encoder_decoder import SOURCE
from memfit.closed_form.layers.program import GRADIENT, TIED, Program, finished, recorder, sharded
from memfit.closed_form.size import TILE_TOKENS
from memfit.closed_form.style import Style
from memfit.nouns.architecture import Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadStyle:
    """Everything that decides which tensors exist after the last block."""

    vocabulary: int
    width: int
    norm: Norm | None
    loss: str = "full"  # a row of LOSSES
    tied: bool = False
    reduced_later: bool = False  # FSDP reduces its gradients with the embedding's
    trained: bool = True
    new: bool = False  # no checkpoint has the head, so it is trained whole, also beside adapters
    itemsize: int = 2  # of the head's weight
    holds_logits: bool = False
    softcap: bool = False
    scaled: bool = False  # the logits are multiplied by a number (Cohere)
    projected: int = 0  # width of what is multiplied by the head's weight, where it is not that of the blocks
    transform: str = ""  # BERT, ModernBERT: dense, this activation, norm before the decoder
    bias: bool = False
    upcast: bool = True  # logits are cast to fp32 for the loss
    returns_fp32: bool = False  # accelerate copies logits that the loss left in 16 bits to fp32
    causal: bool = True  # labels are shifted
    batched: bool = False  # several sequences: the logits without their last positions are no view
    first: bool = False  # a classifier reads the first token alone
    pooled: bool = False  # and passes it through a dense layer and tanh
    dropout: float = 0.0  # between the final norm and the head
    scaled_states: bool = False  # the hidden states are multiplied by a number before the head (T5)
    source: int = 0  # itemsize of an encoder's output, which the model returns; 0: none
    frees_source: bool = False  # nothing else holds it


def logits_of(rec: GraphRecorder, h: HeadStyle, x: Tensor) -> Tensor:
    """Return lm_head(x), scaled and soft-capped if the model does."""
    w = ops.weight(h.vocabulary * h.width, h.itemsize, "embedding" if h.tied else "head", h.trained)
    b = ops.weight(h.vocabulary, h.itemsize, "head.bias", h.trained) if h.bias else None
    logits = ops.linear(rec, x, w, {"T": h.vocabulary}, b, "logits")
    if h.scaled:
        logits = ops.scale(rec, logits, "scaled logits")
    if h.softcap:
        logits = ops.scale(rec, logits, "logits / cap")
        logits = ops.unary(rec, logits, "tanh", keeps="output")
        logits = ops.scale(rec, logits, "capped logits")
    return logits


Loss = tuple[Tensor, list[Tensor]]  # the loss, and tensors that the caller of the model holds until the backward


def _loss_function(rec: GraphRecorder, h: HeadStyle, logits: Tensor) -> Tensor:
    """ForCausalLMLoss, ForMaskedLMLoss, or a bare CrossEntropyLoss."""
    logits = ops.cast(rec, logits, 4, "fp32 logits") if h.upcast else logits
    labels = _shifted_labels(rec) if h.causal else None
    return ops.cross_entropy(rec, logits, labels)


def _shifted_labels(rec: GraphRecorder) -> Tensor:
    padded = rec.new({"T": 1}, 8, "padded labels")
    shifted = rec.new({"T": 1}, 8, "shifted labels")
    del padded
    return shifted


def _full(rec: GraphRecorder, h: HeadStyle, style: Style, x: Tensor) -> Loss:
    """The unfused loss: all logits, an fp32 copy and log_softmax exist at once."""
    logits = logits_of(rec, h, x)
    held = [logits] if h.holds_logits or not style.grad else []
    if h.holds_logits and logits.storage:
        rec.lingering.add(logits.storage.id)
    loss = _loss_function(rec, h, logits)
    if h.returns_fp32:
        rec.until_exit.append(logits)
    return loss, held


def shifted_loss(rec: GraphRecorder, h: HeadStyle, logits: Tensor) -> Tensor:
    """Cross entropy of all logits but those of the last position: a view of one sequence, a copy of several."""
    shifted = ops.slice(rec, logits, {"L": h.vocabulary})
    return ops.cross_entropy(rec, ops.clone(rec, shifted, "shifted logits") if h.batched else shifted)


def _model_loss(rec: GraphRecorder, h: HeadStyle, style: Style, x: Tensor) -> Loss:
    """The loss in the models' own code before transformers 4.46: the fp32 logits take the place of the others."""
    logits = logits_of(rec, h, x)
    logits = ops.cast(rec, logits, 4, "fp32 logits") if h.upcast else logits
    return shifted_loss(rec, h, logits), [] if style.grad else [logits]


def _shifting_loss(rec: GraphRecorder, h: HeadStyle, style: Style, x: Tensor) -> Loss:
    """ForCausalLMLoss before transformers 4.51: the model holds its own logits beside the fp32 ones."""
    logits = logits_of(rec, h, x)
    wide = ops.cast(rec, logits, 4, "fp32 logits") if h.upcast else logits
    return shifted_loss(rec, h, wide), [] if style.grad else [logits]


TILE_VOCABULARY = 32768  # columns of a logits tile in TRL's fused head


def _fused(rec: GraphRecorder, h: HeadStyle, style: Style, x: Tensor) -> Loss:
    """TRL's fused LM head (trl/kernels/chunked_logprob.py): one tile of logits at a time, fp32 gradients."""
    rows = labelled(rec, x, h.width)
    w = ops.weight(h.vocabulary * h.width, h.itemsize, "embedding" if h.tied else "head", h.trained)
    compute = rec.autocast or x.itemsize
    targets = rec.new({"L": 1}, 8, "targets")
    running = [rec.new({"L": 1}, 4, "running statistics") for _ in range(7)]
    tile = [
        rec.new({"tile": TILE_VOCABULARY}, compute, "tile of logits"),
        _narrow(rec, {"tile": h.width}, rows, compute),
    ]
    _narrow(rec, _vocabulary_chunk(h), w, compute)
    kept = [rec.new({"L": 1}, 4, label) for label in ("log-sum-exp", "log-probabilities", "entropy")]
    running.clear()
    tile.clear()
    need, like, weight_like = w.requires_grad, rows.blueprint(), w.blueprint()

    def backward(g: Tensor) -> list[Tensor | None]:
        hidden = rec.like(like, "fp32 gradient of hidden states", 4)
        grad_weight = rec.like(weight_like, "fp32 gradient of the head", 4) if need else None
        tile = [
            rec.new({"tile": TILE_VOCABULARY}, compute, "tile of logits"),
            _narrow(rec, {"tile": h.width}, like, compute),
        ]
        tile.append(_narrow(rec, _vocabulary_chunk(h), weight_like, compute))
        rec.multiplies()
        tile.append(_narrow(rec, _next_chunk(h), weight_like, compute))
        del tile[2:]
        result = ops.cast(rec, hidden, like.itemsize, "gradient of hidden states")
        if grad_weight is None:
            return [result, None]
        return [result, ops.cast(rec, grad_weight, weight_like.itemsize, "head gradient")]

    loss = rec.new({"1": 1}, 4, "loss")
    return rec.record(loss, [rows, w], [rows, w, targets, *kept], backward), []


def _narrow(rec: GraphRecorder, elements: Elements, x: Tensor, itemsize: int) -> Tensor | None:
    """Return a part of x cast to the compute dtype; None if x has it already."""
    return rec.new(elements, itemsize, "piece in the compute dtype") if x.itemsize != itemsize else None


def _vocabulary_chunk(h: HeadStyle) -> Elements:
    return {"1": min(TILE_VOCABULARY, h.vocabulary) * h.width}


def _next_chunk(h: HeadStyle) -> Elements:
    """Return the chunk made beside the previous one: the rest of the vocabulary, or the next tile's first chunk."""
    rest = h.vocabulary - TILE_VOCABULARY
    if rest > 0:
        return {"1": min(TILE_VOCABULARY, rest) * h.width}
    return {("past", TILE_TOKENS, 0): h.vocabulary * h.width}


def labelled(rec: GraphRecorder, x: Tensor, width: int) -> Tensor:
    """hidden_states[:, :-1][labels[:, 1:] != -100]: copies the rows that have a label."""
    body = ops.slice(rec, x, {"L": width})
    rec.new({"L": 1}, 16, "indices")
    out = rec.new({"L": width}, x.itemsize, "labelled hidden states")
    return rec.record(out, [body], [], lambda g: [rec.like(g, "scattered gradient")])


CHUNK_TOKENS = 256  # of TRL's chunked loss


def _chunked(rec: GraphRecorder, h: HeadStyle, style: Style, x: Tensor) -> Loss:
    """chunked_nll of TRL 1.7 to 1.14: 256 labelled tokens at a time, checkpointed, head weight and logits in fp32."""
    contiguous = rec.new({"L": h.width}, x.itemsize, "contiguous hidden states")
    rows = labelled(rec, x, h.width)
    del contiguous
    w = ops.weight(h.vocabulary * h.width, h.itemsize, "embedding" if h.tied else "head", h.trained)
    logits: Elements = {("rows", CHUNK_TOKENS, 0): h.vocabulary}
    operands = _wide_operands(rec, h, rows, w)
    first = rec.new(logits, rec.autocast or 4, "logits of a chunk")
    operands.clear()
    scored = [ops.cast(rec, first.detach(), 4, "fp32 logits"), rec.new(logits, 4, "log_softmax of a chunk")]
    scored += [rec.new(logits, 4, label) for label in ("probabilities of a chunk", "entropy of a chunk")]
    scored.clear()
    del first
    need, like, weight_like = w.requires_grad, rows.blueprint(), w.blueprint()

    def backward(g: Tensor) -> list[Tensor | None]:
        result = rec.like(like, "gradient of hidden states")
        head = rec.like(weight_like, "head gradient") if need else None
        operands = _wide_operands(rec, h, like, weight_like)
        kept = [rec.new(logits, 4, label) for label in ("log_softmax of a chunk", "probabilities of a chunk")]
        kept += [rec.new(logits, 4, label) for label in ("nll gradient of a chunk", "logits gradient of a chunk")]
        del kept[:3]
        if need:
            product = rec.like(weight_like, "head gradient of a chunk", rec.autocast or 4)
            ops.cast(rec, ops.cast(rec, product, 4, "fp32 head gradient"), weight_like.itemsize, "cast head gradient")
            del product
        rec.like(like, "gradient of hidden states of a chunk")
        del kept, operands
        return [result, head]

    loss = rec.new({"1": 1}, 4, "loss")
    return rec.record(loss, [rows, w], [rows, w], backward), []


def _wide_operands(rec: GraphRecorder, h: HeadStyle, x: Tensor, w: Tensor) -> list[Tensor]:
    """h.float() @ w.float().t(): makes fp32 copies, and under autocast 16-bit copies of them."""
    chunk: Elements = {("rows", CHUNK_TOKENS, 0): h.width}
    made = [rec.new(chunk, 4, "fp32 hidden states of a chunk")] if x.itemsize != 4 else []
    made += [rec.new(w.elements, 4, "fp32 head")] if w.itemsize != 4 else []
    if rec.autocast:
        made += [rec.new(chunk, rec.autocast, "autocast copy"), rec.new(w.elements, rec.autocast, "autocast copy")]
    return made


def liger(rec: GraphRecorder, h: HeadStyle, style: Style, x: Tensor, *, product: bool = False) -> Loss:
    """Liger's fused linear cross entropy: makes the gradients in the forward, a chunk of tokens at a time.

    product: as in Liger up to 0.8.0, each chunk's gradient of the head is a tensor of its own, and widened to fp32.
    """
    w = ops.weight(h.vocabulary * h.width, h.itemsize, "embedding" if h.tied else "head", h.trained)
    share = -(-h.vocabulary // h.width)  # a chunk of logits takes about as many bytes as the hidden states
    compute = rec.autocast or x.itemsize
    grads = [rec.like(x, "gradient of hidden states") if x.requires_grad else None]
    grads.append(rec.like(w, "head gradient") if w.requires_grad and rec.grad else None)
    losses = rec.new({"T": 1}, 4, "losses")
    operands = [_narrow(rec, {("liger", share, 0): h.width}, x, compute), _narrow(rec, w.elements, w, compute)]
    logits = [rec.new({("liger", share, 0): h.vocabulary}, compute, "logits of a chunk")]
    if grads[1] is not None and operands[1] is not None:
        # `grad_logits @ weight` casts a leaf, whose copy autocast keeps; `weight.t()` is cast again for every chunk
        operands = [_narrow(rec, w.elements, w, compute)]
        logits.clear()
        operands += [_narrow(rec, {("liger", share, 0): h.width}, x, compute), _narrow(rec, w.elements, w, compute)]
        logits = [rec.new({("liger", share, 0): h.vocabulary}, compute, "logits of a chunk")]
    for _ in range(2 * product):  # a chunk's logits exist until those of the next do
        if grads[1] is not None:
            ops.cast(rec, rec.like(w, "head gradient of a chunk", compute), 4, "fp32 head gradient of a chunk")
        logits = [rec.new({("liger", share, 0): h.vocabulary}, compute, "logits of a chunk")]
    del logits, operands, losses
    held = [None if g is None else g.detach() for g in grads]
    grads.clear()

    def backward(g: Tensor) -> list[Tensor | None]:
        return [held.pop(0), held.pop(0)]

    loss = rec.new({"1": 1}, 4, "loss")
    return rec.record(loss, [x, w], [], backward), []


def _classes(rec: GraphRecorder, h: HeadStyle, style: Style, x: Tensor) -> Loss:
    """Classify each token, or like BertForSequenceClassification each sequence by its first token."""
    basis = "B" if h.pooled or h.first else "T"
    if h.pooled or h.first:
        x = ops.slice(rec, x, {"B": h.width})
    if h.pooled:
        dense = ops.weight(h.width * h.width, h.itemsize, "pooler.weight", h.trained)
        bias = ops.weight(h.width, h.itemsize, "pooler.bias", h.trained)
        x = ops.unary(rec, ops.linear(rec, x, dense, {"B": h.width}, bias, "pooled"), "tanh", keeps="output")
    trained = h.trained or h.new
    w = ops.weight(h.vocabulary * h.width, h.itemsize, "classifier", trained)
    b = ops.weight(h.vocabulary, h.itemsize, "classifier.bias", trained) if h.bias else None
    logits = ops.linear(rec, x, w, {basis: h.vocabulary}, b, "logits")
    return ops.cross_entropy(rec, logits), [logits] if not style.grad else []


def _odds(rec: GraphRecorder, h: HeadStyle, style: Style, x: Tensor) -> Loss:
    """TRL's ORPOTrainer: cross entropy of the chosen half of the rows, and log-probabilities of all of them.

    accelerate casts the logits to fp32 when the model returns. TRL's kernel saves them, not their softmax.
    """
    logits = logits_of(rec, h, x)
    rec.returned = len(rec.events)
    logits = ops.cast(rec, logits, 4, "fp32 logits") if rec.autocast else logits
    chosen = ops.slice(rec, logits, {"T": h.vocabulary // 2})
    chosen = ops.slice(rec, chosen, {"L": h.vocabulary // 2})
    nll = ops.cross_entropy(rec, ops.clone(rec, chosen, "shifted logits") if h.batched else chosen)
    rows = ops.slice(rec, logits, {"L": h.vocabulary})
    scored, like = rec.new({"L": 1}, 4, "log-probabilities"), rows.blueprint()
    scored = rec.record(scored, [rows], [rows], lambda g: [rec.like(like, "gradient of the logits")])
    loss = rec.record(rec.new({"1": 1}, 4, "loss"), [nll, scored], [], lambda g: [g, g])
    return loss, [logits] if not style.grad else []


def _next_token(rec: GraphRecorder, h: HeadStyle, style: Style, x: Tensor) -> Loss:
    """Sample the token after each prompt: logits of its last position alone, which `generate` widens."""
    w = ops.weight(h.vocabulary * h.width, h.itemsize, "embedding" if h.tied else "head", h.trained)
    logits = ops.linear(rec, ops.slice(rec, x, {"B": h.width}), w, {"B": h.vocabulary}, None, "logits")
    return rec.new({"1": 1}, 4, "next tokens"), [ops.cast(rec, logits, 4, "fp32 logits")]


LOSSES: dict[str, Callable[[GraphRecorder, HeadStyle, Style, Tensor], Loss]] = {
    "full": _full, "fused": _fused, "chunked": _chunked, "liger": liger, "classes": _classes, "odds": _odds,
    "next token": _next_token,
    "transformers<4.46": _model_loss, "transformers<4.51": _shifting_loss,
}  # fmt: skip
SHIFTING = ("transformers<4.46", "transformers<4.51")


@lru_cache(maxsize=1024)
def head_program(h: HeadStyle, style: Style) -> Program:
    """Trace final norm, head and loss, forward and backward."""
    rec = recorder(style)
    rec.awaited = "embedding" if h.tied and rec.accumulating else ""
    x = rec.new({"T": h.width}, style.residual, "hidden states")
    rec.new({}, 1, "no gradient")
    source = rec.new({"X": h.width}, h.source, SOURCE, "activations") if h.frees_source else None
    takes = {SOURCE: source.storage.id} if source and source.storage else {}
    rec.taken()
    x.requires_grad = style.grad and style.input_grad
    if h.norm is not None:
        x = norm(rec, x, h.norm, h.width, style, "final_norm")
    if h.transform:
        x = _transform(rec, h, style, x)
    if h.projected:
        w = ops.weight(h.width * h.projected, h.itemsize, "project_out", h.trained)
        x, h = ops.linear(rec, x, w, {"T": h.projected}, None, "projected"), replace(h, width=h.projected)
    x = ops.dropout(rec, x, h.dropout if style.dropout else 0.0)
    body = x  # the output of the model's body, a variable of its forward
    if h.scaled_states:
        x = ops.scale(rec, x, "scaled hidden states")
    loss, held = LOSSES[h.loss](rec, h, style, x)
    del x, body
    forward = rec.taken()
    returned = rec.returned or len(forward)
    forward, after = forward[:returned], forward[returned:]
    rec.cache.clear()
    if h.returns_fp32:  # after the region of autocast
        _widened(rec, h)
    rec.exit_autocast()
    del source
    if not style.grad:
        del loss
        held.clear()
    exits = rec.taken()
    received = None
    if style.grad:
        first = [rec.new({"1": 1}, 4, "gradient of the loss")]
        root = Tensor(None, loss.elements, loss.itemsize, True, loss.grad_fn)
        received = rec.backward(root, first) if loss.grad_fn else None
        first.clear()
        held.clear()
        del loss
        if not h.reduced_later:
            sharded(rec, style, beside=style.unit)  # the last block is prefetched
    else:
        return finished(rec, [forward, [], [*after, *exits], []], 0, None, takes=takes)
    awaited = rec.gradients.get(rec.awaited)
    hands = {TIED: awaited.storage.id} if awaited and awaited.storage else {}
    return finished(rec, [forward, [], exits, [*after, *rec.taken()]], 0, received, takes=takes, hands=hands)


def _widened(rec: GraphRecorder, h: HeadStyle) -> None:
    """accelerate's convert_outputs_to_fp32 of logits in 16 bits, and of what an encoder returns."""
    copies = [ops.cast(rec, logits.detach(), 4, "fp32 copy of the returned logits") for logits in rec.until_exit]
    if h.source == 2:
        copies.append(rec.new({"X": h.width}, 4, "fp32 copy of the returned source"))
    rec.until_exit += copies


def _transform(rec: GraphRecorder, h: HeadStyle, style: Style, x: Tensor) -> Tensor:
    """Run the prediction head of encoders: dense, activation, norm."""
    w = ops.weight(h.width * h.width, h.itemsize, "transform.weight", h.trained)
    b = ops.weight(h.width, h.itemsize, "transform.bias", h.trained)
    x = ops.linear(rec, x, w, {"T": h.width}, b, "transformed")
    x = activation(rec, x, h.transform)
    return norm(rec, x, Norm("layer"), h.width, style, "transform.norm")


@lru_cache(maxsize=256)
def source_program(style: Style, kind: Norm, width: int, dropout: float) -> tuple[Program, int]:
    """Trace the end of an encoder: its final norm and dropout, whose output all blocks of the decoder read.

    The second number is the itemsize of that output.
    """
    rec = recorder(style)
    x = rec.new({"T": width}, style.residual, "hidden states")
    gradient = [rec.new({"T": width}, style.residual, "gradient of the source")]
    rec.taken()
    x.requires_grad = style.grad and style.input_grad
    x = norm(rec, x, kind, width, style, "encoder.final_norm")
    x = ops.dropout(rec, x, dropout if style.dropout else 0.0)
    gradient[0].itemsize, rec.sizes[GRADIENT] = x.itemsize, {"T": width * x.itemsize}
    forward, source = rec.taken(), x.storage.id if x.storage else 0
    rec.exit_autocast()
    exits = rec.taken()
    root = Tensor(None, x.elements, x.itemsize, x.requires_grad, x.grad_fn)
    rec.roles[source] = "activations"
    received = rec.backward(root, gradient) if style.grad and root.grad_fn else None
    gradient.clear()
    backward = rec.taken()
    made = finished(rec, [forward, [], exits, backward], 0, received, takes={f"gradient of the {SOURCE}": GRADIENT},
                    hands={SOURCE: source})  # fmt: skip
    return made, x.itemsize
