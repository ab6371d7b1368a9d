"""memfit trace of the user's own script, or of the command that starts it: how it is run, and the answer."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memfit.allocator.capacity import capacity, judged
from memfit.catalogue.cards import names_count
from memfit.cli import terminal, trace_ranks
from memfit.cli.flags import recipe_values
from memfit.cli.replay import cards_of, reserve, with_nccl, write
from memfit.cli.terminal import EXIT_OF
from memfit.cli.trace_ranks import TracedJob
from memfit.closed_form.parallel.sharding import nccl_bytes, nccl_range
from memfit.documents.codec import RoutingDoc, replay_doc
from memfit.errors import EXIT_MISFIT, BadInput, NothingTrained
from memfit.nouns.alloc_settings import alloc_conf_in, parse_alloc_conf, torch_version
from memfit.nouns.gpu import Gpu
from memfit.nouns.plan import Judgement, NotUnderstood, withheld
from memfit.nouns.tape import STEPS, Alloc, Free, Oom, Tape
from memfit.report.replay import replay_view, routing_words
from memfit.report.watching import leak_lines
from memfit.report.words import card_title
from memfit.units import gib, several
from memfit.virtual.ranks.place import Place
from memfit.virtual.ranks.traced import ScriptOutcome
from memfit.virtual.scripts.command_line import parse
from memfit.virtual.scripts.command_trace import Asked, owned, settled_by
from memfit.virtual.scripts.launched import by_accelerate, launcher_file, processes_of
from memfit.virtual.supported import GRAPHS_KEY, MOVED, check_script

Traced = tuple[Tape, ScriptOutcome] | TracedJob
_ROUTING = "routing="  # the setting of --answer
_ON_CARD = "the script has to train on 'cuda': see its device flag and the arguments it was given (after --)"


def run_script(path: str, args: list[str], flags: dict[str, Any]) -> int:
    """Run a script by the interpreter that runs memfit, and show the answer; what it prints goes to stderr."""
    gpu, cards = _checked(flags)
    check_script()
    conf = _alloc_conf(flags, os.environ)
    launcher, world_size = _launched(Path(path), cards, flags)
    ranks, kept = trace_ranks.check_ranks(flags, world_size), reserve(flags, gpu)
    words: dict[str, Any] = {
        "path": Path(path), "args": args, "gpu": gpu, "steps": flags["steps"] or STEPS, "alloc_conf": conf,
        "capacity": gpu.usable_bytes(kept), "nccl": nccl_bytes(world_size),
    }  # fmt: skip
    if launcher:
        words["command"] = by_accelerate(Path(path), launcher)
    per_node = trace_ranks.per_node(flags)

    def trace(answers: tuple[str, ...]) -> Traced:
        if ranks != (0,) or flags["save"]:
            return trace_ranks.traced_job(words, answers, world_size, per_node, ranks, kept)
        place = Place(0, world_size, per_node) if world_size > 1 or flags["num_gpus"] == 1 else None
        return _alone(words, answers, place)

    return _answer(path, *_routed(trace, flags), gpu, world_size, flags)


def _alone(words: dict[str, Any], answers: Sequence[str], place: Place | None) -> tuple[Tape, ScriptOutcome]:
    """Trace a script in this process: the only one of its job, or rank 0, alone."""
    from memfit.virtual.device.values import Answers
    from memfit.virtual.scripts.script import trace_script

    with contextlib.redirect_stdout(sys.stderr):
        return trace_script(**words, answers=Answers.of(answers), place=place)


def _routed(trace: Callable[[tuple[str, ...]], Traced], flags: dict[str, Any]) -> tuple[Traced, Traced | None]:
    """Trace a job with its tokens routed unevenly to experts, and, if it has any, once more with an even routing.

    What --answer says of the routing is traced alone.
    """
    found = trace(_answers(flags))
    _, outcome = _worst(found)
    if outcome.routed == 1 or outcome.untrained or _ROUTING in (flags["answer"] or ""):
        return found, None
    return found, trace((*_answers(flags), f"{_ROUTING}balanced"))


def run_command(words: list[str], flags: dict[str, Any]) -> int:
    """Trace what a command line starts, in the interpreter that owns it, and show the answer."""
    gpu, count = _checked(flags)
    if flags["from_"]:
        raise BadInput("--from without effect: the command names its own files", hint="accelerate launch --config_file")
    given = count if flags["num_gpus"] or (flags["gpu"] and names_count(flags["gpu"])) else None
    run = owned(parse(words, devices=count).on(given, gpu.short))
    name, kept = run.name, reserve(flags, gpu)
    asked = Asked(
        gpu, given, flags["steps"] or STEPS, flags["alloc_conf"], _answers(flags), kept, flags["debug"],
        alone=flags["ranks"] == "0",
    )  # fmt: skip
    run, alone = settled_by(run, asked)
    world_size = run.world_size
    if flags["gpus_per_node"] not in (None, run.processes):
        raise BadInput(
            f"--gpus-per-node {flags['gpus_per_node']}, but the command starts {run.processes} processes on a machine",
            hint="leave --gpus-per-node out: the launcher's arguments say it",
        )
    conf = _alloc_conf(flags, run.environment)
    ranks = () if alone else trace_ranks.check_ranks(flags, world_size)
    started = {
        "path": Path(run.entry), "args": run.args, "gpu": gpu, "steps": asked.steps, "alloc_conf": conf,
        "capacity": gpu.usable_bytes(kept), "nccl": nccl_bytes(world_size), "command": run,
    }  # fmt: skip

    def trace(answers: tuple[str, ...]) -> Traced:
        if alone is None:
            return trace_ranks.traced_job(started, answers, world_size, run.processes, ranks, kept)
        _, again = (run, alone) if answers == asked.answers else settled_by(run, replace(asked, answers=answers))
        assert again is not None
        return again.tape, again.outcome

    ignored = f"without effect on memory: {', '.join(run.ignored)}" if run.ignored else ""
    left = [key for key in run.unknown if key not in flags["ignore"]]
    judged = [key for key in run.unknown if key in flags["ignore"]]
    without = f"judged without what {', '.join(judged)} changes, as --ignore asks" if judged else ""
    return _answer(
        name, *_routed(trace, flags), gpu, world_size, flags,
        notes=[note for note in (*run.notes, ignored, without) if note],
        unknown=[NotUnderstood(key, "memfit does not know this argument") for key in left],
    )  # fmt: skip


def _answers(flags: dict[str, Any]) -> tuple[str, ...]:
    return (f"{_ROUTING}uneven", *(part.strip() for part in (flags["answer"] or "").split(",") if part.strip()))


def _worst(traced: Traced) -> tuple[Tape, ScriptOutcome]:
    """Return the tape of the only rank, or of the worst one, and how it ended."""
    return traced if isinstance(traced, tuple) else (traced.worst.tape, traced.outcome)


def _answer(
    name: str, traced: Traced, even: Traced | None, gpu: Gpu, world_size: int, flags: dict[str, Any],
    notes: Sequence[str] = (), unknown: Sequence[NotUnderstood] = (),
) -> int:  # fmt: skip
    """Replay a script's tape at the card's capacity and show the answer; of several ranks, that of the worst.

    even: the job with its tokens routed evenly, which is shown where it was traced; the verdict is of both. unknown:
    arguments that withhold the verdict.
    """
    uneven = _worst(traced)
    traced = even or traced
    job = None if isinstance(traced, tuple) else traced
    tape, outcome = _worst(traced)
    if outcome.trace:  # with what the script printed, before the answer; memfit explain reads it
        print(outcome.trace, file=sys.stderr)
    if outcome.untrained:
        terminal.notes([*outcome.assumed, *notes])
        raise NothingTrained(f"no verdict: {outcome.untrained}", hint=_ON_CARD)
    world_size = max(world_size, outcome.processes)  # a script may start its processes itself
    began = outcome.ending != "oom" or outcome.communicators > 0  # NCCL takes its memory with the first collective
    nccl = nccl_bytes(world_size, outcome.communicators) if began else 0
    kept = reserve(flags, gpu) + nccl
    version, conf = tape.about["torch"], tape.about["alloc_conf"]  # which the script may have set
    torch = torch_version(version)
    settings = parse_alloc_conf(conf, torch)
    settled = outcome.survived > 0 and outcome.ending != "oom"  # the script went on with less until it fitted
    lived = _without_ooms(tape, all_but=outcome.ending == "oom")
    with terminal.progress() as tell:
        answer = with_nccl(capacity(lived, settings, torch, gpu, kept, tell), nccl)
    judgement = answer.judgement
    assert judgement is not None
    routing = None
    if even is not None and outcome.ending != "oom":
        stopped = uneven[1].ending == "oom"
        spread = None if stopped else judged(_without_ooms(uneven[0], all_but=False), settings, torch, gpu, kept)
        judgement, routing = _by_routing(judgement, spread, uneven[1].routed, nccl)
    lines = [*_notes(outcome), *notes]
    if nccl:
        lines.append(f"not known: {nccl_range(nccl)}, of which {gib(nccl, 2)} GiB are counted")
    if settled:
        judgement = replace(judgement, verdict="tight")
        lines.insert(1, _settled(tape))
    if MOVED in outcome.assumed and GRAPHS_KEY not in flags["ignore"]:
        unknown = [*unknown, NotUnderstood(GRAPHS_KEY, "their pool may hold more than was counted", adds=True)]
    answer = replace(answer, judgement=withheld(judgement, unknown))
    title, usable = f"{Path(name).name} on {card_title(gpu, world_size)}", judgement.usable - nccl
    lanes = job.lanes(settings, torch, usable) if job is not None else str
    write(tape, title, flags, settings, torch, usable, gpu, lanes)
    if job is not None and flags["save"]:
        trace_ranks.save_ranks(job.found, flags["save"], flags["force"])
    if flags["json"]:
        how: dict[str, Any] = {
            "ending": outcome.ending,
            "steps": outcome.steps,
            "notes": tuple(lines),
            "leaks": outcome.leaks,
            "routing": routing,
        }
        how |= {"ranks": job.document()} if job is not None else {}
        terminal.show_json(replay_doc(lived, answer, gpu, version, conf, **how))
    else:
        if job is not None:
            terminal.show(job.view(world_size))
        rank = 0 if job is None else job.worst.rank
        words = routing_words(routing.share, routing.even, routing.uneven) if routing else ""
        terminal.show(
            replay_view(
                name, lived, answer, settings, version, conf, gpu, count=world_size, rank=rank, routing=words,
            )
        )  # fmt: skip
    terminal.notes(lines)
    assert answer.judgement is not None
    ran_out = outcome.ending == "oom"
    return EXIT_MISFIT if ran_out else EXIT_OF[answer.judgement.verdict]


def _by_routing(found: Judgement, uneven: Judgement | None, share: float, nccl: int) -> tuple[Judgement, RoutingDoc]:
    """Return the verdict by both routings of tokens to experts, and what the run needs with each.

    found: with the even one. uneven: with the other; None: that runs out of memory. The headroom is the lesser of the
    two, and where the verdicts differ, it is too tight to promise.
    """
    doc = RoutingDoc(share=share, even=found.need, uneven=uneven.need + nccl if uneven else None)
    if uneven is None:
        return replace(found, verdict="tight") if found.verdict == "fits" else found, doc
    verdict = found.verdict if found.verdict == uneven.verdict else "tight"
    return replace(found, verdict=verdict, headroom=min(found.headroom, uneven.headroom)), doc


def _alloc_conf(flags: dict[str, Any], environment: Mapping[str, str]) -> str:
    """Return PYTORCH_ALLOC_CONF as the script would read it: from the flag, else from its environment."""
    if flags["alloc_conf"] is not None:
        return str(flags["alloc_conf"])
    if found := alloc_conf_in(environment):
        terminal.note(f"--alloc-conf {found}: from the environment")
    return found


def _without_ooms(tape: Tape, all_but: bool) -> Tape:
    """Return the tape without failed requests that the script caught. all_but: the last one was not caught."""
    failed = [index for index, event in enumerate(tape.events) if isinstance(event, Oom)]
    caught = set(failed[:-1] if all_but else failed)
    return replace(tape, events=tuple(e for i, e in enumerate(tape.events) if i not in caught)) if caught else tape


def _settled(tape: Tape) -> str:
    """Describe what the script needs after its last out-of-memory error."""
    sizes = {event.id: event.size for event in tape.events if isinstance(event, Alloc)}
    held = most = 0
    for event in tape.events:
        held += event.size if isinstance(event, Alloc) else -sizes[event.id] if isinstance(event, Free) else 0
        most = 0 if isinstance(event, Oom) else max(most, held)
    return f"after the last out-of-memory there were at most {gib(most, 2)} GiB of tensors"


def _notes(outcome: ScriptOutcome) -> list[str]:
    """Return notes on how the run ended and what was assumed."""
    endings = {
        "enough": f"stopped after {several(outcome.steps, 'optimizer step')}",
        "finished": f"the script came to its end after {several(outcome.steps, 'optimizer step')}",
        "oom": f"out of memory at {outcome.where}: {outcome.message.partition('. GPU ')[0]}; "
        "a larger --gpu shows what the whole run needs",
    }
    lines = [endings[outcome.ending]]
    if outcome.survived:
        lines.append(f"the script caught an out-of-memory {outcome.survived} times and went on")
    if outcome.answered:
        asked = ", ".join(f"{name} {n}x" for name, n in outcome.answered.items())
        lines.append(f"values of tensors that the script read, answered by defaults (--answer): {asked}")
    if outcome.leaks:
        lines += [line for leak in outcome.leaks for line in leak_lines(leak)]
    return [*lines, *outcome.assumed]


def _checked(flags: dict[str, Any]) -> tuple[Gpu, int]:
    """Return the card and the number of cards. Raises BadInput for recipe flags, which a script ignores."""
    if flags["full"]:
        raise BadInput("--full is for models: a script is always traced whole", hint="leave it out, or name a model")
    others = ("data", "tokenizer", "host_memory", "workers")
    given = sorted(set(recipe_values(flags)) - {"alloc_conf", "num_gpus"} | {n for n in others if flags[n]})
    if given:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise BadInput(f"{names} without effect: a script brings its own recipe", hint="leave it out, or name a model")
    if flags["steps"] is not None and flags["steps"] < 1:
        raise BadInput(f"--steps must be at least 1, not {flags['steps']}", hint="3 are enough: later steps are alike")
    gpu, named = cards_of(flags)
    if gpu is None:
        raise BadInput("no card named", hint="memfit trace train.py --gpu l4")
    count = flags["num_gpus"] or named
    if count < 1 or named not in (1, count):
        raise BadInput(
            f"--num-gpus {count} and --gpu {flags['gpu']} contradict each other", hint="--gpu 8xh100 gives both"
        )
    return gpu, count


def _launched(script: Path, cards: int, flags: dict[str, Any]) -> tuple[Path | None, int]:
    """Return the file of accelerate launch, named or beside the script, and the number of processes."""
    named = flags["from_"]
    if named and not Path(named).is_file():
        raise BadInput(f"{named} does not exist", hint="for a script --from is the file of accelerate launch")
    path = Path(named) if named else launcher_file(script)
    if path is None:
        return None, cards
    count = processes_of(path)
    if cards not in (1, count):
        raise BadInput(f"{path} starts {count} processes, not {cards}", hint=f"--num-gpus {count}, or another file")
    return path, count
