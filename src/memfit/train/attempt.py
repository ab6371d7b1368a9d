"""Run one attempt: load the exported train.py and train until it is done, stopped, or out of memory."""

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
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from memfit.errors import BadInput
from memfit.frameworks.process_layout import backend
from memfit.train.checkpoints import WEIGHTS, Checkpoint, flushed, renamed
from memfit.train.folder import SAMPLES_FILE, Run
from memfit.train.memory_limit import CountingMeter, MemoryMeter, metered
from memfit.train.oom_recovery import eval_batch
from memfit.train.outcome import Outcome, Settings, Shortage
from memfit.train.run_callback import Ended, RunCallback, Stopped, Tell, closed, watcher
from memfit.train.sample_counts import SampleLedger, counted
from memfit.units import human, parse_size

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "deepspeed")
TRACE = 20_000  # characters of a traceback that are kept: its end is what failed
_NAMED = re.compile(r"'[^']*'|\d+")
WARNED = 600  # characters of a library's warning that are shown
LOGGED = 0.02  # share of all steps between two logged losses; short runs log every step
BETWEEN_STEPS = ("forward and backward", "eval")  # stages that change neither weights nor states
STATES = ("optimizer.pt", "optimizer.bin")  # a checkpoint's files of optimizer states; the second is FSDP's
EXHAUSTED = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?(?:[KMGT]i)?(?:B|bytes))")
_HELD = re.compile(r"Of the allocated memory ([\d.]+ ?(?:[KMGT]i)?(?:B|bytes)) is allocated")


def attempt(
    run: Run, tell: Tell, keep: Callable[[RunCallback], None] = lambda callback: None,
    before: Callable[[CountingMeter, int], None] | None = None,
) -> Outcome:  # fmt: skip
    """Train from the last whole checkpoint on. Running out of memory is an Outcome; other errors are raised.

    `keep` receives the RunCallback, which can stop the attempt. `before` is called before every allocation on a CPU.
    """
    settings, started = run.settings, time.monotonic()
    with metered(settings.cpu, settings.memory_limit, before) as meter, _as_on_cards(run), TrlWarnings(tell):
        ledger = SampleLedger(rank_file(run.path / SAMPLES_FILE))
        callback = RunCallback(meter, ledger, tell, run.plan.recipe.optimizer, settings)
        callback.watcher = watcher(run, tell)
        keep(callback)
        try:
            outcome = _attempt(run, settings, callback, meter)
        finally:
            peaks = closed(callback.watcher)
        outcome = replace(
            outcome, peaks={k: v.allocated for k, v in peaks.items()} or dict(meter.peaks),
            reserved=max((v.reserved for v in peaks.values()), default=0), seconds=time.monotonic() - started,
            host=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, versions=_versions(),
        )  # fmt: skip
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return outcome


class TrlWarnings(logging.Handler):
    """Reports each of TRL's warnings once, as they concern the data and what is learned from it.

    What differs in quotes or in numbers is one warning: some name the token of each sample.
    """

    def __init__(self, tell: Tell) -> None:
        super().__init__(logging.WARNING)
        self.tell, self.seen = tell, set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        kind = _NAMED.sub("", text)
        if kind not in self.seen:
            self.seen.add(kind)
            self.tell({"event": "warning", "text": text[:WARNED]})

    def __enter__(self) -> None:
        logging.getLogger("trl").addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("trl").removeHandler(self)


def _attempt(run: Run, settings: Settings, callback: RunCallback, meter: MemoryMeter) -> Outcome:
    trainer = None
    try:
        callback.reading = os.environ.get("WORLD_SIZE", "1") == "1"
        trainer = load(run, settings)
        callback.reading = False
        if run.last_good() is None and not run.falls:
            _report_cut(trainer, run, callback.tell)
        callback.attach(trainer)
        return _trained(run, trainer, callback)
    except Stopped:
        callback.reading = False
        return _result("stopped", callback, None, run)
    except Exception as error:
        if not exhausted(error):
            raise
        shortage = _shortage(error, callback, meter, trainer, run)
        forget(error)
        if trainer is not None:
            _save_last_step(run, trainer, callback)
        return _result("oom", callback, trainer, run, shortage=shortage)


def _report_cut(trainer: Any, run: Run, tell: Tell) -> None:
    """Report how many samples are cut or left out, which the plan may have only estimated.

    TRL leaves out samples whose completion begins beyond the sequence length. Raises BadInput if none is left.
    """
    recipe, rows = run.plan.recipe, trainer.train_dataset
    if recipe.padding == "packing":  # its rows hold several samples
        return
    left = trainer.rows_read - len(rows)
    if left and not len(rows):
        raise BadInput(
            f"no sample has any of its completion within {recipe.sequence_length:,} tokens",
            hint="take a longer --sequence-length; labels or masks in the data must leave some tokens to learn",
        )
    if not trainer.is_world_process_zero():
        return
    if left > 0:
        tell({"event": "cut", "text": f"{left:,} of {trainer.rows_read:,} samples have nothing of their completion "
              f"within {recipe.sequence_length:,} tokens, and are left out: --sequence-length"})  # fmt: skip
    if "input_ids" not in (rows.column_names or ()):
        return
    full = sum(len(tokens) >= recipe.sequence_length for tokens in rows["input_ids"])
    if full:
        tell({"event": "cut", "text": f"{full:,} of {len(rows):,} samples have {recipe.sequence_length:,} tokens or "
              "had more, and are cut there: --sequence-length"})  # fmt: skip


def _as_on_cards(run: Run) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the recipe's backend runs on a CPU as it does on GPUs."""
    return _fsdp_on_cpu() if run.settings.cpu and backend(run.plan.recipe) == "fsdp" else contextlib.nullcontext()


def load(run: Run, settings: Settings) -> Any:
    """Return the trainer that train.py builds, with its output folder, device, logging and evaluation batch set."""
    script: Any = _module(run.path / "train.py")
    words = ["--output", str(run.output), *(["--cpu"] if settings.cpu else [])]
    read = script.load
    rows: list[int] = []

    def counted_load(data: str) -> Any:
        found = read(data)
        rows.append(len(found))
        return found

    script.load = counted_load
    if hasattr(script, "split"):  # a share of the rows is held out for evaluation
        split = script.split

        def counted_split(samples: Any) -> tuple[Any, Any]:
            parts: tuple[Any, Any] = split(samples)
            rows[0] = len(parts[0])
            return parts

        script.split = counted_split
    trainer = script.build(script.arguments(words))
    trainer.rows_read = rows[0]  # rows of the training data, which is read first, before TRL leaves some out
    trainer.args.disable_tqdm = True
    trainer.args.logging_steps = LOGGED
    trainer.args.per_device_eval_batch_size = eval_batch(run.plan.recipe, settings)
    mend_loading(trainer)
    return trainer


def _module(path: Path) -> ModuleType:
    """Import train.py under a name in sys.modules, as libraries that pickle its functions require."""
    name = f"memfit_run_{abs(hash(str(path)))}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _trained(run: Run, trainer: Any, callback: RunCallback) -> Outcome:
    """Train, evaluate at the end, and save."""
    with trainer.args.main_process_first(local=False):  # one process removes broken checkpoints before the others look
        last = _resumable(run, callback)
    callback.resumed = last
    for printing in (PrinterCallback, ProgressCallback):  # they would print to stdout
        trainer.remove_callback(printing)
    with counted(trainer, callback.ledger):
        if last:
            callback.enter("resume")
        with contextlib.suppress(Ended):
            trainer.train(resume_from_checkpoint=str(last.path) if last else None)
        if trainer.state.global_step < trainer.state.max_steps:
            return _result("stopped", callback, trainer, run)
        if trainer.eval_dataset is not None and not _evaluated(trainer):
            trainer.evaluate()
        if callback.due:  # a stop was requested during the evaluation
            return _result("stopped", callback, trainer, run)
        trainer.save_model()
    weights = (p for kind in WEIGHTS for p in run.output.glob(kind)) if trainer.args.should_save else ()
    return _result("done", callback, trainer, run, saved=(str(run.output),), files=flushed(run.output, weights))


def _evaluated(trainer: Any) -> bool:
    """Return whether the present weights were evaluated in this attempt or an earlier one."""
    return any("eval_loss" in log and log["step"] == trainer.state.global_step for log in trainer.state.log_history)


def _logged(trainer: Any, name: str) -> list[float]:
    """Return all values of a loss so far, earlier attempts included."""
    return [float(log[name]) for log in trainer.state.log_history if name in log] if trainer is not None else []


def _resumable(run: Run, callback: RunCallback) -> Checkpoint | None:
    """Return the newest checkpoint that is as it was written, after renaming states of another optimizer in it.

    Unfinished ones are removed, damaged ones are set aside and named.
    """
    run.drop_broken()
    first = callback.trainer.is_world_process_zero()  # the others find what it left
    last, passed = run.verified() if first else (run.last_good(), [])
    for line in passed:
        callback.tell({"event": "warning", "text": line})
    if last:
        what = f"its {len(last.files)} files, {human(last.size)}, are as written"
        callback.tell({"event": "checked", "text": f"going on from {last.path.name}: {what}"})
    elif passed:
        callback.tell({"event": "warning", "text": "no checkpoint is left to go on from: training begins again"})
    if last and last.optimizer != callback.optimizer_name:
        for states in (last.path / name for name in STATES):
            if states.exists():
                states.replace(renamed(states, last.optimizer))
    return last


def exhausted(error: BaseException | None) -> bool:
    """Return whether the error, or one that it was raised from, is an out-of-memory error."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or (
            isinstance(error, RuntimeError) and any(word in str(error) for word in EXHAUSTED)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def forget(error: BaseException | None) -> None:
    """Free the tensors, mostly activations, that the frames of an error keep alive."""
    while error is not None:
        if error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    gc.collect()


def _shortage(error: Exception, callback: RunCallback, meter: MemoryMeter, trainer: Any, run: Run) -> Shortage:
    text = str(error)
    held = _size(_HELD, text) or meter.held  # the meter is second choice, as some memory was freed since
    frames = traceback.extract_tb(error.__traceback__)
    innermost = next(
        (f for f in reversed(frames) if "/torch/" not in f.filename and "/memfit/" not in f.filename), None
    )
    return Shortage(
        stage=callback.stage, step=trainer.state.global_step if trainer is not None else 0, text=text,
        asked=_size(_ASKED, text), held=held, began=callback.held, limit=meter.limit,
        trace="".join(traceback.format_exception(error))[-TRACE:],
        frame=f"{innermost.filename}:{innermost.lineno}" if innermost else "", snapshot=_snapshot(run),
    )  # fmt: skip


def _size(pattern: re.Pattern[str], text: str) -> int:
    found = pattern.search(text)
    return parse_size(found.group(1).replace("bytes", "B")) if found else 0


def _snapshot(run: Run) -> str:
    """Write the CUDA allocator's snapshot and return its path, "" without CUDA or if that fails."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return ""
    folder = run.path / "falls"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{len(run.falls) + 1}.pickle"
    with contextlib.suppress(Exception):  # the original error matters more
        torch.cuda.memory._dump_snapshot(str(path))
        return str(path)
    return ""


def _save_last_step(run: Run, trainer: Any, callback: RunCallback) -> None:
    """Save weights and states of the last whole step, if the failure did not change them and one process holds all.

    DeepSpeed takes its step within backward, so it is unknown whether the step had begun.
    """
    step, last = trainer.state.global_step, run.last_good()
    callback.ledger.drop()
    untouched = callback.stage in BETWEEN_STEPS and not trainer.is_deepspeed_enabled
    if not untouched or trainer.args.world_size > 1 or step <= (last.step if last else 0):
        return
    failed_in = callback.stage
    callback.rewind_randomness()
    trainer.model.zero_grad(set_to_none=True)
    gc.collect()
    try:
        trainer._save_checkpoint(trainer.model, None)
        callback.complete(run.output / f"checkpoint-{step}", step)
    except Exception as error:  # the older checkpoint remains
        if not exhausted(error) and not isinstance(error, OSError):
            raise
        forget(error)
    callback.stage = failed_in


def _result(status: Any, callback: RunCallback, trainer: Any, run: Run, **more: Any) -> Outcome:
    last = run.last_good()
    losses, evaluated = _logged(trainer, "loss"), _logged(trainer, "eval_loss")
    return Outcome(
        status=status, step=last.step if last else 0,
        steps=max(trainer.state.max_steps, 0) if trainer is not None else 0, samples=last.samples if last else 0,
        loss=losses[-1] if losses else None,
        first_loss=losses[0] if losses else None, eval_loss=evaluated[-1] if evaluated else None, **more,
    )  # fmt: skip


def rank_file(path: Path) -> Path:
    """Return the file of this process: samples.jsonl for rank 0, samples.1.jsonl for rank 1, and so on."""
    rank = os.environ.get("RANK", "0")
    return path if rank == "0" else path.with_suffix(f".{rank}{path.suffix}")


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


# ---- corrections of library behaviour


@contextlib.contextmanager
def _fsdp_on_cpu() -> Iterator[None]:
    """Make accelerate use FSDP on a CPU during the block.

    AcceleratorState (accelerate 1.15, state.py) switches to FSDP only for eight distributed types, and MULTI_CPU is not
    one of them. Only the type is changed, after the process group over gloo exists: wrapping, sharding, gathering,
    saving and loading check for the type FSDP and use the device as it is.
    """
    from accelerate.state import DistributedType, PartialState

    original = PartialState.__init__

    def init(state: Any, *args: Any, **named: Any) -> None:
        original(state, *args, **named)
        if state.distributed_type is DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = init
    try:
        yield
    finally:
        PartialState.__init__ = original


def mend_loading(trainer: Any) -> None:
    """Make `trainer` resume with all the weights that it saved, or raise with the names of those missing.

    transformers 5.23 reads a full checkpoint by the model's names, but `save_pretrained` writes experts under other
    names: experts and routers would keep the base's weights (its issue 48805). PEFT reads 16-bit adapters as float32.
    """
    load = trainer._load_from_checkpoint

    def loaded(checkpoint: str, model: Any = None) -> None:
        target = trainer.model if model is None else model
        formats = {name: weight.dtype for name, weight in target.named_parameters()}
        sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        by_name = hasattr(target, "from_pretrained") and not sharded  # sentence-transformers reads its own folders
        saved = _saved(Path(checkpoint)) if by_name else set()
        if saved and not {name for name, _ in target.named_parameters()} <= saved:
            _read_as_saved(target, checkpoint)
        else:
            load(checkpoint, *([] if model is None else [model]))
        for name, weight in target.named_parameters():
            if weight.dtype != formats.get(name, weight.dtype):
                weight.data = weight.data.to(formats[name])

    trainer._load_from_checkpoint = loaded


def _saved(checkpoint: Path) -> set[str]:
    """Return the names of a full model's weights in all its files; empty for a checkpoint of adapters."""
    from safetensors import safe_open

    names = set[str]()
    for path in checkpoint.glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            names.update(file.keys())
    return names


def _read_as_saved(model: Any, checkpoint: str) -> None:
    """Load through from_pretrained, which reverses save_pretrained. Raises BadInput if weights are still missing."""
    saved, loading = type(model).from_pretrained(checkpoint, dtype="auto", device_map=None, output_loading_info=True)
    result = model.load_state_dict(saved.state_dict(), strict=False)
    missing = sorted({*loading["missing_keys"], *result.missing_keys, *result.unexpected_keys})
    if missing:
        shown = ", ".join(missing[:3])
        raise BadInput(
            f"{checkpoint} does not hold the weights of this model ({len(missing)} differ: {shown})",
            hint="its bytes are as they were written: start anew with --out DIR",
        )
