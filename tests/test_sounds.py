"""Recordings as each family's own feature extractor makes them, and the task that a model's class is trained for."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from conftest import Ran
from memfit import Recipe, find_gpu
from memfit.allocator.replay import replay
from memfit.errors import MemfitError
from memfit.models.families import FAMILIES, architecture, without_formula
from memfit.nouns.task import Shape
from memfit.tables.tasks import TASKS, usual

pytestmark = pytest.mark.filterwarnings("ignore")
BLOCKS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
PAIR = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}  # fmt: skip
CONVOLVED = {"conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 4], "num_feat_extract_layers": 2,
             "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}  # fmt: skip
CONFORMER = {"model_type": "parakeet_encoder", **BLOCKS, "subsampling_conv_channels": 8, "num_mel_bins": 24}
LASR = {"model_type": "lasr_encoder", **BLOCKS, "subsampling_conv_channels": 8, "num_mel_bins": 24}
# model type -> its task and config
HEARING: dict[str, tuple[str, dict[str, Any]]] = {
    "speech_to_text": ("speech", {"vocab_size": 64, "input_feat_per_channel": 24, "conv_channels": 16, **PAIR}),
    "moonshine": ("speech", {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 2, "decoder_num_attention_heads": 2,
        "pad_token_id": None}),
    "speecht5": ("speech", {"vocab_size": 64, **BLOCKS, **CONVOLVED, **PAIR, "hidden_size": 32}),
    "wav2vec2": ("speech-ctc", {"vocab_size": 32, **BLOCKS, **CONVOLVED, "feat_extract_norm": "layer"}),
    "hubert": ("speech-ctc", {"vocab_size": 32, **BLOCKS, **CONVOLVED}),
    "wav2vec2-bert": ("speech-ctc", {"vocab_size": 32, **BLOCKS, "feature_projection_input_dim": 160}),
    "parakeet_ctc": ("speech-ctc", {"vocab_size": 32, "pad_token_id": 0, "encoder_config": CONFORMER}),
    "lasr_ctc": ("speech-ctc", {"vocab_size": 32, "encoder_config": LASR}),
}  # fmt: skip
MASKED = ("wav2vec2", "moonshine", "lasr_ctc")  # whose waveforms or spectrograms come with a mask that others lack


def config_of(kind: str) -> dict[str, Any]:
    return {"model_type": kind, **HEARING[kind][1]}


@pytest.mark.parametrize("kind", HEARING)
def test_a_model_learns_from_what_its_extractor_makes(kind: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from memfit.virtual.jobs.models import batch_of_one, class_of
    from memfit.virtual.jobs.models import config_of as configured
    from memfit.virtual.jobs.recipe import setup_of

    shape = Shape(audio_seconds=2.0, target=8)
    setup = setup_of(Recipe(trainer="transformers"), config_of(kind), HEARING[kind][0], shape)
    config, batch = configured(setup), batch_of_one(setup)
    model = class_of(config, setup.task).from_config(config)
    assert {*batch} <= {*signature(model.forward).parameters}
    assert isinstance(model, transformers.PreTrainedModel)
    loss = model(**batch).loss  # a real step: shapes that do not belong together fail
    loss.backward()
    assert torch.isfinite(loss) and model.get_output_embeddings is not None
    masks = [value for name, value in batch.items() if name.endswith("mask")]
    assert all(0 < mask.sum() < mask.numel() for mask in masks)
    assert masks or kind not in MASKED


@pytest.mark.parametrize("kind", ["moonshine", "parakeet_ctc"])
def test_a_longer_recording_takes_more_of_a_model_without_a_window(kind: str) -> None:
    pytest.importorskip("trl")
    from memfit.virtual.tracing import trace_recipe

    recipe, task = Recipe(trainer="transformers", precision="bf16-mixed"), HEARING[kind][0]
    peaks = []
    for seconds in (2.0, 20.0):
        shape = Shape(audio_seconds=seconds, target=8)
        tape, _ = trace_recipe(recipe, config_of(kind), find_gpu("t4"), task=task, shape=shape)
        found = replay(tape.events).by_phase()
        peaks.append(max(found[phase].requested for phase in ("first_step", "step")))
    assert peaks[0] * 1.2 < peaks[1]


def test_a_script_of_a_waveform_takes_what_was_planned(
    tmp_path: Path, ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl")
    transformers = pytest.importorskip("transformers")
    from test_task_scripts import agree, peaks, sound, text, words

    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    model, data, folder = tmp_path / "moonshine", tmp_path / "data.jsonl", tmp_path / "run"
    made = transformers.AutoConfig.for_model(**config_of("moonshine"))
    transformers.AutoModelForSpeechSeq2Seq.from_config(made).save_pretrained(model)
    words().save_pretrained(model)
    transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True).save_pretrained(model)
    (model / "processor_config.json").write_text('{"processor_class": "Wav2Vec2Processor"}')
    rows = [{"audio": sound(2.0 - i / 10), "text": text(9)} for i in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ("--audio-seconds", "2", "--target-length", "8", "--effective-batch", "4", "--micro-batch", "4")
    code, out, err = ran("plan", model, "--gpu", "t4", *given, "--out", folder, "--json")
    assert code == 0, err
    assert json.loads(out)["job"]["task"] == "speech"
    assert "AUDIO_SECONDS = 2" in (folder / "train.py").read_text()
    agree(peaks(json.loads(out)), folder, data, "t4")


# ---- the usual task of a class


def _classes() -> list[Any]:
    """Every class that transformers has for a task, with its family."""
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    rows = {row.mapping for row in TASKS.values() if row.mapping and row.sample != "pictures"}
    found = []
    for mapping in sorted(rows):
        for kind, names in getattr(auto, mapping).items():
            found += [(mapping, kind, name) for name in ([names] if isinstance(names, str) else names)]
    return found


def test_every_class_that_can_be_trained_has_a_usual_task_that_it_can_do() -> None:
    pytest.importorskip("trl")
    from transformers import CONFIG_MAPPING

    from memfit.virtual.jobs.tasks import can

    wrong, seen = [], 0
    for mapping, kind, name in _classes():
        if not any(can(row, kind) for row in TASKS.values() if row.mapping == mapping):
            continue  # such as an encoder with a causal head
        try:
            config = {**CONFIG_MAPPING[kind]().to_dict(), "model_type": kind, "architectures": [name]}
        except Exception:  # a family whose class has no defaults
            config = {"model_type": kind, "architectures": [name]}
        try:
            model = architecture(config, kind) if kind in FAMILIES else without_formula(config, kind)
        except MemfitError:
            model = without_formula(config, kind)
        seen += 1
        if not can(usual(model), kind):
            wrong.append((kind, name, usual(model).key))
    assert seen > 400 and not wrong
