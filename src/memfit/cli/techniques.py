"""memfit techniques: compute every technique of the ladder for one run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memfit.cli import plan_of_task, task_flags, terminal
from memfit.cli.flags import AUTO, BATCH, CARD, COMMON, FROM, HOST, IGNORE, MODEL, TARGET, TASK, takes
from memfit.cli.plan import named_target, plan_shown
from memfit.cli.request import Request, job_of, judged_plan, model_name, read_request
from memfit.documents import codec
from memfit.errors import EXIT_NOT_JUDGED
from memfit.frameworks.targets import Target, frameworks_of
from memfit.frameworks.targets import target as target_named
from memfit.nouns.plan import Plan, Rung, withheld_rung
from memfit.nouns.task import Task
from memfit.planner import left_out, techniques
from memfit.report.plan import techniques_view

EXAMPLES = (
    "memfit techniques meta-llama/Llama-3.1-8B --gpu rtx-4090",
    "memfit techniques openai/whisper-small --task speech --gpu t4",
)


@takes(*CARD, *HOST, *TASK, BATCH, FROM, IGNORE, TARGET, *AUTO, *COMMON, argument=MODEL)
def run(model: str | None = None, **flags: Any) -> int:
    """Show what each technique saves in this run.

    Also shows what it costs in quality, and the setting that turns it on in each framework, or in those that --target
    writes files for.
    """
    flags = task_flags.with_task(flags)
    target = named_target(flags)
    request = read_request(model, flags)
    row = task_flags.asked(flags, request.architecture, request.adopted)
    task_flags.shape_of(flags, row, request.adopted)
    plan, rungs, absent = _answer(request, row, model_name(model, request), flags, target)
    rungs = tuple(withheld_rung(rung, request.not_understood) for rung in rungs)
    if target is not None or row.key != "sft":
        scripts = row.sample == "noise"  # diffusers' scripts have options of their own
        written = () if scripts else frameworks_of(target or target_named(row.target), plan.job.trainer)
        rungs = tuple(replace(r, flags={key: r.flags[key] for key in written if key in r.flags}) for r in rungs)
    terminal.notes(request.notes)
    code = EXIT_NOT_JUDGED if any(rung.judgement.verdict == "not_judged" for rung in rungs) else 0
    if flags["json"]:
        terminal.show_json(codec.techniques_doc(plan, rungs, absent))
        return code

    terminal.show(techniques_view(plan, rungs, absent))
    return code


def _answer(
    request: Request, row: Task, name: str, flags: dict[str, Any], target: Target | None
) -> tuple[Plan, tuple[Rung, ...], tuple[str, ...]]:
    """Return the plan that `memfit plan` shows for the same flags, its techniques, and notes on those left out."""
    what = (row, request.architecture, request.recipe, flags.get("method"))
    if task_flags.apart(*what):
        task_flags.check_flags(flags, row, request.architecture, request.recipe, task_flags.needs_trace(*what))
        flags = {**flags, "out": flags["target"], "any_gpu": False}
        return plan_of_task.plan_and_techniques(request, row, name, flags)
    task_flags.check_target(flags["target"], row)
    job, base = job_of(request, flags)
    return judged_plan(request, plan_shown(request, flags, target)), techniques(job, base), left_out(job, base)
