"""Run torchtune's own recipes, full_ and lora_finetune_single_device, with the config files it ships."""

from __future__ import annotations

import importlib.util
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed

from memfit.virtual.patching import patched
from published.case import NotCovered
from published.rows import Row
from published.torchtune import _compiled

PACKAGES = ("torchtune", "torchao", "bitsandbytes")
CONFIGS = (
    (r"Llama-3\.2-3B", "llama3_2/3B"), (r"Llama-3\.1-8B", "llama3_1/8B"), (r"Llama-2-7b", "llama2/7B"),
)  # fmt: skip
STEPS = 2


class Tokenizer:
    """No words at all: the data is tokenized already."""

    pad_id = 0
    max_seq_len = None

    def __init__(self, **_: Any) -> None:
        pass


class Checkpointer:
    """No files: weights stay as they were built."""

    def __init__(self, **_: Any) -> None:
        pass

    def load_checkpoint(self) -> dict[str, Any]:
        """A checkpoint of nothing."""
        return {"model": {}}

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        """Nothing is saved."""


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Samples of one length, every token labelled."""

    def __init__(self, tokenizer: Any, length: int, count: int, **_: Any) -> None:
        self._length, self._count = length, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, _: int) -> dict[str, list[int]]:
        return {"tokens": [1] * self._length, "labels": [1] * self._length}


def run(row: Row) -> None:
    """The recipe from its setup through its training loop, compiled as the row's was."""
    from omegaconf import OmegaConf

    length = re.fullmatch(r"(\d+)( packed)?", row.seq_len)
    if length is None:
        raise NotCovered(f"sequence length '{row.seq_len}' is not known")
    kind = "full" if row.method == "full" else "lora"
    folder_of = importlib.util.find_spec("recipes")
    assert folder_of is not None and folder_of.origin is not None
    recipes = Path(folder_of.origin).parent  # not a package: its files are scripts
    name = next(path for pattern, path in CONFIGS if re.search(pattern, row.model))
    file = recipes / "configs" / f"{name}_{row.method}_single_device.yaml"
    with tempfile.TemporaryDirectory() as folder, nccl(), without_files():
        script = load(recipes / f"{kind}_finetune_single_device.py")
        config = OmegaConf.merge(OmegaConf.load(file), changes(row, int(length[1]), folder))
        recipe = next(c for name, c in vars(script).items() if name.endswith("RecipeSingleDevice"))
        job = recipe(cfg=config)
        job.setup(cfg=config)
        job.train()


def load(path: Path) -> Any:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def changes(row: Row, length: int, folder: str) -> Any:
    """What the row's command line sets, and what stands in for files."""
    here, batch = __name__, row.number("micro_batch", 2)
    accumulation = min(row.number("grad_accum", 1), 2)
    made: dict[str, Any] = {
        "output_dir": folder, "batch_size": batch, "gradient_accumulation_steps": accumulation, "epochs": 1,
        "compile": _compiled(row), "max_steps_per_epoch": STEPS,
        "enable_activation_checkpointing": row.checkpointing.startswith("on"),
        "enable_activation_offloading": "offload" in row.checkpointing,
        "tokenizer": {"_component_": f"{here}.Tokenizer", "path": "none"},
        "checkpointer": {"_component_": f"{here}.Checkpointer"}, "resume_from_checkpoint": False,
        "dataset": {"_component_": f"{here}.Samples", "packed": False, "length": length,
                    "count": batch * accumulation * STEPS},
        "optimizer_in_bwd": "optimizer_in_bwd" in row.optimizer,
    }  # fmt: skip
    if "Paged" in row.optimizer:
        made["optimizer"] = {"_component_": "bitsandbytes.optim.PagedAdamW8bit"}
    elif "8bit" in row.optimizer:
        made["optimizer"] = {"_component_": "torchao.prototype.low_bit_optim.AdamW8bit"}
    else:
        made["optimizer"] = {"_component_": "torch.optim.AdamW", "fused": True}
    if "Chunked" not in row.loss_kernel:
        made["loss"] = {"_component_": "torch.nn.CrossEntropyLoss"}
    if row.lora_rank and row.method != "full":
        made["model"] = {"lora_rank": row.number("lora_rank")}
    return made


@contextmanager
def nccl() -> Iterator[None]:
    """NCCL is there, and has a version."""
    there = patched(torch.distributed, {"is_nccl_available": lambda: True})
    with there, patched(torch.cuda.nccl, {"version": lambda: (2, 27, 0)}):
        yield


@contextmanager
def without_files() -> Iterator[None]:
    """load_state_dict of nothing: weights stay as they were built."""
    nothing = {"load_state_dict": lambda self, *_, **__: torch.nn.modules.module._IncompatibleKeys([], [])}
    with patched(torch.nn.Module, nothing):
        yield
