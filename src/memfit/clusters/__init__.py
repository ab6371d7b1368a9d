"""Write a plan as the files of a cluster job: GPUs, host memory, allocator settings and image. One row per target."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from memfit.clusters import kubernetes, shell_scripts, skypilot
from memfit.clusters.spec import Spec
from memfit.errors import BadInput, UnknownName
from memfit.frameworks.process_layout import launch_of
from memfit.frameworks.targets import export
from memfit.tables.trainers import script_of


@dataclass(frozen=True, slots=True)
class ClusterTarget:
    """One row: the value of --target, its file, the command that submits it, and notes for the user."""

    key: str
    file: str
    write: Callable[[Spec], dict[str, str]]
    submit: tuple[str, ...]
    notes: Callable[[Spec], tuple[str, ...]]  # a line each; the file's head holds the same
    takes: str = ""  # a flag that only this target uses

    @property
    def line(self) -> str:
        """Return the command that submits it, to be typed in its folder."""
        return shlex.join(self.submit)


TARGETS: dict[str, ClusterTarget] = {
    row.key: row
    for row in (
        ClusterTarget("torchrun", shell_scripts.LAUNCH, shell_scripts.launch_script,
                      ("bash", shell_scripts.LAUNCH), shell_scripts.launch_notes),
        ClusterTarget("slurm", shell_scripts.SBATCH, shell_scripts.sbatch_script,
                      ("sbatch", shell_scripts.SBATCH), shell_scripts.sbatch_notes, "hours"),
        ClusterTarget("skypilot", skypilot.FILE, skypilot.write,
                      ("sky", "launch", "-y", skypilot.FILE), skypilot.notes),
        ClusterTarget("kubernetes", kubernetes.FILE, kubernetes.write,
                      ("kubectl", "apply", "-f", kubernetes.VOLUME, "-f", kubernetes.FILE),
                      kubernetes.notes, "image"),
    )
}  # fmt: skip


def files(spec: Spec, row: ClusterTarget) -> dict[str, str]:
    """Return {path: text} of a job: train.py, requirements.txt, and its launcher; accelerate.yaml only for one node."""
    how = launch_of(spec.plan.recipe)
    if spec.nodes > 1:
        how = replace(how, by_accelerate=False, started_by=row.line)
    return export(spec.plan, script_of(spec.plan.recipe.trainer), how) | row.write(spec)


def check_flags(row: ClusterTarget, given: Iterable[str]) -> None:
    """Raise BadInput for a flag that this target does not use."""
    for flag in given:
        whose = [other.key for other in TARGETS.values() if other.takes == flag]
        if whose and row.key not in whose:
            raise BadInput(f"--{flag} is for --target {whose[0]}, not {row.key}", hint="leave it out")


def target(key: str) -> ClusterTarget:
    """Return the row of a target. Raises UnknownName."""
    if key not in TARGETS:
        raise UnknownName("launch target", key, TARGETS, hint=f"known: {', '.join(TARGETS)}")
    return TARGETS[key]
