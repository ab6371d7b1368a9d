"""The script side of memfit trace: the user's own code, unmodified, on the card that was named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.cli import terminal
from memfit.cli.flags import recipe_values
from memfit.cli.verdict import EXIT_OF, with_nccl
from memfit.errors import EXIT_MISFIT, BadInput
from memfit.nouns.tape import Alloc, Free, Oom, Tape
from memfit.units import gib

if TYPE_CHECKING:
    from memfit.nouns.gpu import Gpu
    from memfit.virtual.scripts.script import ScriptOutcome


def run_script(path: str, args: list[str], flags: dict[str, Any]) -> int:
    """Run it, replay its tape at the card's capacity, show the answer; what the script prints goes to stderr."""
    import contextlib
    import sys

    from memfit.allocator.capacity import capacity
    from memfit.cli.replay import reserve, write
    from memfit.closed_form.parallel.sharding import NCCL_BYTES
    from memfit.nouns.alloc_settings import parse_alloc_conf, torch_version
    from memfit.report.words import card_title
    from memfit.virtual.supported import check_trace

    gpu, cards = _checked(flags)
    check_trace()
    conf = _alloc_conf(flags)
    launcher, world_size = _launched(Path(path), cards, flags)
    from memfit.virtual.device.values import Answers

    answers = Answers.of(part.strip() for part in (flags["answer"] or "").split(",") if part.strip())
    from memfit.virtual.scripts.script import trace_script

    nccl = NCCL_BYTES if world_size > 1 else 0
    kept = reserve(flags, gpu) + nccl
    with contextlib.redirect_stdout(sys.stderr):
        tape, outcome = trace_script(
            Path(path), args, gpu, steps=flags["steps"] or 2, alloc_conf=conf, answers=answers,
            capacity=gpu.usable_bytes(kept), world_size=world_size, launcher=launcher, launched=flags["num_gpus"] == 1,
        )  # fmt: skip
    version = tape.about["torch"]
    torch = torch_version(version)
    settings = parse_alloc_conf(conf, torch)
    small_enough = outcome.survived > 0 and outcome.ending != "oom"  # the script made itself so
    lived = _without_ooms(tape, all_but=outcome.ending == "oom")
    with terminal.progress() as tell:
        answer = with_nccl(capacity(lived, settings, torch, gpu, kept, tell), nccl)
    judgement = answer.judgement
    assert judgement is not None
    notes = said(outcome)
    if small_enough:
        answer = replace(answer, judgement=replace(judgement, verdict="tight"))
        notes.insert(1, _settled(tape))
    write(tape, f"{path} on {card_title(gpu, world_size)}", flags, settings, torch, judgement.usable, gpu)
    if flags["json"]:
        from memfit.documents.replay_doc import replay_doc

        how = {"ending": outcome.ending, "steps": outcome.steps, "notes": tuple(notes)}
        terminal.show_json(replay_doc(lived, answer, gpu, version, conf, **how))
    else:
        from memfit.report.replay import replay_view

        terminal.show(replay_view(path, lived, answer, settings, version, conf, gpu, count=world_size))
    if outcome.trace:
        print(outcome.trace, file=sys.stderr)
    for line in notes:
        terminal.note(line)
    assert answer.judgement is not None
    return EXIT_MISFIT if outcome.ending == "oom" else EXIT_OF[answer.judgement.verdict]


def _alloc_conf(flags: dict[str, Any]) -> str:
    """The allocator's settings: those of the flag, else of the environment, as the script would read them."""
    from memfit.virtual.virtual_gpu import alloc_conf_of_environment

    if flags["alloc_conf"] is not None:
        return str(flags["alloc_conf"])
    if found := alloc_conf_of_environment():
        terminal.note(f"--alloc-conf {found}: as this shell's environment says")
    return found


def _without_ooms(tape: Tape, all_but: bool) -> Tape:
    """What the script did, without the requests that it was refused and went on. all_but: the last one ended it."""
    refused = [index for index, event in enumerate(tape.events) if isinstance(event, Oom)]
    caught = set(refused[:-1] if all_but else refused)
    return replace(tape, events=tuple(e for i, e in enumerate(tape.events) if i not in caught)) if caught else tape


def _settled(tape: Tape) -> str:
    """What it needs once it no longer runs out."""
    sizes = {event.id: event.size for event in tape.events if isinstance(event, Alloc)}
    held = most = 0
    for event in tape.events:
        held += event.size if isinstance(event, Alloc) else -sizes[event.id] if isinstance(event, Free) else 0
        most = 0 if isinstance(event, Oom) else max(most, held)
    return f"after the last out-of-memory there were at most {gib(most, 2)} GiB of tensors"


def said(outcome: ScriptOutcome) -> list[str]:
    """How the run ended, and what was taken for granted."""
    endings = {
        "enough": f"stopped after {outcome.steps} optimizer steps",
        "finished": f"the script came to its end after {outcome.steps} optimizer steps",
        "oom": f"out of memory at {outcome.where}: {_asked(outcome.message)}; a larger --gpu shows what the whole run needs",
    }
    lines = [endings[outcome.ending]]
    if outcome.survived:
        lines.append(f"the script caught an out-of-memory {outcome.survived} times and went on")
    if outcome.answered:
        asked = ", ".join(f"{name} {n}x" for name, n in outcome.answered.items())
        lines.append(f"reads of values nobody has yet, answered by defaults (--answer): {asked}")
    return [*lines, *outcome.assumed]


def _asked(message: str) -> str:
    """'CUDA out of memory. Tried to allocate 6.14 GiB': what PyTorch says before the card's figures."""
    return message.partition(". GPU ")[0]


def _checked(flags: dict[str, Any]) -> tuple[Gpu, int]:
    """The card a script needs, and how many of its kind; it has its own recipe."""
    from memfit.cli.replay import cards_of

    if flags["full"]:
        raise BadInput("--full is for models: a script is always traced whole", hint="leave it out, or name a model")
    given = sorted(
        set(recipe_values(flags)) - {"alloc_conf", "num_gpus"} | {n for n in ("data", "tokenizer") if flags[n]}
    )
    if given:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise BadInput(f"{names} without effect: a script brings its own recipe", hint="leave it out, or name a model")
    if flags["steps"] is not None and flags["steps"] < 1:
        raise BadInput(f"--steps must be at least 1, not {flags['steps']}", hint="2 is enough: later steps are alike")
    gpu, named = cards_of(flags)
    if gpu is None:
        raise BadInput("no card named", hint="memfit trace train.py --gpu l4")
    count = flags["num_gpus"] or named
    if count < 1 or named not in (1, count):
        raise BadInput(f"--num-gpus {count} and --gpu {flags['gpu']} are two answers", hint="--gpu 8xh100 says both")
    return gpu, count


def _launched(script: Path, cards: int, flags: dict[str, Any]) -> tuple[Path | None, int]:
    """accelerate's file, named or beside the script, and how many processes run."""
    from memfit.virtual.scripts.launched import launcher_file, processes_of

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
