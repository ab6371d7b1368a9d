"""The noun Spec: a plan as a cluster job, with nodes, host memory, disk, environment, inputs and container image."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from memfit.closed_form.host_memory import DRIVER, IMPORTED, needed
from memfit.closed_form.run.account import Account
from memfit.closed_form.static import Static
from memfit.errors import BadInput
from memfit.frameworks import process_layout
from memfit.frameworks.accelerate import environment
from memfit.frameworks.targets import absolute, placed
from memfit.frameworks.text import comment, one_line, summary
from memfit.nouns.gpu import Gpu
from memfit.nouns.plan import Plan
from memfit.units import GIB, several

PORT = 29500  # torchrun's own default
# a port per job number, below the ephemeral ports of Linux (from 32768, ip(7))
OWN_PORT = "$((10000 + {number} % 20000))"
# platform of the card -> the compiler torch.utils.cpp_extension looks for
COMPILERS = {
    "cuda": ", and nvcc of PyTorch's own CUDA version in CUDA_HOME",
    "rocm": ", and hipcc of PyTorch's own ROCm version in ROCM_HOME",
}
TOKEN = "HF_TOKEN"  # huggingface_hub's own
KEPT = 3  # checkpoints at one time: save_total_limit=2 in train.py, and the oldest is removed after the next is saved


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One job. `host_bytes` is per node; `environment` holds variables of the workers beside torchrun's own.

    `inputs` are files and folders of this machine that train.py reads, by the argument that names them.
    """

    name: str
    plan: Plan
    nodes: int
    gpus: int  # per node
    host_bytes: int
    output_bytes: int
    environment: dict[str, str]
    inputs: dict[str, str]
    hours: int = 0  # 0: the cluster's own limit
    image: str = ""
    folder: str = ""  # where its files are written; "": not known

    @property
    def gpu(self) -> Gpu:
        """Return the card the plan was made for."""
        return self.plan.job.gpu

    @property
    def host_gib(self) -> int:
        """Return the host memory per node in whole GiB, rounded up."""
        return -(-self.host_bytes // GIB)

    @property
    def shared_gib(self) -> int:
        """Return the size of /dev/shm for NCCL and the data loader's workers, in whole GiB."""
        return self.gpus * DRIVER // GIB

    @property
    def output_gib(self) -> int:
        """Return the size of train.py's output in whole GiB, with 10 % and 1 GiB more for other files."""
        return -(-self.output_bytes * 11 // (10 * GIB)) + 1

    @property
    def parameters(self) -> int:
        """Return the number of weights of the model."""
        return _unsharded(self.plan).parameters

    @property
    def hub(self) -> str:
        """Return a sentence on how weights are read from the Hub; "" where they are an input."""
        name = self.plan.job.architecture.name
        return "" if "model" in self.inputs else f"{name} is read from the Hub, with a token if it is gated"

    @property
    def deepspeed(self) -> bool:
        """Return whether DeepSpeed runs the job; it compiles operators on the node."""
        return process_layout.backend(self.plan.recipe) == "deepspeed"

    @property
    def head(self) -> str:
        """Return the plan's prediction as one line for a comment."""
        return comment(summary(self.plan))

    def moved(self, root: str) -> dict[str, str]:
        """Return argument -> path of the input once it is copied to another machine: root/data.jsonl, root/model."""
        return {name: f"{root}/{name}{_suffix(path)}" for name, path in self.inputs.items()}

    def arguments(self, root: str = "") -> list[str]:
        """Return the arguments of train.py. `root`: the folder the inputs were copied to; "" if they stay."""
        moved = self.moved(root) if root else {}
        return [word for name, path in moved.items() for word in (f"--{name}", path)]

    def exports(self) -> list[str]:
        """Return the shell lines that set the environment."""
        return [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]

    def torchrun(self, nodes: str, rendezvous: str, identity: str, more: str, root: str = "") -> str:
        """Return the command of every node. The arguments are shell text; `more` is appended for train.py.

        Several machines use `rendezvous`. A single machine uses a free port (0): at a fixed one a second job would join
        the first one's processes, and end with them.
        """
        where = "localhost:0" if self.nodes == 1 else rendezvous
        return (
            f"torchrun --nnodes {nodes} --nproc-per-node {self.gpus} --rdzv-id {identity} --rdzv-backend c10d "
            f'--rdzv-endpoint "{where}" {shlex.join(["train.py", *self.arguments(root)])} {more}'
        )

    def needs(self, apart: bool, output: str = "output/") -> tuple[str, ...]:
        """Return the requirements on the user's machines, a line each.

        `apart`: the job runs on other machines than this one. `output`: the folder train.py writes to.
        """
        lines = ["pip install -r requirements.txt where it runs"]
        if self.inputs:
            lines.append(f"every node reads {', '.join(self.inputs.values())} under the same path")
        if apart or self.nodes > 1:
            lines.append(
                f"this folder is on a file system that all nodes share: train.py writes its checkpoints to {output}"
            )
        if self.hub:
            lines.append(f"{self.hub}: {TOKEN} in the environment of {'sbatch' if apart else 'every node'}")
        if self.deepspeed:
            lines.append(f"DeepSpeed compiles on each node: with g++{COMPILERS.get(self.gpu.platform, '')}")
        return tuple(one_line(line) for line in lines)


def spec_of(plan: Plan, nodes: int = 1, hours: int = 0, image: str = "", folder: str = "") -> Spec:
    """Return the job of a plan on `nodes` machines. Raises BadInput if its GPUs cannot be divided evenly."""
    plan = placed(plan)
    total = plan.recipe.num_gpus
    if nodes < 1 or total % nodes:
        raise BadInput(
            f"{several(total, 'GPU')} cannot be divided among {several(nodes, 'node')}",
            hint="--nodes must divide the plan's number of GPUs",
        )
    if hours < 0:
        raise BadInput(f"a job cannot take {hours} hours", hint="--hours 24")
    job = plan.job
    named = {"model": job.architecture.name, "data": job.dataset, "eval-data": job.training.eval_data}
    return Spec(
        name=name_of(plan), plan=plan, nodes=nodes, gpus=total // nodes, host_bytes=host_bytes(plan, nodes),
        output_bytes=output_bytes(plan), environment=environment(plan.recipe, plan.job.architecture.model_type),
        inputs={name: path for name, path in named.items() if Path(path).is_absolute() and absolute(path)},
        hours=hours, image=image, folder=folder,
    )  # fmt: skip


def name_of(plan: Plan) -> str:
    """Return a name valid in Kubernetes and DNS: lower case, digits and dashes, at most 50 characters."""
    words = re.sub(r"[^a-z0-9]+", "-", Path(plan.job.architecture.name).name.lower()).strip("-")
    return f"memfit-{words}"[:50].strip("-") or "memfit"


def host_bytes(plan: Plan, nodes: int) -> int:
    """Return the host memory of one node, torchrun included: it starts the processes of a single card as well."""
    job, recipe = plan.job, plan.recipe
    need = needed(job.architecture, recipe, job.gpu, workers=job.workers, per_node=recipe.num_gpus // nodes)
    return need.bytes + IMPORTED * (process_layout.backend(recipe) == "plain")


def output_bytes(plan: Plan) -> int:
    """Return the most bytes that train.py has on disk: checkpoints of weights and all states, and the model."""
    whole = _unsharded(plan)
    weights = whole.base if plan.recipe.method == "full" else whole.adapter
    copies = 2 if process_layout.backend(plan.recipe) == "deepspeed" else 1  # DeepSpeed's own beside the trainer's
    return KEPT * (copies * weights + whole.states + whole.master) + weights


def _unsharded(plan: Plan) -> Static:
    """Return the recipe's weights and states as if one card held them all."""
    recipe = plan.recipe.but(shard="none", offload="none", num_gpus=1)
    return Account(plan.job.architecture, recipe, plan.job.gpu).static


def _suffix(path: str) -> str:
    """Return the suffix of a file, by which train.py recognises its format."""
    suffix = Path(path).suffix
    return suffix if re.fullmatch(r"\.[A-Za-z0-9]+", suffix) and Path(path).is_file() else ""


# ---- the container image


@dataclass(frozen=True, slots=True)
class Image:
    """A base image, the packages apt adds, and the commands before requirements.txt is installed."""

    base: str
    packages: str
    before: tuple[str, ...] = ()


# PyPI's torch is built for CUDA; ROCm's is installed first and satisfies requirements.txt
_ROCM = ("pip install torch --index-url https://download.pytorch.org/whl/rocm7.2",)
# (platform, DeepSpeed) -> image. Triton compiles its launchers with gcc at run time. DeepSpeed builds operators with
# torch.utils.cpp_extension at run time (deepspeed.ai/tutorials/advanced-install). Its CPU Adam needs only C++ in 0.19.8
# (op_builder/cpu/cpu_adam.py); CUDA operators, and in older versions the import (fp_quantizer.py's is_compatible), need
# nvcc of PyTorch's CUDA version: builder.py accepts other minor versions up to CUDA 12 only. PyTorch's image has both,
# and its torch satisfies requirements.txt. Python's slim image has Python.h, the others do not.
IMAGES: dict[tuple[str, bool], Image] = {
    ("cuda", False): Image("python:3.12-slim", "build-essential"),
    ("cuda", True): Image("pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel", "build-essential python3-dev"),
    ("rocm", False): Image("python:3.12-slim", "build-essential", _ROCM),
    ("rocm", True): Image("rocm/dev-ubuntu-24.04:7.2-complete", "build-essential python3-dev python3-pip", _ROCM),
}


def image_of(spec: Spec) -> Image:
    """Return the image of a job on an NVIDIA or AMD card."""
    return IMAGES[spec.gpu.platform, spec.deepspeed]


def dockerfile(spec: Spec) -> str:
    """Return the Dockerfile, with the layers that change most often last."""
    image = image_of(spec)
    lines = [
        f"FROM {image.base}",
        "# a container is no shared system: pip may install beside the distribution's packages",
        "ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1",
        "# compilers: Triton and DeepSpeed build as they run",
        "RUN apt-get update && apt-get install -y --no-install-recommends "
        f"{image.packages} && rm -rf /var/lib/apt/lists/*",
        "WORKDIR /workspace",
        "COPY requirements.txt .",
        *(f"RUN {line}" for line in image.before),
        "RUN pip install -r requirements.txt",
        "COPY . .",
    ]
    return "\n".join(lines) + "\n"
