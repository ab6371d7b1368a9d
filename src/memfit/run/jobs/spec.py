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
from memfit.gpu import Gpu
from memfit.plan import Plan
from memfit.planner.engine import Estimator
from memfit.run.environment import environment
from memfit.units import GIB

PORT = 29500  # torchrun's own default
# resident memory of a process with PyTorch's CUDA libraries, the tokenised data and its loader, in bytes. Assumed: 2 to 4 GiB
PROCESS = 4 * GIB


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
            f'--rdzv-endpoint "{rendezvous}:{PORT}" train.py "$@"'
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
    found = environment(plan.recipe)
    return Spec(
        name=name_of(plan), plan=plan, nodes=nodes, gpus=total // nodes, host_bytes=host_bytes(plan, nodes),
        environment=found, hours=hours, image=image,
    )  # fmt: skip


def name_of(plan: Plan) -> str:
    """A name that Kubernetes and DNS take: lower case, digits and dashes, at most 50 characters."""
    words = re.sub(r"[^a-z0-9]+", "-", Path(plan.job.architecture.name).name.lower()).strip("-")
    return f"memfit-{words}"[:50].strip("-") or "memfit"


def host_bytes(plan: Plan, nodes: int) -> int:
    """Host memory of one node: its processes, the weights each reads before they go to the card, and what is offloaded.

    Under FSDP2 accelerate reads them in one process only (cpu_ram_efficient_loading), unless they are quantised.
    """
    recipe = plan.recipe
    processes = recipe.num_gpus // nodes
    stored = Account(plan.job.architecture, recipe.but(shard="none", offload="none", num_gpus=1), plan.job.gpu).static
    once = launch.backend(recipe) == "fsdp" and recipe.quantization == "none"
    readers = 1 if once else processes
    return (
        processes * PROCESS + readers * (stored.base + stored.adapter) + Estimator(plan.job).host_bytes(recipe) // nodes
    )
