"""memfit export: write a recipe.toml, or the recipe of another framework's file, as files of a framework."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.cli import terminal
from memfit.cli.flags import COMMON, FROM, IGNORE, OUT, Argument, Flag, takes, typed
from memfit.cli.request import check_judged, exact_recipe, judged, read_request
from memfit.documents.recipe_file import in_folder
from memfit.errors import BadInput, Unsupported
from memfit.frameworks.reading import adopt
from memfit.frameworks.recipe_toml import plan_of_file, plan_of_recipe
from memfit.frameworks.targets import TARGETS, exported, own_target, target, write

if TYPE_CHECKING:
    from memfit.frameworks.keys import Adopted
    from memfit.frameworks.targets import Written
    from memfit.nouns.plan import Plan

EXAMPLES = (
    "memfit export run/recipe.toml --target axolotl --out run-axolotl/",
    "memfit export --from axolotl.yaml --gpu h100 --target trl --out run-trl/",
    "memfit export run/recipe.toml --from axolotl.yaml --out run-axolotl/",
)
GPU = Flag("gpu", str, "A card instead of the one the recipe was planned for.", "NAME")


@takes(GPU, FROM, IGNORE, *OUT, *COMMON, argument=Argument("file", "a recipe.toml", "RECIPE"))
def run(file: str | None = None, **flags: Any) -> int:
    """Write a recipe as another framework's files.

    With --from the recipe is that of the file, unless a recipe.toml is given as well. For the framework of the file,
    the default, the file itself is written with the recipe's values.
    """
    given = flags["from_"]
    if not (file or given):
        raise BadInput("a recipe.toml or --from FILE is needed", hint=EXAMPLES[0])
    adopted = adopt(Path(given)) if given else None
    key = target(flags["target"]).key if flags["target"] else own_target(adopted) if adopted else "trl"
    if not flags["out"]:
        named = [*([file] if file else []), *typed(flags, (FROM,)), *(["--target", key] if key in TARGETS else [])]
        raise BadInput("--out is needed", hint=shlex.join(["memfit", "export", *named, "--out", f"run-{key}/"]))
    if file:
        plan = plan_of_file(in_folder(Path(file)), flags["gpu"] or "", flags["ignore"])
    else:
        request = read_request(None, flags)
        adopted = request.adopted
        assert adopted is not None
        plan = plan_of_recipe(exact_recipe(request, None), request.architecture, request.gpu, adopted)
        plan = replace(plan, judgement=judged(request, plan.judgement))
        terminal.notes(request.notes)
    card = plan.job.gpu.name
    hint = "--force writes it anyway; memfit plan finds one that fits"
    check_judged(plan.judgement, flags["force"], f"this recipe does not fit the {card}", hint)
    made = _exported(plan, key, adopted, file or given, Path(flags["out"]))
    paths = write(made.files, Path(flags["out"]), flags["force"])
    if plan.judgement.verdict != "fits":
        verdict = plan.judgement.verdict.replace("_", " ")
        terminal.note(f"this recipe is {verdict} on the {card}: see memfit estimate --from {file or given}")
    terminal.notes((*(plan.notes if file else ()), *made.notes))
    if flags["json"]:
        files = [str(path) for path in paths]
        terminal.show_json({"schema": "memfit.export/1", "target": key, "files": files, "command": made.command})
        return 0
    for path in paths:
        print(path)
    terminal.note(f"start it with: {made.command}")
    return 0


def _exported(plan: Plan, key: str, adopted: Adopted | None, file: str, folder: Path) -> Written:
    """Return the files of a target; what it refuses of the recipe, another plan of the same file can change."""
    try:
        return exported(plan, key, adopted, folder)
    except Unsupported as refused:
        flags, *targets = (way.strip() for way in re.split(r",? or (?=--target)", refused.hint))
        if not flags.startswith("--") or flags.startswith("--target"):
            raise
        to = f" --target {key}" if key in TARGETS else ""
        again = f"memfit plan --from {file}{to} --out run-{key}/ {flags}"
        raise Unsupported(refused.message, hint=", or ".join([again, *targets])) from None
