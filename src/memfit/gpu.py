"""The noun Gpu: one card as the planner sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One row of gpus.toml. Sizes are bytes; rates are per second; prices in USD."""

    name: str
    short: str  # what is typed: "rtx-4090"
    aliases: tuple[str, ...] = ()
    vendor: str = "NVIDIA"
    arch: str = ""
    compute_capability: tuple[int, int] | None = None  # (8, 9)
    sold_bytes: int  # as printed on the box
    total_bytes: int  # as cudaMemGetInfo reports it
    context_bytes: int  # CUDA context and loaded modules of one process
    bandwidth: float = 0.0  # bytes per second of device memory
    bf16_flops: float = 0.0  # dense, per second; 0: no bf16 units
    fp8_flops: float = 0.0
    pcie: str = ""
    pcie_bandwidth: float = 0.0  # bytes per second, one direction
    link_bandwidth: float = 0.0  # bytes per second to another card, one direction; 0: PCIe only
    price_per_hour: float | None = None
    spot_per_hour: float | None = None
    price_source: str = ""  # where and when the price was read
    sm_count: int = 0
    unverified: tuple[str, ...] = ()  # fields without a source
    note: str = ""

    def usable_bytes(self, reserve: int = 0) -> int:
        """What tensors and the allocator's slack may take: CUDA total - context - the stated reserve."""
        return self.total_bytes - self.context_bytes - reserve
