"""memfit estimate: compute the footprint of one recipe as given, and with --why the arithmetic."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from memfit.cli import terminal
from memfit.cli.flags import CARD, COMMON, FROM, HOST, IGNORE, MODEL, RECIPE, SAVE, TASK, Flag, as_flags, takes, typed
from memfit.cli.one_recipe import counted, without_images
from memfit.cli.request import (
    Request,
    exact_recipe,
    judged,
    judging,
    machine_words,
    model_name,
    plan_of,
    read_request,
    same_file,
)
from memfit.cli.task_flags import as_typed, asked, shape_of, with_task
from memfit.cli.terminal import EXIT_OF
from memfit.closed_form.run.account import Account
from memfit.closed_form.run.timeline import recorded
from memfit.documents.output_files import write_files
from memfit.nouns.architecture import Architecture
from memfit.nouns.footprint import Footprint
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Judgement
from memfit.tables import combinations

EXAMPLES = (
    "memfit estimate Qwen/Qwen2.5-7B --gpu h100 --checkpointing full",
    "memfit estimate Qwen/Qwen2.5-7B --gpu rtx-4090 --method qlora --why",
)
WHY = Flag("why", bool, "Show every formula with its numbers, and the tensors at the worst instant.", default=False)
HTML = Flag("html", str, "Write the answer as one page to open in a browser, without a network.", "FILE")
FORCE = Flag("force", bool, "Overwrite the files of --save-tape and --html.", default=False)


@takes(*CARD, *HOST, FROM, IGNORE, WHY, SAVE, HTML, FORCE, *TASK, *RECIPE, *COMMON, argument=MODEL)
def run(model: str | None = None, **flags: Any) -> int:
    """Estimate the memory of one recipe."""
    terminal.check_files(flags, "save_tape", "html")
    flags = with_task(flags)
    request = read_request(model, flags)
    asking, plain = without_images(flags, request.architecture), request.architecture
    row = asked(asking, plain, request.adopted)
    said = as_typed(row, shape_of(asking, row, request.adopted), plain)
    request = counted(request, row, model_name(model, request), flags)
    if row.key == "sft" and plain.task == "multimodal":
        request.notes.append("counted on text alone: --images 1 adds an image to each")
    recipe = combinations.check(exact_recipe(request, flags["method"]), request.architecture, request.gpu)
    footprint, on_card = request.judged_run(recipe)
    judgement = judged(request, on_card)
    terminal.notes(request.notes)
    _show(request, recipe, footprint, judgement, flags, said)

    def page() -> bytes:
        from memfit.cli.html_answer import recipe_page

        return recipe_page(request.architecture, recipe, request.gpu, footprint, judgement)

    terminal.write_file(flags, "html", page)
    if flags["save_tape"]:
        save_tape(flags["save_tape"], flags["force"], request.architecture, recipe, request.gpu)
    return EXIT_OF[judgement.verdict]


def save_tape(path: str, force: bool, architecture: Architecture, recipe: Recipe, gpu: Gpu) -> None:
    """Write the tape of a recipe's run, computed by formula."""
    from memfit.documents.tape_file import dumps

    write_files({Path(path): dumps(recorded(Account(architecture, recipe, gpu)))}, force)
    terminal.note(f"wrote {path} (see: memfit replay {path})")


def _show(
    request: Request, recipe: Recipe, footprint: Footprint, judgement: Judgement, flags: dict[str, Any], said: list[str]
) -> None:
    from memfit.closed_form.why import explain, tensors_at

    account = Account(request.architecture, recipe, request.gpu)
    why = explain(account, footprint.peak) if flags["why"] else None
    if flags["json"]:
        from memfit.documents import codec

        tensors = {peak.phase: tensors_at(account, peak) for peak in footprint.phases} if why else {}
        terminal.show_json(
            codec.estimate_doc(request.architecture, recipe, request.gpu, footprint, judgement, why, tensors)
        )
        return
    from memfit.report.estimate import estimate_view

    same = [request.architecture.name, *request.gpu_words, *machine_words(request, flags), *said, *as_flags(recipe)]
    commands = [] if why else [shlex.join(["memfit", "estimate", *same, "--why"])]
    commands.append(shlex.join([*plan_of(request), *said, *machine_words(request, flags)]))
    if judgement.verdict == "not_judged":
        words = [
            "memfit",
            "estimate",
            *same_file(flags, request),
            *request.gpu_words,
            *typed(flags, (*CARD[2:], *HOST, *TASK, *RECIPE)),
        ]
        commands = [shlex.join(judging(words, request, judgement))]
    terminal.show(estimate_view(request.architecture, recipe, request.gpu, footprint, judgement, commands))
    if why:
        from memfit.report.estimate import why_view

        terminal.show("")
        terminal.show(why_view(why))
