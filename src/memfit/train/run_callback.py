"""The Trainer callback of a run: stages, sample counts, whole checkpoints, stops on request; and the watch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from transformers import TrainerCallback

from memfit.live.watch.outputs import REFRESH
from memfit.live.watch.transformers import MemfitCallback
from memfit.nouns.footprint import Levels
from memfit.nouns.sample import METERS, Alarm, Leak, Status, Watched
from memfit.nouns.tape import Phase
from memfit.train.checkpoints import Checkpoint, seal
from memfit.train.folder import MEMORY_FILE, Run
from memfit.train.memory_limit import MemoryMeter
from memfit.train.outcome import Event, Settings, Stage
from memfit.train.rehearsal import randomness, rehearse, rehearse_evaluation, restore
from memfit.train.run_file import write_json
from memfit.train.sample_counts import SampleLedger
from memfit.units import several

Tell = Callable[[Event], None]


class Ended(Exception):
    """Raised if nothing is left to train: the checkpoint is at the last step, or a stop came before the first."""


class Stopped(BaseException):
    """Raised by a stop while model and data are loaded. It is a BaseException, so that no library handles it."""


class EvaluationCut(Exception):
    """Raised to leave an evaluation because of a stop."""


class RunCallback(TrainerCallback):
    """The callback of one attempt. `stop` may be set at any time: the current step is then finished and saved."""

    def __init__(
        self, meter: MemoryMeter, ledger: SampleLedger, tell: Tell, optimizer: str, settings: Settings
    ) -> None:
        self.meter, self.ledger, self.tell = meter, ledger, tell
        self.optimizer_name, self.rehearsed, self.lean_save = optimizer, settings.rehearse, settings.lean_save
        self.resumed: Checkpoint | None = None
        self.trainer: Any = None
        self.watcher: MemfitCallback | None = None
        self.stage: Stage = "load"
        self.held = 0  # bytes of tensors at the beginning of the stage
        self.stop = False
        self.reading = False  # model and data are loading in a single process: a stop may end the attempt at once
        self.numbers: Any = None  # states of the random generators after the last whole step and its evaluation
        self.due = False  # an evaluation of the present weights has begun and not ended

    def enter(self, stage: Stage) -> None:
        """Begin a stage."""
        self.stage = stage
        self.held = self.meter.held
        self.meter.enter(stage)

    def attach(self, trainer: Any) -> None:
        """Add the callbacks, the watch first, and wrap evaluation and saving, whose begin triggers no callback."""
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
                free_memory(self.trainer.model)
            found = call(*args, **named)
            self.enter(before)  # not after an error, which happened in `stage`
            return found

        return within

    def _evaluating(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an evaluation: one that does not end stays due and is repeated when the run resumes."""

        def evaluating(*args: Any, **named: Any) -> Any:
            self.due = True
            try:
                found = call(*args, **named)
            except EvaluationCut:
                return {}
            self.due = False
            self.numbers = randomness()
            return found

        return evaluating

    def rewind_randomness(self) -> None:
        """Restore the random generators to their state before a failed step, which will be repeated."""
        # numbers that an evaluation drew belong to the step before it
        if self.stage == "forward and backward" and self.numbers is not None:
            restore(self.numbers)

    # ---- called by the Trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step >= state.max_steps:
            self._count_from(state.global_step)
            raise Ended
        if self.resumed and self.resumed.optimizer != self.optimizer_name:
            load_scheduler(self.resumed.path, self.trainer)
        # under DeepSpeed backward() takes the step, which a rehearsal could not undo
        if self.rehearsed and not self.trainer.is_deepspeed_enabled:
            self._rehearse(named["model"], named["optimizer"])
        self._count_from(state.global_step)
        if self.resumed and self.resumed.evaluate:
            self.trainer.evaluate()
        if self._stop_requested():
            raise Ended
        self.tell({"event": "begin", "step": state.global_step, "steps": state.max_steps})

    def _count_from(self, step: int) -> None:
        """Continue the record of samples, and report what it lacks of the steps so far."""
        args, trained = self.trainer.args, None
        if self.resumed and self.resumed.step == step:
            trained = self.resumed.trained(args.process_index, args.world_size)
        self.ledger.begin(step, trained)
        if self.ledger.missing:
            name, total = self.ledger.path.name, self.ledger.total
            text = f"{name} lists {total - self.ledger.missing:,} of the {several(total, 'sample')} of the first "
            text += several(step, "step")
            self.tell({"event": "warning", "text": f"{text}; the others were trained, and count as missing in it"})

    def _rehearse(self, model: Any, optimizer: Any) -> None:
        """Rehearse. The watch counts it as a step, as it has the optimizer's states and the longest samples."""
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
        has_states = bool(getattr(optimizer, "optimizer", optimizer).state)  # of a loaded checkpoint
        longest = rehearse(self.trainer, model, optimizer, step=not has_states, then=then)
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
        if self._stop_requested():
            control.should_save = control.should_training_stop = True
        self.tell({"event": "step", "step": state.global_step, "steps": state.max_steps})

    def _stop_requested(self) -> bool:
        """Return whether any process received a stop, so that all stop after the same step."""
        if self.trainer.args.world_size == 1:
            return self.stop
        import torch

        stops = torch.tensor([int(self.stop)], device=self.trainer.args.device)
        return bool(self.trainer.accelerator.gather(stops).any())

    def on_prediction_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Leave an evaluation at a stop, because it may take long."""
        if self._stop_requested():
            control.should_save = control.should_training_stop = True
            raise EvaluationCut

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
        logs = logs or {}
        self.tell({"event": "log", "step": state.global_step, **{k: v for k, v in logs.items() if k in LOGGED}})

    def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.complete(Path(args.output_dir) / f"checkpoint-{state.global_step}", state.global_step)

    def complete(self, folder: Path, step: int) -> None:
        """Mark a checkpoint as whole, once every process has written its part."""
        import torch

        self.ledger.flush()
        total = torch.tensor([self.ledger.total], device=self.trainer.args.device)
        counts = self.trainer.accelerator.gather(total).tolist()
        if not self.trainer.args.should_save:
            return
        marks = {
            "step": step, "samples": sum(counts), "by_process": counts, "optimizer": self.optimizer_name,
            "evaluate": self.due,
        }  # fmt: skip
        seal(folder, marks, write_json)
        self.tell({"event": "saved", "step": step})


LOGGED = ("loss", "eval_loss", "learning_rate", "grad_norm")


def free_memory(model: Any) -> None:
    """Free everything on the device that saving does not need."""
    import gc

    import torch

    model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def load_scheduler(checkpoint: Path, trainer: Any) -> None:
    """Continue the learning rate schedule with a new optimizer, whose states start empty."""
    import torch

    trainer.lr_scheduler.load_state_dict(torch.load(checkpoint / "scheduler.pt", weights_only=True))
    for group, rate in zip(trainer.optimizer.param_groups, trainer.lr_scheduler.get_last_lr(), strict=True):
        group["lr"] = rate


# ---- the watch of a run


class EventScreen:
    """A screen of the watch that sends statuses, alarms and leaks to the supervisor as events."""

    def __init__(self, tell: Callable[[Event], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.tell, self.clock, self._shown = tell, clock, -REFRESH

    def show(self, status: Status) -> None:
        if self.clock() - self._shown >= REFRESH:
            self._shown = self.clock()
            self._tell("memory", status)

    def alarm(self, alarm: Alarm) -> None:
        if alarm.kind != "leak":  # `leak` reports it with its holders
            self._tell("alarm", alarm)

    def leak(self, leak: Leak) -> None:
        self._tell("leak", leak)

    def close(self, watched: Watched) -> None: ...

    def _tell(self, kind: str, noun: Any) -> None:
        self.tell({"event": kind, kind: msgspec.to_builtins(noun)})


def watcher(run: Run, tell: Callable[[Event], None]) -> MemfitCallback:
    """Return the callback that watches the run and compares it with its plan."""
    return MemfitCallback(
        predicted=run.plan.footprint, log=run.path / MEMORY_FILE, name=run.path.name, screen=EventScreen(tell)
    )


def closed(callback: MemfitCallback | None) -> dict[Phase, Levels]:
    """Close the watch, which an error leaves open, and return its peaks by phase; {} without a card."""
    if callback is None or callback.watch is None:
        return {}
    callback.watch.close()
    recorder = callback.watch.recorder
    return recorder.peaks if METERS[recorder.header.meter].compared else {}
