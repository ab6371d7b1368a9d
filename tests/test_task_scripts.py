"""The scripts of tasks: they train tiny models, take what was planned, and are read back into the same plan."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import runs
from memfit.frameworks import targets
from memfit.models.families import without_formula
from memfit.nouns.job import Job, Recipe
from memfit.nouns.plan import Plan
from memfit.nouns.task import Shape
from memfit.tables.tasks import TASKS
from plans import CARD, FITS, FOOTPRINT, LLAMA

pytestmark = pytest.mark.filterwarnings("ignore")
SIDE, MEL, FRAMES = 16, 8, 40  # pixels of an image, frequencies and half the frames of a spectrogram
BLOCKS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
# model type -> its config; the words of the tokenizer are its vocabulary
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "pad_token_id": 1, "eos_token_id": 2},
    "bert": {"model_type": "bert", "vocab_size": 64, "max_position_embeddings": 64, **BLOCKS},
    "t5": {"model_type": "t5", "vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2,
           "decoder_start_token_id": 1, "pad_token_id": 1},
    "vit": {"model_type": "vit", "image_size": SIDE, "patch_size": 8, **BLOCKS},
}  # fmt: skip
WORDS = ("<unk>", "<pad>", "<s>", "<mask>", *(f"w{i}" for i in range(60)))


def text(words: int, first: int = 0) -> str:
    return " ".join(f"w{(first + i) % 60}" for i in range(words))


def pixels(value: float) -> list[Any]:
    return [[[value] * SIDE for _ in range(SIDE)] for _ in range(3)]


# task -> the model, and rows of data
TRAINED: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "masked-lm": ("bert", [{"text": text(20, i)} for i in range(12)]),
    "classification": ("bert", [{"text": text(5 + i, i), "label": ("good", "bad", "odd")[i % 3]} for i in range(12)]),
    "token-classification": (
        "bert", [{"tokens": ["w1", "w2", "w3"], "ner_tags": ["O", "PER", "O"]} for i in range(12)]
    ),
    "seq2seq": ("t5", [{"source": text(9, i), "target": text(4, i)} for i in range(12)]),
    "image-classification": ("vit", [{"pixel_values": pixels(i / 12), "label": i % 3} for i in range(12)]),
    "reward": ("llama", [{"prompt": "w1 w2", "chosen": text(9), "rejected": text(5)}] * 12),
    "dpo": ("llama", [{"prompt": [{"role": "user", "content": "w1"}],
                       "chosen": [{"from": "gpt", "value": text(9)}],
                       "rejected": {"role": "assistant", "content": "w3"}}] * 12),
    "kto": ("llama", [{"prompt": "w1 w2", "completion": text(3 + i), "label": i % 2} for i in range(12)]),
}  # fmt: skip


def made_plan(task: str, folder: Path, method: str = "full", **changes: Any) -> Plan:
    """A plan of a task on a tiny model, as if it had been traced."""
    model, row = TRAINED[task][0], TASKS[task]
    trainer = "transformers" if row.trainer == "transformers" else "trl"
    recipe = Recipe(trainer=trainer, precision="fp32", micro_batch=2, accumulation=2, sequence_length=16, method=method)
    architecture = without_formula(CONFIGS[model], str(folder / model))
    data = str(folder / f"{task}.jsonl")
    job = Job(architecture=architecture, gpu=CARD, trainer=trainer, task=task, dataset=data, shape=Shape(target=8))
    footprint = replace(FOOTPRINT, source="traced")
    return Plan(job, recipe.but(**changes), footprint, FITS, ())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny models, their tokenizer, and the data of each task."""
    pytest.importorskip("trl")
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny")
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<s>", "mask_token": "<mask>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **special)
    for name, config in CONFIGS.items():
        made = transformers.AutoConfig.for_model(**config)
        auto = {"vit": "Image", "bert": "Masked", "t5": "Seq2Seq"}.get(name, "Causal")
        kind = {"Image": "ImageClassification", "Masked": "MaskedLM", "Seq2Seq": "Seq2SeqLM", "Causal": "CausalLM"}[
            auto
        ]
        getattr(transformers, f"AutoModelFor{kind}").from_config(made).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for task, (_, rows) in TRAINED.items():
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


_EACH = """\
import runpy, sys, traceback
for script in sys.argv[1:]:
    sys.argv = [script + "/train.py", "--cpu", "--max-steps", "2", "--output", script + "/output"]
    print("SCRIPT", script)
    try: runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException: print(traceback.format_exc())
"""


def test_every_script_trains_its_task(tiny: Path, tmp_path: Path) -> None:
    places = []
    for task in TRAINED:
        method = "lora" if task in ("dpo", "image-classification") else "full"
        plan = made_plan(task, tiny, method)
        places.append(tmp_path / task)
        targets.write(targets.export(plan, plan.recipe.trainer), places[-1])
    printed = runs.script(_EACH, list(map(str, places)), tmp_path, tmp_path / "hf")

    for part in printed.split("SCRIPT ")[1:]:
        losses = [float(x) for x in re.findall(r"'train_loss': '?([^',}]+)", part)]
        assert len(losses) == 1 and math.isfinite(losses[0]), part
