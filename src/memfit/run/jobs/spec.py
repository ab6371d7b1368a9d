"""The noun Spec: what every cluster must be told of a plan, in its own words."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from memfit import launch
from memfit.errors import BadInput
from memfit.export.text import comment, summary
from memfit.formula.account import Account
from memfit.formula.static import Static
from memfit.gpu import Gpu
from memfit.job import Recipe
from memfit.plan import Plan
from memfit.planner.engine import Estimator
from memfit.run.environment import environment
from memfit.units import GIB, MIB

PORT = 29500  # torchrun's own default
# bytes that are resident in a process once torch 2.13+cu130, transformers 5.23, TRL, PEFT and datasets are imported. Measured
IMPORTED = 834 * MIB
# bytes of host memory that the CUDA driver, cuBLAS, NCCL and the data loader take in a process. Assumed: 0.5 to 3 GiB
DRIVER = 3 * GIB
PROCESS = IMPORTED + DRIVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One job. `host_bytes` is per node; `environment` holds what torchrun's workers need beside torchrun's own."""

    name: str
    plan: Plan
    nodes: int
    gpus: int  # per node
    host_bytes: int
    environment: dict[str, str]
    hours: int = 0  # 0: the cluster's own limit
    image: str = ""

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
    def head(self) -> str:
        """One line of comment: what the plan promises."""
        return comment(summary(self.plan))

    def exports(self) -> list[str]:
        """Lines of shell that set the environment."""
        return [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]

    def torchrun(self, nodes: str, rendezvous: str, identity: str) -> str:
        """The line every node runs. The arguments are shell text."""
        return (
            f"torchrun --nnodes {nodes} --nproc-per-node {self.gpus} --rdzv-id {identity} --rdzv-backend c10d "
            f'--rdzv-endpoint "{rendezvous}:{PORT}" train.py'
        )


def spec_of(plan: Plan, nodes: int = 1, hours: int = 0, image: str = "") -> Spec:
    """The job of a plan on so many machines. Raises BadInput where its GPUs cannot be dealt out evenly."""
    total = plan.recipe.num_gpus
    if nodes < 1 or total % nodes:
        raise BadInput(
            f"{total} GPU{'s' * (total != 1)} cannot be dealt to {nodes} node{'s' * (nodes != 1)}",
            hint="--nodes must divide the plan's number of GPUs",
        )
    if hours < 0:
        raise BadInput(f"a job cannot take {hours} hours", hint="--hours 24")
    found = environment(plan.recipe, plan.job.architecture.model_type)
    return Spec(
        name=name_of(plan), plan=plan, nodes=nodes, gpus=total // nodes, host_bytes=host_bytes(plan, nodes),
        environment=found, hours=hours, image=image,
    )  # fmt: skip


def name_of(plan: Plan) -> str:
    """A name that Kubernetes and DNS take: lower case, digits and dashes, at most 50 characters."""
    words = re.sub(r"[^a-z0-9]+", "-", Path(plan.job.architecture.name).name.lower()).strip("-")
    return f"memfit-{words}"[:50].strip("-") or "memfit"


def host_bytes(plan: Plan, nodes: int) -> int:
    """Host memory of one node: torchrun and its processes, what they read or gather at one time, and what is offloaded."""
    recipe, job = plan.recipe, plan.job
    processes = recipe.num_gpus // nodes
    whole = Account(job.architecture, recipe.but(shard="none", offload="none", num_gpus=1), job.gpu).static
    passing = max(_read(recipe, whole, processes), _gathered(recipe, whole))
    return IMPORTED + processes * PROCESS + passing + Estimator(job).host_bytes(recipe) // nodes


def _read(recipe: Recipe, whole: Static, processes: int) -> int:
    """Weights on their way to the cards: FSDP2's are read by one process (cpu_ram_efficient_loading) unless quantised."""
    once = launch.backend(recipe) == "fsdp" and recipe.quantization == "none"
    return (1 if once else processes) * (whole.base + whole.adapter)


def _gathered(recipe: Recipe, whole: Static) -> int:
    """What the first process holds to save: the weights that are written; under FSDP2 then all states (FULL_STATE_DICT)."""
    weights = whole.base if recipe.method == "full" else whole.adapter
    return max(weights, whole.states + whole.master) if launch.backend(recipe) == "fsdp" else weights
