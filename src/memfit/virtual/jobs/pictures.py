"""Images in a text: each family's own processor, on images without data, which counts their tokens and shapes them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from inspect import signature
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.models.auto import image_processing_auto, processing_auto

from memfit.errors import BadInput, Unsupported
from memfit.models.families import FAMILIES as FORMULAS
from memfit.nouns.task import Images, Shape
from memfit.virtual.patching import patched

if TYPE_CHECKING:
    from memfit.virtual.jobs.recipe import Setup

SIDE = 1024  # pixels of a square image, for models that follow the size of an image
_LENGTHS: dict[Hashable, int] = {}  # tokens of the images of samples
_MADE: dict[Hashable, dict[str, Tensor]] = {}  # the last sample
_MODULES: Any = transformers._class_to_module  # type: ignore[attr-defined]  # class -> the module that defines it
PADDED = 8  # tokens
_WORD = "w"  # the one word of the text
_CHANNELS = 3
Words = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one family's processor is made from a config, as its published preprocessor_config.json sets it."""

    text: str  # what stands in a text for one image
    tokens: Mapping[str, tuple[str, str]]  # attribute of the tokenizer -> (token, the config's key of its id)
    images: Words  # arguments of the image processor
    whole: Words = lambda config: {}  # arguments of the processor
    follows: bool = True  # whether the number of tokens follows the size of an image
    others: tuple[str, ...] = ()  # further tokens, whose ids the model does not know


def _vision(config: Any) -> Any:
    return config.vision_config


def _edge(config: Any) -> int:
    """Return the side of the square images, or tiles, that the tower takes."""
    size = _vision(config).image_size
    return int(size[0] if isinstance(size, list | tuple) else size)


def _patch(config: Any) -> int:
    size = _vision(config).patch_size
    return int(size[0] if isinstance(size, list | tuple) else size)


def _square(config: Any) -> dict[str, Any]:
    return {"size": {"height": _edge(config), "width": _edge(config)}}


def _cropped(config: Any) -> dict[str, Any]:
    edge = _edge(config)
    return {"size": {"shortest_edge": edge}, "crop_size": {"height": edge, "width": edge}}


def _strategy(config: Any) -> dict[str, Any]:
    """Return the arguments of LLaVA's processors; CLIP's class token is the additional one."""
    chosen = config.vision_feature_select_strategy
    extra = 1 if _vision(config).model_type == "clip_vision_model" else 0
    return {
        "patch_size": _patch(config), "vision_feature_select_strategy": chosen, "num_additional_image_tokens": extra
    }  # fmt: skip


def _smart(most: int, least: int) -> Words:
    """Return the arguments of Qwen's processor, which keeps the pixels of an image between two bounds."""
    return lambda config: {
        "patch_size": _vision(config).patch_size, "temporal_patch_size": _vision(config).temporal_patch_size,
        "merge_size": _vision(config).spatial_merge_size, "size": {"shortest_edge": least, "longest_edge": most},
    }  # fmt: skip


def _qwen(most: int, least: int) -> Family:
    return Family(
        text="<|vision_start|><|image_pad|><|vision_end|>", images=_smart(most, least),
        tokens={"image_token": ("<|image_pad|>", "image_token_id"), "video_token": ("<|video_pad|>", "video_token_id"),
                "vision_start_token": ("<|vision_start|>", "vision_start_token_id"),
                "vision_end_token": ("<|vision_end|>", "vision_end_token_id")},
    )  # fmt: skip


_IMAGE = {"image_token": ("<image>", "image_token_id image_token_index")}
_PIXTRAL = Family(
    text="[IMG]", tokens={"image_token": ("[IMG]", "image_token_id image_token_index")},
    images=lambda c: {"size": {"longest_edge": _edge(c)}, "patch_size": {"height": _patch(c), "width": _patch(c)}},
    whole=lambda c: {"patch_size": _patch(c), "spatial_merge_size": getattr(c, "spatial_merge_size", 1)},
    others=("[IMG_BREAK]", "[IMG_END]"),
)  # fmt: skip
_LLAVA = Family(text="<image>", tokens=_IMAGE, images=_cropped, whole=_strategy, follows=False)
# Qwen's bounds are those of the published preprocessor_config.json, the classes' own are smaller
_QWEN2, _QWEN3 = _qwen(12_845_056, 3_136), _qwen(16_777_216, 65_536)

FAMILIES: dict[str, Family] = {
    "qwen2_vl": _QWEN2, "qwen2_5_vl": _QWEN2,
    "qwen3_vl": _QWEN3, "qwen3_vl_moe": _QWEN3, "qwen3_5": _QWEN3, "qwen3_5_moe": _QWEN3,
    "gemma3": Family(
        text="<start_of_image>", images=_square, follows=False,
        tokens={"image_token": ("<image_soft_token>", "image_token_id image_token_index"),
                "boi_token": ("<start_of_image>", "boi_token_index"),
                "eoi_token": ("<end_of_image>", "eoi_token_index")},
        whole=lambda c: {"image_seq_length": c.mm_tokens_per_image},
    ),
    "paligemma": Family(
        text="<image>", tokens=_IMAGE, follows=False,
        images=lambda c: {**_square(c), "image_seq_length": (_edge(c) // _patch(c)) ** 2},
    ),
    "llava": _LLAVA,
    "llava_next": Family(
        text="<image>", tokens=_IMAGE, whole=_strategy,
        images=lambda c: {**_cropped(c), "image_grid_pinpoints": c.image_grid_pinpoints},
    ),
    "mllama": Family(
        text="<|image|>", tokens={"image_token": ("<|image|>", "image_token_id image_token_index")},
        images=lambda c: {**_square(c), "max_image_tiles": _vision(c).max_num_tiles},
    ),
    "internvl": Family(
        text="<IMG_CONTEXT>", images=_square, whole=lambda c: {"image_seq_length": c.image_seq_length},
        tokens={"context_image_token": ("<IMG_CONTEXT>", "image_token_id"), "start_image_token": ("<img>", ""),
                "end_image_token": ("</img>", ""), "video_token": ("<video>", "")},
    ),
    "mistral3": _PIXTRAL,
}  # fmt: skip


# families whose model reads pixels, which a virtual card does not have
_READ = "are sorted by their pixels, which a trace does not have"
_NOT = {"idefics2": _READ, "idefics3": _READ, "smolvlm": _READ}


# --- processors without images ---


class _Picture:
    """Pillow's image, for an environment without Pillow: nothing is one."""


class _Resampling(IntEnum):
    """Pillow's filters, for an environment without Pillow."""

    NEAREST = 0
    LANCZOS = 1
    BILINEAR = 2
    BICUBIC = 3
    BOX = 4
    HAMMING = 5


def _blank(image: Any, size: tuple[int, int], *_: Any, data_format: Any = None, **words: Any) -> Any:
    """Return an empty image of the wanted size, in place of resampling one."""
    from transformers.image_utils import ChannelDimension, infer_channel_dimension_format

    given = words.get("input_data_format") or infer_channel_dimension_format(image)
    height, width = size
    first = (data_format or given) == ChannelDimension.FIRST
    return np.zeros((_CHANNELS, height, width) if first else (height, width, _CHANNELS), dtype=image.dtype)


@contextmanager
def _without_pillow() -> Iterator[None]:
    """Let transformers' image processors run on arrays without Pillow, which names filters and resamples for them."""
    from transformers import image_processing_backends, image_transforms, image_utils

    if not hasattr(image_utils, "PIL"):  # the modules of image processors import these names from there, for good
        utils: Any = image_utils
        backends: Any = image_processing_backends
        utils.PIL = SimpleNamespace(Image=SimpleNamespace(Image=_Picture))
        utils.PILImageResampling = _Resampling
        backends.PILImageResampling = _Resampling
    rgb = lambda image, **_: image  # noqa: E731
    arrays = {"requires_backends": lambda *_: None}  # cropping, of arrays too, asks for Pillow
    with (
        patched(image_processing_backends, {"np_resize": _blank, "convert_to_rgb_pil": rgb}),
        patched(image_transforms, arrays),
    ):
        yield


def _defined(name: str) -> Any:
    """Return a class of transformers from the module that defines it, whatever is not installed."""
    return getattr(import_module(f"transformers.{_MODULES[name]}"), name)


@contextmanager
def _missing_named() -> Iterator[None]:
    """Name the package that a processor imports and that is not installed. Raises Unsupported."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise Unsupported(f"the model's processor needs {error.name}", hint=f"pip install {error.name}") from error


def family_of(config: Any) -> Family:
    """Return how the processor of a model is made. Raises Unsupported."""
    kind = config.model_type
    if kind == "llava" and _vision(config).model_type == "pixtral":
        return _PIXTRAL
    if kind not in FAMILIES:
        alone = "--images 0 plans the text alone; " if kind in FORMULAS else ""
        hint = f"{alone}families with images: {', '.join(FAMILIES)}"
        raise Unsupported(f"the images of {kind} models {_NOT.get(kind, 'are not counted yet')}", hint=hint)
    return FAMILIES[kind]


def processor_of(config: Any) -> Any:
    """Return the processor of a model with a tokenizer of one word, made without the Hub."""
    family, kind = family_of(config), config.model_type
    with _without_pillow(), _missing_named():
        known: Any = image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]
        images = known.get(kind) or known[kind.removesuffix("_moe")]
        pixtral = family is _PIXTRAL
        made = _defined("PixtralImageProcessorPil" if pixtral else images["pil"])(**family.images(config))
        whole = _defined("PixtralProcessor" if pixtral else processing_auto.PROCESSOR_MAPPING_NAMES[kind])  # type: ignore[attr-defined]
    parts = {  # without a video processor, which needs torchvision
        "get_attributes": classmethod(lambda cls: ["image_processor", "tokenizer"]),
        "check_argument_for_proper_class": lambda *_: None,  # no class is proper where Pillow is not installed
    }
    absent = {"video_processor": None} if "video_processor" in signature(whole).parameters else {}
    stilled: Any = type(whole.__name__, (whole,), parts)
    return stilled(image_processor=made, tokenizer=_tokenizer(family, config), **absent, **family.whole(config))


def _tokenizer(family: Family, config: Any) -> Any:
    """Return a tokenizer of one word that knows the family's special tokens by the ids of the config."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    named: dict[str, int | None] = {}
    for token, keys in family.tokens.values():
        named[token] = next((getattr(config, key) for key in keys.split() if hasattr(config, key)), None)
    taken = {number for number in named.values() if number is not None}
    free = (n for n in count(3) if n not in taken)
    vocabulary = {token: next(free) if number is None else number for token, number in named.items()}
    for token in ("<unk>", "<pad>", "<s>", _WORD, *family.others):
        vocabulary[token] = next(free)
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {name: token for name, (token, _) in family.tokens.items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", eos_token="<s>", bos_token="<s>",
        extra_special_tokens=special,
    )  # fmt: skip
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.others)})
    return tokenizer


# --- samples ---


def size_of(config: Any, given: tuple[int, int]) -> tuple[int, int]:
    """Return width and height of an image: the given one, else the model's own, else SIDE x SIDE."""
    if all(given):
        return given
    side = SIDE if family_of(config).follows else _edge(config)
    return side, side


def counted(setup: Setup, config: Any) -> Images:
    """Return the size and the tokens of the images of one sample."""
    return Images(size_of(config, setup.shape.image), _length(setup, config))


def _key(config: Any) -> str:
    """Return what a processor is made from: the config without the decoder's."""
    return repr({name: value for name, value in config.to_dict().items() if name != "text_config"})


def _length(setup: Setup, config: Any) -> int:
    """Return the tokens of the images alone."""
    key = (_key(config), setup.shape)
    if key not in _LENGTHS:
        _LENGTHS[key] = _process(config, setup.shape, 0)["input_ids"].shape[1]
    return _LENGTHS[key]


def batch_of_one(setup: Setup, config: Any) -> dict[str, Tensor]:
    """Return what TRL's collator makes of one sample: images, then text up to the setup's length. [1, ...]

    Raises BadInput where the images alone are longer.
    """
    taken = _length(setup, config)
    if taken >= setup.sequence:
        problem = f"the images take {taken:,} tokens, and a sequence has {setup.sequence:,}"
        raise BadInput(problem, hint="a longer --sequence-length, or a smaller --image-size")
    found = _processed(setup, config, setup.sequence - taken)
    return {**found, "labels": found["input_ids"].clone()}


def collated(one: dict[str, Tensor], count: int, padded: bool) -> dict[str, Tensor]:
    """Return a batch of equal samples with unwritten pixels; every second sample is padded where `padded`."""
    batch = {
        name: torch.empty(len(value) * count, *value.shape[1:], dtype=value.dtype)
        if value.is_floating_point()
        else torch.cat([value] * count)
        for name, value in one.items()
    }
    if padded:
        batch["attention_mask"][1::2, -PADDED:] = 0
        batch["labels"][1::2, -PADDED:] = -100
    return batch


def patches(batch: dict[str, Tensor], config: Any) -> int:
    """Return the patches of a batch's images."""
    pixels = batch["pixel_values"]
    if pixels.dim() == 2:  # Qwen's, a row for each
        return len(pixels)
    return int(pixels[..., 0, :, :].numel()) // _patch(config) ** 2


def _processed(setup: Setup, config: Any, words: int) -> dict[str, Tensor]:
    """Return a sample as the processor makes it; it is the same whatever the depth of the decoder."""
    key = (_key(config), setup.shape, words)
    if key not in _MADE:
        _MADE.clear()  # one sample, which may take hundreds of MB
        _MADE[key] = _process(config, setup.shape, words)
    return dict(_MADE[key])


def _process(config: Any, shape: Shape, words: int) -> dict[str, Tensor]:
    processor, number = processor_of(config), shape.images
    wide, tall = size_of(config, shape.image)
    images = [np.zeros((tall, wide, _CHANNELS), dtype=np.uint8)] * number
    text = family_of(config).text * number + f" {_WORD}" * words
    with _without_pillow():
        found = processor(images=[images], text=[text], return_tensors="pt", add_special_tokens=False)
    return {name: value for name, value in found.items() if isinstance(value, Tensor) and name != "labels"}
