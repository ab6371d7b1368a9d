"""Small made-up data for the rows of script_rows.py: tokens, texts, tables, pictures and sounds of a fixed seed.

Each function returns a writer, which gets the folder in which the row's command is typed.
"""

from __future__ import annotations

import base64
import json
import math
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

Write = Callable[[Path], None]
_WORDS = [
    "the", "a", "model", "memory", "card", "of", "and", "to", "trains", "in", "batch", "that", "step", "is", "for",
    "with", "gradient", "layer", "on", "as", "it", "reads", "writes", "one", "two", "many", "first", "last", "small",
    "large", "quick", "slow", "lazy", "river", "house", "green", "under", "over", "between",
]  # fmt: skip
_PARTS = "train", "validation", "test"
_METRIC = """import datasets
import evaluate

class Metric(evaluate.Metric):
    def _info(self):
        kind = datasets.Value("float64")
        features = datasets.Features({{"predictions": kind, "references": kind}})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def add_batch(self, **_):
        "Keep nothing."

    def compute(self, **_):
        "Return the same figures for whatever there is."
        return {answer}
"""


def sentence(words: int, seed: int = 0) -> str:
    """Return that many English words."""
    choose = random.Random(seed)
    return " ".join(choose.choice(_WORDS) for _ in range(words))


def tokens(*names: str, count: int = 1 << 20, most: int = 50000) -> Write:
    """Files of 16-bit token ids, as nanoGPT's data."""

    def write(folder: Path) -> None:
        import numpy as np

        for name in names:
            path = _place(folder, name)
            np.random.default_rng(0).integers(0, most, count).astype(np.uint16).tofile(path)

    return write


def text(name: str, content: str = "", words: int = 50000) -> Write:
    """A file with this content, or with that many words in lines of twenty."""
    return lambda folder: _written(
        folder, name, content or "\n".join(sentence(20, seed) for seed in range(words // 20))
    )


def json_lines(name: str, record: Callable[[int], object], count: int = 64) -> Write:
    """A file with a JSON record a line."""
    return lambda folder: _written(folder, name, "".join(json.dumps(record(i)) + "\n" for i in range(count)))


def json_list(name: str, record: Callable[[int], object], count: int = 64) -> Write:
    """A file with a list of JSON records."""
    return lambda folder: _written(folder, name, json.dumps([record(i) for i in range(count)]))


def dataset(
    name: str, record: Callable[[int], object], count: int = 64, config: str = "", about: str = "",
    parts: Sequence[str] = _PARTS,
) -> Write:  # fmt: skip
    """A folder that `datasets.load_dataset` reads in place of the data set of that name: train, validation and test."""

    def write(folder: Path) -> None:
        for part in parts:
            json_lines(f"{name}/{part}.jsonl", record, count)(folder)
        if config:
            _written(folder, f"{name}/README.md", _card(config, "jsonl", about, parts))

    return write


def _card(config: str, suffix: str, about: str = "", names: Sequence[str] = _PARTS) -> str:
    """Return a dataset card that gives the folder's files the name of a configuration."""
    parts = "".join(f"  - split: {part}\n    path: {part}.{suffix}\n" for part in names)
    return f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{parts}{about}---\n"


def folder_model(name: str, library: str, kind: str, **config: object) -> Write:
    """A model's folder as the Hub has it: its config and, without data, its weights; `kind` names its class."""

    def write(folder: Path) -> None:
        import importlib

        import torch

        made = getattr(importlib.import_module(library), kind)
        with torch.device("meta"):
            model = made(made.config_class(**config)) if library == "transformers" else made(**config)
        place = _place(folder, f"{name}/config.json").parent
        if library == "transformers":
            model.config.architectures = [kind]
            model.config.save_pretrained(place)
        else:
            model.save_config(place)
        weights = "model.safetensors" if library == "transformers" else "diffusion_pytorch_model.safetensors"
        once = {key for key, _ in (*model.named_parameters(), *model.named_buffers())}  # tied weights are stored once
        stored = ((key, t) for key, t in model.state_dict().items() if key in once and t.is_floating_point())
        _sparse(place / weights, {key: tuple(t.shape) for key, t in stored})

    return write


def _sparse(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write a safetensors file of fp32 zeros that takes no room on the disk."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def clip_tokenizer(name: str) -> Write:
    """A CLIP tokenizer of single characters."""

    def write(folder: Path) -> None:
        letters = [chr(c) for c in range(33, 127)]
        words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
        json_lines(f"{name}/vocab.json", lambda _: {word: i for i, word in enumerate(words)}, 1)(folder)
        text(f"{name}/merges.txt", "#version: 0.2\n")(folder)
        about = {"model_max_length": 77, "tokenizer_class": "CLIPTokenizer", "pad_token": "<|endoftext|>"}
        json_lines(f"{name}/tokenizer_config.json", lambda _: about, 1)(folder)

    return write


def stable_diffusion_vae(name: str) -> Write:
    """The VAE of Stable Diffusion 1."""
    return folder_model(
        name, "diffusers", "AutoencoderKL", block_out_channels=[128, 256, 512, 512], layers_per_block=2,
        latent_channels=4, sample_size=512, down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
    )  # fmt: skip


def stable_diffusion(name: str) -> tuple[Write, ...]:
    """Stable Diffusion 1.5 by its published shape: pipeline, text encoder, VAE, UNet, scheduler."""
    pieces = {
        "scheduler": ["diffusers", "DDPMScheduler"], "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"], "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"], "safety_checker": [None, None], "feature_extractor": [None, None],
    }  # fmt: skip
    index = {"_class_name": "StableDiffusionPipeline", "_diffusers_version": "0.30.0", **pieces}
    steps = {
        "_class_name": "DDPMScheduler", "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
        "num_train_timesteps": 1000, "clip_sample": False,
    }  # fmt: skip
    return (
        text(f"{name}/model_index.json", json.dumps(index)),
        text(f"{name}/scheduler/scheduler_config.json", json.dumps(steps)),
        clip_tokenizer(f"{name}/tokenizer"),
        folder_model(
            f"{name}/text_encoder", "transformers", "CLIPTextModel", hidden_size=768, intermediate_size=3072,
            num_attention_heads=12, num_hidden_layers=12, projection_dim=768, hidden_act="quick_gelu",
        ),
        folder_model(f"{name}/unet", "diffusers", "UNet2DConditionModel", cross_attention_dim=768, sample_size=64),
        stable_diffusion_vae(f"{name}/vae"),
    )  # fmt: skip


def on_disk(name: str, record: Callable[[int], object], count: int) -> Write:
    """A data set as `save_to_disk` writes it, with the parts train and test."""

    def write(folder: Path) -> None:
        from datasets import Dataset, DatasetDict

        rows = Dataset.from_list([record(i) for i in range(count)])
        DatasetDict({"train": rows, "test": rows}).save_to_disk(str(folder / name))

    return write


def tiktoken_file(name: str) -> Write:
    """A tokenizer of single bytes, in tiktoken's text form."""
    lines = [f"{base64.b64encode(bytes([i])).decode()} {i}" for i in range(256)]
    return text(name, "\n".join(lines) + "\n")


def lit(name: str) -> Write:
    """A checkpoint of litgpt, converted from a published model: its config and shapes without data."""

    def write(folder: Path) -> None:
        import torch
        from litgpt import GPT, Config
        from litgpt.utils import save_config
        from tokenizers import Tokenizer, models, pre_tokenizers

        config = Config.from_name(name)
        place = _place(folder, f"checkpoints/{config.hf_config['org']}/{name}/lit_model.pth").parent
        with torch.device("meta"):
            model = GPT(config)
        weights = {key: torch.empty(t.shape, dtype=torch.bfloat16) for key, t in model.state_dict().items()}
        with torch.serialization.skip_data():
            torch.save(weights, place / "lit_model.pth")
        save_config(config, place)
        words = {"<unk>": 0, "<|endoftext|>": 1, **{chr(c): c for c in range(33, 127)}}
        made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        made.save(str(place / "tokenizer.json"))
        about = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "tokenizer_class": "GPTNeoXTokenizer"}
        json_lines("tokenizer_config.json", lambda _: about, 1)(place)

    return write


def nanochat(name: str) -> Write:
    """nanochat's base folder: two shards of documents and a tokenizer of 32,768 tokens."""

    def write(folder: Path) -> None:
        import pickle

        import pyarrow
        import pyarrow.parquet
        import tiktoken
        import torch

        ranks = {bytes([i]): i for i in range(256)}
        ranks |= {struct.pack(">I", 0xFF000000 + i): i for i in range(256, 32768 - 9)}
        names = (
            "bos", "user_start", "user_end", "assistant_start", "assistant_end", "python_start", "python_end",
            "output_start", "output_end",
        )  # fmt: skip
        special = {f"<|{word}|>": len(ranks) + i for i, word in enumerate(names)}
        made = tiktoken.Encoding("rustbpe", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens=special)
        _place(folder, f"{name}/tokenizer/tokenizer.pkl").write_bytes(pickle.dumps(made))
        torch.save(torch.ones(32768, dtype=torch.int32), folder / name / "tokenizer" / "token_bytes.pt")
        table = pyarrow.table({"text": [sentence(800, i) for i in range(1024)]})
        for shard in range(2):
            path = _place(folder, f"{name}/base_data_climbmix/shard_{shard:05}.parquet")
            pyarrow.parquet.write_table(table, path, row_group_size=64)

    return write


def pictures(*names: str, size: tuple[int, int] = (500, 375), count: int = 8, name: str = "") -> Write:
    """Folders of pictures of noise."""

    def write(folder: Path) -> None:
        import numpy as np
        from PIL import Image

        noise = np.random.default_rng(0)
        for place in names:
            for i in range(count):
                values = noise.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
                Image.fromarray(values).save(_place(folder, f"{place}/{name}{i:03}.jpg"))

    return write


def masks(name: str, size: tuple[int, int], count: int, suffix: str = "") -> Write:
    """A folder of masks with two values."""

    def write(folder: Path) -> None:
        import numpy as np
        from PIL import Image

        for i in range(count):
            values = np.zeros((size[1], size[0]), dtype=np.uint8)
            values[: size[1] // 2] = 1
            Image.fromarray(values).save(_place(folder, f"{name}/{i:03}{suffix}.png"))

    return write


def mnist(name: str) -> Write:
    """MNIST's four files, as torchvision downloads them."""

    def write(folder: Path) -> None:
        for part, count in (("train", 60000), ("t10k", 10000)):
            header = struct.pack(">IIII", 0x803, count, 28, 28)
            raw = f"{name}/MNIST/raw/{part}"
            _place(folder, f"{raw}-images-idx3-ubyte").write_bytes(header + random.Random(0).randbytes(count * 784))
            labels = struct.pack(">II", 0x801, count) + bytes(i % 10 for i in range(count))
            _place(folder, f"{raw}-labels-idx1-ubyte").write_bytes(labels)

    return write


def metric(name: str, *figures: str) -> Write:
    """A metric that `evaluate` finds beside the script instead of on the Hub: its figures, all 0.5, or one number."""
    return text(f"{name}/{name}.py", _METRIC.format(answer=f"dict.fromkeys({figures}, 0.5)" if figures else "0.5"))


def speech(name: str, seconds: Sequence[float], rate: int = 16000, config: str = "") -> Write:
    """A folder that `datasets.load_dataset` reads: noise of these lengths, already decoded, and what was spoken."""

    def write(folder: Path) -> None:
        import numpy as np
        import pyarrow
        import pyarrow.parquet

        noise = np.random.default_rng(0)
        sound = [
            {"array": noise.standard_normal(int(length * rate), dtype=np.float32), "sampling_rate": rate, "path": ""}
            for length in seconds
        ]
        table = pyarrow.table({"audio": sound, "sentence": [sentence(12, i) for i in range(len(sound))]})
        for part in _PARTS:
            pyarrow.parquet.write_table(table, _place(folder, f"{name}/{part}.parquet"))
        if config:
            _written(folder, f"{name}/README.md", _card(config, "parquet"))

    return write


def _place(folder: Path, name: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _written(folder: Path, name: str, content: str) -> None:
    _place(folder, name).write_text(content)


# --- what the scripts of scripts.toml name ---


def _alpaca(i: int) -> dict[str, object]:
    return {"instruction": sentence(20, i), "input": sentence(20, i + 1), "output": sentence(200, i + 2)}


def _turns(asked: int, answered: int, seed: int) -> list[dict[str, object]]:
    """Return a conversation of two messages."""
    return [
        {"role": "user", "content": sentence(asked, seed)},
        {"role": "assistant", "content": sentence(answered, seed + 1)},
    ]


def _preference(i: int) -> dict[str, object]:
    asked, chosen = _turns(100, 300, i)
    return {"prompt": [asked], "chosen": [chosen], "rejected": _turns(1, 300, i + 1)[1:]}


def _label(i: int) -> dict[str, object]:
    asked, answered = _turns(60, 200, i)
    return {"prompt": [asked], "completion": [answered], "label": bool(i % 2)}


def _conversation(i: int) -> dict[str, object]:
    return {"conversations": _turns(300, 700, i)}


def _seen(i: int) -> dict[str, object]:
    question = [{"type": "image", "text": None}, {"type": "text", "text": sentence(20, i)}]
    answer = [{"type": "text", "text": sentence(80, i)}]
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"file_name": f"{i:03}.jpg", "messages": messages}


def _pair(i: int) -> dict[str, object]:
    return {"sentence1": sentence(20, i), "sentence2": sentence(20, i + 1), "label": i % 2, "idx": i}


def _scored(i: int) -> dict[str, object]:
    return {"sentence1": sentence(12, i), "sentence2": sentence(12, i + 1), "score": i % 5 / 5}


def _triplet(i: int) -> dict[str, object]:
    return {name: sentence(20, i + j) for j, name in enumerate(("anchor", "positive", "negative"))}


def _rewarded(i: int) -> dict[str, object]:
    return {"prompt": sentence(100, i), "chosen": sentence(200, i + 1), "rejected": sentence(200, i + 2)}


_CLASSES = """dataset_info:
- config_name: mrpc
  features:
  - {name: sentence1, dtype: string}
  - {name: sentence2, dtype: string}
  - {name: label, dtype: {class_label: {names: {'0': not_equivalent, '1': equivalent}}}}
  - {name: idx, dtype: int32}
"""
_XLSR = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
_HEARS = {
    "feature_extractor_type": "Wav2Vec2FeatureExtractor", "feature_size": 1, "sampling_rate": 16000, "padding_value": 0,
    "do_normalize": True, "return_attention_mask": True,
}  # fmt: skip
DATA: dict[str, tuple[Write, ...]] = {
    "accuracy": (metric("accuracy", "accuracy"),),
    "all-nli": (
        dataset("sentence-transformers/all-nli", _triplet, 10001, config="triplet", parts=("train", "dev", "test")),
    ),
    "alpaca": (json_list("alpaca.json", _alpaca, 512),),
    "alpaca-cleaned": (dataset("yahma/alpaca-cleaned", _alpaca, 256),),
    "captioned": (
        pictures("pictures/train", count=16),
        json_lines("pictures/train/metadata.jsonl", lambda i: {"file_name": f"{i:03}.jpg", "text": sentence(8, i)}, 16),
    ),
    "c4_test": (json_lines("tests/assets/c4_test/data.json", lambda i: {"text": sentence(3000, i)}, 256),),
    "carvana": (pictures("data/imgs", size=(960, 640), count=40), masks("data/masks", (960, 640), 40, "_mask")),
    "chargpt": (text("input.txt", "\n".join("O God, O God! " + sentence(20, i) for i in range(5000))),),
    "chats": (dataset("chats", lambda i: {"messages": _turns(100, 400, i)}),),
    "dogs": (pictures("dog", "dogs"),),
    "flowers": (pictures("flowers", count=64),),
    "glue": (dataset("nyu-mll/glue", _pair, config="mrpc", about=_CLASSES), metric("glue", "accuracy", "f1")),
    "gpt4-llm": (dataset("teknium/GPT4-LLM-Cleaned", _alpaca, 256),),
    "guanaco": (dataset("timdettmers/openassistant-guanaco", lambda i: {"text": sentence(500, i)}),),
    "imagenet": tuple(pictures(f"imagenet/{part}/n0{i}", count=16) for part in ("train", "val") for i in range(8)),
    "imagenet-512": tuple(pictures(f"imagenet/train/n0{i}", size=(256, 256), count=128) for i in range(4)),
    "input.txt": (text("input.txt"),),
    "labels": (dataset("labels", _label),),
    "llama-3.2-1b": (
        folder_model(
            "llama", "transformers", "LlamaForCausalLM", hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
            num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, head_dim=64, tie_word_embeddings=True,
        ),
        tiktoken_file("llama/tokenizer.model"),
    ),
    "minimind": (
        json_lines("../dataset/pretrain_t2t_mini.jsonl", lambda i: {"text": sentence(400, i)}, 512),
        json_lines("../dataset/sft_t2t_mini.jsonl", _conversation, 512),
    ),
    "mnist": (mnist("../data"),),
    "nanochat": (nanochat("base"),),
    "tinystories": (tokens("data/TinyStories_all_data/0.bin", "data/TinyStories_all_data/1.bin", most=32000),),
    "openwebtext": (tokens("data/openwebtext/train.bin", "data/openwebtext/val.bin"),),
    "pets": (pictures("images", count=128, name="pet_"),),
    "preferences": (dataset("preferences", _preference),),
    "prompts": (dataset("prompts", lambda i: {"prompt": _turns(60, 1, i)[:1]}),),
    "prose": (text("data/train.txt"), text("data/validation.txt", words=4000)),
    "pythia-160m": (lit("pythia-160m"),),
    "rm-static": (on_disk("Dahoas/rm-static", _rewarded, 1400),),
    "sd-vae": (stable_diffusion_vae("stabilityai/sd-vae-ft-ema"),),
    "sd15": stable_diffusion("sd15"),
    "seen": (pictures("seen/train", count=32), json_lines("seen/train/metadata.jsonl", _seen, 32)),
    "stsb": (dataset("sentence-transformers/stsb", _scored),),
    "TinyStories": (dataset("roneneldan/TinyStories", lambda i: {"text": sentence(1500, i)}),),
    "translation": (
        dataset("data", lambda i: {"translation": {"en": sentence(60, i), "ro": sentence(60, i + 1)}}),
        metric("sacrebleu", "score"),
    ),
    "ultrachat": (dataset("smangrul/ultrachat-10k-chatml", lambda i: {"messages": _turns(100, 400, i)}, 256),),
    "voices": (speech("voices", (4, 9, 12, 7) * 8, config="mr"),),
    "wav2vec2": (
        folder_model(
            "facebook/wav2vec2-large-xlsr-53", "transformers", "Wav2Vec2ForPreTraining", hidden_size=1024,
            num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, **_XLSR,
        ),
        text("facebook/wav2vec2-large-xlsr-53/preprocessor_config.json", json.dumps(_HEARS)),
    ),
    "wer": (metric("wer"),),
    "wikitext": tuple(text(f"data/wikitext-2/{part}.txt") for part in ("train", "valid", "test")),
    "wikitext-2": (text("data/wikitext-2.txt", words=400000),),
}  # fmt: skip
