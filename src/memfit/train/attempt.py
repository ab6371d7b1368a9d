"""One attempt: the exported train.py is loaded and its trainer run, until it is done, is stopped, or memory runs out."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import os
import re
import resource
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from memfit.errors import BadInput
from memfit.frameworks.process_layout import backend
from memfit.train.folder import SAMPLES_FILE, Checkpoint, Run
from memfit.train.gloo import sharding
from memfit.train.memory_limit import CountingMeter, Meter, metered
from memfit.train.oom_recovery import eval_batch
from memfit.train.outcome import Outcome, Settings, Shortage
from memfit.train.run_callback import Ended, Keeper, Stopped, Tell
from memfit.train.sample_counts import Ledger, counted
from memfit.train.saved_weights import mend_loading
from memfit.train.watching import closed, watcher
from memfit.units import parse_size

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "deepspeed")
TRACE = 20_000  # characters of a traceback that are kept: its end is what failed
WARNED = 600  # characters of a library's warning that are shown
LOGGED = 0.02  # share of all steps between two logged losses: fifty of them, or one per step of a short run
BETWEEN_STEPS = ("forward and backward", "eval")  # stages in which weights and states are those of a whole step
STATES = ("optimizer.pt", "optimizer.bin")  # a checkpoint's files of nothing else; the second is FSDP's
EXHAUSTED = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?(?:[KMGT]i)?(?:B|bytes))")
_HELD = re.compile(r"Of the allocated memory ([\d.]+ ?(?:[KMGT]i)?(?:B|bytes)) is allocated")


def attempt(
    run: Run, tell: Tell, keep: Callable[[Keeper], None] = lambda keeper: None,
    before: Callable[[CountingMeter, int], None] | None = None,
) -> Outcome:  # fmt: skip
    """Train from the last good checkpoint on. `keep` is handed the Keeper (to stop it), `before` sees every allocation.

    Out of memory is an Outcome; other errors of the trainer are raised as they are.
    """
    settings, started = run.settings, time.monotonic()
    with metered(settings.cpu, settings.memory_limit, before) as meter, _as_on_cards(run), Heard(tell):
        ledger = Ledger(rank_file(run.path / SAMPLES_FILE))
        keeper = Keeper(meter, ledger, tell, run.plan.recipe.optimizer, settings)
        keeper.watcher = watcher(run, tell)
        keep(keeper)
        try:
            outcome = _attempt(run, settings, keeper, meter)
        finally:
            peaks = closed(keeper.watcher)
        outcome = replace(
            outcome, peaks={k: v.allocated for k, v in peaks.items()} or dict(meter.peaks),
            reserved=max((v.reserved for v in peaks.values()), default=0), seconds=time.monotonic() - started,
            host=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, versions=_versions(),
        )  # fmt: skip
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return outcome


class Heard(logging.Handler):
    """What TRL warns of, each once: it speaks of the data and of what is learned from them."""

    def __init__(self, tell: Tell) -> None:
        super().__init__(logging.WARNING)
        self.tell, self.said = tell, set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        if text not in self.said:
            self.said.add(text)
            self.tell({"event": "warning", "text": text[:WARNED]})

    def __enter__(self) -> None:
        logging.getLogger("trl").addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("trl").removeHandler(self)


def _attempt(run: Run, settings: Settings, keeper: Keeper, meter: Meter) -> Outcome:
    trainer = None
    try:
        keeper.reading = os.environ.get("WORLD_SIZE", "1") == "1"
        trainer = load(run, settings)
        keeper.reading = False
        if run.last_good() is None and not run.falls:
            _tell_cut(trainer, run, tell=keeper.tell)
        keeper.attach(trainer)
        return _trained(run, trainer, keeper)
    except Stopped:
        keeper.reading = False
        return _result("stopped", keeper, None, run)
    except Exception as error:
        if not exhausted(error):
            raise
        shortage = _shortage(error, keeper, meter, trainer, run)
        forget(error)
        if trainer is not None:
            _save_what_is_good(run, trainer, keeper)
        return _result("oom", keeper, trainer, run, shortage=shortage)


def _tell_cut(trainer: Any, run: Run, tell: Tell) -> None:
    """How many samples are as long as the sequence may be: the plan may have known their tokens by an estimate only.

    Raises BadInput where TRL has left out all of them: those of whose completion nothing is left.
    """
    recipe, rows = run.plan.recipe, trainer.train_dataset
    if recipe.padding == "packing":  # its rows are made of several
        return
    left = trainer.rows_read - len(rows)
    if left and not len(rows):
        raise BadInput(
            f"no sample has any of its completion within {recipe.sequence_length:,} tokens",
            hint="a longer --sequence-length; where the data bring labels or masks, some that are learned",
        )
    if not trainer.is_world_process_zero():
        return
    if left > 0:
        tell({"event": "cut", "text": f"{left:,} of {trainer.rows_read:,} samples have nothing of their completion within "
              f"{recipe.sequence_length:,} tokens, and are left out: --sequence-length"})  # fmt: skip
    if "input_ids" not in (rows.column_names or ()):
        return
    full = sum(len(tokens) >= recipe.sequence_length for tokens in rows["input_ids"])
    if full:
        tell({"event": "cut", "text": f"{full:,} of {len(rows):,} samples have {recipe.sequence_length:,} tokens or had more, "
              "and are cut there: --sequence-length"})  # fmt: skip


def _as_on_cards(run: Run) -> contextlib.AbstractContextManager[None]:
    """What the recipe's backend needs to run on a CPU as it does on cards."""
    return sharding() if run.settings.cpu and backend(run.plan.recipe) == "fsdp" else contextlib.nullcontext()


def load(run: Run, settings: Settings) -> Any:
    """The trainer that train.py builds, told nothing but where it writes and what it runs on."""
    script: Any = _module(run.path / "train.py")
    words = ["--output", str(run.output), *(["--cpu"] if settings.cpu else [])]
    read = script.load
    rows: list[int] = []

    def noted(data: str) -> Any:
        found = read(data)
        rows.append(len(found))
        return found

    script.load = noted
    trainer = script.build(script.arguments(words))
    trainer.rows_read = rows[0]  # of the training data, which is read first: TRL may leave some out
    trainer.args.disable_tqdm = True
    trainer.args.logging_steps = LOGGED
    trainer.args.per_device_eval_batch_size = eval_batch(run.plan.recipe, settings)
    mend_loading(trainer)
    return trainer


def _module(path: Path) -> ModuleType:
    """train.py imported under a name of its own, as libraries that pickle its functions expect."""
    name = f"memfit_run_{abs(hash(str(path)))}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _trained(run: Run, trainer: Any, keeper: Keeper) -> Outcome:
    """Train, evaluate at the end, save."""
    with trainer.args.main_process_first(local=False):  # one clears away, the others look afterwards
        last = _resumable(run, keeper)
    keeper.resumed = last
    with counted(trainer, keeper.ledger), _quiet_progress(trainer):
        if last:
            keeper.enter("resume")
        with contextlib.suppress(Ended):
            trainer.train(resume_from_checkpoint=str(last.path) if last else None)
        if trainer.state.global_step < trainer.state.max_steps:
            return _result("stopped", keeper, trainer, run)
        if trainer.eval_dataset is not None and not _evaluated(trainer):
            trainer.evaluate()
        if keeper.due:  # a stop was asked for in the midst of it
            return _result("stopped", keeper, trainer, run)
        trainer.save_model()
    return _result("done", keeper, trainer, run, saved=(str(run.output),))


def _evaluated(trainer: Any) -> bool:
    """The weights as they are now were evaluated, in this attempt or in one before."""
    return any("eval_loss" in log and log["step"] == trainer.state.global_step for log in trainer.state.log_history)


def _logged(trainer: Any, name: str) -> list[float]:
    """All values of a loss so far, those of the attempts before included."""
    return [float(log[name]) for log in trainer.state.log_history if name in log] if trainer is not None else []


def _resumable(run: Run, keeper: Keeper) -> Checkpoint | None:
    """The last good checkpoint, the others cleared away; states of another optimizer are put aside."""
    run.drop_broken()
    last = run.last_good()
    if last and last.optimizer != keeper.optimizer_name:
        for states in (last.path / name for name in STATES):
            if states.exists():
                states.replace(states.with_stem(f"{states.stem}.{last.optimizer}"))
    return last


@contextlib.contextmanager
def _quiet_progress(trainer: Any) -> Any:
    """No bars and dictionaries of the libraries' own on stdout."""
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    for kind in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(kind)
    yield


def exhausted(error: BaseException | None) -> bool:
    """The error, or one that it was raised from, says that memory ran out."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or (
            isinstance(error, RuntimeError) and any(word in str(error) for word in EXHAUSTED)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def forget(error: BaseException | None) -> None:
    """Let go of what the frames of an error hold: activations above all."""
    while error is not None:
        if error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    gc.collect()


def _shortage(error: Exception, keeper: Keeper, meter: Meter, trainer: Any, run: Run) -> Shortage:
    text = str(error)
    held = _size(_HELD, text) or meter.held  # by now some of it was let go
    frames = traceback.extract_tb(error.__traceback__)
    innermost = next(
        (f for f in reversed(frames) if "/torch/" not in f.filename and "/memfit/" not in f.filename), None
    )
    return Shortage(
        stage=keeper.stage, step=trainer.state.global_step if trainer is not None else 0, text=text,
        asked=_size(_ASKED, text), held=held, began=keeper.held, limit=meter.limit, trace="".join(traceback.format_exception(error))[-TRACE:],
        frame=f"{innermost.filename}:{innermost.lineno}" if innermost else "", snapshot=_snapshot(run),
    )  # fmt: skip


def _size(pattern: re.Pattern[str], text: str) -> int:
    found = pattern.search(text)
    return parse_size(found.group(1).replace("bytes", "B")) if found else 0


def _snapshot(run: Run) -> str:
    """The allocator's own record, where there is an allocator."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return ""
    folder = run.path / "falls"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{len(run.falls) + 1}.pickle"
    with contextlib.suppress(Exception):  # the record of a failure must not become one
        torch.cuda.memory._dump_snapshot(str(path))
        return str(path)
    return ""


def _save_what_is_good(run: Run, trainer: Any, keeper: Keeper) -> None:
    """Weights and states of the last whole step, where the failure did not touch them and one process has all of them.

    DeepSpeed takes its step within backward, so nobody knows whether it had begun.
    """
    step, last = trainer.state.global_step, run.last_good()
    keeper.ledger.drop()
    untouched = keeper.stage in BETWEEN_STEPS and not trainer.is_deepspeed_enabled
    if not untouched or trainer.args.world_size > 1 or step <= (last.step if last else 0):
        return
    failed_in = keeper.stage
    keeper.rewind_randomness()
    trainer.model.zero_grad(set_to_none=True)
    gc.collect()
    try:
        trainer._save_checkpoint(trainer.model, None)
        keeper.complete(run.output / f"checkpoint-{step}", step)
    except Exception as error:  # the older checkpoint stands
        if not exhausted(error) and not isinstance(error, OSError):
            raise
        forget(error)
    keeper.stage = failed_in


def _result(status: Any, keeper: Keeper, trainer: Any, run: Run, **more: Any) -> Outcome:
    last = run.last_good()
    losses, evaluated = _logged(trainer, "loss"), _logged(trainer, "eval_loss")
    return Outcome(
        status=status, step=last.step if last else 0, steps=max(trainer.state.max_steps, 0) if trainer is not None else 0,
        samples=last.samples if last else 0, loss=losses[-1] if losses else None,
        first_loss=losses[0] if losses else None, eval_loss=evaluated[-1] if evaluated else None, **more,
    )  # fmt: skip


def rank_file(path: Path) -> Path:
    """samples.jsonl; of the other processes of a run samples.1.jsonl and so on."""
    rank = os.environ.get("RANK", "0")
    return path if rank == "0" else path.with_suffix(f".{rank}{path.suffix}")


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
