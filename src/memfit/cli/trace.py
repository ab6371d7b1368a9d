"""memfit trace: a recipe's own trainer, or a script of the user's, run on a virtual card without data."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.cli import terminal
from memfit.cli.flags import CARD, COMMON, DATA, FROM, RECIPE, SAVE, Argument, Flag, as_flags, takes
from memfit.cli.replay import with_nccl
from memfit.cli.terminal import EXIT_OF
from memfit.errors import BadInput

if TYPE_CHECKING:
    from memfit.allocator.capacity import Capacity, Progress
    from memfit.cli.asked import Asked
    from memfit.nouns.alloc_settings import AllocSettings
    from memfit.nouns.footprint import Footprint
    from memfit.nouns.job import Recipe
    from memfit.nouns.tape import Tape

EXAMPLES = (
    "memfit trace llama-2-7b --gpu rtx-4090 --method lora --checkpointing full",
    "memfit trace --from run/recipe.toml --gpu l4 --html timeline.html",
    "memfit trace train.py --gpu l4 -- --epochs 1",
)
WHAT = Argument(
    "what", "a model as for 'memfit plan', or a training script and its arguments", "MODEL|SCRIPT.py", many=True
)
STEPS = Flag("steps", int, "Optimizer steps of a script to run. Default: 2.", "N")
ANSWER = Flag("answer", str, "What a script reads from data nobody has; see docs/trace.md.", "item=1,mask=true,...")
FULL = Flag("full", bool, "Trace every block, where otherwise those that repeat are traced a few times.", default=False)
HTML = Flag("html", str, "Write a timeline to open in a browser, without a network.", "FILE")
SNAPSHOT = Flag("snapshot", str, "Write a snapshot that pytorch.org/memory_viz opens.", "FILE")
FORCE = Flag("force", bool, "Overwrite files.", default=False)


@takes(*CARD, *DATA, FROM, FULL, STEPS, ANSWER, SAVE, SNAPSHOT, HTML, FORCE, *RECIPE, *COMMON, argument=WHAT)
def run(what: tuple[str, ...] = (), **flags: Any) -> int:
    """Run real training code on a virtual GPU.

    A recipe's own trainer, or a script of yours, on tensors that have a shape and no data: loads, trains two steps,
    evaluates, saves. The verdict is a replay of what was allocated, at the card's own capacity.
    """
    from memfit.cli.replay import check

    check(flags)
    if what and what[0].endswith(".py"):
        from memfit.cli.trace_script import run_script

        return run_script(what[0], list(what[1:]), flags)
    if len(what) > 1:
        raise BadInput(
            f"one model at a time, not {' and '.join(what[:3])}", hint="arguments go to scripts: train.py -- ..."
        )
    for name in ("steps", "answer"):
        if flags[name] is not None:
            raise BadInput(f"--{name} is for scripts", hint="memfit trace train.py --gpu l4 --steps 4")
    return _run_recipe(what[0] if what else None, flags)


def _run_recipe(model: str | None, flags: dict[str, Any]) -> int:
    from memfit.cli.asked import asked, exact_recipe, longest_batch, with_data
    from memfit.tables import combinations
    from memfit.virtual.supported import obstacle

    found = with_data(asked(model, flags), flags)
    recipe = longest_batch(found, exact_recipe(found, flags["method"]))
    recipe = combinations.check(recipe, found.architecture, found.gpu)
    if reason := obstacle():
        return _by_formula(reason, model, flags)
    with terminal.progress() as tell:
        name = model or (found.adopted.model if found.adopted else "") or ""
        footprint, answer, tape, settings = traced(recipe, name, found, tell, full=flags["full"])
    for line in found.notes:
        terminal.note(line)
    _show(found, recipe, footprint, answer, settings, flags)
    _write(tape, found, flags, settings, answer)
    assert answer.judgement is not None
    return EXIT_OF[answer.judgement.verdict]


def _by_formula(reason: str, model: str | None, flags: dict[str, Any]) -> int:
    """The closed form's answer on a machine that can trace nothing."""
    from memfit.cli import estimate

    for name in ("snapshot", "html"):
        if flags[name]:
            raise BadInput(f"{reason}, and --{name} is of a trace", hint="--save-tape, then memfit replay")
    terminal.note(f"{reason}: answered by formula, as memfit estimate does")
    return estimate.run(model, **flags, why=False)


def traced(
    recipe: Recipe, name: str, found: Asked, tell: Progress, *, lean: bool = True, full: bool = False
) -> tuple[Footprint, Capacity, Tape, AllocSettings]:
    """One recipe of the model called `name`, run on a virtual card and replayed on the one that was asked about.

    lean: no other recipe is traced in this process. full: every block is traced, those that repeat too.
    """
    from memfit.allocator.capacity import capacity
    from memfit.allocator.replay import replay
    from memfit.closed_form.parallel.sharding import NCCL_BYTES
    from memfit.footprints.footprint_of_trace import footprint_of, judged
    from memfit.models import hub
    from memfit.nouns.alloc_settings import parse_alloc_conf, torch_version
    from memfit.virtual.supported import check_trace

    check_trace()
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # read once by PyTorch: DDP's advice is not this program's output
    from memfit.virtual.tracing import trace_recipe

    tape, answered = trace_recipe(recipe, hub.resolve_config(name), found.gpu, tell, lean=lean, full=full)
    torch, nccl = torch_version(tape.about["torch"]), NCCL_BYTES if recipe.num_gpus > 1 else 0
    settings = parse_alloc_conf(recipe.alloc_conf, torch)
    whole, part = replay(tape.events, settings=settings, torch=torch), judged(tape)
    known = None if whole.oom or whole.retries else whole.until(len(part.events))
    answer = capacity(part, settings, torch, found.gpu, found.reserve + nccl, tell, known)
    data = Path(found.dataset.path).name if found.dataset else ""
    footprint = footprint_of(tape, whole, *beliefs(tape, recipe, answered, data), found.gpu.context_bytes, nccl)
    return footprint, with_nccl(answer, nccl), tape, settings


def beliefs(
    tape: Tape, recipe: Recipe, answered: dict[str, int], data: str = ""
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the trace took for granted, and what it cannot know. data: the file whose longest batch it is."""
    used = ("torch", "transformers", "peft", "trl", *(["deepspeed"] if recipe.zero else []))
    packages = (f"{name} {tape.about[name]}" for name in used if name in tape.about)
    shown = f"2 of {recipe.accumulation} micro-steps traced" if recipe.accumulation > 2 else ""
    asked = f"{sum(answered.values())} reads of values nobody has yet: defaults" if answered else ""
    ranks = f"rank 0 of {recipe.num_gpus}" if recipe.num_gpus > 1 else ""
    hosted = "what is offloaded has room on the host" if recipe.offload != "none" else ""
    spread = (ranks, hosted)
    kernels = "flash-attn 2.8 stood in for: its buffers, no kernels" if recipe.attention == "flash" else ""
    by_card = tape.about.get("assumed", "").splitlines()
    depth = tape.about.get("depth", "")
    assumed = (", ".join(packages), kernels, _lengths(recipe, data), shown, depth, *spread, *by_card, asked)
    unknown = ("context of your driver", "cuDNN's plan workspaces", *(["NCCL's buffers"] if ranks else []))
    return tuple(a for a in assumed if a), unknown


def _lengths(recipe: Recipe, data: str) -> str:
    """Which batch was traced: the largest there can be."""
    of = f", the longest of {data}" if data else ""
    if recipe.padding == "packing":
        return "packed rows, all of them full"
    if recipe.micro_batch == 1:
        return f"every sequence {recipe.sequence_length:,} tokens{of}"
    return f"batches padded to {recipe.sequence_length:,} tokens{of}"


def _show(
    found: Asked, recipe: Recipe, footprint: Footprint, answer: Capacity, settings: AllocSettings, flags: dict[str, Any]
) -> None:
    assert answer.judgement is not None
    if flags["json"]:
        from memfit.documents import codec

        document = codec.trace_doc(found.architecture, recipe, found.gpu, footprint, answer)
        terminal.show_json(document)
        return
    from memfit.cli.asked import plan_of
    from memfit.report.estimate import estimate_view
    from memfit.report.replay import facts

    same = [found.architecture.name, *found.gpu_words, *as_flags(recipe)]
    commands = [
        shlex.join(["memfit", "trace", *same, "--save-tape", "run.tape.gz"]),
        shlex.join(["memfit", "estimate", *same, "--why"]),
    ]
    if answer.judgement.verdict != "fits":
        commands.insert(0, shlex.join(plan_of(found)))
    terminal.show(
        estimate_view(
            found.architecture, recipe, found.gpu, footprint, answer.judgement, commands, facts(answer, settings)
        )
    )


def _write(tape: Tape, found: Asked, flags: dict[str, Any], settings: AllocSettings, answer: Capacity) -> None:
    from memfit.cli.replay import write
    from memfit.nouns.alloc_settings import torch_version

    assert answer.judgement is not None
    title = f"{found.architecture.name} on {found.gpu.name}"
    write(tape, title, flags, settings, torch_version(tape.about["torch"]), answer.judgement.usable, found.gpu)
    if flags["save_tape"]:
        terminal.note(f"next: memfit replay {Path(flags['save_tape'])} --gpu NAME")
