"""Sound before an encoder: Whisper's two convolutions of a recording, and its table of positions.

Source: transformers 5.23, WhisperEncoder.forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from memfit.closed_form import ops
from memfit.closed_form.engine import GraphRecorder, Tensor
from memfit.closed_form.layers.convolution import convolution, convolved
from memfit.closed_form.layers.elementwise import activation
from memfit.closed_form.layers.program import Program, finished, recorder
from memfit.closed_form.style import Style
from memfit.nouns.architecture import Recording
from memfit.tables.cudnn_convolutions import Convolution, Dtype

TAPS = 3  # of both kernels
_FEATURE = 4  # bytes of a number in a batch of recordings


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingStyle:
    """What decides which tensors exist before the first block of an encoder of sound."""

    recording: Recording
    width: int
    dtype: Dtype  # in which the convolutions compute
    weight: int  # itemsize of their weights, and of the positions
    trained: bool
    dropout: float


@lru_cache(maxsize=256)
def recording_program(r: RecordingStyle, style: Style) -> Program:
    """Trace everything before the first block; the convolved recording is a variable until the encoder returns."""
    rec, width = recorder(style), r.width
    rec.new({}, 1, "no input")
    gradient = [rec.new({"T": width}, style.residual, "gradient of the convolved recording")]
    rec.taken()
    convolved_twice = _convolved(rec, r)
    places = rec.new({"S": 1}, 8, "positions")
    table = rec.new({"S": width}, r.weight, "position embedding")
    x = ops.add(rec, _turned(rec, convolved_twice, width), table, "with positions")
    del table
    x = ops.cast(rec, ops.dropout(rec, x, r.dropout if style.dropout else 0.0), style.residual)
    output = x.storage.id if x.storage else 0
    forward = rec.taken()
    del convolved_twice, places
    leave = [event for event in rec.taken() if event != -output]
    rec.exit_autocast()
    exits = rec.taken()
    if style.grad and x.grad_fn:
        root = Tensor(None, x.elements, x.itemsize, True, x.grad_fn)
        del x
        rec.backward(root, gradient)
    gradient.clear()
    backward = [event for event in rec.taken() if event != -output] if style.grad else []
    return finished(rec, [forward, leave, exits, backward], output, None)


def _convolved(rec: GraphRecorder, r: RecordingStyle) -> Tensor:
    """gelu(conv2(gelu(conv1(features)))), of which the second visits every other frame."""
    sound = r.recording
    x = Tensor(None, {"B": sound.numbers}, _FEATURE)
    inside, frames = sound.mels, sound.frames
    for number, stride in enumerate((1, sound.stride), 1):
        out = frames // stride
        c = Convolution(
            batch=1, inside=inside, outside=r.width, groups=1, kernel=(1, TAPS), stride=(1, stride), size=(1, frames),
            out=(1, out), dtype=r.dtype, last=False,
        )  # fmt: skip
        weights = convolved(c, r.weight, f"conv{number}", r.trained)
        x = activation(rec, convolution(rec, x, *weights, c, {"B": out * r.width}), "gelu")
        inside, frames = r.width, out
    return x


def _turned(rec: GraphRecorder, x: Tensor, width: int) -> Tensor:
    """x.permute(0, 2, 1): a view, channels last; the gradient lies position by position."""
    before = x.elements

    def backward(g: Tensor) -> ops.Grads:
        result = g.detach()
        result.elements, result.viewed, result.heads_first = before, True, True
        return [result]

    return rec.record(x.view({"T": width}), [x], [], backward)
