"""Run litgpt's own scripts: Fabric as `setup` makes it, then `main` of the file of finetune/ that the row names."""

from __future__ import annotations

import importlib
import inspect
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from memfit.virtual.patching import patched
from published.case import NotCovered, fixed_length
from published.rows import Row
from published.traced import old_bitsandbytes

PACKAGES = ("litgpt", "lightning", "bitsandbytes")
TARGETS = ("query", "key", "value", "projection", "mlp", "head")
MICRO_STEPS = 2  # micro-batches per optimizer step where the row accumulates: more of them hold nothing more
STEPS = 2


class Tokenizer:
    """As many words as anybody asks for; the text is random anyway."""

    eos_id, bos_id = 1, 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def encode(self, *_: Any, device: Any = None, **__: Any) -> torch.Tensor:
        """Ten tokens."""
        return torch.zeros(10, dtype=torch.long, device=device)

    def decode(self, *_: Any) -> str:
        """Nothing."""
        return ""


@dataclass
class Data:
    """A data module whose every sample has the row's length."""

    length: int
    batch_size: int = 1
    samples: int = 8
    prompt_style: str = ""
    first: int = 0  # so many samples in front, all others are a tenth as long

    def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None) -> None:
        """Told by the script."""
        self.batch_size = batch_size

    def prepare_data(self) -> None:
        """Nothing to download."""

    def setup(self, stage: str = "") -> None:
        """Nothing to split."""

    def train_dataloader(self) -> DataLoader:
        """litgpt's own collate function over samples of one length, every token labelled."""
        rest = self.length // 10 if self.first else self.length
        samples: Any = [_sample(self.length)] * self.first + [_sample(rest)] * (self.samples - self.first)
        return self._loader(samples)

    def val_dataloader(self) -> DataLoader:
        """One batch."""
        return self._loader([_sample(self.length // 10 if self.first else self.length)] * self.batch_size)

    def _loader(self, samples: Any) -> DataLoader:
        from litgpt.data.base import get_sft_collate_fn

        return DataLoader(samples, batch_size=self.batch_size, collate_fn=get_sft_collate_fn())


def _sample(length: int) -> dict[str, Any]:
    return {
        "input_ids": torch.zeros(length, dtype=torch.long), "labels": torch.ones(length, dtype=torch.long),
        "token_counts": {"raw": length, "raw_plus_prompt_template": length},
    }  # fmt: skip


def run(row: Row) -> None:
    """The script's `main`, from an empty card to its last validation."""
    if "thunder" in row.framework:
        pretrain(row)
        return
    import lightning
    from litgpt.args import EvalArgs, TrainArgs

    kind = {"qlora": "lora"}.get(row.method, row.method)
    script = importlib.import_module(f"litgpt.finetune.{kind}")
    config = script.Config.from_name(name_of(row.model), **lora_words(row) if kind == "lora" else {})
    plugins, precision = None, row.weight_dtype.split()[0]
    if row.quant != "none":
        old_bitsandbytes.prepare()
        from lightning.fabric.plugins import BitsandbytesPrecision

        dtype = {"bf16-true": torch.bfloat16}[precision]
        plugins, precision = BitsandbytesPrecision(row.quant[4:], dtype), None
    fabric = lightning.Fabric(devices=1, accelerator="cuda", strategy="auto", precision=precision, plugins=plugins)
    batch = row.number("micro_batch", 1)
    accumulation = min(row.number("grad_accum", 1), MICRO_STEPS)
    length = fixed_length(row)
    # lit-gpt took its longest sample first; everything after it is shorter
    data = Data(
        length, samples=batch * (accumulation * STEPS + 1), first=batch if "first iteration" in row.notes else 0
    )
    train = TrainArgs(
        save_interval=None, log_interval=1, global_batch_size=batch * accumulation, micro_batch_size=batch,
        lr_warmup_steps=1, epochs=1, max_steps=STEPS, max_seq_length=length,
    )  # fmt: skip
    evaluation = EvalArgs(interval=1000, max_new_tokens=1, max_iters=1)
    with tempfile.TemporaryDirectory() as folder, patched(script, stand_ins(script)):
        words = {
            "fabric": fabric, "devices": 1, "seed": 1, "config": config, "data": data, "checkpoint_dir": Path(folder),
            "out_dir": Path(folder), "train": train, "eval": evaluation, "optimizer": optimizer_of(row),
            "resume": False,
        }  # fmt: skip
        script.main(**accepted(script.main, words))


def accepted(function: Any, words: dict[str, Any]) -> dict[str, Any]:
    """The arguments that this release's function takes."""
    return {name: value for name, value in words.items() if name in inspect.signature(function).parameters}


def name_of(model: str) -> str:
    """Hugging Face's name -> litgpt's."""
    from litgpt.config import configs

    owner, _, name = model.rpartition("/")
    for config in configs:
        hub = config.get("hf_config", {})
        if hub.get("name") == name and owner in ("", hub.get("org")):
            return str(config["name"])
    raise NotCovered(f"litgpt has no {model}")


def lora_words(row: Row) -> dict[str, Any]:
    """Arguments of `setup` that make the config's LoRA."""
    on = {f"lora_{target}": target in row.lora_targets.split("+") for target in TARGETS}
    return {"lora_r": row.number("lora_rank", 8), "lora_alpha": 16, "lora_dropout": 0.05, **on}


def optimizer_of(row: Row) -> Any:
    """As the config files write it: config_hub's name torch's AdamW, which litgpt swaps under bitsandbytes."""
    paged = "PagedAdamW" in row.optimizer
    return {"class_path": "bitsandbytes.optim.PagedAdamW" if paged else "torch.optim.AdamW", "init_args": {"lr": 1e-4}}


def stand_ins(script: Any) -> dict[str, Any]:
    """What touches files: the weights stay as they were built, nothing is saved."""

    def nothing(*_: Any, **__: Any) -> None:
        """Nothing to read or write."""

    files = (
        "load_checkpoint", "copy_config_files", "save_hyperparameters", "save_prompt_style", "merge_lora",
        "save_lora_checkpoint", "save_adapter_checkpoint", "save_adapter_v2_checkpoint", "generate_example",
    )  # fmt: skip
    return {"Tokenizer": Tokenizer} | {name: nothing for name in files if hasattr(script, name)}


def pretrain(row: Row) -> None:
    """Run litgpt's model eagerly under the loop of extensions/thunder/pretrain.py, a file that no release contains."""
    import lightning
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    if "eager" not in row.framework:
        raise NotCovered("compiled by thunder")
    batch, length = row.number("micro_batch", 4), fixed_length(row)
    fabric = lightning.Fabric(devices=1, accelerator="cuda", strategy="auto", precision=row.weight_dtype)
    with fabric.init_module(empty_init=True):
        model = GPT(Config.from_name("tiny-llama-1.1b"))
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), fused=True))
    tokens = torch.zeros(batch, length + 1, dtype=torch.long)

    def forward_and_loss() -> torch.Tensor:
        """A function of its own, so that the logits die when it returns."""
        block = fabric.to_device(tokens)
        logits = model(block[:, :length].contiguous())
        return chunked_cross_entropy(logits, block[:, 1:].contiguous(), chunk_size=0)

    for _ in range(STEPS):
        for _ in range(MICRO_STEPS):
            loss = forward_and_loss()
            fabric.backward(loss / MICRO_STEPS)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
