"""The noun Spec: what every cluster must be told of a plan, in its own words."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from memfit.closed_form.run.account import Account
from memfit.closed_form.static import Static
from memfit.errors import BadInput
from memfit.frameworks import process_layout as launch
from memfit.frameworks.accelerate import environment
from memfit.frameworks.targets import absolute, placed
from memfit.frameworks.text import comment, one_line, summary
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Plan
from memfit.planner.candidates import Estimator
from memfit.units import GIB, MIB

PORT = 29500  # torchrun's own default
# a port of its own for every number that a cluster gives a job: below those that systems hand out to connections (32768, ip(7))
OWN_PORT = "$((10000 + {number} % 20000))"
# bytes that are resident in a process once torch 2.13+cu130, transformers 5.23, TRL, PEFT and datasets are imported. Measured
IMPORTED = 834 * MIB
# bytes of host memory that the CUDA driver, cuBLAS, NCCL and the data loader take in a process. Assumed: 0.5 to 3 GiB
DRIVER = 3 * GIB
PROCESS = IMPORTED + DRIVER
# what torch.utils.cpp_extension looks for, by the card's platform
COMPILERS = {
    "cuda": ", and nvcc of PyTorch's own CUDA where CUDA_HOME says",
    "rocm": ", and hipcc of PyTorch's own ROCm where ROCM_HOME says",
}
TOKEN = "HF_TOKEN"  # huggingface_hub's own
KEPT = 3  # checkpoints at one time: train.py's save_total_limit=2, and the next is whole before the oldest goes


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One job. `host_bytes` is per node; `environment` holds what torchrun's workers need beside torchrun's own.

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
        """The card the plan was made for."""
        return self.plan.job.gpu

    @property
    def host_gib(self) -> int:
        """Host memory per node in whole GiB, rounded up."""
        return -(-self.host_bytes // GIB)

    @property
    def shared_gib(self) -> int:
        """Of it, the most that NCCL and the data loader's workers may share (/dev/shm), in whole GiB."""
        return self.gpus * DRIVER // GIB

    @property
    def output_gib(self) -> int:
        """What train.py writes, in whole GiB: a tenth more for what is no tensor and for the file system's own, and 1 GiB for small ones."""
        return -(-self.output_bytes * 11 // (10 * GIB)) + 1

    @property
    def parameters(self) -> int:
        """Weights of the model, as a number."""
        return _whole(self.plan).parameters

    @property
    def hub(self) -> str:
        """What it takes to read weights that come from the Hub, in words; "" where they are an input."""
        name = self.plan.job.architecture.name
        return "" if "model" in self.inputs else f"{name} is read from the Hub, with a token if it is gated"

    @property
    def deepspeed(self) -> bool:
        """DeepSpeed runs it, and compiles what it needs where it runs."""
        return launch.backend(self.plan.recipe) == "deepspeed"

    @property
    def head(self) -> str:
        """One line of comment: what the plan promises."""
        return comment(summary(self.plan))

    def moved(self, root: str) -> dict[str, str]:
        """Argument -> where a machine without this one's files has that input: root/data.jsonl, root/model."""
        return {name: f"{root}/{name}{_suffix(path)}" for name, path in self.inputs.items()}

    def arguments(self, root: str = "") -> list[str]:
        """What train.py is told beside what it was written with; `root` is where the inputs were moved to."""
        moved = self.moved(root) if root else {}
        return [word for name, path in moved.items() for word in (f"--{name}", path)]

    def exports(self) -> list[str]:
        """Lines of shell that set the environment."""
        return [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]

    def torchrun(self, nodes: str, rendezvous: str, identity: str, more: str, root: str = "") -> str:
        """The line every node runs. The arguments are shell text; `more` stands for what the user tells train.py.

        On one machine the processes meet at a port that is free (0): a second job there would join the first one's at any
        that is fixed, and end with it. `rendezvous` is where those of several machines meet.
        """
        where = "localhost:0" if self.nodes == 1 else rendezvous
        return (
            f"torchrun --nnodes {nodes} --nproc-per-node {self.gpus} --rdzv-id {identity} --rdzv-backend c10d "
            f'--rdzv-endpoint "{where}" {shlex.join(["train.py", *self.arguments(root)])} {more}'
        )

    def needs(self, apart: bool, output: str = "output/") -> tuple[str, ...]:
        """What must be so on machines that are the user's own, in lines; `apart`: none of them is this one. `output`: where
        train.py writes there."""
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
    """The job of a plan on so many machines. Raises BadInput where its GPUs cannot be dealt out evenly."""
    plan = placed(plan)
    total = plan.recipe.num_gpus
    if nodes < 1 or total % nodes:
        raise BadInput(
            f"{total} GPU{'s' * (total != 1)} cannot be dealt to {nodes} node{'s' * (nodes != 1)}",
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
    """A name that Kubernetes and DNS take: lower case, digits and dashes, at most 50 characters."""
    words = re.sub(r"[^a-z0-9]+", "-", Path(plan.job.architecture.name).name.lower()).strip("-")
    return f"memfit-{words}"[:50].strip("-") or "memfit"


def host_bytes(plan: Plan, nodes: int) -> int:
    """Host memory of one node: torchrun and its processes, what they read or gather at one time, and what is offloaded."""
    recipe, job = plan.recipe, plan.job
    processes, whole = recipe.num_gpus // nodes, _whole(plan)
    passing = max(_read(recipe, whole, processes), _gathered(recipe, whole))
    return IMPORTED + processes * PROCESS + passing + Estimator(job).host_bytes(recipe) // nodes


def output_bytes(plan: Plan) -> int:
    """The most that train.py has written at one time: checkpoints of weights and all states, and the model."""
    whole = _whole(plan)
    weights = whole.base if plan.recipe.method == "full" else whole.adapter
    copies = 2 if launch.backend(plan.recipe) == "deepspeed" else 1  # its own beside the trainer's
    return KEPT * (copies * weights + whole.states + whole.master) + weights


def _whole(plan: Plan) -> Static:
    """The recipe's weights and states, as if one card held them all."""
    recipe = plan.recipe.but(shard="none", offload="none", num_gpus=1)
    return Account(plan.job.architecture, recipe, plan.job.gpu).static


def _suffix(path: str) -> str:
    """What train.py knows the format of a file by."""
    suffix = Path(path).suffix
    return suffix if re.fullmatch(r"\.[A-Za-z0-9]+", suffix) and Path(path).is_file() else ""


def _read(recipe: Recipe, whole: Static, processes: int) -> int:
    """Weights on their way to the cards: FSDP2's are read by one process (cpu_ram_efficient_loading) unless quantised."""
    once = launch.backend(recipe) == "fsdp" and recipe.quantization == "none"
    return (1 if once else processes) * (whole.base + whole.adapter)


def _gathered(recipe: Recipe, whole: Static) -> int:
    """What the first process holds to save: the weights that are written; under FSDP2 then all states (FULL_STATE_DICT)."""
    weights = whole.base if recipe.method == "full" else whole.adapter
    return max(weights, whole.states + whole.master) if launch.backend(recipe) == "fsdp" else weights
