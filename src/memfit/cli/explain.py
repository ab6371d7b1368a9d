"""memfit explain: read a log or a snapshot, and print what filled the card and what to change."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import sys
import zlib
from collections import Counter
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from memfit.allocator.levels import Levels
from memfit.catalogue.cards import parse_gpu
from memfit.cli import terminal
from memfit.cli.flags import CARD, COMMON, DEVICE, FROM, RECIPE, Argument, Flag, takes, typed
from memfit.cli.logs import LogText, read_log
from memfit.documents import snapshot, tape_file, watch_log
from memfit.documents.snapshot import read
from memfit.documents.snapshot.frames import Stacks
from memfit.errors import EXIT_TIGHT, BadInput, MemfitError
from memfit.explain import Evidence, explain, messages, read_text, read_watch
from memfit.explain.evidence import Estimate
from memfit.explain.history.reading import memory_and_segments_of
from memfit.explain.memory import Memory
from memfit.explain.remedies import fields_in_use
from memfit.explain.text.circumstances import ran_out
from memfit.explain.text.failures import split, without_own_output
from memfit.explain.text.figures import batch_of, stated
from memfit.nouns.finding import Finding, Part, Remedy
from memfit.nouns.footprint import Footprint
from memfit.nouns.job import RECIPE_FIELDS, Job, Recipe
from memfit.nouns.plan import Judgement, Plan
from memfit.nouns.tape import Segment, Tape
from memfit.reading import bounds
from memfit.report.explain import explain_view
from memfit.report.words import DOT, changes, recipe_facts
from memfit.tables import combinations
from memfit.units import human, rough

if TYPE_CHECKING:
    from memfit.cli.request import Request

EXAMPLES = (
    "memfit explain train.log --model qwen2.5-7b --gpu rtx-4090",
    "memfit explain - < train.log",
    "memfit explain oom.pickle --html oom.html",
)
WHAT = Argument(
    "what",
    "a log or traceback ('-': standard input), a snapshot of torch.cuda.memory, a tape, or the log of memfit watch",
    "FILE",
    required=True,
)
OWN = (
    Flag("model", str, "The model that was trained, to compute what each remedy saves.", "MODEL"),
    DEVICE,
    Flag("html", str, "Write the answer, with a snapshot's timeline and flame graph, to open in a browser.", "FILE"),
    Flag("force", bool, "Overwrite files.", default=False),
)
GZIPPED = b"\x1f\x8b"
BINARY = (b"\x80", GZIPPED)  # a pickle, or anything packed with gzip
HEAD = 64  # bytes that show what kind of file it is
TAPE = b'{"format'
DOCUMENT = re.compile(rb'\s*\{\s*"schema":\s*"(memfit\.(?!watch/)(\w+)/\d+)"')  # what a command printed with --json
TRACED = "memfit trace ... --save-tape run.json, then memfit explain run.json"
# hints for documents that record no failure, by kind; "" is for predictions
INSTEAD = {
    "watched": "give the watch's own log, its .jsonl",
    "replay": "give the tape or snapshot that was replayed",
    "trace": TRACED,
    "explain": "this file already is an explanation",
    "": "memfit estimate --why explains a prediction; give the log of a run, a snapshot or a tape",
}
NO_FAILURE = "give the log with the error in it, or a snapshot; memfit watch observes a live run"


@takes(OWN[0], FROM, *CARD, *OWN[1:], *RECIPE, *COMMON, argument=WHAT)
def run(what: str, **flags: Any) -> int:
    """Explain why memory ran out and what to change.

    Reports what filled the card, not only which request failed. Reads logs, tracebacks and out-of-memory messages of
    every PyTorch version, and snapshots of torch.cuda.memory. Descriptions of a failure in prose are not interpreted.
    With --model or --from the bytes that each remedy saves are computed, and the planner looks for a recipe that needs
    less by at least the missing bytes. Exit code: 0 when a cause is named, 4 when none is known, 2 when no memory ran
    out.
    """
    _check_flags(flags)
    terminal.check_files(flags, "html")
    found = explained(what, flags, drawn=bool(flags["html"]))
    evidence, findings = found.evidence, found.findings
    terminal.note_card(found.tape)
    terminal.notes(found.notes)
    if found.left_out:
        terminal.note(
            f"{human(found.left_out)} of the log were only searched for messages; its head, its end and the "
            "surroundings of messages were read"
        )
    if flags["json"]:
        from memfit.documents.explain_doc import explain_doc

        device = found.tape.device if found.tape else None
        terminal.show_json(explain_doc(evidence, findings, found.whole, found.earlier, found.left_out, device))
    else:
        following = _next(what, found, flags)
        terminal.show(explain_view(_name(what), evidence, findings, following, found.whole, found.earlier, found.over))
    terminal.write_file(flags, "html", lambda: _page(what, found))
    return EXIT_TIGHT if findings[0].cause == "not-known" else 0


@dataclass(frozen=True)
class Explained:
    """What `memfit explain` found in a log or a history."""

    evidence: Evidence
    findings: tuple[Finding, ...]
    earlier: tuple[Finding, ...]  # the failures before the last one of the same log
    tape: Tape | None  # None: a log
    left_out: int  # bytes of a long log that were only searched for messages
    whole: Remedy | None = None  # a recipe of the planner that needs less by the shortfall
    over: int = 0  # bytes by which the run that is priced exceeds the card
    stacks: Stacks | None = None  # bytes at a snapshot's end by call stack; None: not asked for
    segments: tuple[Segment, ...] = ()  # of a history, where memory ran out or most was alive
    levels: Levels | None = None  # of a history, over its events, where it is drawn
    notes: tuple[str, ...] = ()  # on the run that is priced


def explained(what: str, flags: dict[str, Any], drawn: bool = False) -> Explained:
    """Explain a log or a history. Raises BadInput for what cannot be read, and where no memory ran out.

    drawn: keep what the pictures of a snapshot need.
    """
    _check_message(what)
    with _bounded(what):
        stacks: Stacks | None = {} if drawn else None
        log, tape = _read(what, flags["device"], stacks)
        memory, segments, levels = memory_and_segments_of(tape, drawn) if tape else (None, (), None)
        *before, evidence = _evidence(log.content, memory)
    earlier = tuple(explain(failure)[0] for failure in before)
    notes: list[str] = []
    planned = _Planned.of(flags, evidence, notes)
    if planned:
        evidence = replace(evidence, vocabulary=planned.job.architecture.vocabulary)
        if flags["from_"] and planned.understood:  # else some of the recipe is a guess, which is no evidence
            evidence = replace(evidence, estimate=planned.estimate)
    findings = explain(evidence, planned.price if planned else None)
    if findings[0].cause == "not-known" and not (evidence.memory or ran_out(evidence)):
        raise BadInput(f"{what}: no out-of-memory in it", hint=NO_FAILURE)
    whole = planned.whole(evidence.shortfall) if planned and evidence.shortfall else None
    over = planned.over if planned else 0
    return Explained(
        evidence, findings, earlier, tape, log.left_out, whole, over, stacks, segments, levels, tuple(notes)
    )


def _bounded(what: str) -> AbstractContextManager[None]:
    """Bound the memory that a regular file may take; of a pipe only a part is kept."""
    return snapshot.memory(Path(what)) if what != "-" and Path(what).is_file() else nullcontext()


def _check_message(what: str) -> None:
    """Raise BadInput for the message of a failure in place of its file."""
    if " " in what and "memory" in what:
        with suppress(OSError):  # longer than a name may be
            if Path(what).exists():
                return
        raise BadInput("that is a message, not a file", hint=f"echo {shlex.quote(what)} | memfit explain -")


def _check_flags(flags: dict[str, Any]) -> None:
    """Refuse recipe and card flags without a model, where they would have no effect."""
    given = typed(flags, (*CARD, *RECIPE))
    if given and not (flags["model"] or flags["from_"]):
        raise BadInput(
            f"{given[0]} is used to price remedies, which needs a model", hint="--model MODEL, or --from FILE"
        )


def _evidence(content: bytes, memory: Memory | None) -> list[Evidence]:
    """Return the evidence of each failure in order; the last one ended the run."""
    if watch_log.known(content):
        return [read_watch(watch_log.loads(content))]
    text = content.decode("utf-8", "replace")
    others = without_own_output(text)
    if not memory and ran_out(read_text(text)) and not ran_out(read_text(others)):
        raise BadInput("the only out-of-memory in it is the one that memfit itself predicted", hint=TRACED)
    return [read_text(one, memory) for one in split(others)]


def _read(what: str, device: int | None, stacks: Stacks | None) -> tuple[LogText, Tape | None]:
    """Return (log, None), or (empty log, tape) for a recorded history. Raises BadInput for what cannot be read."""
    path = Path(what)
    regular = what != "-" and path.is_file()
    try:
        with _standard_input() if what == "-" else bounds.stream_of(path, "memfit explain train.log") as file:
            head = file.read(HEAD)
            packed = _packed_log(path) if regular and head.startswith(GZIPPED) else None
            if packed is not None:
                return packed, None
            if regular and (head.startswith((*BINARY, TAPE)) or tape_file.known(head)):
                return LogText(b""), read(path, device, stacks=stacks)
            # a watch log is read whole, since its first line describes the rest
            log = LogText(head + file.read()) if watch_log.known(head) else read_log(file, head)
    except OSError as error:
        raise BadInput(f"cannot read {what}: {error.strerror or error}", hint="memfit explain train.log") from None
    if not log.content.strip():
        raise BadInput(f"{what} is empty", hint="give the log with the error in it, or a snapshot")
    _check_content(log.content, what)
    return log, None


def _standard_input() -> AbstractContextManager[BinaryIO]:
    """Return standard input. Raises BadInput where it is closed, or a device that need not end."""
    if sys.stdin is None:
        raise BadInput("standard input is closed", hint="memfit explain train.log")
    with suppress(OSError, ValueError):  # no file of the system
        if bounds.is_endless(sys.stdin.buffer.fileno()):
            raise BadInput("standard input is a device, not a file", hint="memfit explain train.log")
    return nullcontext(sys.stdin.buffer)


def _packed_log(path: Path) -> LogText | None:
    """Return a log that is packed with gzip; None for a history or a broken file."""
    try:
        with gzip.open(path) as file:
            head = file.read(HEAD)
            if head.startswith((*BINARY, b"{")) or not head.strip():  # a tape is a document
                return None
            log = read_log(cast("BinaryIO", file), head, path.stat().st_size)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        return None  # reading it as a history reports the error
    _check_content(log.content, str(path))
    return log


def _check_content(content: bytes, what: str) -> None:
    """Raise BadInput for what cannot be the text of a failure: tapes in pipes, plans, recipes and records."""
    if content.startswith((*BINARY, TAPE)):
        raise BadInput("a snapshot or tape cannot come through a pipe", hint="give its path: memfit explain FILE")
    if b"\0" in content and not messages(content.decode("utf-8", "replace")):
        raise BadInput(f"{what} is a binary file, neither a log nor a snapshot or tape", hint=NO_FAILURE)
    if found := DOCUMENT.match(content):
        kind = found[2].decode()
        raise BadInput(f"{what} is a document {found[1].decode()}, no log", hint=INSTEAD.get(kind, INSTEAD[""]))
    if content.startswith(b"schema = ") and b"[recipe]" in content:
        raise BadInput(f"{what} is a recipe, no log", hint=f"memfit estimate --from {what} --why")
    if not watch_log.known(content) and _is_json(content) and not messages(content.decode("utf-8", "replace")):
        tape = Path(what).with_suffix(".tape.json.gz")
        hint = f"memfit explain {tape}" if tape.is_file() else "give the log with the error in it, a snapshot or a tape"
        raise BadInput(f"{what} is JSON without an out-of-memory in it", hint=hint)


def _is_json(content: bytes) -> bool:
    """Return whether the content is one JSON object or list."""
    try:
        return content.lstrip()[:1] in (b"{", b"[") and isinstance(json.loads(content), dict | list)
    except (ValueError, RecursionError):
        return False


NO_TENSORS = ("context", "workspace", "fragmentation")  # roles
# settings of a file that may not have been in effect, and what takes their place then
OFF: tuple[tuple[str, dict[str, Any]], ...] = (
    ("sharding", {"shard": "none", "offload": "none"}),
    ("offloading", {"offload": "none"}),
    ("checkpointing", {"checkpointing": "none"}),
    ("the fused loss", {"loss": "full"}),
    ("quantization", {"method": "lora", "quantization": "none"}),
)


@dataclass(frozen=True)
class _Planned:
    """The run that the flags describe, for computing what remedies save and what the planner would run instead."""

    job: Job
    recipe: Recipe
    understood: bool = True  # no setting of the file may change the memory in a way that is not known

    @classmethod
    def of(cls, flags: dict[str, Any], evidence: Evidence, notes: list[str]) -> _Planned | None:
        """Return the run, or None where the flags name no model; add to `notes` what it was taken to be."""
        if not flags["model"] and not flags["from_"]:
            return None
        from memfit.cli.request import job_of, read_request

        message = evidence.message
        if not flags["gpu"] and not flags["gpu_memory"] and message is not None and message.total is not None:
            flags = {**flags, "gpu_memory": str(message.total)}
        words = read_request(flags["model"], flags).architecture.vocabulary
        shown = {} if flags["from_"] else _as_it_failed(flags, replace(evidence, vocabulary=words), notes)
        request, recipe = _described(flags, shown, notes)
        notes += request.notes
        notes += (f"{found.key} is not understood: {found.why}" for found in request.not_understood)
        job, _ = job_of(request, {**flags, "method": recipe.method})
        planned = cls(job, recipe, understood=not request.not_understood)
        if not flags["from_"]:
            notes.append(f"savings are computed for {DOT.join(recipe_facts(recipe))}; flags change these settings")
        return planned

    def price(self, remedy: Remedy) -> int | None:
        """Return the tensor bytes that a remedy saves at the peak; None where tensors do not tell, or it cannot run."""
        if dict(remedy.change).keys() <= {"alloc_conf"}:  # what it saves lies between the tensors
            return None
        now, changed = self._tensors({}), self._tensors(dict(remedy.change))
        return None if now is None or changed is None else now - changed

    @cached_property
    def shown(self) -> tuple[Footprint, Judgement]:
        """The estimate of the described run, and its comparison with the card."""
        from memfit.planner.search import Estimator

        return Estimator(self.job).shown(self.recipe, exact=True)

    @property
    def estimate(self) -> Estimate:
        """The estimate of the described run, and of the same with one of its settings off."""
        used = ((name, off) for name, off in OFF if self.recipe.but(**off) != self.recipe)
        sizes = ((name, self._tensors(off)) for name, off in used)
        footprint, judgement = self.shown
        worst = max(footprint.phases, key=lambda phase: phase.levels.requested)
        roles: Counter[Part] = Counter()
        for line in worst.lines:
            roles[line.role] += line.bytes * (line.role not in NO_TENSORS)
        without = tuple((name, size) for name, size in sizes if size is not None)
        return Estimate(judgement.need, roles.most_common(1)[0], worst.instant, without)

    def _tensors(self, change: dict[str, Any]) -> int | None:
        """Return the tensor bytes of the run with some fields changed; None where it cannot run like that."""
        from memfit.planner.next_lower_recipe import tensor_bytes

        try:
            changed = combinations.check(self.recipe.but(**change), self.job.architecture, self.job.gpu)
            return tensor_bytes(self.job, changed)
        except MemfitError:
            return None

    @property
    def over(self) -> int:
        """The bytes by which the described run exceeds the card, by estimate."""
        _, judgement = self.shown
        return max(judgement.need - judgement.usable, 0)

    def whole(self, shortfall: int) -> Remedy | None:
        """Return, as a remedy, the planner's fastest recipe that learns the same and needs `shortfall` bytes less."""
        from memfit.planner.next_lower_recipe import down, tensor_bytes

        plan = Plan(self.job, self.recipe, *self.shown, ladder=())
        found = down(plan, shortfall)
        saves = tensor_bytes(self.job, self.recipe) - tensor_bytes(self.job, found.recipe) if found else 0
        if found is None or saves < shortfall:
            return None
        altered = tuple(
            (f.name, getattr(found.recipe, f.name))
            for f in fields(found.recipe)
            if getattr(found.recipe, f.name) != getattr(self.recipe, f.name)
        )
        over = found.judgement.need - found.judgement.usable
        cost = "same effective batch" + (f", by estimate still {rough(over)} too much for the card" if over > 0 else "")
        return Remedy(", ".join(changes(self.recipe, found.recipe)), cost, altered, saves)


# settings of a log that memfit may not run together; the first is left out first
LEAST = ("optimizer", "attention", "loss", "offload", "shard")


def _described(flags: dict[str, Any], shown: dict[str, Any], notes: list[str]) -> tuple[Request, Recipe]:
    """Return the request made of the flags and of the settings `shown` by the failure, and its recipe.

    Of settings that do not run it leaves one out, or all of them. Raises MemfitError where the flags do not run.
    """
    from memfit.cli.request import exact_recipe, read_request

    for out in ((), *((name,) for name in LEAST if name in shown), tuple(shown)):
        kept = {name: value for name, value in shown.items() if name not in out}
        try:
            request = read_request(flags["model"], {**flags, **kept})
            recipe = combinations.check(exact_recipe(request, flags["method"]), request.architecture, request.gpu)
        except MemfitError:
            if not kept:
                raise
            continue
        # the planner may change fields that no flag sets
        request.wanted = {name: value for name, value in request.wanted.items() if name not in kept}
        if out:
            left = _flags({name: shown[name] for name in out})
            notes.append(f"{left}: ignored, as it does not run on this card or with these flags")
        return request, recipe
    raise AssertionError


def _as_it_failed(flags: dict[str, Any], evidence: Evidence, notes: list[str]) -> dict[str, Any]:
    """Return the fields of a recipe that the failure and its log show and that no flag sets."""
    cause = explain(evidence)[0].cause
    given = {name: flags[name] for name in RECIPE_FIELDS if flags[name] is not None}
    cards = parse_gpu(flags["gpu"])[1] if flags["gpu"] else 1
    fixed = {*given, *(["quantization"] if "method" in given else []), *(["num_gpus"] if cards > 1 else [])}
    read = fields_in_use(evidence.text) | stated(evidence)
    logged = {name: value for name, value in read.items() if name not in fixed}
    if "shard" in logged and max(cards, given.get("num_gpus", 1), logged.get("num_gpus", 1)) == 1:
        del logged["shard"]
        notes.append("the log shards the weights, over a number of cards that it does not name: --num-gpus")
    if logged:
        notes.append(f"{_flags(logged)}: read from the log")
    shown: dict[str, Any] = dict(logged)
    if cause == "logits":
        batch = batch_of(evidence, given if given.keys() & {"micro_batch", "sequence_length"} else logged)
        if batch := {name: value for name, value in batch.items() if name not in given and logged.get(name) != value}:
            notes.append(f"{_flags(batch)}: the request that failed is the logits of that many tokens")
            shown |= batch
        if not given.keys() & {"trainer", "loss"}:
            notes.append("--trainer transformers: the run that failed computed all logits at once, which trl does not")
            shown["trainer"] = "transformers"
    if cause == "optimizer-step" and "_multi_tensor_adam" in evidence.failure and "optimizer" not in given:
        notes.append("--optimizer adamw-foreach: the step that failed updated all weights at once")
        shown["optimizer"] = "adamw-foreach"
    return shown


def _flags(values: dict[str, Any]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in values.items())


def _name(what: str) -> str:
    return "standard input" if what == "-" else Path(what).name


def _next(what: str, found: Explained, flags: dict[str, Any]) -> list[str]:
    """Return the commands to suggest. The planner's is free in what its own recipe changes."""
    lines = []
    if found.tape is not None and not flags["html"]:
        lines.append(["memfit", "explain", what, "--html", "oom.html"])
    if found.tape is not None:
        lines.append(["memfit", "replay", what, "--alloc-conf", "expandable_segments:True"])
    if found.tape is None and what != "-" and not (flags["model"] or flags["from_"]):
        lines.append(["memfit", "explain", what, "--model", "MODEL", "--gpu", "CARD"])
    if flags["model"]:
        changed = dict(found.whole.change) if found.whole else {}
        names = [name for name in ("gpu", *RECIPE_FIELDS) if name not in changed]
        given = {name: flags[name] for name in names if flags.get(name) is not None}
        lines.append(["memfit", "plan", flags["model"], *shlex.split(_flags(given))])
    return [shlex.join(line) for line in lines]


def _page(what: str, found: Explained) -> bytes:
    """Return the explanation as a page."""
    from memfit.cli.web_files import look
    from memfit.report.document_html import document

    return document(_name(what), history_html(what, found), look())


def history_html(what: str, found: Explained) -> str:
    """Return the explanation; of a history with its timeline, flame graphs and segments."""
    from memfit.allocator import UNLIMITED
    from memfit.allocator.replay import made_with, room_of
    from memfit.report.document_html import words
    from memfit.report.explanation_html import explanation_html
    from memfit.report.pictures_html import pictures
    from memfit.report.timeline_html import plot_html

    tape, memory = found.tape, found.evidence.memory
    made = explanation_html(_name(what), found.evidence, found.findings, found.whole, found.earlier, found.over)
    made += "".join(f"<p class='dim'>note: {words(line)}</p>" for line in found.notes)
    if tape is None or memory is None:
        return made
    torch, settings = made_with(tape)
    # without total_memory, room_of returns the most that was held, which is no limit
    limit = room_of(tape) if "total_memory" in tape.about else None
    same = found.levels and found.levels.capacity == (UNLIMITED if limit is None else limit)  # the card explained
    plot = plot_html(tape, settings, torch, limit, go_on=True, levels=found.levels if same else None)
    below = pictures(memory, found.stacks or {}, found.segments)
    return f"{made}<h2>Timeline</h2>{plot}{below}"
