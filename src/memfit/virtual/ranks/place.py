"""Where a traced process stands in its cluster: its rank, the number of processes, and the cards of each machine."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.errors import BadInput

PER_NODE = 8  # cards of a machine where nothing else is said


@dataclass(frozen=True, slots=True)
class Place:
    """Rank `rank` of `world_size` processes, one a card, `per_node` of them on each machine."""

    rank: int = 0
    world_size: int = 1
    per_node: int = PER_NODE

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise BadInput(
                f"rank {self.rank} of {self.world_size} does not exist", hint=f"ranks are 0 to {self.world_size - 1}"
            )
        if self.per_node < 1:
            raise BadInput(f"{self.per_node} cards a machine train nothing", hint="--gpus-per-node 8")

    @property
    def local_size(self) -> int:
        """Return how many processes run on this machine; the last one may have fewer cards than the others."""
        return min(self.per_node, self.world_size - self.node * self.per_node)

    @property
    def node(self) -> int:
        return self.rank // self.per_node

    @property
    def nodes(self) -> int:
        return -(-self.world_size // self.per_node)

    @property
    def local_rank(self) -> int:
        return self.rank % self.per_node

    def variables(self) -> dict[str, str]:
        """Return the variables that torchrun sets for this process."""
        numbers = {
            "RANK": self.rank, "LOCAL_RANK": self.local_rank, "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.local_size, "GROUP_RANK": self.node, "GROUP_WORLD_SIZE": self.nodes,
            "ROLE_RANK": self.rank, "ROLE_WORLD_SIZE": self.world_size, "NODE_RANK": self.node,
            "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
        }  # fmt: skip
        words = {
            "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "ROLE_NAME": "default",
            "TORCHELASTIC_RUN_ID": "none",
        }  # fmt: skip
        return {name: str(number) for name, number in numbers.items()} | words
