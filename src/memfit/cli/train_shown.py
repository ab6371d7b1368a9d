"""The screen of memfit train: progress on stderr, a live view of memory on a terminal, and a report at the end."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import convert

from memfit.cli import terminal
from memfit.nouns.sample import Alarm, Leak, Status
from memfit.report.watching import alarm_line, leak_lines, live_view
from memfit.report.words import DOT, clock
from memfit.tables.adapters import method_title
from memfit.train.sample_counts import recorded
from memfit.units import human, several

if TYPE_CHECKING:
    from memfit.train.folder import Run
    from memfit.train.outcome import Outcome


class Shown:
    """Shows a run, as a context manager around it. `interrupted`: Ctrl-C stopped the run."""

    def __init__(self, run: Run, json: bool, now: Callable[[], float] = time.monotonic) -> None:
        self.run, self.json, self.interrupted, self.now = run, json, False, now
        self.line = ""  # progress, shown above the view
        self.losses: dict[str, float] = {}  # the last of each kind
        self.steps = 0  # of the whole run
        self.first: tuple[int, float] | None = None  # the first step that ended in this attempt, and when
        self.view: Any = None  # memory
        self.live: Any = None
        plan = run.plan
        r = plan.recipe
        where = "this CPU" if run.settings.cpu else plan.job.gpu.name
        processes = f" on {r.num_gpus} processes" if r.num_gpus > 1 else ""
        batch = f"micro-batch {r.micro_batch} x {r.accumulation}{processes}"
        terminal.note(f"{Path(plan.job.architecture.name).name} on {where}: {method_title(r)}, {batch}, in {run.path}")

    def __enter__(self) -> Shown:
        if sys.stderr.isatty():
            from rich.live import Live

            self.live = Live(console=terminal.console(sys.stderr), auto_refresh=False, transient=True)
            self.live.start()
            self._draw("loading the libraries and the model")
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def tell(self, event: dict[str, Any]) -> None:
        """Show one event of the run."""
        SHOWS.get(event["event"], lambda shown, event: None)(self, event)

    def _draw(self, line: str = "", view: Any = None) -> None:
        """Draw one line of progress, and memory below it."""
        if self.live is None:
            return
        from rich.console import Group
        from rich.text import Text

        self.line, self.view = line or self.line, view or self.view
        self.live.update(Group(Text(self.line), *([self.view] if self.view else [])), refresh=True)

    def _begin(self, event: dict[str, Any]) -> None:
        self.steps, self.first = event["steps"], None
        terminal.note(f"training from step {event['step']:,} of {self.steps:,}")
        self._draw(f"step {event['step']:,} of {self.steps:,}")

    def _rehearsed(self, event: dict[str, Any]) -> None:
        terminal.note(f"rehearsed a step on the longest samples ({event['tokens']:,} tokens): it fits")
        planned = self.run.plan.job.longest_sample or 0
        if 2 * event["tokens"] < planned:  # a model's class may build its tokenizer otherwise than its file says
            terminal.note(
                f"the plan counted {planned:,} tokens in the longest sample: the tokenizer that transformers loads "
                "makes fewer of it, so look at a batch before you train on"
            )

    def _step(self, event: dict[str, Any]) -> None:
        self.first = self.first or (event["step"], self.now())
        self._draw(self._progress(event["step"]))

    def _progress(self, step: int) -> str:
        """Return the line above the view: 'step 12 of 125 · loss 1.2345 · 3.1 s a step, 5.8 min left'.

        The first step of an attempt is left out of the pace, as it is slower than the others.
        """
        parts = [f"step {step:,} of {self.steps:,}"]
        parts += [f"{name.replace('_', ' ')} {value:.4f}" for name, value in self.losses.items()]
        if self.first and step > self.first[0]:
            pace = (self.now() - self.first[1]) / (step - self.first[0])
            parts.append(f"{clock(pace)} a step, {clock(pace * (self.steps - step))} left")
        return DOT.join(parts)

    def _log(self, event: dict[str, Any]) -> None:
        for name in ("loss", "eval_loss"):
            if name in event:
                self.losses[name] = event[name]
                terminal.note(f"step {event['step']:,}: {name.replace('_', ' ')} {event[name]:.4f}")
        self._draw(self._progress(event["step"]))

    def _memory(self, event: dict[str, Any]) -> None:
        if self.live is None:
            return
        self._draw(view=live_view(convert(event["memory"], Status)))

    def _alarm(self, event: dict[str, Any]) -> None:
        terminal.note(alarm_line(convert(event["alarm"], Alarm)))

    def _leak(self, event: dict[str, Any]) -> None:
        terminal.notes(leak_lines(convert(event["leak"], Leak)))

    def _fall(self, event: dict[str, Any]) -> None:
        terminal.notes(f"out of memory: {line}" for line in event["cause"])
        terminal.note(f"falling one rung: {', '.join(event['changed'])}; resuming from step {event['step']}")

    def _cause(self, event: dict[str, Any]) -> None:
        terminal.notes(f"out of memory: {line}" for line in event["cause"])
        terminal.note(f"its traceback and files are in {event['kept']}")

    def _cut(self, event: dict[str, Any]) -> None:
        terminal.note(event["text"])

    def _warning(self, event: dict[str, Any]) -> None:
        terminal.note(f"warning: {event['text']}")

    def _stopping(self, event: dict[str, Any]) -> None:
        self.interrupted = event["signal"] == signal.SIGINT
        more = " (Ctrl-C again to stop at once)" if self.interrupted else ""
        terminal.note(f"{signal.Signals(event['signal']).name}: finishing this step and saving{more}")

    @property
    def resume(self) -> str:
        """Return the command that continues the run."""
        return shlex.join(["memfit", "train", "--out", str(self.run.path), "--resume"])

    def broken_off(self) -> None:
        """Report that a second Ctrl-C ended the run at once."""
        last = self.run.last_good()
        terminal.note(f"ended at once; {_kept(last.step if last else 0)}; continue with: {self.resume}")

    def full(self, error: OSError) -> None:
        """Report that the disk of the run's folder is full."""
        last = self.run.last_good()
        kept = _kept(last.step if last else 0)
        terminal.error(
            f"{self.run.path} cannot be written: {error.strerror}", f"{kept}; make room, then continue: {self.resume}"
        )

    def end(self, outcome: Outcome) -> None:
        """Show the report, and what to type next."""
        if self.json:
            terminal.show_json(report(self.run, outcome, self.resume))
        else:
            for line in lines(self.run, outcome):
                print(line)
        if outcome.status in ("stopped", "oom"):
            terminal.note(f"{_kept(outcome.step)}; continue with: {self.resume}")
        if outcome.status == "failed":
            terminal.error(outcome.error, f"see {self.run.path / 'log.txt'}; continue with: {self.resume}")


def _kept(step: int) -> str:
    return f"everything up to step {step} is saved" if step else "no step is saved yet"


SHOWS = {
    "begin": Shown._begin, "rehearsed": Shown._rehearsed, "step": Shown._step, "log": Shown._log,
    "memory": Shown._memory,
    "alarm": Shown._alarm, "leak": Shown._leak, "fall": Shown._fall, "cause": Shown._cause,
    "cut": Shown._cut, "checked": Shown._cut,
    "warning": Shown._warning, "stopping": Shown._stopping,
}  # fmt: skip


def lines(run: Run, outcome: Outcome) -> list[str]:
    """Return the report as lines of text."""
    of = f" of {outcome.steps}" if outcome.steps else ""
    reached = f"step {outcome.step}{of}, {several(outcome.samples, 'sample')}"
    found = [f"{outcome.status}: {reached if outcome.step or outcome.steps else 'before a step was saved'}"]
    there = recorded(run.path, outcome.step)
    if there != outcome.samples:
        found.append(
            f"record: samples.jsonl lists {there:,} of {several(outcome.samples, 'sample')}, the others are missing"
        )
    if outcome.error and outcome.status != "failed":  # a failure is shown as an error on stderr
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
    """Return the report as data."""
    return {
        "schema": "memfit.train/1", "folder": str(run.path), **asdict(outcome),
        "recorded": recorded(run.path, outcome.step),
        "falls": [asdict(fall) for fall in run.falls], "resume": resume if outcome.status != "done" else "",
    }  # fmt: skip
