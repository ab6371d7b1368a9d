"""memfit diff: one job in two environments, and what the upgrade from one to the other changes."""

from __future__ import annotations

import json
import shlex
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from memfit.cli import terminal
from memfit.cli.flags import CARD, COMMON, IGNORE, Argument, Flag, takes
from memfit.cli.trace import ANSWER, STEPS
from memfit.errors import BadInput

if TYPE_CHECKING:
    from memfit.check.environments import Environment
    from memfit.check.judges import Judged
    from memfit.nouns.check import CheckJob, JobAnswer
    from memfit.nouns.upgrade import Upgrade

EXAMPLES = (
    "memfit diff --env old --env new --gpu l4 train.py -- --epochs 1",
    "memfit diff --env old --env new --gpu l4 -- trl sft --config sft.yaml",
    "memfit diff --env uv.lock --env requirements.txt --gpu l4 train.py",
    "memfit diff --env old --env new --gpu l4 run/recipe.toml",
)
WHAT = Argument(
    "what", "a training script whose arguments follow after '--'; a recipe.toml, its folder or a framework's file, of "
    "which TRL's script is written and run; or what follows after '--' is the whole command",
    "SCRIPT.py|RECIPE|-- COMMAND", many=True, command=True,
)  # fmt: skip
ENV = Flag(
    "env", str, "A virtual environment's folder, its python, a folder of pip install --target, or a lock file "
    "(requirements.txt with pins, pylock.toml, uv.lock, poetry.lock); two, the old first.",
    "ENV", default=(), many=True,
)  # fmt: skip
ALLOC_CONF = Flag("alloc_conf", str, "PYTORCH_ALLOC_CONF. Default: as the environment sets it.", "TEXT")
FRESH = Flag("fresh", bool, "Trace both again, without the answers that are kept.", default=False)
HTML = Flag("html", str, "Write the comparison as a page to open in a browser, without a network.", "FILE")
FORCE = Flag("force", bool, "Overwrite the file of --html.", default=False)
_BATCHES = 4  # of the data that a recipe is run with: a trace ends after fewer steps
_CARD = tuple(row for row in CARD if row.name != "gpu_memory")


@takes(ENV, *_CARD, IGNORE, STEPS, ANSWER, ALLOC_CONF, FRESH, HTML, FORCE, *COMMON, argument=WHAT)
def run(what: tuple[str, ...] = (), command: tuple[str, ...] = (), **flags: Any) -> int:
    """Say what an upgrade changes: the same job in two environments.

    Both are traced in the interpreter that owns them, their tensors are aligned by module and operator, and of what
    moved the line of a library is named that decides it.

    Exit code: that of the second environment's verdict.
    """
    from memfit.check.environments import environment, refuse_unknown

    terminal.check_files(flags, "html")
    if len(flags["env"]) != 2:
        raise BadInput(f"two environments are compared, not {len(flags['env'])}", hint=EXAMPLES[0])
    with ExitStack() as stack:
        is_script = bool(command or not what or what[0].endswith(".py"))
        words = _words(what, command) if is_script else _written(what, flags, stack)
        job = _job(words, flags)
        for name in flags["env"]:
            refuse_unknown(name)
        first, second = (environment(name, terminal.note) for name in flags["env"])
        found = _compared(job, (first, second), flags)
    if flags["json"]:
        from memfit.documents.check_doc import diff_doc

        terminal.show_json(diff_doc(found))
    else:
        from memfit.report.upgrade import upgrade_view

        # what was written of a recipe is gone with its folder
        terminal.show(upgrade_view(found, [_next(words, second, flags)] if is_script else []))
    terminal.write_file(flags, "html", lambda: _page(found))
    return found.exit_code


def _words(what: tuple[str, ...], command: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command line of the job, whose program is looked up in each environment."""
    words = (*what, *command)
    if not words:
        raise BadInput("no job named", hint=EXAMPLES[0])
    if what and not Path(what[0]).is_file():
        raise BadInput(f"{what[0]} does not exist", hint="paths are looked up from the current folder")
    return words


def _written(what: tuple[str, ...], flags: dict[str, Any], stack: ExitStack) -> tuple[str, ...]:
    """Write a recipe, or that of a framework's file, as a script that each environment runs with its own libraries."""
    from memfit.cli import run_words
    from memfit.reading.settings_text import of_toml

    if len(what) > 1 or not Path(what[0]).exists():
        raise BadInput(f"{shlex.join(what)} is no script and no file of a recipe", hint=EXAMPLES[0])
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="memfit-")))
    is_recipe = Path(what[0]).is_dir() or what[0].endswith(".toml")
    words = ["export", *([] if is_recipe else ["--from"]), what[0], "--target", "trl", "--out", str(folder), "--force"]
    for key in flags["ignore"]:
        words += ["--ignore", key]
    with redirect_stdout(StringIO()):
        run_words(words if flags["gpu"] is None else [*words, "--gpu", flags["gpu"]])
    recipe = of_toml((folder / "recipe.toml").read_text())
    if recipe["job"].get("task", "sft") != "sft":
        raise BadInput(
            f"{what[0]} is of the task {recipe['job']['task']}, whose rows memfit does not make up",
            hint=f"memfit export {shlex.quote(what[0])} --out run; then -- python run/train.py --data FILE",
        )
    said = recipe["recipe"]
    row = json.dumps({"input_ids": [1] * said["sequence_length"]}) + "\n"
    (folder / "data.jsonl").write_text(row * (_BATCHES * said["micro_batch"] * said["accumulation"] * said["num_gpus"]))
    return str(folder / "train.py"), "--data", str(folder / "data.jsonl"), "--output", str(folder / "output")


def _job(words: tuple[str, ...], flags: dict[str, Any]) -> CheckJob:
    from memfit.cli.replay import cards_of
    from memfit.nouns.check import CheckJob

    if flags["steps"] is not None and flags["steps"] < 1:
        raise BadInput(f"--steps must be at least 1, not {flags['steps']}", hint="2 is enough: later steps are alike")
    if flags["gpu"] is None or cards_of({**flags, "gpu_memory": None, "num_gpus": None})[0] is None:
        raise BadInput("no card named", hint=EXAMPLES[0])
    answers = tuple(part.strip() for part in (flags["answer"] or "").split(",") if part.strip())
    return CheckJob(
        "", flags["gpu"], words, reserve=flags["reserve"] or "", alloc_conf=flags["alloc_conf"], steps=flags["steps"],
        answer=answers, ignore=tuple(flags["ignore"]),
    )  # fmt: skip


def _compared(job: CheckJob, envs: tuple[Environment, Environment], flags: dict[str, Any]) -> Upgrade:
    from memfit.check import git
    from memfit.check.judges import Case, judge
    from memfit.check.upgrade import upgrade
    from memfit.cli.check import interruptible
    from memfit.cli.check_worker import CALL

    here = Path.cwd().resolve()
    root = git.repository(here) or here
    inside = "" if here == root.resolve() else str(here.relative_to(root.resolve()))
    cases = [Case(replace(job, name=env.name, command=env.command(job.command)), root, inside, True) for env in envs]
    with ExitStack() as stack:
        stack.enter_context(interruptible())
        tell = stack.enter_context(terminal.progress())
        base, head = (
            _answered(*pair) for pair in zip(envs, judge(cases, CALL, tell, fresh=flags["fresh"]), strict=True)
        )
    return upgrade(job, envs, base, head)


def _answered(env: Environment, judged: Judged) -> JobAnswer:
    from memfit.nouns.check import JobAnswer

    if isinstance(judged.answer, JobAnswer):
        return judged.answer
    error = BadInput(f"in {env.name}: {judged.answer.message}", hint=judged.answer.hint)
    error.exit_code = judged.answer.exit_code
    raise error


def _next(words: tuple[str, ...], env: Environment, flags: dict[str, Any]) -> str:
    """Return the command that traces the job in the second environment alone."""
    command = env.command(words)
    shown = [word for word in command if not word.startswith(("PATH=", "VIRTUAL_ENV="))]
    shown = shown[1:] if shown[:1] == ["env"] and "=" not in shown[1] else shown
    return shlex.join(["memfit", "trace", "--gpu", flags["gpu"], "--html", "timeline.html", "--", *shown])


def _page(found: Upgrade) -> bytes:
    from memfit.check.upgrade import footprints
    from memfit.cli.html_answer import comparison_page
    from memfit.footprints.compare import compare

    sides = footprints(found)
    return comparison_page(*found.environments, sides, compare(*sides))
