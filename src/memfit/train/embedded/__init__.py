"""The default run, which downloads nothing: a small model with random weights, a byte tokenizer, and prose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memfit.nouns.job import Training

HERE = Path(__file__).parent
NAME = "memfit-tiny"
SEQUENCE, BATCH, TRAINING = 256, 8, Training(learning_rate=2e-3, epochs=10.0)
SPECIAL = {"<bos>": 256, "<eos>": 257, "<pad>": 258}
SEED = 0


def config() -> dict[str, Any]:
    """Return the model's config.json: a Llama with under a million parameters and 260 tokens."""
    return dict(json.loads((HERE / "config.json").read_text()))


def write(folder: Path, changes: dict[str, Any] | None = None) -> tuple[Path, Path]:
    """Write the model's folder and the data; return both. `changes` go into the config: a smaller model for tests."""
    model, data = folder / NAME, folder / "prose.txt"
    folder.mkdir(parents=True, exist_ok=True)
    data.write_bytes((HERE / "prose.txt").read_bytes())
    (folder / "prose.LICENSE").write_bytes((HERE / "LICENSE").read_bytes())
    tokenizer().save_pretrained(model)
    _weights(model, config() | (changes or {}))
    return model, data


def tokenizer() -> Any:
    """Return a tokenizer: every byte is a token, <bos> begins a text, <eos> ends it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=letters | SPECIAL, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", SPECIAL["<bos>"])])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")


def _weights(folder: Path, settings: dict[str, Any]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(LlamaConfig(**settings))
    model.save_pretrained(folder)
