"""memfit plan: find the cheapest recipe that fits, show the ladder to it, and write the files to run it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.catalogue.cards import list_gpus, prices_read
from memfit.cli import confirm, plan_of_task, task_flags, terminal
from memfit.cli.flags import (
    AUTO,
    BATCH,
    CARD,
    COMMON,
    DATA,
    FROM,
    HOST,
    IGNORE,
    MODEL,
    OUT,
    SAVE,
    TARGET,
    TASK,
    Flag,
    as_flags,
    takes,
    typed,
)
from memfit.cli.request import (
    Request,
    card_named,
    cards_of,
    check_judged,
    job_of,
    judged_plan,
    judging,
    machine_words,
    model_name,
    on_card,
    read_request,
    same_file,
    text_alone,
)
from memfit.cli.request_data import with_data
from memfit.cli.terminal import EXIT_OF
from memfit.errors import BadInput, Unsupported
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Job
from memfit.nouns.plan import Alternative, Plan
from memfit.planner import make_plan
from memfit.planner.search import Known, Writable
from memfit.tables.trainers import target_of
from memfit.virtual.supported import obstacle

if TYPE_CHECKING:
    from memfit.frameworks.targets import Target

EXAMPLES = (
    "memfit plan meta-llama/Llama-3.1-8B --gpu rtx-4090",
    "memfit plan Qwen/Qwen2.5-7B --gpu 8xh100 --method full --data train.jsonl",
    "memfit plan --from axolotl.yaml --gpu l40s --out run/ --target trl",
    "memfit plan Qwen/Qwen3-8B --any-gpu",
)
ANY = Flag("any_gpu", bool, "Look for cheaper cards; without --gpu, for the cheapest of all.", default=False)
COUNTS = (1, 2, 4, 8)  # numbers of cards tried without --gpu, until some card fits
LISTED = 8  # cards in the answer without --gpu
TRACE = Flag("trace", bool, "Confirm the answer by a trace in a pipe, too; needs memfit[trace].", default=False)
HTML = Flag("html", str, "Write the answer as one page to open in a browser, without a network.", "FILE")
NO_TRACE = Flag("no_trace", bool, "Do not confirm the answer by a trace.", default=False)


@takes(
    *CARD,
    *HOST,
    ANY,
    TRACE,
    NO_TRACE,
    *TASK,
    BATCH,
    *DATA,
    FROM,
    IGNORE,
    *OUT,
    SAVE,
    HTML,
    *AUTO,
    *COMMON,
    argument=MODEL,
)
def run(model: str | None = None, **flags: Any) -> int:
    """Find the cheapest recipe that fits.

    Shows what each technique saves, and with --out writes the files that run the recipe. On a terminal, with
    memfit[trace] installed, the chosen recipe is then traced to confirm the answer.
    """
    terminal.check_files(flags, "save_tape", "html")
    flags = task_flags.with_task(flags)
    target = _target(flags)
    _train_as(target, flags)
    anywhere = flags["any_gpu"] and not card_named(flags)
    request = read_request(model, {**flags, "gpu": _priced()[-1].short} if anywhere else flags)
    name = model_name(model, request)
    row = task_flags.asked(flags, request.architecture, request.adopted)
    task_flags.shape_of(flags, row, request.adopted)
    what = (row, request.architecture, request.recipe, flags.get("method"))
    if task_flags.apart(*what):
        task_flags.check_flags(
            {**flags, "any_gpu": anywhere}, row, request.architecture, request.recipe, task_flags.needs_trace(*what)
        )
        plan = plan_of_task.plan(with_data(request, flags, row), row, name, flags)
        plan_of_task.show(plan, request, flags)
        terminal.write_file(flags, "html", lambda: _page(plan))
        if flags["out"]:
            own = plan_of_task.revises(request, flags)
            target = None if own else plan_of_task.target_of(row, plan.recipe, flags)
            _write(plan, target, request, Path(flags["out"]), flags["force"])
        return EXIT_OF[plan.judgement.verdict]
    task_flags.check_target(flags.get("target"), row)
    request = with_data(request, flags)
    traced_too = confirm.wanted(flags) and not request.not_understood
    with terminal.progress() as tell:
        others: Sequence[Alternative] | None = None
        if anywhere:
            request, others = _cheapest(request, flags, target, tell)
        again = planning(request, flags, others, target)
        plan = again(progress=tell)
        if flags["trace"] and (reason := obstacle()):
            request.notes.append(f"{reason}: the formulas' answer, not confirmed")
        elif flags["trace"] and traced_too:
            plan = confirm.confirmed(plan, name, request, lambda known: again(known=known), tell)
    plan = judged_plan(request, plan)
    terminal.notes(request.notes)
    _show(plan, request, flags)
    if traced_too and not flags["trace"]:
        before, plan = plan, confirm.at_leisure(plan, name, request, lambda known: again(known=known))
        if (plan.recipe, plan.judgement.verdict) != (before.recipe, before.judgement.verdict):
            _show(plan, request, flags)
    terminal.write_file(flags, "html", lambda: _page(plan))
    if flags["save_tape"]:
        from memfit.cli.estimate import save_tape

        save_tape(flags["save_tape"], flags["force"], request.architecture, plan.recipe, request.gpu)
    if flags.get("out"):
        _write(plan, target, request, Path(flags["out"]), flags["force"])
    return EXIT_OF[plan.judgement.verdict]


def planning(
    request: Request, flags: dict[str, Any], others: Sequence[Alternative] | None, target: Target | None
) -> Callable[..., Plan]:
    """Return a function that makes the plan, with the duration on the user's data and the day of the prices.

    others: the next cheapest cards where the card was chosen by price; None: the user named the card. target: what the
    plan is written for, if anything.
    """
    job, base = job_of(request, flags)
    fixed: dict[str, Any] = {"base": base, "cards": list_gpus(), "any_gpu": flags["any_gpu"] and others is None}
    express = _express(request, flags, target, job)

    def again(known: Known | None = None, progress: Callable[[str, float], None] | None = None) -> Plan:
        plan = _made(job, express, bool(flags.get("out")), known=known, progress=progress, **fixed)
        if others:
            note = f"the {job.gpu.name} is the cheapest per step of the priced cards that would do; the next are below"
            plan = replace(plan, alternatives=tuple(others[:LISTED]), notes=(*plan.notes, note))
        if request.dataset is not None and plan.judgement.verdict != "misfit":
            from memfit.planner.cost import duration

            plan = replace(plan, duration=duration(plan, request.dataset.lengths))
        return replace(plan, prices_read=prices_read())

    return again


def plan_shown(request: Request, flags: dict[str, Any], target: Target | None) -> Plan:
    """Return the plan that `memfit plan` shows for the same flags, without --out or written for a target."""
    job, base = job_of(request, flags)
    return _made(job, _express(request, flags, target, job), must=target is not None, base=base)


def named_target(flags: dict[str, Any]) -> Target | None:
    """Return the target that --target names, and let its trainer train."""
    from memfit.frameworks.targets import target

    found = target(flags["target"]) if flags["target"] else None
    _train_as(found, flags)
    return found


def _train_as(target: Target | None, flags: dict[str, Any]) -> None:
    """Set --trainer to that of a target, unless flags or a file name one."""
    if target is not None and target.trainer and not (flags.get("trainer") or flags.get("from_")):
        flags["trainer"] = target.trainer


def _made(job: Job, express: Writable | None, must: bool, **words: Any) -> Plan:
    """Return the best plan that files can express; unless they `must`, any plan where they can express none."""
    try:
        return make_plan(job, writable=express, **words)
    except Unsupported:
        if must or express is None:
            raise
        return make_plan(job, **words)


def _express(request: Request, flags: dict[str, Any], target: Target | None, job: Job) -> Writable | None:
    """Return a test of what can be written; None where nothing is, and the trainer's script expresses any plan."""
    scripted = job.trainer.partition("==")[0] in ("trl", "transformers", "torch") and request.adopted is None
    if scripted and target is None and not flags.get("out"):
        return None
    from memfit.frameworks.targets import writable

    return writable(job, key_of(target, request, job.trainer), request.adopted)


def _priced() -> list[Gpu]:
    """Return the cards that have a price, the smallest memory first."""
    return sorted((g for g in list_gpus() if g.price_per_hour is not None), key=lambda g: g.total_bytes)


def _cheapest(
    request: Request, flags: dict[str, Any], target: Target | None, tell: Callable[[str, float], None]
) -> tuple[Request, list[Alternative]]:
    """Return the request on the card whose optimizer step costs least, and the other cards that fit, by that cost.

    With no number of cards given, several are tried where no single one fits. If nothing fits, it is the card with the
    most memory.
    """
    from memfit.planner.hardware import by_price_per_step

    counts = (request.recipe.num_gpus,) if request.recipe.num_gpus > 1 or "num_gpus" in request.wanted else COUNTS
    for count in counts:
        there = [on_card(request, gpu, count) for gpu in _priced()]
        jobs = [job_of(one, flags) for one in there]
        found = by_price_per_step(jobs, tell, _express(there[0], flags, target, jobs[0][0]))
        if found:
            best, _ = found[0]
            return on_card(request, there[best].gpu, count), [option for _, option in found[1:]]
    return there[-1], []


def _target(flags: dict[str, Any]) -> Target | None:
    """Return the export target after checking its folder; None without --out, and for the framework of a file."""
    if not flags.get("out"):
        if flags.get("target") or (flags.get("force") and not (flags["save_tape"] or flags["html"])):
            raise BadInput(
                "--target and --force need --out", hint=f"--out run/ --target {flags.get('target') or 'trl'}"
            )
        return None
    from memfit.frameworks.targets import check_free, target

    check_free(Path(flags["out"]), ["recipe.toml"], flags["force"])  # every target writes it
    if flags.get("from_") and not flags.get("target"):
        return None
    return target(flags.get("target") or target_of(str(flags.get("trainer"))))


def _show(plan: Plan, request: Request, flags: dict[str, Any]) -> None:
    if flags["json"]:
        from memfit.documents import codec

        terminal.show_json(codec.plan_doc(plan))
        return
    from memfit.report.plan import plan_view

    terminal.show(plan_view(plan, next_commands(plan, request, flags)))


def _page(plan: Plan) -> bytes:
    """Return the answer as a page of its own."""
    from memfit.cli.html_answer import plan_page

    return plan_page(plan)


def next_commands(plan: Plan, request: Request, flags: dict[str, Any]) -> list[str]:
    """Return the commands to type next."""
    model, card = plan.job.architecture.name, list(request.gpu_words)
    machine = machine_words(request, flags)
    same, alone = [*machine, *typed(flags, (BATCH, *AUTO))], text_alone(plan.job.architecture)
    used = cards_of(request, plan.recipe.num_gpus)
    why = ["memfit", "estimate", model, *used, *machine, *as_flags(plan.recipe), "--why"]
    measured = plan.job.longest_sample is not None and flags.get("sequence_length") is None
    length = ["--sequence-length", str(plan.job.sequence_length)] if measured else []
    named = typed(flags, (TARGET,)) if flags.get("out") else []
    techniques = ["memfit", "techniques", model, *card, *same, *length, *typed(flags, (FROM, IGNORE)), *named]
    if plan.judgement.verdict == "not_judged":
        words = ["memfit", "plan", *same_file(flags, request), *alone, *card, *same]
        return [shlex.join(judging(words, request, plan.judgement))]
    if plan.judgement.verdict == "misfit":
        return [shlex.join(techniques), shlex.join(why)]
    if plan.recipe.context_parallel > 1 or plan.job.task != "sft":  # no target writes it
        return [shlex.join(why), shlex.join(techniques)]

    folder = ["--out", "run/", *([] if flags.get("from_") else ["--target", target_of(plan.recipe.trainer)])]
    files = ["memfit", "plan", model, *alone, *card, *same, *typed(flags, (*DATA, FROM, IGNORE)), *folder]
    if flags.get("out"):
        files = _after_writing(plan, request, flags)
    return [shlex.join(words) for words in (files, why, techniques)]


def _after_writing(plan: Plan, request: Request, flags: dict[str, Any]) -> list[str]:
    """Return the command that trains what was written, or that reads back the user's own file."""
    from memfit.frameworks.targets import own_file

    folder, adopted = Path(flags["out"]), request.adopted
    own = own_file(adopted) if adopted and not flags.get("target") else ""
    if own and adopted and adopted.model:
        return ["memfit", "estimate", "--from", str(folder / own), *request.gpu_words, *machine_words(request, flags),
                *typed(flags, (IGNORE,))]  # fmt: skip
    data = [] if plan.job.dataset else ["--data", "train.jsonl"]
    return ["memfit", "train", str(folder / "recipe.toml"), *data]


def key_of(target: Target | None, request: Request, trainer: str) -> str:
    """Return the target to write: the one named, else the framework of the user's file, else the trainer's script."""
    from memfit.frameworks.targets import own_target

    return target.key if target else own_target(request.adopted) if request.adopted else target_of(trainer)


def _write(plan: Plan, target: Target | None, request: Request, folder: Path, force: bool) -> None:
    from memfit.frameworks.targets import exported, write

    misfit = "nothing fits, so no files were written"
    check_judged(plan.judgement, force, misfit, "add --force to write the closest recipe")
    adopted = request.adopted
    made = exported(plan, key_of(target, request, plan.recipe.trainer), adopted, folder)
    for path in write(made.files, folder, force):
        terminal.note(f"wrote {path}")
    terminal.notes(made.notes)
    if adopted is not None and adopted.source is not None:
        terminal.note(f"start it with: {made.command}")
