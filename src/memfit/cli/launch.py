"""memfit launch: write a recipe as a job for one machine or a cluster, and with --submit start it."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from memfit.cli import terminal
from memfit.cli.flags import COMMON, HOST, IGNORE, TRAINING, Argument, Flag, check_ranges, takes, training_of
from memfit.cli.request import check_judged, host
from memfit.cli.train_checks import ON_HUB
from memfit.clusters import ClusterTarget, check_flags, files, target
from memfit.clusters.spec import Spec, spec_of
from memfit.data.files import READERS
from memfit.documents.recipe_file import in_folder
from memfit.errors import BadInput, Refused
from memfit.frameworks.recipe_toml import plan_of_file
from memfit.frameworks.script import NO_DATA
from memfit.frameworks.targets import write
from memfit.units import rough

EXAMPLES = (
    "memfit launch run/recipe.toml --target slurm --nodes 2 --out job/",
    "memfit launch run/recipe.toml --target skypilot --out job/ --submit",
)
STDERR = 2  # the file descriptor
ROWS = (
    Flag("gpu", str, "A card instead of the one the recipe was planned for.", "NAME"),
    Flag("target", str, "What runs the job.", "torchrun|slurm|skypilot|kubernetes"),
    Flag("nodes", int, "Number of machines to spread the GPUs over. Default: 1.", "N"),
    *HOST,
    Flag("hours", int, "Slurm: the job's time limit.", "N"),
    Flag("image", str, "Kubernetes: the container image.", "NAME"),
    IGNORE,
    *TRAINING,
    Flag("out", str, "Write the files into this folder.", "DIR"),
    Flag("submit", bool, "Submit the job as well.", default=False),
    Flag("force", bool, "Overwrite files, and write a job even if its recipe does not fit.", default=False),
)


@takes(*ROWS, *COMMON, argument=Argument("file", "a recipe.toml", "RECIPE", required=True))
def run(file: str, **flags: Any) -> int:
    """Write a recipe as a job for a cluster.

    The files request the plan's number of GPUs and host memory, and set its allocator settings. Learning rate, epochs
    and steps come from [training] in the recipe, or from the flags. A model and data on this machine are copied to the
    cloud or into the image. Notes list what is copied, what is assumed and what is left to do.
    """
    if not (flags["out"] and flags["target"]):
        raise BadInput("--target and --out are needed", hint=f"memfit launch {file} --target slurm --out job/")
    check_ranges(flags)
    if flags["hours"] == 0:
        raise BadInput("--hours 0 leaves no time to run", hint="without --hours there is no limit")
    row = target(flags["target"])
    check_flags(row, (name for name in ("hours", "image") if flags[name] is not None))
    if flags["submit"]:
        _check_tool(row)
    path = in_folder(Path(file))
    if path.suffix != ".toml" and not path.exists():
        planned = f"memfit plan {shlex.quote(file)} --gpu h100 --out run/"
        raise BadInput(f"there is no file {path}", hint=f"give a recipe.toml: {planned} writes run/recipe.toml")
    if flags["eval_data"]:
        _check_named(flags["eval_data"])
    plan = plan_of_file(path, flags["gpu"] or "", flags["ignore"])
    given, workers = host(flags, file=plan.job)
    training = training_of(flags, plan.job.training)
    plan = replace(plan, job=replace(plan.job, training=training, host_memory=given, workers=workers))
    misfit = f"this recipe does not fit the {plan.job.gpu.name}"
    check_judged(plan.judgement, flags["force"], misfit, "--force writes it anyway")
    nodes = 1 if flags["nodes"] is None else flags["nodes"]
    folder = Path(flags["out"])
    spec = spec_of(plan, nodes, flags["hours"] or 0, flags["image"] or "", str(folder.absolute()))
    if 0 < given < spec.host_bytes and not flags["force"]:
        raise Refused(
            f"a node needs {rough(spec.host_bytes)} of host RAM, and has {rough(given)}",
            hint="more --nodes share it, and --force writes it anyway",
        )
    if row.key == "torchrun" and flags["submit"] and spec.nodes > 1:
        raise BadInput("several nodes cannot be started from one machine", hint=f"start {row.file} on each of them")
    paths = write(files(spec, row), folder, flags["force"])
    terminal.notes((*plan.notes, *_absent(spec), *row.notes(spec)))
    _show(flags["json"], row, paths, spec)
    if not flags["submit"]:
        return 0
    sys.stdout.flush()
    # with --json stdout is only for the document; otherwise the cluster's own output is the answer
    return subprocess.run(row.submit, cwd=folder, check=False, stdout=STDERR if flags["json"] else None).returncode


def _check_tool(row: ClusterTarget) -> None:
    """Refuse --submit without the cluster's command, before anything is written."""
    if shutil.which(row.submit[0]) is None:
        raise BadInput(
            f"there is no {row.submit[0]} on this machine", hint="leave --submit out, and submit it where there is one"
        )


def _check_named(data: str) -> None:
    """Refuse data that is no file here, no dataset on the Hub, and has no ending of a data file elsewhere."""
    if not (Path(data).exists() or Path(data).suffix.lower() in READERS or ON_HUB.fullmatch(data)):
        raise BadInput(
            f"--eval-data: there is no file {data}", hint="give an existing file, or a dataset on the Hub: owner/name"
        )


def _absent(spec: Spec) -> Iterator[str]:
    """Yield notes on data that is not on this machine and therefore cannot be copied."""
    if not spec.plan.job.dataset:
        yield f"the recipe names no data; train.py reads {NO_DATA} from its own folder"
    for argument, path in (("data", spec.plan.job.dataset), ("eval-data", spec.plan.job.training.eval_data)):
        if Path(path).suffix.lower() in READERS and argument not in spec.inputs:
            yield f"{path} is not on this machine: train.py looks for it where the job runs"


def _show(json: bool, row: ClusterTarget, paths: tuple[Path, ...], spec: Spec) -> None:
    if json:
        files = [str(path) for path in paths]
        document = {
            "schema": "memfit.launch/1", "target": row.key, "files": files, "command": row.line,
            "host_bytes": spec.host_bytes, "output_bytes": spec.output_bytes,
        }  # fmt: skip
        terminal.show_json(document)
        return
    for path in paths:
        print(path)
    several = row.key == "torchrun" and spec.nodes > 1
    start, before = ("start it on every node with", "HEAD=first-node ") if several else ("submit it with", "")
    terminal.note(f"{start}: cd {shlex.quote(str(paths[0].parent))} && {before}{row.line}")
