"""memfit trace: run a recipe's trainer, or the user's own script, on a virtual card without data."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from memfit.allocator.capacity import Capacity, Progress, capacity
from memfit.allocator.replay import Timeline, replay
from memfit.cli import estimate, terminal, trace_ranks, trace_script
from memfit.cli.flags import (
    CARD,
    COMMON,
    DATA,
    FROM,
    HOST,
    IGNORE,
    RECIPE,
    SAVE,
    TASK,
    Argument,
    Flag,
    as_flags,
    takes,
    typed,
)
from memfit.cli.kept_answers import pictured, trained_size
from memfit.cli.replay import check, with_nccl, write
from memfit.cli.request import Request, judging, machine_words, model_name, plan_of, same_file
from memfit.cli.task_flags import (
    apart,
    as_run,
    as_typed,
    asked,
    check_flags,
    length_with,
    notes_on,
    shape_of,
    sized,
    with_task,
)
from memfit.cli.terminal import EXIT_OF
from memfit.closed_form.host_memory import with_host
from memfit.closed_form.parallel.sharding import nccl_bytes
from memfit.documents import codec
from memfit.errors import BadInput
from memfit.models import hub
from memfit.nouns.alloc_settings import AllocSettings, parse_alloc_conf, torch_version
from memfit.nouns.footprint import Footprint
from memfit.nouns.job import Recipe
from memfit.nouns.tape import GENERATION, WITHOUT_GRADIENTS, Tape
from memfit.nouns.task import PLAIN, Shape, Task
from memfit.report.estimate import estimate_view
from memfit.report.replay import facts
from memfit.tables import combinations
from memfit.tables.adapters import adapter
from memfit.tables.tasks import TASKS
from memfit.units import human
from memfit.virtual.scripts.command_line import names_program
from memfit.virtual.supported import check_trace, obstacle
from memfit.virtual.tracing import trace_recipe

EXAMPLES = (
    "memfit trace llama-2-7b --gpu rtx-4090 --method lora --checkpointing full",
    "memfit trace --from run/recipe.toml --gpu l4 --html timeline.html",
    "memfit trace train.py --gpu l4 -- --epochs 1",
    "memfit trace --gpu l4 -- python -m package.train --epochs 1",
    "memfit trace --gpu h100 -- torchrun --nproc_per_node 8 train.py",
    "memfit trace --gpu 8xh100 -- accelerate launch train.py",
    "memfit trace --gpu rtx-4090 -- trl sft --config sft.yaml",
    "memfit trace --gpu 8xa100-80gb -- bash train.sh",
)
WHAT = Argument(
    "what",
    "a model as for 'memfit plan', or a training script whose arguments follow after '--'; without either, what "
    "follows after '--' is the whole command that starts the training",
    "MODEL|SCRIPT.py|-- COMMAND", many=True, command=True,
)  # fmt: skip
STEPS = Flag("steps", int, "Optimizer steps of a script to run. Default: 3.", "N")
ANSWER = Flag(
    "answer",
    str,
    "Defaults for values that a script reads from unknown data; see docs/trace.md.",
    "item=1,mask=true,...",
)
FULL = Flag(
    "full", bool, "Trace every block; by default blocks that repeat are traced a few times and unrolled.", default=False
)
HTML = Flag("html", str, "Write a timeline to open in a browser, without a network.", "FILE")
SNAPSHOT = Flag("snapshot", str, "Write a snapshot that pytorch.org/memory_viz opens.", "FILE")
FORCE = Flag("force", bool, "Overwrite files.", default=False)


@takes(
    *CARD, *HOST, *TASK, *DATA, FROM, IGNORE, FULL, STEPS, ANSWER, *trace_ranks.FLAGS, SAVE, SNAPSHOT, HTML, FORCE,
    *RECIPE, *COMMON, argument=WHAT,
)  # fmt: skip
def run(what: tuple[str, ...] = (), command: tuple[str, ...] = (), **flags: Any) -> int:
    """Run real training code on a virtual GPU.

    Runs a recipe's own trainer, a script of yours, or the command that starts it, on tensors that have shapes but no
    data: it loads, trains three steps, evaluates and saves. The verdict comes from replaying all allocations at the
    card's own capacity.
    """
    check(flags)
    if what and what[0].endswith(".py"):
        if not Path(what[0]).is_file():  # said before PyTorch is imported
            raise BadInput(f"{what[0]} does not exist", hint="paths are looked up from the current folder")
        return trace_script.run_script(what[0], [*what[1:], *command], flags)
    if command or (what and _starts(what[0])):
        return trace_script.run_command([*what, *command], flags)
    if len(what) > 1:
        raise BadInput(
            f"one model at a time, not {' and '.join(what[:3])}", hint="arguments go to scripts: train.py -- ..."
        )
    for name in ("steps", "answer", *(flag.name for flag in trace_ranks.FLAGS)):
        if flags[name] is not None:
            raise BadInput(
                f"--{name.replace('_', '-')} is for scripts", hint="memfit trace train.py --gpu l4 --steps 4"
            )
    return _run_recipe(what[0] if what else None, flags)


def _starts(word: str) -> bool:
    """Return whether a word is a program or a file that starts a training, not a model."""
    path = Path(word)
    return names_program(word) or (path.is_file() and path.suffix in ("", ".sh", ".bash", ".slurm", ".sbatch"))


def _run_recipe(model: str | None, flags: dict[str, Any]) -> int:
    from memfit.cli.request import exact_recipe, judged, read_request
    from memfit.cli.request_data import longest_batch, with_data

    flags = with_task(flags)
    request = read_request(model, flags)
    row = asked(flags, request.architecture, request.adopted)
    request = with_data(request, flags, row)
    shape = sized(
        shape_of(flags, row, request.adopted), row, request.architecture.name, request.dataset, flags, request.notes
    )
    if row.key != "sft":
        check_flags(flags, row, request.architecture, request.recipe)
        request.recipe = as_run(request.recipe, row, shape)
        request.notes += notes_on(row, request.adopted)
        request.wanted |= {"loss": request.recipe.loss}
    name = model_name(model, request)
    if row.sample == "pictures" and not obstacle():
        images = pictured(name, row.key, shape)
        given = "sequence_length" in {*request.wanted, *(request.adopted.stated if request.adopted else ())}
        text = request.lengths.longest if request.lengths else 0
        length = length_with(images, request.recipe.sequence_length, given, text)
        shape, request.recipe = replace(shape, image=images.size), request.recipe.but(sequence_length=length)
    if row.sample == "noise":
        shape = trained_size(name, shape)
    recipe = longest_batch(request, exact_recipe(request, flags["method"]))
    recipe = combinations.check(recipe, request.architecture, request.gpu)
    if reason := obstacle():
        return _by_formula(reason, model, flags)
    with terminal.progress() as tell:
        footprint, answer, tape, settings = traced(
            recipe, name, request, tell, full=flags["full"], task=row.key, shape=shape
        )
    assert answer.judgement is not None
    answer = replace(answer, judgement=judged(request, answer.judgement))
    terminal.notes(request.notes)
    _show(request, recipe, footprint, answer, settings, flags)
    _write(tape, request, flags, settings, answer)
    assert answer.judgement is not None
    return EXIT_OF[answer.judgement.verdict]


def _by_formula(reason: str, model: str | None, flags: dict[str, Any]) -> int:
    """Answer by the closed form on a machine that cannot trace."""
    for name in ("snapshot", "html"):
        if flags[name]:
            raise BadInput(f"{reason}, and --{name} needs a trace", hint="--save-tape, then memfit replay")
    terminal.note(f"{reason}: answered by formula, as memfit estimate does")
    return estimate.run(model, **flags, why=False)


def traced(
    recipe: Recipe, name: str, request: Request, tell: Progress, *, lean: bool = True, full: bool = False,
    task: str = "sft", shape: Shape = PLAIN, brief: bool = False,
) -> tuple[Footprint, Capacity, Tape, AllocSettings]:  # fmt: skip
    """Run a recipe of the model `name` on a virtual card without a limit, and replay its tape on the card in question.

    The verdict includes that on the host RAM, which is by formula: the tensors of a trace have no data on the host.
    It is left out for what no formula models. lean: no other recipe is traced in this process. full: trace every block,
    also those that repeat. brief: leave out what no verdict depends on, phases and the search for the smallest card.
    """
    from memfit.footprints.footprint_of_trace import footprint_of, judged

    check_trace()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # PyTorch reads it once; silences DDP's advice

    tape, answered = trace_recipe(
        recipe, hub.resolve_config(name), request.gpu, tell, lean=lean, full=full, shape=shape,
        task="" if task == "sft" else task, brief=brief,
    )  # fmt: skip
    torch, nccl = torch_version(tape.about["torch"]), nccl_bytes(recipe.num_gpus)
    settings = parse_alloc_conf(recipe.alloc_conf, torch)
    whole, part = replay(tape.events, settings=settings, torch=torch), judged(tape)
    known = None if whole.oom or whole.retries else whole.until(len(part.events))
    answer = capacity(part, settings, torch, request.gpu, request.reserve + nccl, tell, known, search=not brief)
    data = Path(request.dataset.path).name if request.dataset else ""
    footprint = footprint_of(
        tape,
        whole,
        *beliefs(tape, recipe, answered, data, TASKS[task], parts_of(whole)),
        request.gpu.context_bytes,
        nccl,
        answer,
    )
    answer = with_nccl(answer, nccl)
    assert answer.judgement is not None
    if apart(TASKS[task], request.architecture, recipe):
        return footprint, answer, tape, settings
    ram = {"given": request.host_memory, "workers": request.workers}
    judgement = with_host(answer.judgement, request.architecture, recipe, request.gpu, **ram)
    return footprint, replace(answer, judgement=judgement), tape, settings


def beliefs(
    tape: Tape,
    recipe: Recipe,
    answered: dict[str, int],
    data: str = "",
    row: Task = TASKS["sft"],
    parts: str = "",
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the assumptions of a trace, and what it leaves open. data: the file whose longest batch was traced."""
    used = ("torch", "transformers", "peft", "trl", *(["deepspeed"] if recipe.zero else []))
    packages = (f"{name} {tape.about[name]}" for name in used if name in tape.about)
    shown = f"2 of {recipe.accumulation} micro-steps traced" if recipe.accumulation > 2 else ""
    asked = f"values of tensors read {sum(answered.values())} times, answered by defaults" if answered else ""
    ranks = f"rank 0 of {recipe.num_gpus}" if recipe.num_gpus > 1 else ""
    hosted = "what is offloaded has room on the host" if recipe.offload != "none" else ""
    spread = (ranks, hosted)
    kernels = "flash-attn 2.8 stood in for: its buffers, no kernels" if recipe.attention == "flash" else ""
    by_card = tape.about.get("assumed", "").splitlines()
    depth = tape.about.get("depth", "")
    lengths = _lengths(recipe, data) if row.of_tokens else ""
    adapted = adapter(recipe.adapter).caveat if recipe.method != "full" else ""
    task = (parts if row.sample == "prompt" else "", lengths, row.caveat, adapted)
    assumed = (", ".join(packages), kernels, *task, shown, depth, *spread, *by_card, asked)
    unknown = ("context of your driver", "cuDNN's plan workspaces", *(["NCCL's buffers"] if ranks else []))
    return tuple(a for a in assumed if a), unknown


_PARTS = {GENERATION: "generation", WITHOUT_GRADIENTS: "log-probabilities of the reference"}


def parts_of(timeline: Timeline) -> str:
    """Return what the parts of a step allocate at most, where it is more than an update: 'generation 3.1 GiB, ...'."""
    most: dict[str, int] = {}
    for span in timeline.spans:
        if span.phase == "step":
            part = _PARTS.get(span.instant, "update")
            most[part] = max(most.get(part, 0), span.peak.allocated)
    return "allocated in a step: " + ", ".join(f"{part} {human(size)}" for part, size in most.items())


def _lengths(recipe: Recipe, data: str) -> str:
    """Describe the batch that was traced: the largest that can occur."""
    of = f", the longest of {data}" if data else ""
    if recipe.padding == "packing":
        return "packed rows, all of them full"
    if recipe.micro_batch == 1:
        return f"every sequence {recipe.sequence_length:,} tokens{of}"
    return f"batches padded to {recipe.sequence_length:,} tokens{of}"


def _show(
    request: Request,
    recipe: Recipe,
    footprint: Footprint,
    answer: Capacity,
    settings: AllocSettings,
    flags: dict[str, Any],
) -> None:
    assert answer.judgement is not None
    if flags["json"]:
        document = codec.trace_doc(request.architecture, recipe, request.gpu, footprint, answer)
        terminal.show_json(document)
        return

    row = asked(flags, request.architecture, request.adopted)
    shape = sized(shape_of(flags, row, request.adopted), row, request.architecture.name, request.dataset, flags, [])
    said = as_typed(row, shape, request.architecture)
    same = [request.architecture.name, *request.gpu_words, *machine_words(request, flags), *said, *as_flags(recipe)]
    commands = [shlex.join(["memfit", "trace", *same, "--save-tape", "run.tape.gz"])]
    if not apart(row, request.architecture, recipe):
        commands.append(shlex.join(["memfit", "estimate", *same, "--why"]))
    if answer.judgement.verdict == "not_judged":
        words = ["memfit", "trace", *same_file(flags, request), *request.gpu_words,
                 *typed(flags, (*CARD[2:], *HOST, *TASK, *RECIPE))]  # fmt: skip
        commands = [shlex.join(judging(words, request, answer.judgement))]
    elif answer.judgement.verdict != "fits" and request.adopted:
        words = ["memfit", "plan", *same_file(flags, request), *request.gpu_words]
        commands.insert(0, shlex.join([*words, *machine_words(request, flags)]))
    elif answer.judgement.verdict != "fits":
        commands.insert(0, shlex.join([*plan_of(request), *machine_words(request, flags), *said]))
    terminal.show(
        estimate_view(
            request.architecture, recipe, request.gpu, footprint, answer.judgement, commands, facts(answer, settings)
        )
    )


def _write(tape: Tape, request: Request, flags: dict[str, Any], settings: AllocSettings, answer: Capacity) -> None:
    assert answer.judgement is not None
    title = f"{request.architecture.title} on {request.gpu.name}"
    usable = answer.judgement.usable - nccl_bytes(request.recipe.num_gpus)
    write(tape, title, flags, settings, torch_version(tape.about["torch"]), usable, request.gpu)
    if flags["save_tape"]:
        terminal.note(f"next: memfit replay {Path(flags['save_tape'])} --gpu NAME")
