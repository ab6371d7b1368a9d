"""trainjob.yaml: a TrainJob of Kubeflow Trainer 2.2 or later (v1alpha1), its Dockerfile, and its output volume."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from memfit.clusters.spec import TOKEN, Spec, dockerfile
from memfit.errors import Unsupported
from memfit.frameworks.text import one_line, yaml_text

FILE, VOLUME, FETCH = "trainjob.yaml", "output.yaml", "fetch.yaml"
RUNTIME = "torch-distributed"  # the ClusterTrainingRuntime that Kubeflow installs; it sets torchrun's variables
NODE = "node"  # name of the runtime's training job and of its container
SECRET = "huggingface"  # a secret that the user creates in the cluster
RESOURCES = {"cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu"}
INPUTS, OUTPUT = "inputs", "/workspace/output"  # beside the Dockerfile, whose WORKDIR is /workspace
# JobSet restarts containers and replaces pods (restartPolicy OnFailure is its default). It labels them with its own id,
# which every attempt of one TrainJob shares and no other job has (jobset.sigs.k8s.io/docs/concepts, JobSet labels)
IDENTITY = {
    "name": "JOBSET_UID",
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"}},
}
AGAIN = ("--output", f"{OUTPUT}/$({IDENTITY['name']})", "--resume")  # Kubernetes expands $(NAME)


def write(spec: Spec) -> dict[str, str]:
    """Return the TrainJob, its Dockerfile and its volume. Raises Unsupported for cards without a device plugin."""
    if spec.gpu.platform not in RESOURCES:
        raise Unsupported(
            f"Kubernetes has no device plugin memfit knows for the {spec.gpu.name}", hint="--target torchrun"
        )
    amounts = {"memory": f"{spec.host_gib}Gi", RESOURCES[spec.gpu.platform]: spec.gpus}
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": spec.name},
        "spec": {
            "runtimeRef": {"name": RUNTIME},
            "trainer": {
                "image": _image(spec),
                "command": ["torchrun"],
                "args": ["train.py", *spec.arguments(f"/workspace/{INPUTS}"), *AGAIN],
                "numNodes": spec.nodes,
                "numProcPerNode": spec.gpus,
                "resourcesPerNode": {"requests": amounts, "limits": amounts},
                "env": _environment(spec),
            },
            "runtimePatches": [_patch(spec)],
        },
    }
    head = [f"# {line}" for line in (spec.head, *notes(spec))]
    return {FILE: yaml_text(job, head=head), VOLUME: _claim(spec), FETCH: _fetch(spec), "Dockerfile": dockerfile(spec)}


def notes(spec: Spec) -> tuple[str, ...]:
    """Return the steps to take in order: inputs go into the image, output to a volume that outlives the job."""
    image, pod = shlex.quote(_image(spec)), _output(spec)
    lines = [_copy(spec.inputs[name], target) for name, target in spec.moved(INPUTS).items()]
    lines.append(f"docker build -t {image} . && docker push {image} && kubectl apply -f {VOLUME} -f {FILE}")
    if spec.hub:
        make = f"kubectl create secret generic {SECRET} --from-literal={TOKEN}=$" + TOKEN
        lines.append(f"{spec.hub}: {make}, once")
    lines += [] if spec.image else ["--image REGISTRY/NAME:TAG names one that the cluster can pull"]
    lines.append("further arguments of train.py (--epochs 3) go to the end of args")
    lines.append(
        "a restarted job continues from its last checkpoint; "
        f"another TrainJob starts a folder of its own in {VOLUME}'s volume, which has room for one, "
        f"or continues one with --output {OUTPUT}/FOLDER"
    )
    if spec.nodes > 1:
        lines.append(
            f"{VOLUME} needs a storage class that several nodes can write to (ReadWriteMany: NFS, CephFS, Lustre)"
        )
    lines.append(
        f"kubectl apply -f {FETCH} && kubectl wait --for=condition=Ready pod/{pod} && kubectl cp {pod}:{OUTPUT} output"
        f" && kubectl delete -f {FETCH} fetches the output; kubectl delete -f {VOLUME} removes it"
    )
    return tuple(one_line(line) for line in lines)


def _copy(source: str, target: str) -> str:
    """Return the command that copies an input beside the Dockerfile, and the files behind links, which Docker skips."""
    if Path(source).is_dir():
        return f"mkdir -p {target} && cp -RL {shlex.quote(source)}/. {target}"
    return f"mkdir -p {INPUTS} && cp -L {shlex.quote(source)} {target}"


def _environment(spec: Spec) -> list[dict[str, Any]]:
    """Return the environment of the containers. The token is in no file: it comes from an optional secret."""
    variables: list[dict[str, Any]] = [IDENTITY]
    variables += [{"name": name, "value": value} for name, value in spec.environment.items()]
    secret = {"name": SECRET, "key": TOKEN, "optional": True}
    return [*variables, {"name": TOKEN, "valueFrom": {"secretKeyRef": secret}}] if spec.hub else variables


def _image(spec: Spec) -> str:
    return spec.image or f"{spec.name}:latest"


def _output(spec: Spec) -> str:
    return f"{spec.name}-output"


def _claim(spec: Spec) -> str:
    """Return the volume claim for the output; several nodes each write their part of a checkpoint."""
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": _output(spec)},
        "spec": {
            "accessModes": ["ReadWriteOnce" if spec.nodes == 1 else "ReadWriteMany"],
            "resources": {"requests": {"storage": f"{spec.output_gib}Gi"}},
        },
    }
    return yaml_text(
        claim, head=["# checkpoints and the model: not in the job's file, so that deleting the job keeps them"]
    )


def _fetch(spec: Spec) -> str:
    """Return a pod that only mounts the volume: `kubectl cp` needs a running container with tar, as in busybox."""
    files = {"name": "files", "image": "busybox", "command": ["sleep", "86400"], "volumeMounts": [_mount()]}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": _output(spec)},
        "spec": {"restartPolicy": "Never", "containers": [files], "volumes": [_volume(spec)]},
    }
    return yaml_text(pod, head=["# for kubectl cp, once the job has ended"])


def _volume(spec: Spec) -> dict[str, Any]:
    return {"name": "output", "persistentVolumeClaim": {"claimName": _output(spec)}}


def _mount() -> dict[str, str]:
    return {"name": "output", "mountPath": OUTPUT}


def _patch(spec: Spec) -> dict[str, Any]:
    """Return the pod's volumes: the output's, and a /dev/shm for NCCL and the data loader's workers.

    A container's own /dev/shm has 64 MiB. It counts as memory of the container.
    """
    size = f"{spec.shared_gib}Gi"
    pod = {
        "volumes": [{"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}, _volume(spec)],
        "containers": [{"name": NODE, "volumeMounts": [{"name": "dshm", "mountPath": "/dev/shm"}, _mount()]}],
    }
    jobs = [{"name": NODE, "template": {"spec": {"template": {"spec": pod}}}}]
    return {"manager": "memfit", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
