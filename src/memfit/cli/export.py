"""memfit export: a recipe.toml as files for another framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memfit.cli import terminal
from memfit.cli.flags import COMMON, OUT, Argument, Flag, takes
from memfit.errors import BadInput, Refused
from memfit.plan import Plan

EXAMPLES = ("memfit export run/recipe.toml --target axolotl --out run-axolotl/",)
GPU = Flag("gpu", str, "Another card than the one the recipe was planned for.", "NAME")


@takes(GPU, *OUT, *COMMON, argument=Argument("file", "a recipe.toml", "RECIPE", required=True))
def run(file: str, **flags: Any) -> int:
    """Write a recipe as another framework's files."""
    from memfit.export import export, notes, target, write

    if not flags.get("out"):
        raise BadInput("--out is missing", hint=f"memfit export {file} --target trl --out run/")
    row = target(flags.get("target") or "trl")
    plan = plan_of_file(Path(file), flags.get("gpu") or "")
    if plan.judgement.verdict == "misfit" and not flags["force"]:
        raise Refused(
            f"this recipe does not fit the {plan.job.gpu.name}",
            hint="--force writes it all the same; memfit plan finds one that fits",
        )
    paths = write(export(plan, row.key), Path(flags["out"]), flags["force"])
    if plan.judgement.verdict != "fits":
        terminal.note(
            f"this recipe is {plan.judgement.verdict} on the {plan.job.gpu.name}: see memfit estimate --from {file}"
        )
    for line in notes(plan):
        terminal.note(line)
    if flags["json"]:
        terminal.show_json(
            {
                "schema": "memfit.export/1",
                "target": row.key,
                "files": [str(p) for p in paths],
                "command": row.command(plan),
            }
        )
        return 0
    for path in paths:
        print(path)
    terminal.note(f"start it with: {row.command(plan)}")
    return 0


def plan_of_file(path: Path, gpu: str) -> Plan:
    """A recipe.toml as a plan without a ladder: its recipe is the answer, judged again on its card."""
    from memfit import recipe_file
    from memfit.cards import parse_gpu
    from memfit.formula.estimate import estimate
    from memfit.hub import resolve_model
    from memfit.job import Job
    from memfit.verdicts import judge

    file = recipe_file.read(path)
    if not (gpu or file.gpu):
        raise BadInput(f"{path} names no GPU", hint="add --gpu rtx-4090")
    card, _ = parse_gpu(gpu or file.gpu)
    architecture, recipe = resolve_model(file.model), file.recipe
    footprint = estimate(architecture, recipe, card)
    job = Job(
        architecture=architecture, gpu=card, num_gpus=recipe.num_gpus, sequence_length=recipe.sequence_length,
        effective_batch=file.effective_batch or recipe.effective_batch, method=recipe.method, trainer=recipe.trainer,
        longest_sample=file.longest_sample or None, dataset=file.data,
    )  # fmt: skip
    return Plan(job, recipe, footprint, judge(footprint, card), ())
