"""Text-to-image models: the catalogue's pipelines, and their training against an H100."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conftest import Ran
from memfit import Recipe, find_gpu
from memfit.allocator.replay import replay
from memfit.models.hub import list_models, resolve_config
from memfit.nouns.task import Shape
from memfit.tables.pipelines import PIPELINES
from traced import check_as_measured

CACHED, ATTENTION = Shape(cached=True), ("to_k", "to_q", "to_v", "to_out.0")
# case of benchmarks/measure/tasks.py -> the pipeline by name, and its job
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "stable diffusion lora": ("stable-diffusion-v1-5", {"method": "lora", "micro_batch": 4}),
    "stable diffusion full": ("stable-diffusion-v1-5", {"dtype": "fp32", "micro_batch": 2}),
    "sdxl lora": ("stable-diffusion-xl-base-1.0", {"method": "lora", "shape": CACHED}),
    "sdxl lora b4": ("stable-diffusion-xl-base-1.0", {"method": "lora", "shape": CACHED, "micro_batch": 4}),
    "sd3 lora": ("stable-diffusion-3-medium", {"method": "lora", "shape": CACHED, "micro_batch": 2}),
}  # fmt: skip
# component -> parameters, as the repositories' safetensors count them
PARAMETERS = {
    "stable-diffusion-v1-5": {"unet": 859_520_964, "vae": 83_653_863, "text_encoder": 123_060_480},
    "stable-diffusion-2-1": {"unet": 865_910_724, "vae": 83_653_863, "text_encoder": 340_387_840},
    "stable-diffusion-xl-base-1.0": {"unet": 2_567_463_684, "vae": 83_653_863, "text_encoder_2": 694_659_840},
    "flux.1-dev": {"transformer": 11_901_408_320, "vae": 83_819_683, "text_encoder_2": 4_762_310_656},
    "stable-diffusion-3.5-medium": {"transformer": 2_243_171_520},
    "stable-diffusion-3.5-large": {"transformer": 8_056_627_520},
    "qwen-image": {"transformer": 20_430_401_088},
    "z-image-turbo": {"transformer": 6_154_908_736},
    "pixart-sigma": {"transformer": 610_856_096},
    "sana-1.6b": {"transformer": 1_604_462_752},
    "cosmos-predict2-2b": {"transformer": 1_956_405_248},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_pipeline_has_the_published_parameters(name: str) -> None:
    pytest.importorskip("diffusers")
    import torch

    from memfit.virtual.jobs.diffusion import made

    for part, count in PARAMETERS[name].items():
        with torch.device("meta"):
            model = made(resolve_config(name)[part])
        assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.nightly if case.startswith("sdxl") else ()) for case in JOBS]
)
def test_a_pipeline_takes_what_it_took_on_the_card(case: str) -> None:
    pytest.importorskip("diffusers")
    from memfit.virtual.jobs.recipe import Setup

    name, words = JOBS[case]
    config = resolve_config(name)
    if case == "sd3 lora":  # as it was measured
        config["transformer"] = {**config["transformer"], "num_layers": 12}
        words = {**words, "targets": ATTENTION}
    setup = Setup(
        config=config, task="text-to-image", trainer="torch", autocast="bf16", alpha=16, widen=True, load="device",
        optimizer="adamw_torch", steps=3, **words,
    )  # fmt: skip
    check_as_measured(setup, case)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("flux.1-dev", "--resolution", "520x520"), "--resolution 528x528"),
        (("sdxl", "--resolution", "512x512", "--method", "qlora", "--out", "run"), "--method lora"),
        (("stable-diffusion-v1-5", "--method", "lora", "--resolution", "64x64", "--micro-batch", "1"), "64 x 64"),
    ],
)
def test_what_is_planned_and_what_is_refused(
    words: tuple[str, ...], said: str, ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("diffusers")
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    _, out, err = ran("plan", *words, "--gpu", "rtx-4090")
    assert said in out + err


def test_a_missing_library_is_named(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    monkeypatch.setattr("memfit.cli.task_flags.find_spec", lambda name: None)
    code, out, err = ran("plan", "stabilityai/stable-diffusion-xl-base-1.0", "--gpu", "t4")
    assert (code, out) == (2, "")
    assert "pip install diffusers" in err


VALUES = ("Lumina2Pipeline", "OmniGenPipeline")  # which read values
FEW = dict.fromkeys(
    ("num_layers", "num_single_layers", "n_layers", "n_refiner_layers", "num_refiner_layers", "num_mmdit_layers",
     "num_single_dit_layers", "num_visual_blocks", "num_text_blocks", "layers_per_block",
     "transformer_layers_per_block"), 1,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", [key for key in PIPELINES if key not in VALUES])
def test_every_pipeline_predicts_noise_of_the_shape_of_its_latents(key: str) -> None:
    pytest.importorskip("diffusers")
    import torch

    from memfit.virtual.jobs.diffusion import forward_on_meta
    from memfit.virtual.jobs.recipe import Setup

    row = next(row for row in list_models() if row.architecture == key)
    shape = Shape(cached=True, image=(128, 192))
    config, kind = resolve_config(row.stem), PIPELINES[key]
    part = config[kind.denoiser]
    config[kind.denoiser] = part | {name: few for name, few in FEW.items() if name in part}
    setup = Setup(config=config, task="text-to-image", trainer="torch", shape=shape)
    model, forward = forward_on_meta(setup)
    assert type(model).__name__ == kind.trained
    with torch.no_grad():
        channels = setup.config["vae"]["latent_channels"]
        assert forward().shape == (1, channels, 192 // kind.downscale, 128 // kind.downscale)


@pytest.mark.filterwarnings("ignore")
def test_repeated_blocks_of_a_denoiser_are_unrolled_to_the_tape_of_all() -> None:
    pytest.importorskip("diffusers")
    from memfit.virtual.repeated_blocks.unroll import in_order_of_birth
    from memfit.virtual.tracing import trace_recipe

    config = resolve_config("z-image-turbo")  # with two more lists of blocks
    config["transformer"] |= {"n_layers": 20}
    recipe = Recipe(method="lora", lora_rank=4, trainer="torch", checkpointing="full", loss="full")
    given = {"task": "text-to-image", "shape": Shape(image=(64, 64), cached=True)}
    short, whole = (trace_recipe(recipe, config, find_gpu("l4"), full=full, **given) for full in (False, True))
    assert "of 20 layers" in short[0].about["depth"]
    sizes = [[(type(e), getattr(e, "size", 0)) for e in events] for events in
             (short[0].events, in_order_of_birth(whole[0].events))]  # fmt: skip
    assert sizes[0] == sizes[1]
    assert short[1] == whole[1]


def test_cached_texts_are_as_long_as_the_trainer_pads_them() -> None:
    pytest.importorskip("diffusers")
    from memfit.virtual.jobs import diffusion
    from memfit.virtual.jobs.recipe import Setup

    config = resolve_config("stable-diffusion-3.5-medium")
    given = (Shape(cached=True), Shape(cached=True, text=231), Shape(text=231))
    usual, padded, encoded = (diffusion.tokens(Setup(config=config, task="text-to-image", shape=s)) for s in given)
    assert (padded - usual, encoded) == (77, usual)


# one has groups of blocks under a checkpoint, the other checkpoints one block in so many
GROUPED = ("stable-diffusion-3.5-medium", "qwen-image")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_blocks_keep_what_simpletuner_keeps(name: str) -> None:
    pytest.importorskip("diffusers")
    from memfit.virtual.tracing import trace_recipe

    config = resolve_config(name)
    config["transformer"] |= {"num_layers": 8} | ({"dual_attention_layers": []} if "3.5" in name else {})
    recipe = Recipe(method="lora", lora_rank=4, trainer="torch", loss="full", sequence_length=32)
    given = {"task": "text-to-image", "shape": Shape(image=(256, 256), cached=True)}

    def most(**words: Any) -> int:
        tape, _ = trace_recipe(recipe.but(**words), config, find_gpu("l4"), full=True, **given)
        return replay(tape.events).peak.allocated

    kept, each = most(), most(checkpointing="full")
    half, pairs = ((most(checkpointing="full", checkpoint_interval=2, checkpoint_stride=n) - each) / (kept - each)
                   for n in (4, 0))  # fmt: skip
    assert 0.25 < half < 0.65
    assert 0.25 < pairs < 0.65 if name == "qwen-image" else pairs < 0.25


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--model", "kolors"), "--checkpoint-interval 1"), (("--checkpoint-stride", "1"), "--checkpoint-stride 0"),
     (("--checkpointing", "none"), "--checkpoint-interval 1"), (("--model", "qwen2.5-7b"), "--checkpoint-interval 1")],
)  # fmt: skip
def test_groups_of_blocks_that_nothing_has_are_refused(words: tuple[str, ...], said: str, ran: Ran) -> None:
    pytest.importorskip("diffusers")
    words, model = (words[2:], words[1]) if words[0] == "--model" else (words, "z-image-turbo")
    kept = () if "--checkpointing" in words else ("--checkpointing", "full")
    code, _, err = ran("trace", model, "--gpu", "l4", "--method", "lora", "--checkpoint-interval", "2", *kept, *words)
    assert code == 2 and said in err


def test_no_script_is_promised_for_a_denoiser_alone(ran: Ran) -> None:
    pytest.importorskip("diffusers")
    code, out, err = ran("plan", "qwen-image", "--method", "lora", "--gpu", "h100", "--out", "run")
    assert (code, out) == (2, "") and "--out" in err


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("stable-diffusion-v1-5", {"method": "lora", "checkpointing": "full", "accumulation": 4, "lora_dropout": 0.1}),
        ("stable-diffusion-v1-5", {"optimizer": "adamw-8bit", "precision": "bf16-mixed"}),
        ("lumina2", {"method": "lora", "accumulation": 2}),  # which reads values
    ],
)
def test_steps_that_repeat_are_the_traced_ones(
    name: str, words: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("diffusers")
    from memfit.virtual import tracing

    config = resolve_config(name)
    for part, given in config.items():
        if isinstance(given, dict):
            config[part] = given | {few: 1 for few in (*FEW, "num_hidden_layers") if few in given}
    monkeypatch.setattr("memfit.virtual.repeated_blocks.depths.depths", lambda setup: None)
    ran, traced = [], tracing._traced

    def noted(setup: Any, *given: Any, **more: Any) -> Any:
        ran.append(setup.sections)
        return traced(setup, *given, **more)

    monkeypatch.setattr(tracing, "_traced", noted)
    recipe = Recipe(trainer="torch", loss="full", **words)
    given = {"task": "text-to-image", "shape": Shape(image=(64, 64))}
    short, whole = (tracing.trace_recipe(recipe, config, find_gpu("l4"), full=f, **given) for f in (False, True))
    assert short == whole and ran == [True, False]
