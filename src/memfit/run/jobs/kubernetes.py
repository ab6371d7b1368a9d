"""trainjob.yaml: a TrainJob of Kubeflow Trainer v2 (trainer.kubeflow.org/v1alpha1), and the Dockerfile of its image."""

from __future__ import annotations

from memfit.errors import Unsupported
from memfit.export.text import yaml_text
from memfit.run.jobs.spec import Spec

FILE = "trainjob.yaml"
RUNTIME = "torch-distributed"  # the ClusterTrainingRuntime that Kubeflow installs; it tells torchrun about its nodes
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
        },
    }
    head = [f"# {spec.head}", f"# docker build -t {image} . && docker push {image} && kubectl apply -f {FILE}"]
    return {FILE: yaml_text(job, head=head), "Dockerfile": DOCKERFILE}
