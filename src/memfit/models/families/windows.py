"""Which layers of a family use a sliding window, and which rotate their queries and keys.

Each function takes a config and a layer's index and returns the window in tokens (None: full attention), or the
rotated width.
"""

from __future__ import annotations

from collections.abc import Callable

from memfit.models.families.dialect import rotary
from memfit.models.families.fields import Fields

Window = Callable[[Fields, int], int | None]


def uniform(f: Fields, index: int) -> int | None:
    """Every layer has a window of `sliding_window` tokens, when that is set."""
    return f.size("sliding_window") if f.raw("sliding_window") is not None else None


def optional(f: Fields, index: int) -> int | None:
    """Qwen: layers have a window if `use_sliding_window`, and then from layer `max_window_layers` on."""
    if not f.flag("use_sliding_window") or f.raw("sliding_window") is None:
        return None
    types = f.per_layer("layer_types", f.layers())
    slides = types[index] == "sliding_attention" if types else index >= f.size("max_window_layers", least=0)
    return f.size("sliding_window") if slides else None


def switched(f: Fields, index: int) -> int | None:
    """Every layer has the window, if `use_sliding_window`."""
    return uniform(f, index) if f.flag("use_sliding_window") else None


def every(period: int, key: str = "sliding_window_pattern") -> Window:
    """All but each `period`-th layer have a window; `layer_types`, or the number under `key`, overrides the pattern."""

    def window(f: Fields, index: int) -> int | None:
        types = f.per_layer("layer_types", f.layers())
        slides = types[index] == "sliding_attention" if types else bool((index + 1) % f.size(key, period))
        return uniform(f, index) if slides else None

    return window


def alternating_until(f: Fields, index: int) -> int | None:
    """Qwen2-MoE: every other layer below `max_window_layers` has a window, if `use_sliding_window`."""
    types = f.per_layer("layer_types", f.layers())
    listed = types is not None and types[index] == "sliding_attention"
    slides = listed if types else index % 2 == 0 and index < f.size("max_window_layers", least=0)
    return switched(f, index) if slides else None


def rotary_where_sliding(f: Fields, index: int) -> int:
    """Cohere 2, EXAONE 4: layers with full attention do not rotate, unless no layer has a window."""
    slides = every(4)(f, index) is not None
    return rotary(f, index) if slides or f.raw("sliding_window") is None else 0


def chunked(f: Fields, index: int) -> int | None:
    """Llama 4: the layers that rotate attend within chunks."""
    return f.size("attention_chunk_size") if has_rotary(f, index) else None


def without_rotary(f: Fields, index: int) -> int | None:
    """SmolLM3: only layers that do not rotate have a window, and only if `use_sliding_window`."""
    return None if has_rotary(f, index) else switched(f, index)


def has_rotary(f: Fields, index: int) -> bool:
    """SmolLM3, Llama 4: `no_rope_layers` holds a 1 for layers that rotate; without it every n-th does not."""
    listed = f.items("no_rope_layers", int)
    if listed:
        return bool((f.per_layer("no_rope_layers", f.layers(), int) or listed)[index])
    return (index + 1) % f.size("no_rope_layer_interval") != 0


def some_rotary(f: Fields, index: int) -> int:
    return rotary(f, index) if has_rotary(f, index) else 0
