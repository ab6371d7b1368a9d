"""Jobs: a plan as the file a cluster runs, with what the plan knows: GPUs, host RAM, allocator settings. One module per target."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from memfit.clusters import kubernetes, skypilot, slurm, torchrun
from memfit.clusters.spec import Spec
from memfit.errors import BadInput, UnknownName
from memfit.frameworks.process_layout import launch_of
from memfit.frameworks.targets import export
from memfit.tables.trainers import script_of


@dataclass(frozen=True, slots=True)
class Target:
    """One row: what --target takes, the file it writes, the line that submits it, and what the user must know."""

    key: str
    title: str
    file: str
    write: Callable[[Spec], dict[str, str]]
    submit: tuple[str, ...]
    notes: Callable[[Spec], tuple[str, ...]]  # a line each; the file's head holds the same
    takes: str = ""  # the flag that is for this target alone

    @property
    def line(self) -> str:
        """The line that submits it, as it is typed in its folder."""
        return shlex.join(self.submit)


TARGETS: dict[str, Target] = {
    row.key: row
    for row in (
        Target("torchrun", "a shell script, started on every node", torchrun.FILE, torchrun.write, ("bash", torchrun.FILE), torchrun.notes),
        Target("slurm", "an sbatch script", slurm.FILE, slurm.write, ("sbatch", slurm.FILE), slurm.notes, "hours"),
        Target("skypilot", "a SkyPilot task", skypilot.FILE, skypilot.write, ("sky", "launch", "-y", skypilot.FILE), skypilot.notes),
        Target("kubernetes", "a Kubeflow TrainJob, its Dockerfile and a volume for what it writes", kubernetes.FILE, kubernetes.write,
               ("kubectl", "apply", "-f", kubernetes.VOLUME, "-f", kubernetes.FILE), kubernetes.notes, "image"),
    )
}  # fmt: skip


def files(spec: Spec, row: Target) -> dict[str, str]:
    """{path: text} of a job: train.py with what belongs to it, and what starts it. accelerate.yaml is for one machine."""
    how = launch_of(spec.plan.recipe)
    if spec.nodes > 1:
        how = replace(how, by_accelerate=False, started_by=row.line)
    return export(spec.plan, script_of(spec.plan.recipe.trainer), how) | row.write(spec)


def check_flags(row: Target, given: Iterable[str]) -> None:
    """Raises BadInput for a flag that this target would not hear."""
    for flag in given:
        whose = [other.key for other in TARGETS.values() if other.takes == flag]
        if whose and row.key not in whose:
            raise BadInput(f"--{flag} is for --target {whose[0]}, not {row.key}", hint="leave it out")


def target(key: str) -> Target:
    """The row of a target. Raises UnknownName."""
    if key not in TARGETS:
        raise UnknownName("launch target", key, TARGETS, hint=f"known: {', '.join(TARGETS)}")
    return TARGETS[key]
