"""memfit export: write a recipe.toml as another framework's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memfit.cli import terminal
from memfit.cli.flags import COMMON, OUT, Argument, Flag, takes
from memfit.errors import BadInput, Refused

EXAMPLES = ("memfit export run/recipe.toml --target axolotl --out run-axolotl/",)
GPU = Flag("gpu", str, "A card instead of the one the recipe was planned for.", "NAME")


@takes(GPU, *OUT, *COMMON, argument=Argument("file", "a recipe.toml", "RECIPE", required=True))
def run(file: str, **flags: Any) -> int:
    """Write a recipe as another framework's files."""
    from memfit.cli.request import check_judged
    from memfit.frameworks.recipe_toml import plan_of_file
    from memfit.frameworks.targets import export, notes, target, write

    row = target(flags.get("target") or "trl")
    if not flags.get("out"):
        raise BadInput("--out is needed", hint=f"memfit export {file} --target {row.key} --out run-{row.key}/")
    plan = plan_of_file(Path(file), flags.get("gpu") or "")
    check_judged(plan.judgement, flags["force"])
    if plan.judgement.verdict == "misfit" and not flags["force"]:
        raise Refused(
            f"this recipe does not fit the {plan.job.gpu.name}",
            hint="--force writes it anyway; memfit plan finds one that fits",
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
