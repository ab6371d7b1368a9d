"""Images in a text: patches are embedded, pass a tower, become tokens, and are written into the embedded text.

Sources: transformers 5.23, modeling_qwen2_vl.py and modeling_qwen2_5_vl.py. The tower runs after the text is embedded
and before its decoder; its blocks are those of layers.block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from memfit.closed_form import ops
from memfit.closed_form.engine import Elements, GraphRecorder, Tensor
from memfit.closed_form.layers.convolution import convolution, convolved
from memfit.closed_form.layers.elementwise import activation
from memfit.closed_form.layers.embedding import EmbeddingStyle, masks
from memfit.closed_form.layers.linears import LayerRun
from memfit.closed_form.layers.program import Program, finished, recorder
from memfit.closed_form.size import rows_of, tokens_of_the_text
from memfit.closed_form.style import Style
from memfit.nouns.architecture import Rows, Tower
from memfit.tables.cudnn_convolutions import Convolution, Dtype

_PIXEL = 4  # bytes of a number in a batch of images


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerStyle:
    """What decides which tensors a tower's ends make beside those of its blocks."""

    tower: Tower
    dtype: Dtype  # in which the convolution of patches computes
    weight: int = 2  # itemsize of its weights
    trained: bool = True  # they get gradients
    leaf: bool = False  # frozen, but the embedded patches require a gradient, as EmbeddingStyle.leaf
    learns: bool = True  # something in the tower gets gradients
    text: int = 2  # itemsize of the embedded text


# ---- patches ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def stem_program(t: TowerStyle, style: Style) -> Program:
    """Trace everything of the tower before its first block; `leave` frees what ends with the tower."""
    rec, tower = recorder(style), t.tower
    rec.new({}, 1, "no input")
    gradient = [rec.new({"T": tower.width}, style.residual, "gradient of the embedded patches")]
    rec.taken()
    rec.units = tokens_of_the_text
    pixels, computed = _pixels(rec, t)
    rec.units = rows_of(tower.rows)
    places = rec.new({"T": 2}, 8, "rows and columns of patches")
    x = _patches(rec, t, computed, {"T": tower.width})
    leaf = x if t.leaf else None
    x.requires_grad |= t.leaf
    if tower.windows:
        x = _in_order(rec, x, "patches in the order of windows")
    tables = _angles(rec, tower)
    if x.itemsize != style.residual:
        x = ops.cast(rec, x, style.residual)
    output = x.storage.id if x.storage else 0
    if leaf and leaf.storage:
        rec.lingering.add(leaf.storage.id)
    forward = rec.taken()
    del pixels, computed, places
    if not (style.grad and t.learns):
        tables.clear()
    leave = rec.taken()
    rec.exit_autocast()
    exits = rec.taken()
    tables.clear()  # blocks save them or get them as arguments until the backward of the first block
    if style.grad and x.requires_grad:
        root = Tensor(None, x.elements, x.itemsize, True, x.grad_fn)
        del x
        received = rec.backward(root, gradient) if root.grad_fn else gradient.pop()
        if t.leaf and received and received.storage:
            rec.lingering.add(received.storage.id)
        del leaf, received, root
    gradient.clear()
    backward = [event for event in rec.taken() if event != -output] if style.grad else []
    return finished(rec, [forward, leave, exits, backward], output, None)


def _pixels(rec: GraphRecorder, t: TowerStyle) -> tuple[Tensor, Tensor]:
    """Return the pixels of a batch in the dtype of the model, and in the one that autocast computes in."""
    pixels = ops.cast(rec, Tensor(None, {"B": t.tower.pixels}, _PIXEL), t.weight, "pixels in the dtype of the tower")
    return pixels, ops.autocast(rec, pixels)


def _patches(rec: GraphRecorder, t: TowerStyle, pixels: Tensor, shape: Elements, *, bias: bool = False) -> Tensor:
    """Embed patches by a convolution whose kernels do not overlap."""
    tower = t.tower
    described = Convolution(
        batch=1, inside=tower.channels, outside=tower.width, groups=1, kernel=tower.kernel, stride=tower.kernel,
        size=tower.size, out=tuple(a // b for a, b in zip(tower.size, tower.kernel, strict=True)), dtype=t.dtype,
        last=False,
    )  # fmt: skip
    each = tower.pixels // (tower.channels * prod(tower.size))
    weights = convolved(described, t.weight, "patches", t.trained, bias=bias)
    return convolution(rec, pixels, *weights, described, shape, each)


def _in_order(rec: GraphRecorder, x: Tensor, label: str) -> Tensor:
    """x[index]: its gradient is written into zeros by sorted indices."""
    index = rec.new({"T": 2}, 1, "index")
    out = rec.new(x.elements, x.itemsize, label)
    del index
    like = x.blueprint()

    def backward(g: Tensor) -> ops.Grads:
        result = rec.like(like, "gradient in the order of the image")
        held = [rec.new({"T": 2}, 1, "sorted index") for _ in range(4)]
        held.clear()
        return [result]

    return rec.record(out, [x], [], backward)


def _angles(rec: GraphRecorder, tower: Tower) -> list[Tensor]:
    """Return cos and sin of every patch in fp32, in the order of windows if there are any."""
    head = tower.layers[0].attention.rotary_dim
    half: Elements = {"T": head // 2}
    angles = rec.new(half, 4, "angles")
    cos = ops.scale(rec, rec.new(half, 4, "cosine"), "scaled cosine")
    sin = ops.scale(rec, rec.new(half, 4, "sine"), "scaled sine")
    tables = []
    for narrow in (cos, sin):
        both = rec.new(half, 4, "rows and columns")
        tables.append(rec.new({"T": head}, 4, "rotary table"))
        del both, narrow
    del angles, cos, sin
    if tower.windows:
        tables = [_in_order(rec, table, "rotary table") for table in tables]
    for table in tables:
        if table.storage:
            rec.roles[table.storage.id] = "activations"
    return tables


@lru_cache(maxsize=256)
def pictures_program(t: TowerStyle, style: Style, dropout: float) -> Program:
    """Trace the embeddings of ViT, whose sequence is one image: a token of the class, patches, and their positions."""
    rec, width = recorder(style), t.tower.width
    rec.new({}, 1, "no input")
    gradient = [rec.new({"T": width}, style.residual, "gradient of the embedded patches")]
    rec.taken()
    pixels, computed = _pixels(rec, t)
    patches: Elements = {"B": (t.tower.rows.length - 1) * width}
    x = _patches(rec, t, computed, patches, bias=True)
    del computed
    token = ops.weight(width, t.weight, "class token", t.trained)
    x = _with_token(rec, x, token, {"T": width})
    places = Tensor(None, {"S": width}, t.weight, t.trained, None, "positions")
    x = ops.dropout(rec, ops.add(rec, x, places, "with positions"), dropout if style.dropout else 0.0)
    leaf = x if t.leaf else None
    output = x.storage.id if x.storage else 0
    forward = rec.taken()
    del pixels
    leave = [event for event in rec.taken() if event != -output]
    rec.exit_autocast()
    exits = rec.taken()
    if style.grad and x.grad_fn:
        root = Tensor(None, x.elements, x.itemsize, True, x.grad_fn)
        del x
        rec.backward(root, gradient)
    del leaf
    gradient.clear()
    backward = [event for event in rec.taken() if event != -output] if style.grad else []
    return finished(rec, [forward, leave, exits, backward], output, None)


def _with_token(rec: GraphRecorder, x: Tensor, token: Tensor, shape: Elements) -> Tensor:
    """torch.cat((token.expand(batch, 1, width), patches)): gradients are views, that of the token a sum of one."""
    columns, width, patches = token.elements, token.itemsize, x.elements

    def backward(g: Tensor) -> ops.Grads:
        part = g.detach()
        part.elements, part.viewed, part.heads_first = patches, True, True  # laid out patch by patch
        return [part, rec.new(columns, width, "summed gradient")]

    out = rec.new(shape, max(x.itemsize, width), "class token and patches")
    return rec.record(out, [x, token], [], backward)


# ---- tokens ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def merger_program(t: TowerStyle, style: Style) -> Program:
    """Trace what makes tokens of patches; the tower's outputs exist until the body of the model returns."""
    rec, tower = recorder(style), t.tower
    x = rec.new({"T": tower.width}, style.residual, "patches")
    merged = Rows(tower.rows.count, tower.tokens)
    rec.units = rec.scratch = rows_of(merged)
    gradient = [rec.new({"T": tower.out}, t.text, "gradient of the images")]
    rec.taken()
    x.requires_grad = style.grad and style.input_grad
    pooled = _merged(LayerRun(rec, tower.merger, style, tower.width), t, x, merged)
    out = rec.record(
        rec.new(pooled.elements, pooled.itemsize, "tokens of all images"), [pooled], [],
        lambda g: [rec.like(g, "joined gradient")],
    )  # fmt: skip
    out = ops.cast(rec, out, t.text, "images in the dtype of the text")
    output = out.storage.id if out.storage else 0
    forward = rec.taken()
    held = [pooled, x]
    del pooled, x
    held.clear()
    leave = rec.taken()
    rec.exit_autocast()
    exits, received = rec.taken(), None
    if style.grad and out.requires_grad:
        root = Tensor(None, out.elements, out.itemsize, True, out.grad_fn)
        del out
        received = rec.backward(root, gradient)
    gradient.clear()
    backward = [event for event in rec.taken() if event != -output] if style.grad else []
    return finished(rec, [forward, leave, exits, backward], output, received)


def _merged(run: LayerRun, t: TowerStyle, x: Tensor, merged: Rows) -> Tensor:
    """Qwen2VLPatchMerger: a norm, and two linear layers on patches joined to tokens."""
    rec, tower = run.rec, t.tower
    joint = tower.width * tower.rows.length // tower.tokens
    rec.units = rows_of(tower.rows)
    x = run.norm(x, "ln_q")
    rec.units = rows_of(merged)
    x = run.linear("0", _grouped(rec, x, {"T": joint}), joint, "mlp")
    x = run.linear("2", activation(rec, x, "gelu"), tower.out, "mlp")
    return _in_order(rec, x, "tokens in the order of the image") if tower.windows else x


def _grouped(rec: GraphRecorder, x: Tensor, elements: Elements) -> Tensor:
    """x.view(-1, width of a token): the gradient is viewed as patches again."""
    before = x.elements

    def backward(g: Tensor) -> ops.Grads:
        result = g.detach()
        result.elements, result.viewed = before, True
        return [result]

    return rec.record(x.view(elements), [x], [], backward)


# ---- the text --------------------------------------------------------------------------------------------------------

TEXT = 3  # id of the embedded text in join_program
_TEXT = "embedded text"


@lru_cache(maxsize=256)
def join_program(t: TowerStyle, e: EmbeddingStyle, style: Style) -> Program:
    """Trace how images are written into the embedded text, and the masks and tables of the decoder."""
    rec, tower = recorder(style), t.tower
    rec.accumulating = rec.release_gradients = False  # no parameter gets a gradient here
    merged = rows_of(Rows(tower.rows.count, tower.tokens))
    rec.units = merged
    images = rec.new({"T": tower.out}, t.text, "tokens of all images")
    rec.units = tokens_of_the_text
    gradient = [rec.new({"T": e.width}, style.residual, "gradient of the text with images")]
    x = rec.new({"T": e.width}, t.text, _TEXT)
    rec.taken()
    x.requires_grad, x.parameter = style.grad and (e.trained or e.leaf), _TEXT
    images.requires_grad = style.grad and t.learns
    where, videos = rec.new({"T": 1}, 1, "places of images"), rec.new({"T": 1}, 1, "places of videos")
    out = ops.cast(rec, _written(rec, x, images, where), style.residual)
    leaf = x if e.leaf else None  # the embedding's program frees it, as the graph holds it until then
    del where, x
    places = rec.new({"T": 3}, 8, "places in time, rows and columns")
    made = masks(rec, e.masks)
    tables = _axial_tables(rec, e, style)
    output = out.storage.id if out.storage else 0
    forward = rec.taken()
    del images, videos, places
    if not e.checkpointed:
        made.clear()
    if not style.grad:
        tables.clear()
    leave = rec.taken()
    made.clear()
    tables.clear()
    received, kept = None, None
    if style.grad and out.grad_fn:
        root = Tensor(None, out.elements, out.itemsize, True, out.grad_fn)
        del out
        received, kept = rec.backward(root, gradient), rec.gradients.pop(_TEXT, None)
    gradient.clear()
    backward = [event for event in rec.taken() if event != -output] if style.grad else []
    text = kept.storage.id if kept and kept.storage else 0
    if text:
        rec.roles[text] = "temporaries"
    rec.roles[TEXT] = "activations"
    made_of_it = replace(finished(rec, [forward, leave, [], backward], output, received), aside=(TEXT, text))
    del leaf
    return made_of_it


def _written(rec: GraphRecorder, x: Tensor, images: Tensor, where: Tensor) -> Tensor:
    """x.masked_scatter(where, images): the text's gradient is a copy, and that of the images is selected from it."""
    need_text, need_images, like = x.requires_grad, images.requires_grad, x.blueprint()
    shape = images.blueprint()
    selected = rec.sizes[images.storage.id] if images.storage else {}

    def backward(g: Tensor) -> ops.Grads:
        text = rec.like(like, "gradient of the embedded text") if need_text else None
        found = None
        if need_images:
            found = rec.new(selected, 1, "gradient of the images")
            found.elements, found.itemsize = shape.elements, shape.itemsize
        return [text, found]

    return rec.record(rec.like(x, "text with images"), [x, images], [where], backward)


def _axial_tables(rec: GraphRecorder, e: EmbeddingStyle, style: Style) -> list[Tensor]:
    """Qwen2VLRotaryEmbedding: angles of three axes for every token, of which each table takes a part."""
    (width,) = e.rotary
    axes: Elements = {"T": 3 * width // 2}
    angles = rec.new(axes, 4, "angles")
    cos = ops.scale(rec, rec.new(axes, 4, "cosine"), "scaled cosine")
    sin = ops.scale(rec, rec.new(axes, 4, "sine"), "scaled sine")
    wide = []
    for _ in range(2):
        part = rec.new({"T": width // 2}, 4, "parts of the axes")
        wide.append(rec.new({"T": width}, 4, "rotary table in fp32"))
        del part
    del cos, sin
    tables = [ops.cast(rec, table, style.residual, "rotary table") for table in wide]
    del angles, wide
    for table in tables:
        if table.storage:
            rec.roles[table.storage.id] = "activations"
    return tables
