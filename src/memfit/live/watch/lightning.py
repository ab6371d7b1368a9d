"""LightningCallback: watches a Lightning Trainer, of the package lightning or of pytorch_lightning."""

from __future__ import annotations

from typing import Any

from memfit.errors import BadInput
from memfit.live.watch.loop import Watching, watch

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback  # type: ignore[no-redef, unused-ignore]
    except ImportError:
        raise BadInput("LightningCallback needs Lightning", hint="pip install lightning") from None


class LightningCallback(Watching, Callback):  # type: ignore[misc, unused-ignore]
    """Trainer(callbacks=[LightningCallback(predicted="run/recipe.toml")]); it takes the arguments of memfit.watch.

    A step is an optimizer step: with accumulated batches the trainer's global_step shows when one is done. Several
    optimizers that step in one batch make one step, and the states of all count.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        first, *others = getattr(trainer, "optimizers", None) or [None]
        self.watch = watch(pl_module, **self.options)
        self.watch.optimizer = first
        self.watch.beside(others)
        self._step = int(trainer.global_step)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.watch:
            self.watch.train()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.watch and trainer.global_step != self._step:
            self._step = int(trainer.global_step)
            self.watch.step()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self.watch:
            self.watch.enter("eval")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self.watch:
            self.watch.train()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self.watch:
            self.watch.enter("save")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.watch:
            self.watch.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.watch:
            self.watch.close()
