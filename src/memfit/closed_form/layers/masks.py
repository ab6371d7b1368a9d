"""transformers.masking_utils: what building the attention masks of a forward allocates, and which masks remain."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.closed_form.engine import Elements, Recorder, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskStyle:
    """Which masks a model makes. `windows`: one entry per mask, True where a window shortens the look back."""

    windows: tuple[bool, ...] = (False,)
    given: bool = True  # the batch carries an attention_mask ...
    padded: bool = False  # ... and it masks something
    additive: int = 0  # itemsize of a float mask (eager attention); 0: a bool mask, skipped where it can be
    causal: bool = True
    always: bool = False  # Falcon: made even when the kernel could mask by itself
    itemsize: int = 2  # of the hidden states
    saved: bool = False  # the attention kernel saves the mask itself, not a copy in its dtype
    alibi: int = 0  # heads of a position bias; Falcon adds it to the mask, BLOOM and MPT keep it beside


def masks(rec: Recorder, m: MaskStyle) -> list[Tensor]:
    """Build the masks; returns those that live as long as the body of the model."""
    made = [rec.new({"T": m.alibi}, 4, "position bias", "activations")] if m.alibi else []
    made += [mask for mask in (_mask(rec, m, window) for window in m.windows) if mask is not None]
    if m.alibi and m.always:
        made[-1] = rec.new({"TS": m.alibi}, m.itemsize, "mask with position bias", "activations")
    return made


def _mask(rec: Recorder, m: MaskStyle, window: bool) -> Tensor | None:
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


def _positions(rec: Recorder) -> Tensor:
    plain = rec.new({"S": 1}, 8, "positions")
    shifted = rec.new({"S": 1}, 8, "shifted positions")
    del plain
    return shifted


def _pattern(rec: Recorder, m: MaskStyle, window: bool) -> Tensor:
    """Who may look at whom, padding aside: bool comparisons of positions, and-ed one by one."""
    square: Elements = {"SS": 1}
    if not m.causal:
        if not window:
            return rec.new({"S": 1}, 1, "every position")
        distance = rec.new(square, 8, "distance")
        absolute = rec.new(square, 8, "absolute distance")
        del distance
        near = rec.new(square, 1, "within the window")
        del absolute
        return _and(rec, near)
    if window:
        earlier = rec.new({"S": 1}, 8, "window start")
        near = rec.new(square, 1, "within the window")
        del earlier
        pattern = _and(rec, near)
        del near
        pattern = _anded(rec, pattern, rec.new(square, 1, "causal"))
        return _and(rec, pattern)
    causal = rec.new(square, 1, "causal")
    return _and(rec, causal)


def _and(rec: Recorder, mask: Tensor) -> Tensor:
    return rec.new(mask.elements, 1, "mask")


def _anded(rec: Recorder, mask: Tensor, other: Tensor) -> Tensor:
    return rec.new(mask.elements, 1, "mask")
