"""Shell scripts: launch.sh, which is started on every node, and job.sbatch for Slurm."""

from __future__ import annotations

import shlex

from memfit.clusters.spec import OWN_PORT, PORT, Spec

LAUNCH = "launch.sh"
SBATCH = "job.sbatch"
OWN = '--output "output/$SLURM_JOB_ID"'  # in a shared folder, --resume would take another job's checkpoints
CORES = 8  # per GPU, for loading and tokenising data; clusters usually allow 6 to 16


def launch_notes(spec: Spec) -> tuple[str, ...]:
    """Return what launch.sh requires of the nodes."""
    beside = f"a second job on these nodes at the same time: PORT={PORT + 1} on each of them"
    return (*spec.needs(apart=False), *([beside] if spec.nodes > 1 else []))


def launch_script(spec: Spec) -> dict[str, str]:
    """Return launch.sh. With several nodes the variable HEAD names the first one."""
    where = f"${{HEAD:?set HEAD to the name of the first node}}:${{PORT:-{PORT}}}"
    lines = [
        "#!/bin/bash",
        f"# {spec.head}",
        f"# on each of {spec.nodes} node(s) with {spec.gpus} GPU(s) and {spec.host_gib} GiB of free host memory:",
        f"#     {'' if spec.nodes == 1 else 'HEAD=first-node '}bash {LAUNCH}",
        *(f"# {line}" for line in launch_notes(spec)),
        "set -euo pipefail",
        'cd "$(dirname "$0")"',
        *spec.exports(),
        spec.torchrun(str(spec.nodes), where, spec.name, '"$@"'),  # what train.py takes
    ]
    return {LAUNCH: "\n".join(lines) + "\n"}


def sbatch_notes(spec: Spec) -> tuple[str, ...]:
    """Return what job.sbatch requires of the cluster, and how a stopped job continues."""
    again = (
        f"a requeued job continues from its last checkpoint; "
        f"sbatch {SBATCH} --output output/JOBID --resume continues one that ended"
    )
    return (*spec.needs(apart=True, output="output/JOBID"), again)


def sbatch_script(spec: Spec) -> dict[str, str]:
    """Return job.sbatch: one task per node, which starts a process per GPU. Slurm counts --mem in units of 1024."""
    settings = {
        "job-name": spec.name, "nodes": spec.nodes, "ntasks-per-node": 1, "gpus-per-node": spec.gpus,
        "cpus-per-task": CORES * spec.gpus, "mem": f"{spec.host_gib}G", "output": "%x-%j.log",
        "open-mode": "append",  # a requeued job writes on
    }  # fmt: skip
    settings |= {"time": f"{spec.hours}:00:00"} if spec.hours else {}
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{name}={value}" for name, value in settings.items()),
        f"# {spec.head}",
        f"# sbatch {SBATCH} --epochs 3: arguments after the file go to train.py",
        *(f"# {line}" for line in sbatch_notes(spec)),
        "set -euo pipefail",
        f"folder={shlex.quote(spec.folder)}  # of train.py, or where this file was copied to and submitted from",
        f'if cmp -s "$0" "$SLURM_SUBMIT_DIR/{SBATCH}" || [ ! -d "$folder" ]; then folder=$SLURM_SUBMIT_DIR; fi',
        'cd "$folder"',
        *spec.exports(),
        'if ((${SLURM_RESTART_COUNT:-0})); then set -- "$@" --resume; fi  # requeued',
        *(['head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'] if spec.nodes > 1 else []),
        # since Slurm 22.05 srun does not inherit --cpus-per-task, and a node's processes would share one core
        'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" '
        + spec.torchrun(
            '"$SLURM_NNODES"', "$head_node:" + OWN_PORT.format(number="SLURM_JOB_ID"), '"$SLURM_JOB_ID"', f'{OWN} "$@"'
        ),
    ]
    return {SBATCH: "\n".join(lines) + "\n"}
