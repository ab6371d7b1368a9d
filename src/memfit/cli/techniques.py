"""memfit techniques: compute every technique of the ladder for one run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memfit.cli import terminal
from memfit.cli.flags import AUTO, BATCH, CARD, COMMON, FROM, HOST, IGNORE, MODEL, TARGET, takes
from memfit.cli.one_recipe import check_task
from memfit.cli.plan import named_target, plan_shown
from memfit.cli.request import job_of, judged_plan, read_request
from memfit.documents import codec
from memfit.errors import EXIT_NOT_JUDGED
from memfit.frameworks.targets import frameworks_of
from memfit.nouns.plan import withheld_rung
from memfit.planner import left_out, techniques
from memfit.report.plan import techniques_view

EXAMPLES = ("memfit techniques meta-llama/Llama-3.1-8B --gpu rtx-4090",)


@takes(*CARD, *HOST, BATCH, FROM, IGNORE, TARGET, *AUTO, *COMMON, argument=MODEL)
def run(model: str | None = None, **flags: Any) -> int:
    """Show what each technique saves in this run.

    Also shows what it costs in quality, and the setting that turns it on in each framework, or in those that --target
    writes files for.
    """
    target = named_target(flags)
    request = read_request(model, flags)
    check_task(request.architecture)
    job, base = job_of(request, flags)
    rungs = tuple(withheld_rung(rung, request.not_understood) for rung in techniques(job, base))
    if target is not None:
        written = frameworks_of(target, job.trainer)
        rungs = tuple(replace(r, flags={key: r.flags[key] for key in written if key in r.flags}) for r in rungs)
    plan = judged_plan(request, plan_shown(request, flags, target))
    for line in request.notes:
        terminal.note(line)
    code = EXIT_NOT_JUDGED if any(rung.judgement.verdict == "not_judged" for rung in rungs) else 0
    if flags["json"]:
        terminal.show_json(codec.techniques_doc(plan, rungs, left_out(job, base)))
        return code

    terminal.show(techniques_view(plan, rungs, left_out(job, base)))
    return code
