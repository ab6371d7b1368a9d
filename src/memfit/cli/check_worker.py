"""The process in which `memfit check` judges one job: the command line of `memfit trace` or `memfit estimate`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from memfit.allocator.player import alive_at
from memfit.allocator.replay import replay
from memfit.cli import run_words, terminal
from memfit.closed_form.why import Kept
from memfit.documents import codec
from memfit.documents.codec import ReplayDoc
from memfit.documents.tape_file import loads
from memfit.errors import MemfitError, Unsupported
from memfit.footprints.footprint_of_trace import general
from memfit.nouns.alloc_settings import parse_alloc_conf, torch_version
from memfit.nouns.check import CheckJob, JobAnswer, JobFailure, PhaseShares, Share
from memfit.nouns.footprint import KEPT, WORKING, PhasePeak
from memfit.nouns.sample import Leak, LeakHolder
from memfit.nouns.tape import Role, Tape
from memfit.virtual.process.end_with_parent import end_with_parent
from memfit.virtual.process.recorded_inputs import ROOT, recording

CALL = "from memfit.cli.check_worker import main; main()"
SMALLEST = 1 / 2000  # of a peak: smaller shares of a role are one
LARGE = "4TiB"  # a card on which a run that ran out of memory is traced to its end
_BUG = 1
Lines = tuple[str, ...]


def main() -> None:
    """Judge the job in the folder that sys.argv names, and write the answer there."""
    end_with_parent()
    folder = Path(sys.argv[1])
    job, place, records = pickle.loads((folder / "job").read_bytes())
    answer: JobAnswer | JobFailure
    try:
        answer = judged(job, Path(place), Path(records))
    except MemfitError as error:
        answer = JobFailure(error.message, error.hint, error.exit_code)
    except Exception as error:  # a bug in memfit, told with the job
        answer = JobFailure(f"{type(error).__name__}: {error}", "this is a bug in memfit; please report it", _BUG)
    made = folder / "answer.part"
    made.write_bytes(pickle.dumps(answer))
    made.rename(folder / "answer")


def judged(job: CheckJob, folder: Path, records: Path) -> JobAnswer:
    """Judge a job in its folder. records: where its processes note what they read. Raises MemfitError."""
    os.chdir(folder)
    with recording():
        return _of_command(job, records) if job.command else _of_config(job)


def _of_config(job: CheckJob) -> JobAnswer:
    words = [*([job.model] if job.model else []), "--from", job.config, *_card(job)]
    if job.host_memory:
        words += ["--host-memory", job.host_memory]
    if job.workers is not None:
        words += ["--workers", str(job.workers)]
    for key in job.ignore:
        words += ["--ignore", key]
    try:
        found = _document(["estimate", "--why", *words])
    except Unsupported as error:  # what no formula models is traced
        try:
            found = _document(["trace", *words])
        except MemfitError:
            raise error from None
    body, notes = found
    source: Literal["formula", "traced"] = "formula" if body.source == "formula" else "traced"
    phases = tuple(
        PhaseShares(p.phase, p.instant, p.levels, _by_module(p, getattr(body, "tensors", {}).get(p.phase, ())))
        for p in body.phases
    )
    return JobAnswer(
        f"{body.model} by {job.config}", job.gpu, source, body.verdict, body.usable, body.need, body.band, phases,
        notes=notes, not_understood=tuple(one.key for one in body.not_understood), host=body.host,
    )  # fmt: skip


def _by_module(peak: PhasePeak, tensors: Sequence[Kept]) -> tuple[Share, ...]:
    """Return the shares of a phase of an estimate, with the tensors of modules in place of their sum."""
    shares: list[Share] = []
    for line in peak.lines:
        found = [Share(k.role, f"{k.where}, {k.label}", k.total) for k in tensors if k.role == line.role]
        told = line.label in (KEPT, WORKING) and sum(share.bytes for share in found) == line.bytes
        shares += found if told else [Share(line.role, line.label, line.bytes)]
    return _large(shares, peak.levels.reserved)


def _of_command(job: CheckJob, records: Path) -> JobAnswer:
    with tempfile.TemporaryDirectory(prefix="memfit-") as name:
        tape_file = Path(name, "run.tape.gz")
        words = ["trace", *_card(job), "--save-tape", str(tape_file), "--force"]
        if job.steps is not None:
            words += ["--steps", str(job.steps)]
        if job.answer:
            words += ["--answer", ",".join(job.answer)]
        for key in job.ignore:
            words += ["--ignore", key]
        command = ["--", *job.command]
        document, notes = _document([*words, *command])
        ran_out = next((note for note in notes if note.startswith("out of memory at ")), "")
        whole = document
        if document.ending == "oom":  # traced to its end, so that its peaks are known
            with contextlib.suppress(MemfitError):
                whole, _ = _document([*words, "--gpu-memory", LARGE, *command])
        phases = _phases(_tape(tape_file), whole, records)
    need = whole.peak.reserved
    if whole is document and document.verdict == "fits" and document.usable is not None:
        need = min(need, document.usable)  # cached blocks that a full card would give back are not needed
    if (routing := whole.routing) and routing.uneven:  # the lines are those of the even trace
        need += routing.uneven - routing.even
    return JobAnswer(
        document.about.get("script", job.command[0]), job.gpu, "traced", document.verdict or "not_judged",
        document.usable or 0, need, document.band or 0, phases, _placed(document.leaks, records), notes,
        tuple(one.key for one in document.not_understood), ran_out.removeprefix("out of memory at ").partition(": ")[0],
    )  # fmt: skip


def _placed(leaks: tuple[Leak, ...], records: Path) -> tuple[Leak, ...]:
    """Return leaks whose lines are named relative to the repository, where a file that was read has that line."""
    root = (records / ROOT).read_text()
    read = {file for one in records.glob("*.json") for file in json.loads(one.read_text())["files"]}
    own = [os.path.relpath(file, root) for file in read if file.startswith(root + os.sep)]

    def place(holder: LeakHolder) -> LeakHolder:
        file, _, line = holder.place.rpartition(":")
        for path in sorted(own):
            if line.isdecimal() and (path == file or path.endswith(f"/{file}")):
                lines = Path(root, path).read_text(errors="replace").splitlines()[int(line) - 1 : int(line)]
                if lines and (not holder.code or lines[0].strip().startswith(holder.code[:20])):
                    return replace(holder, place=f"{path}:{line}")
        return holder

    return tuple(replace(leak, holders=tuple(map(place, leak.holders))) for leak in leaks)


def _card(job: CheckJob) -> list[str]:
    words = ["--gpu", job.gpu]
    if job.reserve:
        words += ["--reserve", job.reserve]
    if job.alloc_conf is not None:
        words += ["--alloc-conf", job.alloc_conf]
    return words


def _document(words: list[str]) -> tuple[Any, tuple[str, ...]]:
    """Run a command of memfit and return its JSON document and its notes. Raises MemfitError."""
    out = io.StringIO()
    notes: list[str] = []
    with contextlib.redirect_stdout(out), _noted(terminal, notes):
        run_words([words[0], "--json", *words[1:]])  # before --, behind which all is the command's
    return codec.loads(out.getvalue()), tuple(notes)


@contextlib.contextmanager
def _noted(terminal: Any, notes: list[str]) -> Any:
    """Collect the notes of a command in place of printing them."""
    real, terminal.note = terminal.note, notes.append
    try:
        yield
    finally:
        terminal.note = real


def _tape(path: Path) -> Tape:
    return loads(path.read_bytes())


def _phases(tape: Tape, document: ReplayDoc, records: Path) -> tuple[PhaseShares, ...]:
    """Return the worst instant of each phase of a tape, by role, label and line."""
    torch = torch_version(document.torch)
    timeline = replay(tape.events, settings=parse_alloc_conf(document.alloc_conf, torch), torch=torch)
    lines, reads = _lines(records, document.ranks[0].rank if document.ranks else 0)
    found = []
    for phase, levels in timeline.by_phase().items():
        span, at = timeline.peak_of(phase)
        sizes: Counter[tuple[Role, str, Lines]] = Counter()
        readers: dict[tuple[Role, str, Lines], dict[Lines, None]] = {}
        for alloc in alive_at(tape.events, at, tape.start):
            key = alloc.role, general(alloc.label), lines.get(alloc.id, ())
            sizes[key] += alloc.size
            readers.setdefault(key, {}).update(reads.get(alloc.id, {}))
        shares = [Share(*key[:2], size, key[2], tuple(readers[key])) for key, size in sizes.items()]
        shares.append(Share("fragmentation", "rounding, free pieces and cache", levels.reserved - sizes.total()))
        found.append(PhaseShares(phase, span.instant, levels, _large(shares, levels.reserved)))
    return tuple(found)


def _large(shares: list[Share], peak: int) -> tuple[Share, ...]:
    """Return the shares, the largest first, with small ones of a role and a line together."""
    kept = [share for share in shares if abs(share.bytes) >= peak * SMALLEST]
    small: Counter[Role] = Counter()
    for share in shares:
        if abs(share.bytes) < peak * SMALLEST:
            small[share.role] += share.bytes
    kept += [Share(role, "small tensors", size) for role, size in small.items() if size]
    return tuple(sorted(kept, key=lambda share: -share.bytes))


def _lines(records: Path, rank: int) -> tuple[dict[int, Lines], dict[int, dict[Lines, None]]]:
    """Return the lines that allocate, and those that read, by the number of an allocation, the innermost first.

    They are as the traced process of a rank noted them.
    """
    file = records / f"rank-{rank}.json"
    if not file.is_file():
        return {}, {}
    said = json.loads(file.read_text())
    chains = [tuple(chain.split("\n")) if chain else () for chain in said["chains"]]
    lines = {int(number): chains[index] for number, index in said["lines"].items()}
    return lines, {int(number): {chains[i]: None for i in indices} for number, indices in said["reads"].items()}
