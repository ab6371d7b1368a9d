"""Vision towers as they run on the images of a sample: their blocks, and how many patches and tokens an image makes.

The rules are those of the published image processors (transformers 5.23), which a trace runs themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from math import ceil, floor, sqrt

from memfit.errors import BadInput
from memfit.models.families.dialect import Dialect, block, prefixed
from memfit.models.families.fields import Fields
from memfit.models.families.vision import QWEN2_5_VISION, QWEN2_VISION, VIT, merger_of
from memfit.nouns.architecture import Layer, Rows, Tower
from memfit.nouns.task import Images, Shape, Task

SIDE = 1024  # pixels of a square image, for models that follow the size of an image
FRAMING = 2  # tokens around an image in the text
_MOST_RATIO = 200  # of the sides of an image that Qwen's processor takes
_ROTATED = "half_fp32_once"  # apply_rotary_pos_emb_vision: queries and keys in fp32


def smart_resized(wide: int, tall: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Return the size of an image with sides in multiples of `factor` and from `least` to `most` pixels.

    Raises BadInput for an image that the processor refuses.
    """
    if max(wide, tall) > _MOST_RATIO * min(wide, tall):
        raise BadInput(f"an image of {wide}x{tall} is longer than {_MOST_RATIO} times its other side",
                       hint="--image-size 1024x768")  # fmt: skip
    sides = [round(side / factor) * factor for side in (wide, tall)]
    if sides[0] * sides[1] > most:
        ratio = sqrt(wide * tall / most)
        sides = [max(factor, floor(side / ratio / factor) * factor) for side in (wide, tall)]
    elif sides[0] * sides[1] < least:
        ratio = sqrt(least / (wide * tall))
        sides = [ceil(side * ratio / factor) * factor for side in (wide, tall)]
    return sides[0], sides[1]


def _windows(wide: int, tall: int, side: int) -> Counter[int]:
    """Return how many windows have so many tokens, where windows of `side` tokens a side are laid over an image."""
    across, down = ([min(side, length - at) for at in range(0, length, side)] for length in (wide, tall))
    return Counter(a * b for a, b in product(across, down))


def _qwen(d: Dialect, bounds: tuple[int, int], top: Fields, shape: Shape) -> Tower:
    """Build the tower of Qwen2-VL and Qwen2.5-VL, which takes the patches of all images as one sequence."""
    f = Fields(top.section("vision_config"), top.name, d.aliases, d.defaults)
    patch, merge = f.size("patch_size"), f.size("spatial_merge_size")
    wide, tall = (side // patch for side in smart_resized(*(shape.image if all(shape.image) else (SIDE, SIDE)),
                                                          patch * merge, *bounds))  # fmt: skip
    whole = _within_images(block(f, d, 0))
    layers, windows = (whole,) * f.layers(), Counter[int]()
    if side := f.size("window_size", 0, least=0) // merge // patch:
        full = f.items("fullatt_block_indexes", int) or ()
        within = replace(whole, attention=replace(whole.attention, window=side))
        layers = tuple(whole if i in full else within for i in range(len(layers)))
        windows = _windows(wide // merge, tall // merge, side)
    kernel = (f.size("temporal_patch_size"), patch, patch)
    merger = prefixed("merger", merger_of(f, d))
    return Tower(
        "qwen", f.size("hidden_size"), layers, Rows(shape.images, wide * tall), wide * tall // merge**2, kernel, kernel,
        merger[-1].numel, replace(whole, weights=merger),
        tuple(Rows(shape.images * n, length * merge**2) for length, n in sorted(windows.items())),
    )  # fmt: skip


def _within_images(layer: Layer) -> Layer:
    a = layer.attention
    return replace(layer, attention=replace(a, code="images", rotary_dim=a.head_dim, rotary=_ROTATED))


_PIXELS = (3_136, 12_845_056)  # fewest and most of an image


def _vit(top: Fields, shape: Shape) -> Tower:
    """Build ViT, whose images are the samples of a batch, each of the size of its grid of positions."""
    f = Fields(top.values, top.name, VIT.aliases, VIT.defaults)
    side, patch, layer = f.size("image_size"), f.size("patch_size"), block(f, VIT, 0)
    if shape.image not in ((0, 0), (side, side)):
        raise BadInput(f"{top.name} takes images of {side}x{side}", hint="leave out --image-size")
    return Tower(
        "vit", f.size("hidden_size"), (layer,) * f.layers(), Rows(1, (side // patch) ** 2 + 1), 0, (side, side),
        (patch, patch), 0, layer, channels=f.size("num_channels"),
    )  # fmt: skip


CLASSIFIERS: dict[str, Callable[[Fields, Shape], Tower]] = {"vit": _vit}
IN_TEXT: dict[str, Callable[[Fields, Shape], Tower]] = {
    "qwen2_vl": partial(_qwen, QWEN2_VISION, _PIXELS), "qwen2_5_vl": partial(_qwen, QWEN2_5_VISION, _PIXELS),
}  # fmt: skip


def tower(config: Mapping[str, object], name: str, task: Task, shape: Shape) -> Tower | None:
    """Return the tower of a model on the images of a sample; None for a task or a family without a formula."""
    kind = str(config.get("model_type"))
    if task.sample == "image" and kind in CLASSIFIERS:
        return CLASSIFIERS[kind](Fields(config, name), shape)
    build = IN_TEXT.get(kind) if task.sample == "pictures" else None
    return build(Fields(config, name), shape) if build else None


def images_of(config: Mapping[str, object], name: str, shape: Shape) -> Images:
    """Return the size and the tokens of the images of a sample, for a family with a formula."""
    made = IN_TEXT[str(config.get("model_type"))](Fields(config, name), shape)
    return Images(shape.image if all(shape.image) else (SIDE, SIDE), shape.images * (made.tokens + FRAMING))
