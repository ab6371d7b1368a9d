"""Run attempts, changing the recipe where memory ran out, until the run is done or nothing is left to change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from memfit.errors import BadInput
from memfit.explain import explain, read_text
from memfit.nouns.finding import CAUSES, Cause
from memfit.nouns.plan import Plan
from memfit.train.folder import Run, evidence, fallen
from memfit.train.oom_recovery import NextAttempt, changes, lower
from memfit.train.outcome import Event, Fall, Outcome, Shortage, Stage
from memfit.units import KIB, MIB, human, several

Start = Callable[[Run, Callable[[Event], None]], Outcome]
# causes that a stage excludes: a rehearsal comes before the steps, and its batch is the longest on purpose; train.py
# keeps no logits in evaluation, whatever function of the Trainer the traceback shows
NOT_IN: dict[Stage, tuple[Cause, ...]] = {"rehearsal": ("long-sample", "leak"), "eval": ("eval-logits",)}
MODEL_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.safetensors", "*.bin")
LARGE = 64 * MIB  # bytes; larger files are only sampled, as weights may have hundreds of gigabytes
SAMPLES, SAMPLE = 64, 64 * KIB  # number of samples, spread evenly, and bytes of each


def supervise(run: Run, start: Start, tell: Callable[[Event], None]) -> Outcome:
    """Run attempts until the run is done, is stopped, or may not change again; return the last outcome.

    Raises BadInput before any change if the data or the model have changed since the run began.
    """
    while True:
        if run.last_good():
            check_unchanged(run.plan, run.settings.inputs, lambda text: tell({"event": "warning", "text": text}))
        elif (now := replace(run.settings, inputs=digests(run.plan))) != run.settings:
            run.keep(now, run.falls)  # nothing is trained yet, so the present files count
        outcome = start(run, tell)
        run.write_outcome(outcome)
        if outcome.status != "oom" or outcome.shortage is None:
            return outcome
        if len(run.falls) >= run.settings.falls:
            times = len(run.falls) + 1
            why = f"memory ran out {several(times, 'time')}, the most allowed (--falls)"
            return _stop(run, outcome, outcome.shortage, tell, why)
        below = lower(run, outcome.shortage)
        if below is None:
            why = f"nothing that learns the same needs less memory in {outcome.shortage.stage}"
            return _stop(run, outcome, outcome.shortage, tell, why)
        fall = fall_of(run, outcome.shortage, below)
        fallen(run, fall, below.plan, below.settings)
        tell({"event": "fall", "cause": list(fall.cause), "changed": list(fall.changed), "step": fall.resumed_at})


def _stop(run: Run, outcome: Outcome, shortage: Shortage, tell: Callable[[Event], None], why: str) -> Outcome:
    """Report the cause, keep the evidence, and return the outcome of a run that stops for lack of memory."""
    stopped = replace(outcome, error=why)
    run.write_outcome(stopped)
    kept = evidence(run, shortage)
    tell({"event": "cause", "cause": list(cause(shortage)), "kept": str(kept)})
    return stopped


def fall_of(run: Run, shortage: Shortage, below: NextAttempt) -> Fall:
    """Return the record of a shortage and of the changes for the next attempt."""
    before, after, last = run.plan.recipe, below.plan.recipe, run.last_good()
    return Fall(
        shortage=shortage, cause=cause(shortage), changed=changes(run, below), resumed_at=last.step if last else 0,
        moments_lost=last is not None and before.optimizer != after.optimizer,
    )  # fmt: skip


# ---- why memory ran out


def cause(shortage: Shortage) -> tuple[str, str]:
    """Return two lines on a failed allocation: the request with its place, and what filled the memory."""
    after = f"after {several(shortage.step, 'step')}"
    what = f"{human(shortage.asked)} more" if shortage.asked else "memory"
    first = f"{what} asked for in {shortage.stage}, {after}{f', at {shortage.frame}' if shortage.frame else ''}"
    return first, "; ".join(filter(None, (_levels(shortage), _found(shortage)))) or shortage.text.splitlines()[0][:160]


def _levels(shortage: Shortage) -> str:
    if not shortage.limit:
        return ""
    free = max(shortage.limit - shortage.held, 0)
    return f"tensors held {human(shortage.held)} of {human(shortage.limit)}, {human(free)} were left"


def _found(shortage: Shortage) -> str:
    """Return the cause in the traceback if it is at least likely, else ""."""
    never = NOT_IN.get(shortage.stage, ())
    found = [f for f in explain(read_text(shortage.trace or shortage.text)) if f.cause not in never]
    known = found and found[0].cause != "not-known" and found[0].confidence != "possible"
    return CAUSES[found[0].cause] if known else ""


# ---- the inputs of a run


def digests(plan: Plan) -> dict[str, str]:
    """Return path -> digest of the local files and folders that training reads; the Hub's are left out."""
    job = plan.job
    read = {name: _digest_of_file for name in (job.dataset, job.training.eval_data) if name and Path(name).is_file()}
    model = job.architecture.name
    return {name: of(Path(name)) for name, of in read.items()} | (
        {model: _digest_of_model(Path(model))} if Path(model).is_dir() else {}
    )


def check_unchanged(plan: Plan, began: dict[str, str], tell: Callable[[str], None]) -> None:
    """Raise BadInput if data or model differ from the digests in `began`: the run would skip or repeat samples.

    Changed evaluation data are only reported through `tell`.
    """
    job = plan.job
    for name, before in began.items():
        path = Path(name)
        if not path.exists():
            raise BadInput(f"{name}, which the run reads, is gone", hint="put it back; what was trained is safe")
        if (_digest_of_model if path.is_dir() else _digest_of_file)(path) == before:
            continue
        if name == job.training.eval_data != job.dataset:
            tell(f"{name} has changed since the run began: its evaluation losses cannot be compared with earlier ones")
            continue
        what = "the model" if path.is_dir() else "the data"
        raise BadInput(
            f"{name} has changed since the run began",
            hint=f"put {what} back as it was, or start a new run in another folder: --out DIR",
        )


def _digest_of_file(path: Path) -> str:
    found = blake2b(digest_size=16)
    with path.open("rb") as file:
        while part := file.read(MIB):
            found.update(part)
    return found.hexdigest()


def _digest_of_model(folder: Path) -> str:
    """Return a digest of a model's configuration, tokenizer and weights; other files in the folder do not count."""
    found = blake2b(digest_size=16)
    for path in sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern) if path.is_file()}):
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        if size <= LARGE:
            found.update(path.read_bytes())
            continue
        with path.open("rb") as file:
            for at in range(SAMPLES):
                found.update(_sample(file, (size - SAMPLE) * at // (SAMPLES - 1)))
    return found.hexdigest()


def _sample(file: BinaryIO, offset: int) -> bytes:
    file.seek(offset)
    return file.read(SAMPLE)
