"""Rows of the Qwen-VL README: its finetune.py on one image and padded text, of which the sequence holds both.

The model's code is not in transformers. Its text part is Qwen-7B's; the vision transformer and the resampler, both
frozen, are counted by their sizes in configuration and visual.py. What they compute without gradients is gone before
the text part begins, and smaller.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from memfit.nouns.architecture import Architecture, Layer, Weight
from published import qwen
from published.case import Case, NotCovered, architecture_of
from published.rows import Row

TEXT = "Qwen/Qwen-7B-Chat"
WIDTH, DEPTH, FFN, PATCH, PATCHES = 1664, 48, 8192, 14, 1024  # of the vision transformer
OUT, QUERIES = 4096, 256  # of the resampler
OUTPUT = "o_proj"  # what attn.c_proj is called here, because mlp.c_proj has no adapter


def case(row: Row) -> Case:
    """A row as a Case. Raises NotCovered. finetune_qlora_single_gpu.sh runs under ZeRO-2, as that of Qwen does."""
    length = re.match(r"(\d+) \+ 1 image \(448x448, 256 visual tokens inside\)", row.seq_len)
    if length is None:
        raise NotCovered(f"sequence length '{row.seq_len}' is not known")
    text = replace(
        row, model=TEXT, seq_len=length[1], attention="eager",
        lora_targets=row.lora_targets.replace("attn.c_proj", OUTPUT).replace(" + ", " + trainable "),
        sharding="DeepSpeed ZeRO-2 (single GPU)" if row.method == "qlora" else row.sharding,
    )  # fmt: skip
    return replace(qwen.case(text), architecture=_architecture())


@cache
def _architecture() -> Architecture:
    text = architecture_of(TEXT)
    made: dict[int, Layer] = {}
    for layer in text.kinds:
        weights = tuple(replace(w, name=w.name.replace("attn.c_proj", f"attn.{OUTPUT}")) for w in layer.weights)
        made[id(layer)] = replace(layer, weights=weights)
    return replace(text, layers=tuple(made[id(layer)] for layer in text.layers), tower=_tower())


def _tower() -> tuple[Weight, ...]:
    """VisionTransformer and Resampler of visual.py."""
    block = (
        (3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,), (FFN, WIDTH), (FFN,), (WIDTH, FFN), (WIDTH,),
        *[(WIDTH,)] * 4,
    )  # fmt: skip
    ends = ((WIDTH, 3, PATCH, PATCH), (PATCHES, WIDTH), *[(WIDTH,)] * 4, (OUT, OUT))
    resampler = (
        (QUERIES, OUT), (QUERIES, OUT), (OUT, WIDTH), (3 * OUT, OUT), (3 * OUT,), (OUT, OUT), (OUT,), *[(OUT,)] * 6
    )  # fmt: skip
    shapes = (*ends, *DEPTH * block, *resampler)
    return tuple(Weight(f"visual.{number}.weight", shape, "other") for number, shape in enumerate(shapes))
