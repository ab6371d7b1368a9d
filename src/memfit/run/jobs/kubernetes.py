"""trainjob.yaml: a TrainJob of Kubeflow Trainer 2.2 or later (trainer.kubeflow.org/v1alpha1), and the Dockerfile of its image."""

from __future__ import annotations

from typing import Any

from memfit.errors import Unsupported
from memfit.export.text import yaml_text
from memfit.run.jobs.spec import Spec

FILE = "trainjob.yaml"
RUNTIME = "torch-distributed"  # the ClusterTrainingRuntime that Kubeflow installs; it tells torchrun about its nodes
NODE = "node"  # its job that trains, and the container in it
RESOURCES = {"cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu"}
DOCKERFILE = """\
FROM python:3.12-slim
WORKDIR /workspace
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
COPY . .
"""


def write(spec: Spec) -> dict[str, str]:
    """The TrainJob and its Dockerfile. Raises Unsupported for cards that Kubernetes has no resource for."""
    if spec.gpu.platform not in RESOURCES:
        raise Unsupported(
            f"Kubernetes has no device plugin memfit knows for the {spec.gpu.name}", hint="--target torchrun"
        )
    image = spec.image or f"{spec.name}:latest"
    amounts = {"memory": f"{spec.host_gib}Gi", RESOURCES[spec.gpu.platform]: spec.gpus}
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": spec.name},
        "spec": {
            "runtimeRef": {"name": RUNTIME},
            "trainer": {
                "image": image,
                "command": ["torchrun", "train.py"],
                "numNodes": spec.nodes,
                "numProcPerNode": spec.gpus,
                "resourcesPerNode": {"requests": amounts, "limits": amounts},
                **({"env": [{"name": k, "value": v} for k, v in spec.environment.items()]} if spec.environment else {}),
            },
            "runtimePatches": [_shared_memory(spec)],
        },
    }
    head = [f"# {spec.head}", f"# docker build -t {image} . && docker push {image} && kubectl apply -f {FILE}"]
    return {FILE: yaml_text(job, head=head), "Dockerfile": DOCKERFILE}


def _shared_memory(spec: Spec) -> dict[str, Any]:
    """A /dev/shm for NCCL and the data loader's workers: a container's own has 64 MiB. It counts as memory of the container."""
    size = f"{spec.shared_gib}Gi"
    pod = {
        "volumes": [{"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}],
        "containers": [{"name": NODE, "volumeMounts": [{"name": "dshm", "mountPath": "/dev/shm"}]}],
    }
    jobs = [{"name": NODE, "template": {"spec": {"template": {"spec": pod}}}}]
    return {"manager": "memfit", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
