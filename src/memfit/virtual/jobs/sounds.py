"""Recordings: each family's own feature extractor, run on noise, which shapes what the encoder takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import transformers
from torch import Tensor
from transformers.models.auto import feature_extraction_auto

from memfit.errors import Unsupported
from memfit.nouns.task import USUAL_SECONDS

if TYPE_CHECKING:
    from memfit.virtual.jobs.recipe import Setup

_MADE: dict[Hashable, dict[str, Tensor]] = {}  # the last sample
# families whose published preprocessor_config.json names another class than transformers' own table, or that has none
_EXTRACTORS = {"wav2vec2-bert": "SeamlessM4TFeatureExtractor", "moonshine_streaming": "Wav2Vec2FeatureExtractor"}
_BANDS = ("num_mel_bins", "input_feat_per_channel")  # a config's key of the numbers of one frame
_MASKED = ("moonshine", "moonshine_streaming", "lasr_ctc")  # which take a mask that the class leaves out by default


def _bands(config: Any) -> int | None:
    """Return the numbers of one frame of a spectrogram; None where the extractor's own are the model's."""
    parts = (config, getattr(config, "encoder_config", None))
    return next((value for part in parts for key in _BANDS if (value := getattr(part, key, None))), None)


def _words(config: Any, made: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of a feature extractor, as the model's published preprocessor_config.json sets them."""
    taken, bands = signature(made).parameters, _bands(config)
    found: dict[str, Any] = {name: bands for name in ("feature_size", "num_mel_bins") if bands and name in taken}
    if "chunk_length" in taken and hasattr(config, "max_source_positions"):  # two frames, of 10 ms, for each position
        found["chunk_length"] = config.max_source_positions // 50
    return found


def extractor_of(config: Any) -> Any:
    """Return the feature extractor of a model. Raises Unsupported where it has none, or needs a missing package."""
    config = getattr(config, "encoder", config)  # of a pair of models
    kind = config.model_type
    known: Any = feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING_NAMES  # type: ignore[attr-defined]
    name = _EXTRACTORS.get(kind) or known.get(kind)
    if name is None:
        raise Unsupported(f"transformers names no feature extractor of {kind} models",
                          hint="trace the script that trains it: memfit trace train.py")  # fmt: skip
    made = getattr(transformers, name)
    try:
        return made(**_words(config, made))
    except ImportError as missing:
        package = next(iter(re.findall(r"requires the (\w+) library", str(missing))), "a package")
        problem = f"the feature extractor of {kind} models needs {package}, which is not installed"
        raise Unsupported(problem, hint=f"pip install {package}") from missing


def heard(setup: Setup, config: Any) -> dict[str, Tensor]:
    """Return what the extractor makes of one recording: waveform or spectrogram, and its mask where it makes one.

    The mask's last tenth is padding, as in a batch of recordings of several lengths.
    """
    seconds = setup.shape.audio_seconds or USUAL_SECONDS
    key = (config.to_json_string(), seconds)
    if key not in _MADE:
        extractor = extractor_of(config)
        length = max(int(seconds * extractor.sampling_rate), 1)
        noise = np.random.default_rng(0).standard_normal(length, dtype=np.float32)  # silence has no scale
        layered = getattr(config, "feat_extract_norm", "group") == "layer"  # of Wav2Vec2 and its like
        masked = {"return_attention_mask": True} if layered or config.model_type in _MASKED else {}
        found = extractor(noise, sampling_rate=extractor.sampling_rate, return_tensors="pt", **masked)
        _MADE.clear()
        _MADE[key] = {name: value[0] for name, value in found.items() if isinstance(value, Tensor)}
    made = {name: value.clone() for name, value in _MADE[key].items()}
    for name, value in made.items():
        if name.endswith("mask"):
            value[..., -max(value.shape[-1] // 10, 1) :] = 0
    return made
