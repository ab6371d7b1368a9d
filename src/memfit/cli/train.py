"""memfit train: a recipe run for real, which falls down a rung and resumes where memory runs out."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.cli import terminal
from memfit.cli.flags import AUTO, BATCH, CARD, COMMON, DATA, Argument, Flag, takes
from memfit.errors import EXIT_MISFIT, BadInput, Refused

if TYPE_CHECKING:
    from memfit.plan import Plan
    from memfit.run.folder import Run
    from memfit.run.nouns import Outcome, Settings

EXAMPLES = (
    "memfit train",
    "memfit train run/recipe.toml --out run-1 --merge",
    "memfit train Qwen/Qwen2.5-0.5B --gpu local --data train.jsonl",
    "memfit train --out run-1 --resume",
)
WHAT = Argument(
    "what", "a recipe.toml or a model as for 'memfit plan'; without one a small embedded model", "RECIPE|MODEL"
)
RUN: tuple[Flag, ...] = (
    Flag("out", str, "The run's folder. Default: memfit-run.", "DIR"),
    Flag("resume", bool, "Continue the run in that folder.", default=False),
    Flag("force", bool, "Start again in a folder that holds a run.", default=False),
    Flag("cpu", bool, "Train on the CPU.", default=False),
    Flag("eval_data", str, "A file to evaluate on, at every checkpoint.", "FILE"),
    Flag("epochs", float, "Passes over the data. Default: 1.", "N"),
    Flag("learning_rate", float, "Default: 2e-5, and 2e-4 for adapters.", "RATE"),
    Flag("max_steps", int, "Stop after so many optimizer steps.", "N"),
    Flag("save_steps", float, "Steps between checkpoints; below 1 a share of all. Default: 0.1.", "N"),
    Flag("falls", int, "How often memory may run out before the run stops. Default: 5.", "N"),
    Flag("memory_limit", str, "Use only so much of the device: to try what happens.", "4GiB"),
    Flag("merge", bool, "Write the adapters merged into their base as well.", default=False),
    Flag("no_rehearsal", bool, "Do not try the worst batch before the first step.", default=False),
)
EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
EXIT_OF = {"done": 0, "stopped": EXIT_INTERRUPTED, "oom": EXIT_MISFIT, "failed": EXIT_FAILED}


@takes(*CARD, BATCH, *DATA, *RUN, *AUTO, *COMMON, argument=WHAT)
def run(what: str | None = None, **flags: Any) -> int:
    """Fine-tune for real, and survive running out of memory.

    Runs the train.py that 'memfit export' writes. Where memory runs out the plan is made again with what was missing, the
    next rung down is taken with the same effective batch and learning rates, and the run resumes from its last good step.
    """
    from memfit.run.children import in_child
    from memfit.run.supervise import supervise

    need_libraries()
    folder = Path(flags["out"] or "memfit-run").resolve()
    found = _resumed(folder, what, flags) if flags["resume"] else _started(folder, what, flags)
    shown = Shown(found, flags["json"])
    outcome = supervise(found, in_child, shown.tell)
    if outcome.status == "done":
        finish(found, outcome)
    shown.end(outcome)
    return EXIT_OF[outcome.status]


def need_libraries() -> None:
    """Raises BadInput naming what to install; imports nothing."""
    from importlib.util import find_spec

    missing = [name for name in ("torch", "transformers", "trl", "accelerate", "datasets") if find_spec(name) is None]
    if missing:
        raise BadInput(f"training needs {', '.join(missing)}", hint="pip install 'memfit[train]'")


# ---- what is run


def _resumed(folder: Path, what: str | None, flags: dict[str, Any]) -> Run:
    """The run in the folder; falls and the limit may be said anew, the rest is as it was."""
    from dataclasses import replace

    from memfit.run.folder import opened
    from memfit.units import parse_size

    if what:
        raise BadInput("--resume continues what is in the folder", hint=f"memfit train --out {folder.name} --resume")
    found = opened(folder)
    settings = found.settings
    if flags["falls"] is not None:  # counted from here on
        settings = replace(settings, falls=len(found.falls) + flags["falls"])
    if flags["memory_limit"]:
        settings = replace(settings, memory_limit=parse_size(flags["memory_limit"]))
    found.keep(settings, found.falls)
    return found


def _started(folder: Path, what: str | None, flags: dict[str, Any]) -> Run:
    """A new run: planned, judged, written."""
    from memfit.run.folder import create, prepare

    settings = _settings(what, flags)
    if what is None:
        prepare(folder, flags["force"])
        what = _embedded(folder, flags)
        plan, notes = _planned(what, flags, settings)
    else:
        plan, notes = _planned(what, flags, settings)
        _check(plan, flags)
        prepare(folder, flags["force"])
    if settings.cpu and (plan.recipe.shard != "none" or plan.recipe.offload != "none"):
        raise BadInput("on a CPU accelerate neither shards nor offloads", hint="--shard none --offload none")
    for line in notes:
        terminal.note(line)
    return create(folder, plan, settings)


def _settings(what: str | None, flags: dict[str, Any]) -> Settings:
    from memfit.run import embedded
    from memfit.run.nouns import FALLS, Settings
    from memfit.units import parse_size

    cpu = flags["cpu"] or (what is None and not has_gpu())
    if not cpu and not has_gpu():
        raise BadInput(
            "there is no GPU in this machine", hint="--cpu trains on the CPU; memfit launch writes a job for others"
        )
    own = what is None
    said = {name: flags[name] for name in ("max_steps", "save_steps") if flags[name] is not None}
    return Settings(
        cpu=cpu, memory_limit=parse_size(flags["memory_limit"]) if flags["memory_limit"] else 0,
        eval_data=str(Path(flags["eval_data"]).resolve()) if flags["eval_data"] else "",
        learning_rate=flags["learning_rate"] or (embedded.LEARNING_RATE if own else 0.0),
        epochs=flags["epochs"] or (embedded.EPOCHS if own else 0.0),
        falls=FALLS if flags["falls"] is None else flags["falls"], rehearse=not flags["no_rehearsal"],
        merge=flags["merge"], **said,
    )  # fmt: skip


def has_gpu() -> bool:
    """This machine has an NVIDIA card that answers."""
    from memfit.cards import local_gpu

    try:
        local_gpu()
    except BadInput:
        return False
    return True


def _embedded(folder: Path, flags: dict[str, Any]) -> str:
    """Make the embedded model and its data in the run's folder, in a process of its own; returns the model's folder."""
    from memfit.run import embedded

    assets = folder / "assets"
    done = subprocess.run(
        [sys.executable, "-m", "memfit.run.embedded", str(assets)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BadInput(f"the embedded model could not be made: {done.stderr.strip().splitlines()[-1:]}", hint="--debug")
    flags["data"] = flags["data"] or str(assets / "prose.txt")
    flags["tokenizer"] = flags["tokenizer"] or "bytes"
    for name, value in (("sequence_length", embedded.SEQUENCE), ("effective_batch", embedded.BATCH)):
        flags[name] = flags[name] or value
    return str(assets / embedded.NAME)


def _planned(what: str, flags: dict[str, Any], settings: Settings) -> tuple[Plan, list[str]]:
    """The plan of a recipe.toml as it stands, or of a model by the planner; with what was assumed."""
    from memfit.cli.asked import asked, job_of, with_data
    from memfit.planner import make_plan

    if what.endswith(".toml"):
        return _of_file(Path(what), flags, settings), []
    if settings.cpu:
        if not (flags["gpu"] or flags["gpu_memory"]):
            flags["gpu_memory"] = str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        flags["precision"] = flags["precision"] or "fp32"  # a CPU is slow at everything else
    if not flags["data"]:
        raise BadInput("no data to train on", hint="--data train.jsonl")
    found = with_data(asked(what, flags), flags)
    job, base = job_of(found, flags)
    with terminal.progress() as tell:
        return make_plan(job, base=base, progress=tell), found.notes


def _of_file(path: Path, flags: dict[str, Any], settings: Settings) -> Plan:
    from dataclasses import replace

    from memfit import recipe_file
    from memfit.cards import custom_gpu, local_gpu, parse_gpu
    from memfit.export.again import plan_of
    from memfit.units import parse_size

    file = recipe_file.read(path)
    name = flags["gpu"] or (file.gpu if file.gpu != "custom" else "")
    card = (local_gpu() if name == "local" else parse_gpu(name)[0]) if name else None
    if flags["gpu_memory"]:
        card = custom_gpu(parse_size(flags["gpu_memory"]), card)
    if card is None:
        card = custom_gpu(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) if settings.cpu else local_gpu()
    if flags["data"]:
        file = replace(file, data=str(Path(flags["data"]).resolve()))
    if not file.data:
        raise BadInput(f"{path} names no data", hint="--data train.jsonl")
    return plan_of(file, card)


def _check(plan: Plan, flags: dict[str, Any]) -> None:
    if plan.judgement.verdict == "misfit" and not flags["force"]:
        raise Refused(
            f"the closest recipe does not fit the {plan.job.gpu.name}",
            hint="--force tries it; memfit plan says what would",
        )


# ---- what is shown


class Shown:
    """Progress on stderr as it happens, the report on stdout at the end."""

    def __init__(self, run: Run, json: bool) -> None:
        from memfit.export.text import title

        self.run, self.json, self.last_share = run, json, -1
        plan = run.plan
        r = plan.recipe
        where = "this CPU" if run.settings.cpu else plan.job.gpu.name
        terminal.note(
            f"{Path(plan.job.architecture.name).name} on {where}: {title(r)}, micro-batch {r.micro_batch} x {r.accumulation}, in {run.path}"
        )
        self.begun, self.progress = terminal.progress(), None
        self.bar = self.begun.__enter__()

    def tell(self, event: dict[str, Any]) -> None:
        """One event of the run."""
        kind = event["event"]
        if kind == "begin":
            terminal.note(f"step {event['step']} of {event['steps']}")
        elif kind == "step":
            self.bar(f"step {event['step']}/{event['steps']}", event["step"] / max(event["steps"], 1))
        elif kind == "log" and "loss" in event:
            terminal.note(f"step {event['step']}: loss {event['loss']:.4f}")
        elif kind == "log" and "eval_loss" in event:
            terminal.note(f"step {event['step']}: eval loss {event['eval_loss']:.4f}")
        elif kind == "fall":
            for line in event["cause"]:
                terminal.note(f"out of memory: {line}")
            terminal.note(f"one rung down: {', '.join(event['changed'])}; resumed from step {event['step']}")
        elif kind == "stopping":
            terminal.note("finishing this step and saving (Ctrl-C again to stop at once)")

    def end(self, outcome: Outcome) -> None:
        """The report, and what to type next."""
        self.begun.__exit__(None, None, None)
        resume = shlex.join(["memfit", "train", "--out", str(self.run.path), "--resume"])
        if self.json:
            terminal.show_json(report(self.run, outcome, resume))
        else:
            for line in lines(self.run, outcome):
                print(line)
        if outcome.status in ("stopped", "oom"):
            terminal.note(f"everything up to step {outcome.step} is saved; continue with: {resume}")
        if outcome.status == "failed":
            terminal.error(outcome.error, f"see {self.run.path / 'log.txt'}; continue with: {resume}")


def finish(run: Run, outcome: Outcome) -> None:
    """The last things a run that is done asks for: the merged model, and the model card."""
    from memfit.run.card import write_card
    from memfit.run.merge import merged

    if run.settings.merge and run.plan.recipe.method != "full":
        terminal.note("merging the adapters into their base")
        terminal.note(f"wrote {merged(run)}")
    write_card(run, outcome)


def lines(run: Run, outcome: Outcome) -> list[str]:
    """The report in words."""
    from memfit.units import human

    found = [f"{outcome.status}: step {outcome.step} of {outcome.steps}, {outcome.samples:,} samples"]
    if outcome.error:
        found.append(f"why: {outcome.error}")
    if outcome.loss is not None:
        found.append(f"loss: {outcome.first_loss:.4f} -> {outcome.loss:.4f}")
    if outcome.eval_loss is not None:
        found.append(f"eval loss: {outcome.eval_loss:.4f}")
    found += [
        f"fall: {', '.join(fall.changed)} at step {fall.resumed_at} ({fall.shortage.stage})" for fall in run.falls
    ]
    if outcome.peaks:
        found.append("peaks: " + ", ".join(f"{stage} {human(size)}" for stage, size in outcome.peaks.items()))
    return found + [f"model: {path}" for path in outcome.saved]


def report(run: Run, outcome: Outcome, resume: str) -> dict[str, Any]:
    """The report as data."""
    from dataclasses import asdict

    return {
        "schema": "memfit.train/1", "folder": str(run.path), **asdict(outcome),
        "falls": [asdict(fall) for fall in run.falls], "resume": resume if outcome.status != "done" else "",
    }  # fmt: skip
