"""Attention over sequences that several GPUs share: torch's ring attention, and DeepSpeed's Ulysses.

Each GPU holds its share of every sequence, and everything but attention runs on that share alone. Sources: PyTorch 2.13
_context_parallel/_attention.py (all-gathered keys and values, its default), which a trace runs and agrees with;
DeepSpeed 0.19 ulysses_sp.py, derived and not traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.closed_form.engine import GraphRecorder, Tensor
from memfit.closed_form.layers.attention_kernels import scaled_dot_product_attention
from memfit.closed_form.style import Style
from memfit.nouns.architecture import Attention

Exchange = Callable[[GraphRecorder, Style, Tensor, Tensor, Tensor, Attention], Tensor]
MERGING = 4  # fp32 outputs at once in _SDPAMerger: the result so far, the next part, their difference, the new result


def ring(rec: GraphRecorder, style: Style, q: Tensor, k: Tensor, v: Tensor, a: Attention) -> Tensor:
    """_templated_ring_attention: keys and values of the whole sequence are gathered, partial outputs merged in fp32."""
    gathered = _gathered(rec, style, k, v)
    out = scaled_dot_product_attention(rec, style, q, k, v, a, 0.0, None)
    merging = [rec.like(out, "merged output", 4) for _ in range(MERGING)]
    del gathered, merging
    out.heads_first = True  # the merged output is concatenated anew, so that the model's own order needs a copy
    node, shapes = out.grad_fn, (q.blueprint(), k.blueprint(), v.blueprint())
    if node is None:
        return out
    plain = node.apply

    def backward(g: Tensor) -> Sequence[Tensor | None]:
        held = [rec.like(x, "gradient accumulator", 4) for x in shapes] + _gathered(rec, style, *shapes[1:])
        grads = plain(g)
        # the queries' gradient is concatenated anew; those of keys and values are joined, sent and received
        held += [rec.like(shapes[0], "updated gradient", 4)]
        held += [rec.like(x, label, 4) for label in ("sent gradient", "received gradient") for x in shapes[1:]]
        held.clear()
        return grads

    node.apply = backward
    return out


def _gathered(rec: GraphRecorder, style: Style, k: Tensor, v: Tensor) -> list[Tensor]:
    """Return keys and values as contiguous copies, joined to be sent, and of the whole sequence."""
    copies = [rec.like(x, "contiguous copy") for x in (k, v)]
    times = 1 + style.sequence_shards
    whole = [rec.new({e: n * times for e, n in x.elements.items()}, x.itemsize, "gathered keys") for x in (k, v)]
    return copies + whole


def ulysses(rec: GraphRecorder, style: Style, q: Tensor, k: Tensor, v: Tensor, a: Attention) -> Tensor:
    """UlyssesSPAttentionHF: whole sequences of a share of the heads, by an all-to-all before and after the kernel."""
    more = max(1, style.sequence_shards // a.kv_heads)  # every GPU needs a key head
    q, k, v = _exchanged(rec, q), _exchanged(rec, k, more), _exchanged(rec, v, more)
    return _exchanged(rec, scaled_dot_product_attention(rec, style, q, k, v, a, 0.0, None))


def _exchanged(rec: GraphRecorder, x: Tensor, times: int = 1) -> Tensor:
    """_SeqAllToAll: a copy in the order of the receivers, and what is received; the same for the gradient."""
    before = x.blueprint()
    sent = rec.like(x, "send buffer")
    out = rec.new({e: n * times for e, n in x.elements.items()}, x.itemsize, "received", heads_first=x.heads_first)

    def backward(g: Tensor) -> list[Tensor | None]:
        sent = rec.like(g, "send buffer")
        received = rec.like(before, "received gradient")
        del sent
        return [received]

    del sent
    return rec.record(out, [x], [], backward)


EXCHANGES: dict[str, Exchange] = {"ring": ring, "ulysses": ulysses}
