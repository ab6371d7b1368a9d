"""Jobs: a plan as the file a cluster runs, with what the plan knows: GPUs, host RAM, allocator settings. One module per target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memfit.errors import UnknownName
from memfit.run.jobs import kubernetes, skypilot, slurm, torchrun
from memfit.run.jobs.spec import Spec


@dataclass(frozen=True, slots=True)
class Target:
    """One row: what --target takes, the file it writes, the line that submits it, and what the user must know."""

    key: str
    title: str
    file: str
    write: Callable[[Spec], dict[str, str]]
    submit: tuple[str, ...]
    notes: Callable[[Spec], tuple[str, ...]]  # a line each; the file's head holds the same


TARGETS: dict[str, Target] = {
    row.key: row
    for row in (
        Target("torchrun", "a shell script, started on every node", torchrun.FILE, torchrun.write, ("bash", torchrun.FILE), torchrun.notes),
        Target("slurm", "an sbatch script", slurm.FILE, slurm.write, ("sbatch", slurm.FILE), slurm.notes),
        Target("skypilot", "a SkyPilot task", skypilot.FILE, skypilot.write, ("sky", "launch", "-y", skypilot.FILE), skypilot.notes),
        Target("kubernetes", "a Kubeflow TrainJob, its Dockerfile and a volume for what it writes", kubernetes.FILE, kubernetes.write,
               ("kubectl", "apply", "-f", kubernetes.VOLUME, "-f", kubernetes.FILE), kubernetes.notes),
    )
}  # fmt: skip


def target(key: str) -> Target:
    """The row of a target. Raises UnknownName."""
    if key not in TARGETS:
        raise UnknownName("launch target", key, TARGETS, hint=f"known: {', '.join(TARGETS)}")
    return TARGETS[key]
