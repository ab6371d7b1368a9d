"""The layers of a family that use a sliding window, and those that rotate their queries and keys.

Each function takes a config and a layer's index and returns the window in tokens (None: full attention), or the
rotated width.
"""

from __future__ import annotations

from collections.abc import Callable

from memfit.models.families.dialect import rotary
from memfit.models.families.fields import Fields

Window = Callable[[Fields, int], int | None]


def uniform(f: Fields, index: int) -> int | None:
    """Give every layer a window of `sliding_window` tokens, if that is set."""
    return f.size("sliding_window") if f.raw("sliding_window") is not None else None


def optional(f: Fields, index: int) -> int | None:
    """Give layers a window as Qwen does: from `max_window_layers` on, if `use_sliding_window`."""
    if not f.flag("use_sliding_window") or f.raw("sliding_window") is None:
        return None
    types = f.per_layer("layer_types", f.layers())
    slides = types[index] == "sliding_attention" if types else index >= f.size("max_window_layers", least=0)
    return f.size("sliding_window") if slides else None


def switched(f: Fields, index: int) -> int | None:
    """Give every layer the window, if `use_sliding_window`."""
    return uniform(f, index) if f.flag("use_sliding_window") else None


def every(period: int, key: str = "sliding_window_pattern") -> Window:
    """Give all but every `period`-th layer a window, unless the config has `layer_types` or a period under `key`."""

    def window(f: Fields, index: int) -> int | None:
        types = f.per_layer("layer_types", f.layers())
        slides = types[index] == "sliding_attention" if types else bool((index + 1) % f.size(key, period))
        return uniform(f, index) if slides else None

    return window


def alternating_until(f: Fields, index: int) -> int | None:
    """Give every other layer below `max_window_layers` a window (Qwen2-MoE), if `use_sliding_window`."""
    types = f.per_layer("layer_types", f.layers())
    if types:
        slides = types[index] == "sliding_attention"
    else:
        slides = index % 2 == 0 and index < f.size("max_window_layers", least=0)
    return switched(f, index) if slides else None


def rotary_where_sliding(f: Fields, index: int) -> int:
    """Rotate in layers with a window, or in all if no layer has one (Cohere 2, EXAONE 4)."""
    slides = every(4)(f, index) is not None
    return rotary(f, index) if slides or f.raw("sliding_window") is None else 0


def chunked(f: Fields, index: int) -> int | None:
    """Limit attention to chunks in the layers that rotate (Llama 4)."""
    return f.size("attention_chunk_size") if has_rotary(f, index) else None


def without_rotary(f: Fields, index: int) -> int | None:
    """Give only layers that do not rotate a window (SmolLM3), if `use_sliding_window`."""
    return None if has_rotary(f, index) else switched(f, index)


def has_rotary(f: Fields, index: int) -> bool:
    """Return whether a layer rotates: it has a 1 in `no_rope_layers`, or is not every n-th (SmolLM3, Llama 4)."""
    listed = f.items("no_rope_layers", int)
    if listed:
        return bool((f.per_layer("no_rope_layers", f.layers(), int) or listed)[index])
    return (index + 1) % f.size("no_rope_layer_interval") != 0


def some_rotary(f: Fields, index: int) -> int:
    return rotary(f, index) if has_rotary(f, index) else 0
