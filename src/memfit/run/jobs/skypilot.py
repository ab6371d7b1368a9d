"""sky.yaml: a SkyPilot task, which finds a cloud that has the card."""

from __future__ import annotations

from typing import Any

from memfit.errors import UnknownName
from memfit.export.text import yaml_text
from memfit.run.jobs.spec import Spec

FILE = "sky.yaml"
# rows of gpus.toml -> SkyPilot's name; every name is in its catalog v8 (common/accelerators.csv, d4d53f0), which has no others of them
ACCELERATORS = {
    "t4": "T4", "p100": "P100", "v100-16gb": "V100", "v100-32gb": "V100-32GB", "a10": "A10", "a10g": "A10G", "a30": "A30", "a40": "A40",
    "l4": "L4", "l40": "L40", "l40s": "L40S", "a100-40gb": "A100", "a100-pcie-40gb": "A100", "a100-80gb": "A100-80GB",
    "a100-pcie-80gb": "A100-80GB", "h100": "H100", "h100-pcie": "H100", "h100-nvl": "H100-NVL", "gh200-96gb": "GH200", "h200": "H200",
    "h200-nvl": "NVIDIA-H200-NVL", "b200": "B200", "b300": "B300", "mi300x": "MI300X", "rtx-3060": "RTX3060", "rtx-3090": "RTX3090",
    "rtx-4060": "RTX4060", "rtx-4070": "RTX4070", "rtx-4090": "RTX4090", "rtx-5070": "RTX5070", "rtx-5090": "RTX5090",
    "rtx-a4000": "RTXA4000", "rtx-a4500": "RTXA4500", "rtx-a5000": "RTXA5000", "rtx-a6000": "RTXA6000", "rtx-4000-ada": "RTX4000-Ada",
    "rtx-6000-ada": "RTX6000-Ada", "rtx-pro-6000": "RTXPRO6000",
}  # fmt: skip


def write(spec: Spec) -> dict[str, str]:
    """The task. Raises UnknownName for a card that SkyPilot's catalog does not have."""
    if spec.gpu.short not in ACCELERATORS:
        raise UnknownName(
            "SkyPilot accelerator", spec.gpu.short, ACCELERATORS, hint="--gpu a card that clouds rent out"
        )
    task: dict[str, Any] = {
        "name": spec.name,
        "resources": {"accelerators": f"{ACCELERATORS[spec.gpu.short]}:{spec.gpus}", "memory": f"{spec.host_gib}+"},
        "num_nodes": spec.nodes,
        "workdir": ".",
        **({"envs": spec.environment} if spec.environment else {}),
        "setup": "pip install -r requirements.txt\n",
        "run": 'head_node=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n'
        + spec.torchrun('"$SKYPILOT_NUM_NODES"', "$head_node", spec.name)
        + "\n",
    }
    return {FILE: yaml_text(task, head=[f"# {spec.head}", f"# sky launch {FILE}"])}
