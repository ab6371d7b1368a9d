"""sky.yaml: a SkyPilot task. SkyPilot chooses a cloud that has the card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memfit.clusters.spec import OWN_PORT, TOKEN, Spec, image_of
from memfit.errors import UnknownName
from memfit.frameworks.text import one_line, yaml_text
from memfit.units import GIB

FILE = "sky.yaml"
INPUTS = "/inputs"
COMPILER = (
    "command -v g++ > /dev/null || { sudo apt-get update && sudo apt-get install -y build-essential; }  # for Triton"
)
# Only managed jobs have ids sky-managed-..., and "all recoveries of that job will have the same ID value" (SkyPilot's
# docs, environment-variables)
RECOVERED = (
    "output=${OUTPUT:-output} resume=",
    "# a recovered managed job has the same id, and continues from what it saved under it",
    'case "$SKYPILOT_TASK_ID" in sky-managed-*) output=$output/$SKYPILOT_TASK_ID resume=--resume ;; esac',
)
DISK = 256  # SkyPilot's own disk_size, in GB
SYSTEM = 64 * GIB  # the machine's image, drivers and packages. Assumed
# rows of gpus.toml -> SkyPilot's name, for all cards in its catalog v8 (common/accelerators.csv, d4d53f0)
ACCELERATORS = {
    "t4": "T4", "p100": "P100", "v100-16gb": "V100", "v100-32gb": "V100-32GB", "a10": "A10", "a10g": "A10G",
    "a30": "A30", "a40": "A40", "l4": "L4", "l40": "L40", "l40s": "L40S", "a100-40gb": "A100",
    "a100-pcie-40gb": "A100", "a100-80gb": "A100-80GB", "a100-pcie-80gb": "A100-80GB", "h100": "H100",
    "h100-pcie": "H100", "h100-nvl": "H100-NVL", "gh200-96gb": "GH200", "h200": "H200", "h200-nvl": "NVIDIA-H200-NVL",
    "b200": "B200", "b300": "B300", "mi300x": "MI300X", "rtx-3060": "RTX3060", "rtx-3090": "RTX3090",
    "rtx-4060": "RTX4060", "rtx-4070": "RTX4070", "rtx-4090": "RTX4090", "rtx-5070": "RTX5070", "rtx-5090": "RTX5090",
    "rtx-a4000": "RTXA4000", "rtx-a4500": "RTXA4500", "rtx-a5000": "RTXA5000", "rtx-a6000": "RTXA6000",
    "rtx-4000-ada": "RTX4000-Ada", "rtx-6000-ada": "RTX6000-Ada", "rtx-pro-6000": "RTXPRO6000",
}  # fmt: skip


def write(spec: Spec) -> dict[str, str]:
    """Return the task. Raises UnknownName for a card that SkyPilot's catalog does not have."""
    if spec.gpu.short not in ACCELERATORS:
        raise UnknownName(
            "SkyPilot accelerator", spec.gpu.short, ACCELERATORS, hint="choose a card that clouds rent out with --gpu"
        )
    mounts = {target: spec.inputs[name] for name, target in spec.moved(INPUTS).items()}
    task: dict[str, Any] = {
        "name": spec.name,
        "resources": _resources(spec),
        "num_nodes": spec.nodes,
        "workdir": ".",
        **({"file_mounts": mounts} if mounts else {}),
        **({"envs": spec.environment} if spec.environment else {}),
        "setup": "".join(f"{line}\n" for line in (*image_of(spec).before, "pip install -r requirements.txt", COMPILER)),
        "run": "".join(f"{line}\n" for line in _run(spec)),
    }
    head = [spec.head, f"sky launch {FILE}", *notes(spec)]
    return {FILE: yaml_text(task, head=[f"# {line}" for line in head])}


def notes(spec: Spec) -> tuple[str, ...]:
    """Return what is copied to the cluster, and how to fetch the output: nothing on a cluster outlives `sky down`."""
    lines = [
        f"{path} is copied to {target}"
        for path, target in zip(spec.inputs.values(), spec.moved(INPUTS).values(), strict=True)
    ]
    lines += [
        f"{path} holds links, whose files are not copied: copy it with cp -RL and name the copy"
        for path in spec.inputs.values()
        if _linked(path)
    ]
    whose = "the first node" if spec.nodes > 1 else "the cluster"
    lines += [
        f"sky launch --env ARGS='--epochs 3' {FILE} passes further arguments to train.py",
        *([f"{spec.hub}: sky launch --secret {TOKEN} {FILE} passes on this shell's token"] if spec.hub else []),
        f"before sky down, from ~/sky_workdir/output of {whose}: "
        "rsync -avP CLUSTER:sky_workdir/output . (CLUSTER: see sky status)",
        "or in a bucket: under file_mounts '/output: {source: s3://BUCKET, mode: MOUNT_CACHED}',"
        f" and sky launch --env OUTPUT=/output {FILE}",
        f"sky jobs launch {FILE}: a recovered job continues from its last checkpoint in such a bucket; "
        "without one it starts at the beginning",
    ]
    if spec.nodes > 1:
        lines.append("nodes share no disk: to resume from a checkpoint its output must be in a bucket")
    return tuple(one_line(line) for line in lines)


def _run(spec: Spec) -> list[str]:
    """Return what every node runs. A task has one id, the same on all of its nodes."""
    rendezvous = [
        'head_node=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
        'number=$(echo "$SKYPILOT_TASK_ID" | cksum | cut -d " " -f 1)',
    ]
    where = "$head_node:" + OWN_PORT.format(number="number")
    line = spec.torchrun(
        '"$SKYPILOT_NUM_NODES"', where, '"$SKYPILOT_TASK_ID"', '--output "$output" $resume ${ARGS:-}', INPUTS
    )
    return [*(rendezvous if spec.nodes > 1 else []), *RECOVERED, line]


def _resources(spec: Spec) -> dict[str, Any]:
    disk = -(-(SYSTEM + 2 * spec.parameters) // GIB) + spec.output_gib
    return {
        "accelerators": f"{ACCELERATORS[spec.gpu.short]}:{spec.gpus}",
        "memory": f"{spec.host_gib}+",
        **({"disk_size": disk} if disk > DISK else {}),
        **({"image_id": f"docker:{image_of(spec).base}"} if spec.deepspeed else {}),  # for its compilers
    }


def _linked(path: str) -> bool:
    """Return whether the folder holds links, as snapshots of the Hub's cache do."""
    return Path(path).is_dir() and any(inner.is_symlink() for inner in Path(path).iterdir())
