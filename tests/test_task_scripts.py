"""The scripts of tasks: they train tiny models, take what was planned, and are read back into the same plan."""

from __future__ import annotations

import ast
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from conftest import Ran
from memfit.allocator.replay import replay
from memfit.documents import recipe_file
from memfit.frameworks import targets
from memfit.models.families import architecture, without_formula
from memfit.nouns.alloc_settings import parse_alloc_conf, torch_version
from memfit.nouns.job import Job, Recipe
from memfit.nouns.plan import Plan
from memfit.nouns.task import Shape
from memfit.tables.adapters import ADAPTERS
from memfit.tables.tasks import TASKS
from plans import CARD, FITS, FOOTPRINT, LLAMA

pytestmark = pytest.mark.filterwarnings("ignore")
SIDE, MEL = 16, 8  # pixels of an image, frequencies of a spectrogram of one second
BLOCKS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
# model type -> its config; the words of the tokenizer are its vocabulary
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "vocab_size": 1100, "pad_token_id": 1, "eos_token_id": 2},
    "bert": {"model_type": "bert", "vocab_size": 64, "max_position_embeddings": 64, **BLOCKS},
    "t5": {"model_type": "t5", "vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2,
           "decoder_start_token_id": 1, "pad_token_id": 1},
    "vit": {"model_type": "vit", "image_size": SIDE, "patch_size": 8, **BLOCKS},
    "whisper": {"model_type": "whisper", "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
                "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64,
                "decoder_ffn_dim": 64,
                "num_mel_bins": MEL, "max_source_positions": 50, "max_target_positions": 32, "pad_token_id": 1,
                "decoder_start_token_id": 2, "eos_token_id": 2, "bos_token_id": 2, "suppress_tokens": None,
                "begin_suppress_tokens": None},
    "llava": {"model_type": "llava", "image_token_index": 63, "architectures": ["LlavaForConditionalGeneration"],
              "text_config": {**LLAMA, "vocab_size": 1100},
              "vision_config": {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, **BLOCKS}},
    "wav2vec2": {"model_type": "wav2vec2", "vocab_size": 32, "conv_dim": [8, 8], "conv_kernel": [10, 3],
                 "conv_stride": [5, 4], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
                 "num_conv_pos_embedding_groups": 2, **BLOCKS},
}  # fmt: skip
AUTO = {"llama": "AutoModelForCausalLM", "llava": "AutoModelForImageTextToText"}
WORDS = ("<unk>", "<pad>", "<s>", "<mask>", *(f"w{i}" for i in range(59)), "<image>")


def text(words: int, first: int = 0) -> str:
    return " ".join(f"w{(first + i) % 60}" for i in range(words))


def pixels(value: float) -> list[Any]:
    return [[[value] * SIDE for _ in range(SIDE)] for _ in range(3)]


def sound(seconds: float) -> dict[str, Any]:
    return {"array": [round(math.sin(i / 9), 3) for i in range(int(16_000 * seconds))], "sampling_rate": 16_000}


# task -> the model, and rows of data
TRAINED: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "masked-lm": ("bert", [{"text": text(20, i)} for i in range(12)]),
    "classification": ("bert", [{"text": text(9 + i, i), "label": ("good", "bad", "odd")[i % 3]} for i in range(12)]),
    "token-classification": (
        "bert", [{"tokens": ["w1", "w2"] * (9 + i), "ner_tags": ["O", "PER"] * (9 + i)} for i in range(12)]
    ),
    "seq2seq": ("t5", [{"source": text(12 + i, i), "target": text(4 + i, i)} for i in range(12)]),
    "image-classification": ("vit", [{"pixel_values": pixels(i / 12), "label": i % 3} for i in range(12)]),
    "speech": ("whisper", [{"audio": sound(0.1 + i / 20), "text": text(3 + i)} for i in range(6)]),
    "speech-ctc": ("wav2vec2", [{"audio": sound(0.25 + i / 20), "sentence": "so it is"[i:]} for i in range(6)]),
    "reward": ("llama", [{"prompt": "w1 w2", "chosen": text(13), "rejected": text(5)}] * 12),
    "dpo": ("llama", [{"prompt": [{"role": "user", "content": "w1"}],
                       "chosen": [{"from": "gpt", "value": text(9)}],
                       "rejected": {"role": "assistant", "content": "w3"}}] * 12),
    "pretrain": ("llama", [{"text": text(20, i)} for i in range(12)]),
    "orpo": ("llama", [{"prompt": text(8), "chosen": f" {text(7 - i % 3)}", "rejected": " w1"} for i in range(12)]),
    "grpo": ("llama", [{"prompt": text(4 + i % 5), "answer": "#### w1"} for i in range(12)]),
    "rloo": ("llama", [{"question": text(4 + i % 5), "answer": "w1"} for i in range(12)]),
    "embedding": ("bert", [{"query": text(9 + i, i), "answer": text(12, i)} for i in range(12)]),
    "image-text": ("llava", [{"image": "a.png", "messages": [{"role": "user", "content": text(3, i)},
                                                            {"role": "assistant", "content": text(13 - 9 * (i % 2))}]}
                             for i in range(12)]),
    "kto": ("llama", [{"prompt": text(8), "completion": text(4 + i % 4), "label": i % 2} for i in range(12)]),
}  # fmt: skip


# packages beside the training libraries, and the tasks that can run here
NEEDED = {"embedding": "sentence_transformers", "image-text": "PIL"}
HERE = tuple(task for task in TRAINED if task not in NEEDED or find_spec(NEEDED[task]))
SHAPE = Shape(target=8, prompt=8, completion=4, generations=2)


def made_plan(task: str, folder: Path, method: str = "full", **changes: Any) -> Plan:
    """A plan of a task on a tiny model, as if it had been traced."""
    model, row = TRAINED[task][0], TASKS[task]
    recipe = Recipe(trainer=row.by, precision="fp32", micro_batch=2, accumulation=2, sequence_length=16, method=method)
    architecture = without_formula(CONFIGS[model], str(folder / model))
    data = str(folder / f"{task}.jsonl")
    shape = replace(SHAPE, image=(28, 28)) if task == "image-text" else SHAPE  # the others' models have one size
    job = Job(architecture=architecture, gpu=CARD, trainer=row.by, task=task, dataset=data, shape=shape)
    footprint = replace(FOOTPRINT, source="traced")
    return Plan(job, recipe.but(**changes), footprint, FITS, ())


def words() -> Any:
    """A tokenizer of WORDS."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<s>", "mask_token": "<mask>",
               "additional_special_tokens": ["<image>"]}  # fmt: skip
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **special)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny models, their tokenizer, and the data of each task."""
    pytest.importorskip("trl")
    import transformers

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = words()
    for name, config in CONFIGS.items():
        made = transformers.AutoConfig.for_model(**config)
        auto = getattr(transformers, AUTO.get(name, "AutoModel"))
        auto.from_config(made).save_pretrained(folder / name)
        if name not in ("vit", "wav2vec2"):
            tokenizer.save_pretrained(folder / name)
    size = {"image_processor_type": "ViTImageProcessor", "size": {"height": SIDE, "width": SIDE}}
    (folder / "vit" / "preprocessor_config.json").write_text(json.dumps(size))
    sides = {"shortest_edge": 28}, {"height": 28, "width": 28}
    clip = {"image_processor_type": "CLIPImageProcessor", "size": sides[0], "crop_size": sides[1]}
    (folder / "llava" / "preprocessor_config.json").write_text(json.dumps(clip))
    llava = {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    (folder / "llava" / "processor_config.json").write_text(json.dumps({"processor_class": "LlavaProcessor", **llava}))
    if "image-text" in HERE:
        import PIL.Image

        PIL.Image.new("RGB", (40, 30)).save(folder / "a.png")
    transformers.WhisperFeatureExtractor(feature_size=MEL, chunk_length=1).save_pretrained(folder / "whisper")
    (folder / "whisper" / "processor_config.json").write_text('{"processor_class": "WhisperProcessor"}')
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(folder / "wav2vec2")
    for task, (_, rows) in TRAINED.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{task}.jsonl").write_text(lines.replace("a.png", str(folder / "a.png")))
    return folder


_EACH = """\
import runpy, sys, traceback
for script in sys.argv[1:]:
    sys.argv = [script + "/train.py", "--cpu", "--max-steps", "2", "--output", script + "/output"]
    print("SCRIPT", script)
    try: runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException: print(traceback.format_exc())
"""


ADAPTED = {"dpo": "lora", "image-classification": "lora", "classification": "qlora"}
QUANTISED = {"quantization": "nf4-double", "precision": "bf16"}  # around a head that is not


def test_every_script_trains_its_task(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    import runs

    places = []
    for task in HERE:
        plan = made_plan(task, tiny, ADAPTED.get(task, "full"), **(QUANTISED if task == "classification" else {}))
        places.append(tmp_path / task)
        targets.write(targets.export(plan, plan.recipe.trainer), places[-1])
    parts = runs.script(_EACH, list(map(str, places)), tmp_path, tmp_path / "hf").split("SCRIPT ")[1:]
    for task, place, part in zip(HERE, places, parts, strict=True):
        losses = [float(x) for x in re.findall(r"'train_loss': '?([^',}]+)", part)]
        sampled = TASKS[task].sample == "prompt"  # whose advantages may all be 0
        assert len(losses) == 1 and math.isfinite(losses[0]) and (losses[0] > 0 or sampled), part
        saved = "adapter_model" if task in ADAPTED else "model"
        for folder in (place / "output", place / "output" / "checkpoint-2"):
            assert (folder / f"{saved}.safetensors").stat().st_size > 1000, task


def test_labels_and_new_heads_are_saved(tiny: Path, tmp_path: Path) -> None:
    """What a classifier's labels are called is in its config, and its head is trained beside adapters."""
    import runs

    places = [tmp_path / task for task in ("classification", "image-classification")]
    for place in places:
        plan = made_plan(place.name, tiny, "lora")
        targets.write(targets.export(plan, plan.recipe.trainer), place)
    read = """\
import json, runpy, sys
for script in sys.argv[1:]:
    made = runpy.run_path(script + "/train.py")
    model = made["build"](made["arguments"](["--cpu"])).model
    head = [name for name, weight in model.named_parameters() if weight.requires_grad and "classifier" in name]
    print("FOUND", json.dumps([model.config.id2label, head]))
"""
    found = runs.script(read, list(map(str, places)), tmp_path, tmp_path / "hf").split("FOUND ")[1:]
    labels = [json.loads(line.splitlines()[0])[0] for line in found]
    assert labels == [{"0": "bad", "1": "good", "2": "odd"}, {"0": "0", "1": "1", "2": "2"}]
    assert all(json.loads(line.splitlines()[0])[1] for line in found)


def test_a_folder_of_images_is_read(tiny: Path, tmp_path: Path) -> None:
    """A folder holds a folder of images for each label; the model's own processor scales them."""
    image = pytest.importorskip("PIL.Image")
    import runs

    for number, label in enumerate(("cat", "dog") * 3):
        (tmp_path / "pictures" / label).mkdir(parents=True, exist_ok=True)
        image.new("L", (20 + number, 30), number).save(tmp_path / "pictures" / label / f"{number}.png")
    plan = made_plan("image-classification", tiny)
    targets.write(targets.export(plan, plan.recipe.trainer), tmp_path / "run")
    read = """\
import runpy
made = runpy.run_path("run/train.py")
trainer = made["build"](made["arguments"](["--cpu", "--data", "pictures"]))
batch = next(iter(trainer.get_train_dataloader()))
print("BATCH", *batch["pixel_values"].shape, *sorted(trainer.model.config.label2id))
"""
    assert f"BATCH 2 3 {SIDE} {SIDE} cat dog" in runs.script(read, [], tmp_path, tmp_path / "hf")


# ---- a plan, its script, and its recipe.toml


def peaks(document: dict[str, Any]) -> dict[str, int]:
    """The most bytes of the training steps, by level."""
    steps = [p["levels"] for p in document["phases"] if p["phase"] in ("first_step", "step")]
    return {level: max(step[level] for step in steps) for level in ("requested", "reserved")}


_ANSWERS = ["--prompt-length", "8", "--completion-length", "4", "--generations", "2"]
MICRO_BATCH, LENGTHS = {"image-text": "2"}, {"image-text": "24"}  # a plan counts every second text 8 tokens shorter
SIZES = {  # flags that a task's plan needs on the tiny model
    "speech": ["--target-length", "8"], "seq2seq": ["--target-length", "8"], "speech-ctc": ["--audio-seconds", "0.5"],
    "pretrain": ["--loss", "full"], "orpo": ["--method", "full"], "rloo": ["--method", "full", *_ANSWERS],
    "grpo": ["--method", "lora", "--adapter", "ia3", *_ANSWERS],
    "image-text": ["--image-size", "28x28"],
}  # fmt: skip


@pytest.mark.parametrize(
    "task", [pytest.param(t, marks=() if t == "image-classification" else pytest.mark.nightly) for t in TRAINED]
)
def test_a_script_takes_what_was_planned(
    task: str, tiny: Path, tmp_path: Path, ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    folder, data = tmp_path / "run", tiny / f"{task}.jsonl"
    model = tiny / TRAINED[task][0]
    length = ["--sequence-length", LENGTHS.get(task, "16")] if TASKS[task].of_tokens else []
    length += SIZES.get(task, [])
    size = MICRO_BATCH.get(task, "4")
    batch = ["--effective-batch", size, "--micro-batch", size]
    words = [model, "--gpu", "t4", "--task", task, *batch, *length]
    code, out, err = ran("plan", *words, "--out", folder, "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert {path.name for path in folder.iterdir()} == {"train.py", "requirements.txt", "recipe.toml"}
    code, _, err = ran("plan", *words, "--out", folder)
    assert code == 2 and "--force" in err

    code, out, err = ran("plan", "--from", folder / "recipe.toml", "--json")
    again = json.loads(out)
    assert (again["chosen"]["recipe"], again["phases"]) == (plan["chosen"]["recipe"], plan["phases"])
    assert again["job"]["task"] == task

    agree(peaks(plan), folder, data, "t4")


def agree(planned: dict[str, int], folder: Path, data: Path, gpu: str) -> None:
    """Compare what was planned with a trace of the script."""
    from memfit.virtual.scripts.script import trace_script

    tape, _ = trace_script(folder / "train.py", ["--data", str(data)], gpu)
    torch = torch_version(tape.about["torch"])
    found = replay(tape.events, settings=parse_alloc_conf("", torch), torch=torch).by_phase()
    for level, most in planned.items():
        traced = max(getattr(found[p], level) for p in ("first_step", "step"))
        assert most == pytest.approx(traced, rel=0.01 if level == "requested" else 0.02)


def test_a_file_of_a_task_is_estimated_and_written_and_has_a_ladder(tiny: Path, tmp_path: Path, ran: Ran) -> None:
    plan = made_plan("kto", tiny)
    targets.write(targets.export(plan, "trl"), tmp_path / "run")
    file = tmp_path / "run" / "recipe.toml"
    assert recipe_file.read(file).task == "kto"
    assert "Kahneman-Tversky" in ran("estimate", "--from", file)[1]
    assert ran("export", file, "--out", tmp_path / "x", "--force")[0] == 0
    plans = [json.loads(ran(command, "--from", file, "--json")[1]) for command in ("plan", "techniques")]
    assert plans[0]["need"] == plans[1]["need"] and plans[1]["techniques"]
    assert ran("compare", file, file)[0] == 0
    code, out, err = ran("train", file, "--cpu")
    assert (code, out) == (2, "") and "dpo" in err and "memfit plan --from" in err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--task", "dpo", "--target", "transformers"), "--target trl"),
        (("--task", "dpo", "--target", "axolotl"), "--target trl"),
        (("--task", "classification", "--target", "trl"), "--target transformers"),
    ],
)
def test_a_target_that_does_not_run_a_task_is_refused(
    words: tuple[str, ...], hint: str, ran: Ran, tmp_path: Path
) -> None:
    pytest.importorskip("trl")
    code, out, err = ran("plan", "qwen2.5-0.5b", "--gpu", "t4", *words, "--out", tmp_path / "run")
    assert (code, out) == (2, "") and hint in err
    assert not (tmp_path / "run").exists()


# ---- text-to-image

CLIP_TEXT = {"model_type": "clip_text_model", "architectures": ["CLIPTextModel"], "vocab_size": 64, "hidden_size": 32,
             "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "projection_dim": 32,
             "eos_token_id": 2, "pad_token_id": 1, "bos_token_id": 2}  # fmt: skip
LAST = {**CLIP_TEXT, "architectures": ["CLIPTextModelWithProjection"]}
T5 = {**CONFIGS["t5"], "architectures": ["T5EncoderModel"]}
VAE = {"_class_name": "AutoencoderKL", "block_out_channels": [8, 8, 8, 8], "norm_num_groups": 4, "sample_size": 64,
       "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
       "latent_channels": 4, "layers_per_block": 1, "scaling_factor": 0.18}  # fmt: skip
UNET = {"_class_name": "UNet2DConditionModel", "sample_size": 8, "block_out_channels": [16, 32], "norm_num_groups": 8,
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "cross_attention_dim": 32, "layers_per_block": 1,
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"]}  # fmt: skip
DIT = {"_class_name": "SD3Transformer2DModel", "in_channels": 4, "out_channels": 4, "num_layers": 2, "patch_size": 2,
       "attention_head_dim": 8, "num_attention_heads": 4, "caption_projection_dim": 32, "joint_attention_dim": 64,
       "pooled_projection_dim": 64, "sample_size": 8, "pos_embed_max_size": 32}  # fmt: skip
PIPES: dict[str, dict[str, Any]] = {
    "StableDiffusionPipeline": {"unet": UNET, "text_encoder": CLIP_TEXT},
    "StableDiffusionXLPipeline": {
        "unet": {**UNET, "cross_attention_dim": 64, "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
                 "projection_class_embeddings_input_dim": 80},
        "text_encoder": CLIP_TEXT, "text_encoder_2": LAST,
    },
    "StableDiffusion3Pipeline": {
        "transformer": DIT, "text_encoder": LAST, "text_encoder_2": LAST, "text_encoder_3": {**T5, "d_model": 64},
    },
    "FluxPipeline": {
        "transformer": {"_class_name": "FluxTransformer2DModel", "in_channels": 16, "num_layers": 1,
                        "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
                        "joint_attention_dim": 32, "pooled_projection_dim": 32, "guidance_embeds": True,
                        "axes_dims_rope": [4, 6, 6]},
        "text_encoder": CLIP_TEXT, "text_encoder_2": T5,
    },
}  # fmt: skip


def pipeline_in(folder: Path, name: str) -> Path:
    """A tiny pipeline of a class with its weights and tokenizers, memfit's config of it, and captioned images."""
    import diffusers
    import PIL.Image
    import transformers

    parts = {**PIPES[name], "vae": VAE}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"_class_name": name, "model_type": "diffusers", **parts}))
    (folder / "model_index.json").write_text("{}")
    for part, config in parts.items():
        given = dict(config)
        if kind := given.pop("_class_name", ""):
            getattr(diffusers, kind).from_config(given).save_pretrained(folder / part)
            continue
        kind = given.pop("architectures")[0]
        made = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
        getattr(transformers, kind)(made).save_pretrained(folder / part)
        words().save_pretrained(folder / part.replace("text_encoder", "tokenizer"))
    flows = "transformer" in parts
    made = diffusers.FlowMatchEulerDiscreteScheduler() if flows else diffusers.DDPMScheduler()
    made.save_pretrained(folder / "scheduler")
    PIL.Image.new("RGB", (70, 90)).save(folder / "a.png")
    rows = [{"image": str(folder / "a.png"), "text": text(i + 1)} for i in range(6)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


FULL = {"method": "full", "precision": "bf16-mixed", "optimizer": "adafactor", "checkpointing": "full"}


@pytest.mark.parametrize(
    ("name", "changes", "cached"),
    [
        ("StableDiffusionPipeline", {"method": "lora"}, True),
        pytest.param("StableDiffusionXLPipeline", {"method": "lora"}, False, marks=pytest.mark.nightly),
        pytest.param("StableDiffusion3Pipeline", FULL, False, marks=pytest.mark.nightly),
        pytest.param("FluxPipeline", {"method": "lora", "precision": "fp16-mixed"}, True, marks=pytest.mark.nightly),
    ],
)
def test_a_pipeline_trains_and_resumes(name: str, changes: dict[str, Any], cached: bool, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    import runs

    folder, place = pipeline_in(tmp_path / "pipe", name), tmp_path / "run"
    recipe = Recipe(trainer="torch", micro_batch=2, accumulation=2).but(**changes)
    job = Job(
        architecture=without_formula(json.loads((folder / "config.json").read_text()), str(folder)), gpu=CARD,
        trainer="torch", task="text-to-image", dataset=str(folder / "data.jsonl"),
        shape=Shape(image=(64, 64), cached=cached),
    )  # fmt: skip
    targets.write(targets.export(Plan(job, recipe, replace(FOOTPRINT, source="traced"), FITS, ()), "diffusers"), place)
    more = _EACH.replace('"--max-steps", "2"', '"--max-steps", "3", "--save-steps", "1", "--resume"')
    for code, step in ((_EACH, 2), (more, 3)):
        found = runs.script(code, [str(place)], tmp_path, tmp_path / "hf")
        assert f"'step': {step}" in found and "nan" not in found, found
        assert (place / "output" / f"checkpoint-{step}" / "state.pt").stat().st_size > 1000
    saved = "pytorch_lora_weights" if recipe.method == "lora" else "transformer/diffusion_pytorch_model"
    assert (place / "output" / f"{saved}.safetensors").stat().st_size > 1000
    clean((place,))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["StableDiffusionPipeline", "StableDiffusionXLPipeline"])
def test_a_pipeline_takes_what_was_planned(
    name: str, tmp_path: Path, ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("diffusers")
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    folder = pipeline_in(tmp_path / "pipe", name)
    words = [folder, "--gpu", "l4", "--method", "lora", "--resolution", "64x64", "--effective-batch", "2"]
    code, out, err = ran("plan", *words, "--micro-batch", "2", "--out", tmp_path / "run", "--json")
    assert code == 0, err
    agree(peaks(json.loads(out)), tmp_path / "run", folder / "data.jsonl", "l4")


@pytest.mark.nightly
def test_a_pipeline_is_traced_by_its_name(tmp_path: Path) -> None:
    """A script that names a catalogued pipeline is traced without the network, with weights of the published size."""
    pytest.importorskip("diffusers")
    from memfit.models.hub import resolve_config
    from memfit.virtual.scripts.script import trace_script

    name, data = "stable-diffusion-v1-5/stable-diffusion-v1-5", pipeline_in(tmp_path / "p", "StableDiffusionPipeline")
    job = Job(
        architecture=without_formula(resolve_config(name), name), gpu=CARD, trainer="torch", task="text-to-image",
        dataset=str(data / "data.jsonl"), shape=Shape(image=(256, 256)),
    )  # fmt: skip
    plan = Plan(job, Recipe(trainer="torch", method="lora"), replace(FOOTPRINT, source="traced"), FITS, ())
    targets.write(targets.export(plan, "diffusers"), tmp_path / "run")
    tape, _ = trace_script(tmp_path / "run" / "train.py", [], "l4")
    step = replay(tape.events).by_phase()["step"]
    weights = 2 * (859_520_964 + 83_653_863 + 123_060_480)  # UNet, VAE and text encoder in bf16
    assert weights < step.requested < 2 * weights


# ---- every adapter


@pytest.mark.parametrize("key", [key for key, row in ADAPTERS.items() if not row.refused[0]])
def test_a_script_makes_the_adapter_that_was_traced(key: str) -> None:
    """The arguments in a script are those with which the trace makes PEFT's configuration."""
    peft = pytest.importorskip("peft")
    from memfit.virtual.jobs.models import adapter_config
    from memfit.virtual.jobs.recipe import setup_of

    row = ADAPTERS[key]
    trainer = row.trainer or "trl"
    recipe = Recipe(
        trainer=trainer, method="lora", adapter=key, lora_rank=8, lora_targets=("q_proj", "v_proj"),
        loss="fused" if trainer == "trl" else "full",
    )  # fmt: skip
    job = Job(architecture=architecture(CONFIGS["llama"], "org/llama"), gpu=CARD, trainer=trainer)
    made = targets.export(Plan(job, recipe, FOOTPRINT, FITS, ()), trainer)["train.py"]
    tree = ast.parse(made)
    line = next(n for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "ADAPTER")  # type: ignore[attr-defined]
    written = eval(ast.unparse(line.value), {row.config: getattr(peft, row.config)})
    assert written == adapter_config(setup_of(recipe, CONFIGS["llama"]))


# ---- every task


def test_every_task_has_a_script(tiny: Path, tmp_path: Path) -> None:
    """Scripts of all tasks and methods are clean, and name what they import."""
    for task in TRAINED:
        for method in ("full", "lora", "qlora"):
            quantised = QUANTISED if method == "qlora" else {}
            plan = made_plan(task, tiny, method, **quantised)
            files = targets.export(plan, plan.recipe.trainer)
            (tmp_path / f"{task}_{method}.py").write_text(files["train.py"])
            assert ("peft" in files["requirements.txt"]) == (method != "full")
    assert set(TASKS) - {"sft", "text-to-image"} == set(TRAINED)
    clean((tmp_path,))


def clean(folders: Iterable[Path]) -> None:
    """Check that ruff has nothing to say of the scripts in some folders."""
    for command in (("check", "--select", "E,F,I,UP,B,SIM,PTH,RET"), ("format", "--check")):
        words = [sys.executable, "-m", "ruff", *command, "--isolated", "--line-length", "120", *map(str, folders)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
