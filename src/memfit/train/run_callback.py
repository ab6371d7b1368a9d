"""What happens beside training: stages are told apart, samples counted, checkpoints marked whole, a stop is obeyed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from memfit.live.watch.transformers import MemfitCallback
from memfit.train.folder import COMPLETE, Checkpoint, write_json
from memfit.train.memory_limit import Meter
from memfit.train.outcome import Event, Settings, Stage
from memfit.train.rehearsal import randomness, rehearse, rehearse_evaluation, restore
from memfit.train.sample_counts import Ledger

Tell = Callable[[Event], None]


class Ended(Exception):
    """There is nothing to train: the checkpoint that was loaded holds the last step, or a stop was asked for before the first."""


class Stopped(BaseException):
    """A stop was asked for while model and data were read: no library takes it for an error of its own."""


class Cut(Exception):
    """An evaluation is left where it is: a stop was asked for."""


class Keeper(TrainerCallback):
    """Watches one attempt. `stop` may be set at any time: the step under way is finished and saved."""

    def __init__(self, meter: Meter, ledger: Ledger, tell: Tell, optimizer: str, settings: Settings) -> None:
        self.meter, self.ledger, self.tell = meter, ledger, tell
        self.optimizer_name, self.rehearsed, self.lean_save = optimizer, settings.rehearse, settings.lean_save
        self.resumed: Checkpoint | None = None
        self.trainer: Any = None
        self.watcher: MemfitCallback | None = None
        self.stage: Stage = "load"
        self.held = 0  # bytes of tensors as the stage began
        self.stop = False
        self.reading = False  # nothing was trained in this attempt, and no other process waits: it may be left at once
        self.numbers: Any = None  # random ones, where they stood after the last whole step and its evaluation
        self.due = False  # an evaluation of the weights as they are was begun, and has not ended

    def enter(self, stage: Stage) -> None:
        """The run is now in `stage`."""
        self.stage = stage
        self.held = self.meter.held
        self.meter.enter(stage)

    def attach(self, trainer: Any) -> None:
        """Be told of what the trainer's callbacks do not tell: when it evaluates and saves. The watch looks first."""
        self.trainer = trainer
        if self.watcher:
            trainer.add_callback(self.watcher)
        trainer.add_callback(self)
        trainer.evaluate = self._evaluating(self._within("eval", trainer.evaluate))
        for name in ("_save_checkpoint", "save_model"):
            setattr(trainer, name, self._within("save", getattr(trainer, name)))

    def _within(self, stage: Stage, call: Callable[..., Any]) -> Callable[..., Any]:
        def within(*args: Any, **named: Any) -> Any:
            before = self.stage
            self.enter(stage)
            if stage == "save" and self.lean_save:
                give_back(self.trainer.model)
            found = call(*args, **named)
            self.enter(before)  # not after an error: it happened in `stage`
            return found

        return within

    def _evaluating(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """What does not end stays due, and is made up from the checkpoint of its step."""

        def evaluating(*args: Any, **named: Any) -> Any:
            self.due = True
            try:
                found = call(*args, **named)
            except Cut:
                return {}
            self.due = False
            self.numbers = randomness()
            return found

        return evaluating

    def rewind_randomness(self) -> None:
        """Forget what a step that failed drew: it is taken again. What an evaluation draws belongs to the step before."""
        if self.stage == "forward and backward" and self.numbers is not None:
            restore(self.numbers)

    # ---- what the Trainer calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step >= state.max_steps:
            self.ledger.begin(state.global_step)
            raise Ended
        if self.resumed and self.resumed.optimizer != self.optimizer_name:
            scheduler_of(self.resumed.path, self.trainer)
        # DeepSpeed's backward takes the step: no rehearsal undoes that
        if self.rehearsed and not self.trainer.is_deepspeed_enabled:
            self._rehearse(named["model"], named["optimizer"])
        self.ledger.begin(state.global_step)
        if self.resumed and self.resumed.evaluate:
            self.trainer.evaluate()
        if self._asked_to_stop():
            raise Ended
        self.tell({"event": "begin", "step": state.global_step, "steps": state.max_steps})

    def _rehearse(self, model: Any, optimizer: Any) -> None:
        """In the watch it is a step like those to come: with the optimizer's states, on the longest samples."""
        self.enter("rehearsal")
        watch = self.watcher.watch if self.watcher else None
        if watch:
            watch.enter("step")

        def evaluation() -> None:
            self.enter("eval")
            if watch:
                watch.enter("eval")
            rehearse_evaluation(self.trainer, model)
            self.enter("rehearsal")

        then = evaluation if self.trainer.eval_dataset is not None else None
        longest = rehearse(self.trainer, model, optimizer, step=not has_states(optimizer), then=then)
        if watch:
            watch.train()
        self.tell({"event": "rehearsed", "tokens": longest})

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.enter("forward and backward")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.enter("optimizer step")

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.enter("forward and backward")
        self.numbers = randomness()
        self.ledger.step(state.global_step)
        if self._asked_to_stop():
            control.should_save = control.should_training_stop = True
        self.tell({"event": "step", "step": state.global_step, "steps": state.max_steps})

    def _asked_to_stop(self) -> bool:
        """Several processes agree: all stop after the same step, whoever was asked."""
        if self.trainer.args.world_size == 1:
            return self.stop
        import torch

        asked = torch.tensor([int(self.stop)], device=self.trainer.args.device)
        return bool(self.trainer.accelerator.gather(asked).any())

    def on_prediction_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """An evaluation may take longer than who asks for a stop will wait."""
        if self._asked_to_stop():
            control.should_save = control.should_training_stop = True
            raise Cut

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
        logs = logs or {}
        self.tell({"event": "log", "step": state.global_step, **{k: v for k, v in logs.items() if k in LOGGED}})

    def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.complete(Path(args.output_dir) / f"checkpoint-{state.global_step}", state.global_step)

    def complete(self, folder: Path, step: int) -> None:
        """Mark a checkpoint whole: every process has written its part."""
        import torch

        one = torch.tensor([self.ledger.total], device=self.trainer.args.device)
        samples = int(self.trainer.accelerator.gather(one).sum())
        if not self.trainer.args.should_save:
            return
        told = {"step": step, "samples": samples, "optimizer": self.optimizer_name, "evaluate": self.due}
        write_json(folder / COMPLETE, told)
        self.tell({"event": "saved", "step": step})


LOGGED = ("loss", "eval_loss", "learning_rate", "grad_norm")


def give_back(model: Any) -> None:
    """Leave nothing on the device that saving does not need."""
    import gc

    import torch

    model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def has_states(optimizer: Any) -> bool:
    """It has taken a step before, in this process or in the one whose checkpoint was loaded."""
    return bool(getattr(optimizer, "optimizer", optimizer).state)


def scheduler_of(checkpoint: Path, trainer: Any) -> None:
    """The learning rate goes on where it was, though the new optimizer's states start again."""
    import torch

    trainer.lr_scheduler.load_state_dict(torch.load(checkpoint / "scheduler.pt", weights_only=True))
    for group, rate in zip(trainer.optimizer.param_groups, trainer.lr_scheduler.get_last_lr(), strict=True):
        group["lr"] = rate
