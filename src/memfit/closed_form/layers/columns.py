"""Pairs of texts whose embeddings are compared: each column runs by itself, then all are scored against all.

Sources: sentence-transformers 6.2 (Pooling, MultipleNegativesRankingLoss, util.normalize_embeddings).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from memfit.closed_form import ops
from memfit.closed_form.engine import GraphRecorder, Tensor
from memfit.closed_form.layers.elementwise import norm
from memfit.closed_form.layers.head import HeadStyle
from memfit.closed_form.layers.program import Program, await_others, finished, recorder, waiting_gradients
from memfit.closed_form.style import Style

ANCHORS = "embeddings of the first column"
ANCHORS_GRADIENT = f"gradient of the {ANCHORS}"


@lru_cache(maxsize=256)
def column_program(h: HeadStyle, style: Style) -> Program:
    """Trace what follows a column's last block: pooling, and behind the second column the scores and the loss."""
    rec, last = recorder(style), style.column == "second"
    x = rec.new({"T": h.width}, style.residual, "hidden states")
    # what the other column's program hands over: embeddings to score, or their gradient
    given = rec.new({"B": h.width}, 4, ANCHORS if last else ANCHORS_GRADIENT, "activations" if last else "temporaries")
    assert given.storage is not None
    takes = {ANCHORS if last else ANCHORS_GRADIENT: given.storage.id}
    takes |= {} if last else await_others(rec, column_program(h, replace(style, column="second")))
    rec.taken()
    x.requires_grad = style.grad and style.input_grad
    tokens, root = _pooled(rec, h, style, x)
    del x
    pooled = root.storage.id if root.storage else 0
    given.itemsize, rec.sizes[given.storage.id] = root.itemsize, {"B": h.width * root.itemsize}
    held = [tokens, root]  # the features of the column, a variable of the trainer until the loss is there
    del tokens
    gradient = [given]
    if last:
        root, more = _ranking(rec, given, root)
        held += [given, *more]
        gradient.clear()
        del more
    del given
    forward = rec.taken()
    rec.exit_autocast()
    held.clear()
    root = Tensor(None, root.elements, root.itemsize, root.requires_grad, root.grad_fn)
    exits = [event for event in rec.taken() if last or event != -pooled]  # the second column's program frees them
    received = None
    if style.grad and root.grad_fn:
        gradient += [rec.new({"1": 1}, 4, "gradient of the loss")] * last
        received = rec.backward(root, gradient)
    gradient.clear()
    found = rec.inputs.get(ANCHORS, [None])[0]
    hands = {} if last else {ANCHORS: pooled}
    hands |= {ANCHORS_GRADIENT: found.storage.id} if found and found.storage else {}
    hands |= waiting_gradients(rec, style)
    return finished(rec, [forward, [], exits, rec.taken()], 0, received, takes=takes, hands=hands)


def _pooled(rec: GraphRecorder, h: HeadStyle, style: Style, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the model's output and the mean of each text's tokens, which is summed in fp32."""
    if h.norm is not None:
        x = norm(rec, x, h.norm, h.width, style, "final_norm")
    if h.pooled:  # BERT's pooler runs, and nothing uses what it returns
        dense = rec.product({"B": h.width}, rec.autocast or x.itemsize, "pooled")
        rec.like(dense, "tanh")
        del dense
    mask = rec.new({"T": 1}, x.itemsize, "mask of the tokens")
    mean = _mean(rec, ops.mul(rec, x, mask, "tokens without padding"), x.itemsize)
    if rec.autocast and x.itemsize != 4:  # accelerate returns copies of all features
        wide = rec.like(x, "fp32 copy of the returned features", 4)
        mean = ops.cast(rec, mean, 4, "fp32 embeddings")
        del wide
    return x, mean


def _mean(rec: GraphRecorder, x: Tensor, itemsize: int) -> Tensor:
    """Pooling._forward_padded: the sum over the tokens in fp32, divided by their number, and a copy by torch.cat."""
    whole, each = x.blueprint(), x.elements["T"]
    summed = rec.record(
        rec.new({"B": each}, 4, "sum over the tokens"), [x], [],
        lambda g: [ops.cast(rec, g.view(whole.elements), whole.itemsize, "gradient of every token")],
    )  # fmt: skip
    del x
    count = rec.new({"B": 1}, 4, "number of tokens")
    mean = rec.record(rec.like(summed, "mean"), [summed], [count], lambda g: [rec.like(g, "gradient of the sum")])
    del summed
    mean = ops.cast(rec, mean, itemsize, "narrow mean")
    return ops.clone(rec, mean, "embeddings")


def _ranking(rec: GraphRecorder, anchors: Tensor, answers: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of scores of each anchor for the answers of the whole batch, and the variables of its code."""
    width, itemsize = anchors.elements["B"], anchors.itemsize
    anchors.parameter, anchors.requires_grad = ANCHORS, answers.requires_grad
    rec.inputs[ANCHORS] = [None]
    answers = ops.clone(rec, answers, "all answers")
    rows = ops.rows(rec, anchors, rec.new({"B": 1}, 8, "indices"))
    own = rec.like(answers, "answers of the batch")
    first, second = (_normalised(rec, x) for x in (rows, answers))
    scores = _scores(rec, first, second, {"B": width}, itemsize)
    scaled = ops.scale(rec, scores, "scaled scores")
    del scores
    positive = ops.slice(rec, scaled, {"B": 1})
    joined = rec.record(rec.like(scaled, "joined scores"), [scaled], [], lambda g: [ops.viewed(g.detach())])
    like = joined.blueprint()

    def backward(g: Tensor) -> list[Tensor | None]:
        passing = [rec.like(like, "gradient of the scores") for _ in range(2)]
        result = rec.like(like, "gradient of the scores")
        passing.clear()
        return [result]

    total = rec.record(rec.new({"B": 1}, 4, "log-sum-exp"), [joined], [joined], backward)
    loss = rec.record(rec.new({"1": 1}, 4, "loss"), [positive, total], [], lambda g: [g, g])
    return loss, [own, scaled]


def _scores(rec: GraphRecorder, a: Tensor, b: Tensor, shape: dict[str, int], itemsize: int) -> Tensor:
    """torch.mm(a, b.transpose(0, 1)): makes the gradient of b first."""

    def backward(g: Tensor) -> list[Tensor | None]:
        second, first = (rec.product(shape, itemsize, "gradient of embeddings") for _ in range(2))
        return [first, ops.viewed(second)]

    return rec.record(rec.product({"BB": 1}, itemsize, "scores"), [a, b], [a, b], backward)


def _normalised(rec: GraphRecorder, x: Tensor) -> Tensor:
    """F.normalize: divides by the norm of each row, through which a second gradient comes back."""
    lengths = [rec.new({"B": 1}, 4, label) for label in ("norm", "norm or the least")]
    out = rec.like(x, "normalised embeddings")

    def backward(g: Tensor) -> list[Tensor | None]:
        passing = [rec.like(g, "gradient of the norm") for _ in range(3)]
        product = rec.like(g, "gradient of the norm")
        passing.clear()
        result = rec.like(g, "gradient of the embeddings")
        del product
        return [result]

    return rec.record(out, [x], [x, *lengths], backward)
