"""job.sbatch: a Slurm batch script, one task per node that starts one process per GPU."""

from __future__ import annotations

import shlex

from memfit.clusters.spec import OWN_PORT, Spec

FILE = "job.sbatch"
OWN = '--output "output/$SLURM_JOB_ID"'  # checkpoints of another job beside its own would be taken for them
CORES = 8  # per GPU: loading and tokenising data; clusters deal out 6 to 16


def notes(spec: Spec) -> tuple[str, ...]:
    """What must be so on the cluster, and what becomes of a job that is stopped."""
    again = f"a requeued job goes on from its last checkpoint; sbatch {FILE} --output output/JOBID --resume continues one that ended"
    return (*spec.needs(apart=True, output="output/JOBID"), again)


def write(spec: Spec) -> dict[str, str]:
    """The script. Slurm counts --mem in units of 1024."""
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
        f"# sbatch {FILE} --epochs 3: what follows the file goes to train.py",
        *(f"# {line}" for line in notes(spec)),
        "set -euo pipefail",
        f"folder={shlex.quote(spec.folder)}  # of train.py, or where this file was copied to and submitted from",
        f'if cmp -s "$0" "$SLURM_SUBMIT_DIR/{FILE}" || [ ! -d "$folder" ]; then folder=$SLURM_SUBMIT_DIR; fi',
        'cd "$folder"',
        *spec.exports(),
        'if ((${SLURM_RESTART_COUNT:-0})); then set -- "$@" --resume; fi  # requeued',
        *(['head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'] if spec.nodes > 1 else []),
        # by itself srun does not take over --cpus-per-task since Slurm 22.05, and a node's processes would share one core
        'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" '
        + spec.torchrun(
            '"$SLURM_NNODES"', "$head_node:" + OWN_PORT.format(number="SLURM_JOB_ID"), '"$SLURM_JOB_ID"', f'{OWN} "$@"'
        ),
    ]
    return {FILE: "\n".join(lines) + "\n"}
