"""Makers of the weights that blocks are put together from, with the names and shapes of PyTorch modules."""

from __future__ import annotations

from memfit.nouns.architecture import Weight

Weights = tuple[Weight, ...]


def linear(name: str, width_out: int, width_in: int, bias: bool = False, transposed: bool = False) -> Weights:
    """nn.Linear (out, in); `transposed` is the Conv1D of GPT-2, which stores (in, out)."""
    shape = (width_in, width_out) if transposed else (width_out, width_in)
    weight = Weight(f"{name}.weight", shape, "linear")
    return (weight, Weight(f"{name}.bias", (width_out,), "bias")) if bias else (weight,)


def norm(name: str, width: int, bias: bool = False) -> Weights:
    """A norm's scale and, with `bias`, its shift."""
    weight = Weight(f"{name}.weight", (width,), "norm")
    return (weight, Weight(f"{name}.bias", (width,), "norm")) if bias else (weight,)


def embedding(name: str, rows: int, width: int) -> Weights:
    return (Weight(f"{name}.weight", (rows, width), "embedding"),)


def conv(name: str, *shape: int, bias: bool = False) -> Weights:
    """A convolution (out, in / groups, *kernel)."""
    weight = Weight(f"{name}.weight", shape, "conv")
    return (weight, Weight(f"{name}.bias", shape[:1], "bias")) if bias else (weight,)


def other(name: str, *shape: int) -> Weights:
    return (Weight(name, shape, "other"),)


def experts(name: str, count: int, width: int, inner: int, bias: bool = False, transposed: bool = False) -> Weights:
    """Fused experts: gate_up (E, 2F, D) and down (E, D, F); `transposed` swaps the last two axes."""
    up, down = (count, 2 * inner, width), (count, width, inner)
    weights = []
    for part, (e, width_out, width_in) in (("gate_up_proj", up), ("down_proj", down)):
        shape = (e, width_in, width_out) if transposed else (e, width_out, width_in)
        weights.append(Weight(f"{name}.{part}", shape, "experts"))
        if bias:
            weights.append(Weight(f"{name}.{part}_bias", (e, width_out), "experts"))
    return tuple(weights)


def prefixed(prefix: str, weights: Weights) -> Weights:
    """The same weights below a module name; '' leaves them as they are."""
    if not prefix:
        return weights
    return tuple(Weight(f"{prefix}.{w.name}", w.shape, w.kind) for w in weights)
