"""memfit plan: find the cheapest recipe that fits, show the ladder to it, and write the files to run it."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.cli import terminal
from memfit.cli.flags import AUTO, BATCH, CARD, COMMON, DATA, FROM, HOST, MODEL, OUT, SAVE, Flag, as_flags, takes, typed
from memfit.cli.terminal import EXIT_OF
from memfit.errors import BadInput, Refused

if TYPE_CHECKING:
    from memfit.cli.request import Request
    from memfit.frameworks.targets import Target
    from memfit.nouns.plan import Plan

EXAMPLES = (
    "memfit plan meta-llama/Llama-3.1-8B --gpu rtx-4090",
    "memfit plan Qwen/Qwen2.5-7B --gpu 8xh100 --method full --data train.jsonl",
    "memfit plan --from axolotl.yaml --gpu l40s --out run/ --target trl",
)
ANY = Flag("any_gpu", bool, "Also look for cheaper cards.", default=False)
TRACE = Flag("trace", bool, "Confirm the answer by a trace in a pipe, too; needs memfit[trace].", default=False)
NO_TRACE = Flag("no_trace", bool, "Do not confirm the answer by a trace.", default=False)


@takes(*CARD, *HOST, ANY, TRACE, NO_TRACE, BATCH, *DATA, FROM, *OUT, SAVE, *AUTO, *COMMON, argument=MODEL)
def run(model: str | None = None, **flags: Any) -> int:
    """Find the cheapest recipe that fits.

    Shows what each technique saves, and with --out writes the files that run the recipe. On a terminal, with
    memfit[trace] installed, the chosen recipe is then traced to confirm the answer.
    """
    from memfit.catalogue.cards import list_gpus
    from memfit.cli import confirm
    from memfit.cli.request import job_of, read_request, with_data
    from memfit.documents.output_files import check_free
    from memfit.planner import make_plan
    from memfit.virtual.supported import obstacle

    if flags["save_tape"]:
        check_free([Path(flags["save_tape"])], flags["force"])
    target = _target(flags)
    if target is not None and target.trainer and not (flags.get("trainer") or flags.get("from_")):
        flags["trainer"] = target.trainer
    request = with_data(read_request(model, flags), flags)
    job, base = job_of(request, flags)
    again = partial(make_plan, job, base=base, cards=list_gpus(), any_gpu=flags["any_gpu"])
    name, by_trace = model or (request.adopted.model if request.adopted else "") or "", confirm.wanted(flags)
    with terminal.progress() as tell:
        plan = again(progress=tell)
        if flags["trace"] and (reason := obstacle()):
            request.notes.append(f"{reason}: the formulas' answer, not confirmed")
        elif flags["trace"]:
            plan = confirm.confirmed(plan, name, request, lambda known: again(known=known), tell)
    for line in request.notes:
        terminal.note(line)
    _show(plan, request, flags)
    if by_trace and not flags["trace"]:
        before, plan = plan, confirm.at_leisure(plan, name, request, lambda known: again(known=known))
        if (plan.recipe, plan.judgement.verdict) != (before.recipe, before.judgement.verdict):
            _show(plan, request, flags)
    if flags["save_tape"]:
        from memfit.cli.estimate import save_tape

        save_tape(flags["save_tape"], flags["force"], request.architecture, plan.recipe, job.gpu)
    if flags.get("out"):
        assert target is not None
        _write(plan, target.key, Path(flags["out"]), flags["force"])
    return EXIT_OF[plan.judgement.verdict]


def _target(flags: dict[str, Any]) -> Target | None:
    """Return the export target after checking its folder; None without --out."""
    if not flags.get("out"):
        if flags.get("target") or (flags.get("force") and not flags["save_tape"]):
            raise BadInput("--target and --force need --out", hint="--out run/ --target trl")
        return None
    from memfit.frameworks.targets import check_free, target
    from memfit.tables.trainers import script_of

    check_free(Path(flags["out"]), ["recipe.toml"], flags["force"])  # every target writes it
    return target(flags.get("target") or script_of(str(flags.get("trainer"))))


def _show(plan: Plan, request: Request, flags: dict[str, Any]) -> None:
    from memfit.report.plan import chosen_index

    if flags["json"]:
        from memfit.documents import codec

        terminal.show_json(codec.plan_doc(plan, chosen_index(plan)))
        return
    from memfit.report.plan import plan_view

    terminal.show(plan_view(plan, next_commands(plan, request, flags)))


def next_commands(plan: Plan, request: Request, flags: dict[str, Any]) -> list[str]:
    """Return the commands to type next."""
    model, card = plan.job.architecture.name, list(request.gpu_words)
    same = typed(flags, (*CARD[2:], *HOST, BATCH, *AUTO))
    why = ["memfit", "estimate", model, *card, *typed(flags, (*CARD[2:], *HOST)), *as_flags(plan.recipe), "--why"]
    measured = plan.job.longest_sample is not None and flags.get("sequence_length") is None
    length = ["--sequence-length", str(plan.job.sequence_length)] if measured else []
    techniques = ["memfit", "techniques", model, *card, *same, *length]
    if plan.judgement.verdict == "misfit":
        return [shlex.join(techniques), shlex.join(why)]
    from memfit.tables.trainers import script_of

    folder = ["--out", "run/", "--target", script_of(plan.recipe.trainer)]
    files = ["memfit", "plan", model, *card, *same, *typed(flags, (*DATA, FROM)), *folder]
    if flags.get("out"):
        data = [] if plan.job.dataset else ["--data", "train.jsonl"]
        files = ["memfit", "train", str(Path(flags["out"]) / "recipe.toml"), *data]
    return [shlex.join(words) for words in (files, why, techniques)]


def _write(plan: Plan, target: str, folder: Path, force: bool) -> None:
    from memfit.frameworks.targets import export, notes, write

    if plan.judgement.verdict == "misfit" and not force:
        raise Refused("nothing fits, so no files were written", hint="add --force to write the closest recipe")
    for path in write(export(plan, target), folder, force):
        terminal.note(f"wrote {path}")
    for line in notes(plan):
        terminal.note(line)
