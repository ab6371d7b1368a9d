"""The files of a plan, as the page offers them: packed for a download, or written into a folder that the user typed."""

from __future__ import annotations

import base64
import io
import zipfile
from pathlib import Path

from memfit.cli.page_question import Found, Tell, by_formula, model_of, read_question
from memfit.errors import BadInput


def _made(question: dict[str, str], tell: Tell) -> dict[str, str]:
    """Return the files that --out writes, by name."""
    from memfit.cli import plan_of_task, task_flags
    from memfit.cli.plan import key_of
    from memfit.errors import Refused
    from memfit.frameworks.targets import exported

    if "config" in question:
        raise BadInput("a dropped config.json has no weights to train", hint="name a model of the Hub, or a folder")
    with model_of(question) as name:
        flags, request, row = read_question(question, name)
        if task_flags.apart(row, request.architecture, request.recipe, flags["method"]):
            plan = plan_of_task.plan(request, row, name, {**flags, "out": "run"}, tell)
            key = plan_of_task.target_of(row, plan.recipe, flags).key
        else:
            plan = by_formula({**flags, "out": "run"}, request)
            key = key_of(None, request, plan.recipe.trainer)
        if plan.judgement.verdict == "misfit":
            raise Refused("nothing fits, so there are no files to run", hint="take a larger card or a smaller model")
        return exported(plan, key).files


def packed(question: dict[str, str], tell: Tell) -> Found:
    """Return the files of a plan as a zip in base64."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in _made(question, tell).items():
            archive.writestr(zipfile.ZipInfo(f"memfit-run/{name}"), text)  # the same files give the same bytes
    return {"zip": base64.b64encode(buffer.getvalue()).decode()}


def save(given: dict[str, str], tell: Tell) -> Found:
    """Write the files of a plan into the folder that the user typed; nothing is overwritten."""
    from memfit.frameworks.targets import write

    folder = given.pop("folder", "").strip()
    if not folder:
        raise BadInput("no folder given", hint="type one, for example run")
    path = Path(folder).expanduser()
    return {"written": [str(p) for p in write(_made(given, tell), path)]}
