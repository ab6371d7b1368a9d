"""Checkpoints of a trainer's own: saved at the end of its last step, and resumed from, without writing what is in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback, modeling_utils, trainer_utils

from memfit.virtual.observer import Observer
from memfit.virtual.patching import patched
from memfit.virtual.process.files import Saves


class _Loaded(Exception):
    """The checkpoint is loaded; training goes on as it did before."""


class Saving(TrainerCallback):
    """Marks where the checkpoint of the last step begins, and ends a training that has just been resumed."""

    def __init__(self, observer: Observer) -> None:
        self._observer, self.resuming = observer, False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step is over: the trainer saves next, if it does."""
        if state.global_step >= args.max_steps:
            self._observer.mark("save", "saving a checkpoint")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Everything is loaded."""
        if self.resuming:
            raise _Loaded


@contextmanager
def without_files() -> Iterator[None]:
    """While the block runs, files of tensors are remembered by their shapes. Libraries hold these functions by name."""
    import peft.peft_model
    import peft.utils.save_and_load

    saves = Saves(lambda: None, lambda: None)
    load = saves.load(torch.load)
    load_file = lambda file, device="cpu": load(file, device)  # noqa: E731
    with ExitStack() as stack:
        for module, words in (
            (torch, {"save": saves.save, "load": load}),
            (safetensors.torch, {"save_file": saves.save, "load_file": load_file}),
            (modeling_utils, {"safe_save_file": saves.save}),
            (trainer_utils, {"safe_load_file": load_file}),  # of checkpoints in several files
            (peft.peft_model, {"safe_save_file": saves.save}),
            (peft.utils.save_and_load, {"safe_load_file": load_file}),
        ):
            stack.enter_context(patched(module, words))
        yield


def resume(trainer: Any, saving: Saving, observer: Observer, folder: str) -> None:
    """Load the checkpoint as a new process would: with the model on the card, without states, with nothing cached."""
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.callback_handler.optimizer = trainer.callback_handler.lr_scheduler = None
    for module in trainer.model_wrapped.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation leaves the last of them gathered
    trainer.accelerator.free_memory()  # empties the cache too
    observer.restarted()
    observer.mark("resume", "loading a checkpoint")
    saving.resuming = True
    with suppress(_Loaded):
        trainer.train(resume_from_checkpoint=str(next(Path(folder).glob("checkpoint-*"))))
