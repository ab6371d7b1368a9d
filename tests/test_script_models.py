"""Models that a traced script names: every catalogued one has weights, a tokenizer and processors of its kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from memfit.errors import BadInput  # noqa: E402
from memfit.virtual.scripts.repositories import Repositories  # noqa: E402
from memfit.virtual.scripts.script import trace_script  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
LOADED = """
import json, torch, transformers
found = {}
def load(kind, name, **words):
    made = getattr(transformers, kind).from_pretrained(name, **words)
    found[f"{kind} {name}"] = type(made).__name__
    return made
load("AutoModelForSpeechSeq2Seq", "openai/whisper-tiny")
load("WhisperModel", "openai/whisper-tiny")
load("AutoModelForImageClassification", "google/vit-base-patch16-224", num_labels=3, ignore_mismatched_sizes=True)
load("AutoModelForImageTextToText", "Qwen/Qwen3-VL-2B-Instruct", dtype=torch.bfloat16)
load("CLIPModel", "openai/clip-vit-base-patch32")
load("CLIPTextModel", "openai/clip-vit-base-patch32")
load("AutoConfig", "Qwen/Qwen2.5-VL-3B-Instruct")
load("AutoConfig", "Qwen/Qwen2.5-VL-3B-Instruct")
load("AutoFeatureExtractor", "openai/whisper-tiny")
whisper = load("AutoProcessor", "openai/whisper-tiny", language="hindi", task="transcribe")
mel = whisper.feature_extractor([0.0] * 16000, sampling_rate=16000, return_tensors="pt").input_features
found["mel"] = list(mel.shape)
words = whisper.tokenizer
found["prefix"] = words.prefix_tokens
model = transformers.WhisperForConditionalGeneration.from_pretrained("openai/whisper-tiny").cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
labels = words("some words", return_tensors="pt").input_ids.cuda()
for _ in range(2): model(mel.cuda(), labels=labels).loss.backward(); optimizer.step()
found["tokenizer's name"] = words.init_kwargs["name_or_path"]
print(json.dumps(found))
"""


def test_models_and_processors_of_every_modality_are_loaded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOADED)
    _, outcome = trace_script(script, [], "l4")
    found = json.loads(capfd.readouterr().out.strip().splitlines()[-1])
    assert found["AutoModelForSpeechSeq2Seq openai/whisper-tiny"] == "WhisperForConditionalGeneration"
    assert found["AutoModelForImageTextToText Qwen/Qwen3-VL-2B-Instruct"] == "Qwen3VLForConditionalGeneration"
    assert found["AutoProcessor openai/whisper-tiny"] == "WhisperProcessor"
    assert found["mel"] == [1, 80, 3000]
    assert found["tokenizer's name"] == "openai/whisper-tiny"  # not a folder, of which each rank has another
    assert found["prefix"] == [50258, 50276, 50359, 50363]  # start, hindi, transcribe, no timestamps, as published
    assert outcome.steps == 2 and any("feature extractor" in text for text in outcome.assumed)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("Qwen/Qwen2.5-0.5B", {"<|im_end|>": 151645}), ("meta-llama/Llama-3.1-8B", {"<|eot_id|>": 128009}),
        ("FacebookAI/roberta-base", {"<mask>": 50264}), ("google-bert/bert-base-cased", {"[MASK]": 103}),
    ],
)  # fmt: skip
def test_tokens_that_scripts_ask_for_by_name_are_the_published_ones(
    tmp_path: Path, name: str, asked: dict[str, int]
) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = Repositories(tmp_path, lambda text: None).folder(name)
    made = PreTrainedTokenizerFast.from_pretrained(folder)
    assert {word: made.convert_tokens_to_ids(word) for word in asked} == asked
    assert made.add_special_tokens({"pad_token": next(iter(asked))}) == 0  # nothing to make the embedding larger for
    assert made.mask_token in (None, *asked)
    assert made.model_max_length == {"FacebookAI/roberta-base": 512}.get(name, made.model_max_length)


def test_what_processors_read_follows_from_the_config(tmp_path: Path) -> None:
    repositories = Repositories(tmp_path, lambda text: None)

    def read(name: str, *files: str) -> list[Any]:
        folder = Path(repositories.folder(name))
        return [json.loads((folder / f"{file}.json").read_text()) for file in files]

    image, whole, words = read("gemma-3-4b", "preprocessor_config", "processor_config", "tokenizer")
    assert image["size"] == {"height": 896, "width": 896} and whole["image_seq_length"] == 256
    assert words["model"]["vocab"]["<image_soft_token>"] == 262144
    image, whole, words = read("qwen2.5-vl-3b", "preprocessor_config", "processor_config", "tokenizer")
    assert image["patch_size"] == 14 and image["merge_size"] == 2
    assert whole["processor_class"] == "Qwen2_5_VLProcessor" and words["model"]["vocab"]["<|image_pad|>"] == 151655
    assert read("clip-vit-large-patch14", "preprocessor_config")[0]["crop_size"] == {"height": 224, "width": 224}
    image, words = read("whisper-large-v3", "preprocessor_config", "tokenizer")
    ids = words["model"]["vocab"]
    assert image["feature_size"] == 128 and ids["<|notimestamps|>"] == 50364 and ids["<|transcribe|>"] == 50360


def test_a_model_with_code_of_its_own_is_refused_by_name(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import transformers\ntransformers.AutoModelForCausalLM.from_pretrained('internlm2-1.8b')\n")
    with pytest.raises(BadInput, match=r"train.py:2: internlm2-1.8b brings code of its own"):
        trace_script(script, [], "l4")


SAVED = """
import io, os, shutil, torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
name = "HuggingFaceTB/SmolLM2-135M"
words = AutoTokenizer.from_pretrained(name); words.add_special_tokens({"pad_token": "<own>"})
model = AutoModelForCausalLM.from_pretrained(name, num_hidden_layers=2).cuda()
adapted = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj"]))
optimizer = torch.optim.AdamW(adapted.parameters())
ids = torch.zeros(2, 64, dtype=torch.long, device="cuda")
for _ in range(2): adapted(input_ids=ids, labels=ids).loss.backward(); optimizer.step()
adapted.save_pretrained("saved/adapter"); words.save_pretrained("saved/words")
base = AutoModelForCausalLM.from_pretrained(name, num_hidden_layers=2)
PeftModel.from_pretrained(base, "saved/adapter").merge_and_unload().save_pretrained("saved/full", max_shard_size="60MB")
assert len([f for f in os.listdir("saved/full") if f.endswith(".safetensors")]) > 1
loaded = AutoModelForCausalLM.from_pretrained("saved/full", device_map="cuda")
assert AutoTokenizer.from_pretrained("saved/words").pad_token == "<own>"
held = io.BytesIO(); torch.save({"a": torch.ones(3), "step": 7}, held); held.seek(0)
again = torch.load(held); assert again["step"] == 7 and again["a"].tolist() == [1, 1, 1]
torch.save(loaded.state_dict(), "saved/m.pt"); os.rename("saved/m.pt", "saved/n.pt")
shutil.copy("saved/n.pt", "saved/o.pt")
loaded.load_state_dict(torch.load("saved/o.pt", map_location="cuda", weights_only=True))
save_file({"x": torch.arange(9), "y": torch.zeros(1 << 20, device="cuda")}, "saved/x.safetensors")
assert load_file("saved/x.safetensors", device="cuda:0")["y"].is_cuda
with safe_open("saved/x.safetensors", "pt") as file: assert file.get_tensor("y").shape == (1 << 20,)
print("all was loaded")
"""


def test_what_was_saved_can_be_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(SAVED)
    _, outcome = trace_script(script, [], "l4")
    assert outcome.ending == "finished" and "all was loaded" in capfd.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_whisper_generates_with_the_numbers_of_its_vocabulary() -> None:
    from memfit.virtual.scripts.stand_ins import generation_settings

    base = {"model_type": "whisper", "eos_token_id": 50257, "max_target_positions": 448}
    third, second, english = (generation_settings(base | {"vocab_size": size}) for size in (51866, 51865, 51864))
    assert (third["lang_to_id"]["<|en|>"], third["lang_to_id"]["<|yue|>"]) == (50259, 50358)  # as openai publishes them
    assert third["task_to_id"] == {"translate": 50359, "transcribe": 50360}
    assert second["task_to_id"]["transcribe"] == 50359 and len(second["lang_to_id"]) == 99
    assert [found["no_timestamps_token_id"] for found in (third, second, english)] == [50364, 50363, 50362]
    assert not english["is_multilingual"] and generation_settings({"model_type": "gpt2"}) == {}
