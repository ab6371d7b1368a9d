"""The noun Gpu: one card as the planner sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memfit.units import GB, GIB

Platform = Literal["cuda", "rocm", "xpu", "hpu", "mps"]  # PyTorch's names of its devices; ROCm calls itself cuda
FIRST_BF16 = (8, 0)  # compute capability from which NVIDIA's tensor cores multiply bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One row of gpus.toml. Sizes are bytes; rates are per second; prices in USD."""

    name: str
    short: str  # the name to type: "rtx-4090"
    aliases: tuple[str, ...] = ()
    vendor: str = "NVIDIA"
    arch: str = ""
    compute_capability: tuple[int, int] | None = None  # (8, 9)
    sold_bytes: int  # as printed on the box
    total_bytes: int  # as cudaMemGetInfo reports it
    context_bytes: int  # CUDA context and loaded modules of one process
    bandwidth: float = 0.0  # bytes per second of device memory
    bf16_flops: float = 0.0  # dense, per second; 0: no bf16 units
    fp16_flops: float = 0.0  # dense, fp32 accumulation; 0: as bf16
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

    @property
    def platform(self) -> Platform:
        """Return PyTorch's device type for the card; one of which only the memory is known counts as NVIDIA's."""
        if self.vendor == "Intel":
            return "hpu" if self.arch == "Gaudi" else "xpu"
        found: dict[str, Platform] = {"AMD": "rocm", "Apple": "mps"}
        return found.get(self.vendor, "cuda")

    @property
    def bf16(self) -> bool:
        """Return whether the card has bf16 units, as all cards of other vendors in the table do."""
        return self.compute_capability is None or self.compute_capability >= FIRST_BF16

    @property
    def unified(self) -> bool:
        """Return whether the card shares the host's memory. On AMD a part set aside by firmware counts as its own."""
        return self.pcie == "unified" and self.vendor != "AMD"

    @property
    def pool_bytes(self) -> int:
        """Return the bytes of the memory that CPU and GPU share; 0 for a card with memory of its own.

        On NVIDIA CUDA reports the whole pool, on others a share that the system or the firmware lets the GPU use.
        """
        if self.pcie != "unified":
            return 0
        if self.vendor == "NVIDIA" or self.sold_bytes == self.total_bytes:  # the latter: --gpu-memory
            return self.total_bytes
        return self.sold_bytes // GB * GIB  # memory chips are sold in powers of two, and named GB

    @property
    def half_flops(self) -> float:
        """Return operations per second in bf16, or in fp16 without bf16 units; 0: unknown."""
        return self.bf16_flops or self.fp16_flops

    def usable_bytes(self, reserve: int = 0) -> int:
        """Return the bytes left for PyTorch's allocator: CUDA total - context - reserve."""
        return self.total_bytes - self.context_bytes - reserve
