"""The share of the data sheet's rate that matrix products sustain in PyTorch: measured by card, derived for the others.

A data sheet multiplies units by boost clock. GeForce cards reach that, because their rate with fp32 accumulation is
half of what the units could do, so power suffices. Cards at full rate are held back by their power limit: an A6000
(300 W) reaches 78 %, an L4 (72 W) 58 %, and a T4 (70 W) 37 % once it has been busy for a while.

Sources:
  MAMF   ml-engineering, compute/accelerator, maximum achievable matmul FLOPS, @744d01e1 (2026-08), bf16
  MM     zzc0721/torch-performance-test-data, database.md, torch.mm on squares of 1024 to 10240: bf16 (fp16 without bf16
         units), and fp32 without TF32
  LAYERS mli/transformers-benchmarks, README.md, matrix products of micro_bench.ipynb, fp16
  T4     forums.developer.nvidia.com 264462: 100 products of 4096 in a row, 24 TFLOP/s, which NVIDIA puts down to the
         70 W limit; MM's 42 to 43 are short bursts
"""

from __future__ import annotations

from typing import NamedTuple

from memfit.nouns.gpu import Gpu


class Measured(NamedTuple):
    """TFLOP/s of 16-bit products in PyTorch: the value used, the range that was published, and the data sheet's rate.

    `fp32`: TFLOP/s of fp32 products with TF32 off; 0: not published.
    """

    half: float
    low: float
    high: float
    sheet: float
    fp32: float = 0.0


MEASURED: dict[str, Measured] = {
    # MM, GeForce
    "rtx-3060": Measured(25.5, 24.8, 25.5, 25.5, 8.2),
    "rtx-3060-ti": Measured(36.5, 33.0, 36.5, 32.4, 13.8),
    "rtx-3070": Measured(41.4, 38.4, 43.0, 40.6, 13.7),
    "rtx-3080": Measured(64.5, 53.4, 64.7, 59.5, 21.1),
    "rtx-3080-ti": Measured(76.5, 75.6, 78.3, 68.2, 24.4),
    "rtx-3090": Measured(76.5, 75.5, 76.7, 71.2, 24.8),
    "rtx-4060": Measured(31.5, 31.2, 32.6, 30.2, 8.3),
    "rtx-4060-ti-16gb": Measured(44.7, 42.7, 47.8, 44.1, 11.9),
    "rtx-4070-super": Measured(75.9, 73.6, 76.8, 71.0, 24.6),
    "rtx-4070-ti-super": Measured(90.0, 89.4, 92.7, 88.2, 30.3),
    "rtx-4090": Measured(165.0, 158.9, 173.3, 165.2, 54.0),
    "rtx-5060": Measured(41.0, 39.6, 41.9, 38.4, 13.3),
    "rtx-5060-ti-16gb": Measured(48.0, 45.9, 50.2, 47.4, 16.9),
    "rtx-5070": Measured(67.0, 65.1, 67.5, 61.7, 23.0),
    "rtx-5070-ti": Measured(92.0, 84.0, 99.1, 87.9, 30.7),
    "rtx-5080": Measured(102.9, 102.4, 102.9, 112.6, 33.6),
    "rtx-5090": Measured(237.0, 220.9, 242.2, 209.6, 69.0),
    "rtx-2080-ti": Measured(58.6, 58.6, 58.6, 53.8, 13.0),
    # MM, at full rate and bound by power
    "titan-rtx": Measured(66.3, 66.3, 66.3, 130.5, 11.9),
    "rtx-a4000": Measured(63.0, 62.8, 65.4, 76.7, 11.9),
    "rtx-a6000": Measured(121.0, 95.0, 123.3, 154.8, 23.9),  # and LAYERS
    "rtx-pro-6000": Measured(409.0, 368.4, 418.0, 504.0, 77.0),
    "l4": Measured(70.0, 68.8, 70.9, 121.0, 15.4),
    "l40s": Measured(267.0, 264.0, 269.2, 362.0, 46.9),
    "a10g": Measured(69.5, 69.5, 69.5, 70.0, 23.4),
    "h100-pcie": Measured(495.9, 458.0, 503.8, 756.0, 37.0),
    "p100": Measured(8.4, 7.9, 8.4, 18.7, 8.6),  # cuBLAS accumulates in fp32, at the rate of fp32
    "v100-16gb": Measured(95.0, 94.8, 97.4, 125.0, 14.1),  # and LAYERS
    "v100-32gb": Measured(95.0, 88.9, 97.4, 125.0, 14.1),  # V100S, and the same chip as above
    "rx-7900-xtx": Measured(92.0, 84.9, 105.4, 122.8, 24.8),
    # T4; fp32 by MM, in bursts
    "t4": Measured(24.0, 24.0, 42.7, 65.0, 4.3),
    # MAMF; fp32 by MM
    "a100-40gb": Measured(271.2, 230.0, 271.2, 312.0, 18.1),  # low: LAYERS
    "a100-80gb": Measured(271.2, 230.0, 271.2, 312.0, 19.1),
    "a100-pcie-40gb": Measured(252.9, 234.1, 252.9, 312.0, 17.6),
    "a100-pcie-80gb": Measured(252.9, 234.1, 252.9, 312.0, 17.6),
    "h100": Measured(794.5, 783.7, 797.5, 989.0, 52.0),
    "h200": Measured(794.5, 790.3, 794.5, 989.0, 51.3),
    "gh200-96gb": Measured(828.6, 794.5, 828.6, 989.0),  # high: the 141 GiB version with 900 W
    "gh200-144gb": Measured(828.6, 828.6, 828.6, 989.0),
    "b200": Measured(1745.0, 1696.0, 1745.0, 2250.0, 66.2),
    "b300": Measured(1769.0, 1769.0, 1769.0, 2250.0),
    "gb200": Measured(1822.0, 1822.0, 1822.0, 2500.0),
    "mi300x": Measured(668.4, 668.4, 668.4, 1300.0),
    "mi325x": Measured(784.9, 784.9, 784.9, 1300.0),
    "mi355x": Measured(1565.0, 1565.0, 1565.0, 2500.0),
    "gaudi2": Measured(418.7, 418.7, 418.7, 432.0),
    "gaudi3": Measured(1243.0, 1243.0, 1243.0, 1677.0),
}  # fmt: skip

# Shares of the data sheet for cards that nobody measured, from the cards above of the same kind.
GEFORCE_SHARE = 1.0  # range 0.91 (RTX 5080) to 1.13 (RTX 5090)
OTHER_SHARE = {"Hopper": 0.80, "Blackwell Ultra": 0.73, "CDNA4": 0.63}
USUAL_SHARE = 0.75  # range 0.51 (MI300X) to 0.97 (Gaudi 2)
# Cards with GDDR at full rate: TFLOP/s per watt of the power limit, and no more than the best of them.
PER_WATT = {
    "Ampere": 0.43,  # range 0.40 (A6000) to 0.45 (A4000)
    "Ada": 0.85,  # range 0.76 (L40S) to 0.97 (L4)
    "Blackwell": 0.68,  # RTX PRO 6000
}
FULL_RATE_SHARE = 0.82  # A4000
WATTS = {  # power limits by NVIDIA's data sheets
    "rtx-a4500": 200, "rtx-a5000": 230, "a10": 150, "a40": 300, "rtx-4000-ada": 130, "rtx-5000-ada": 250,
    "rtx-6000-ada": 300, "l40": 300, "rtx-pro-2000": 70, "rtx-pro-4000": 140, "rtx-pro-4500": 200, "rtx-pro-5000": 300,
}  # fmt: skip
# fp32 products against 16-bit ones: medians of GeForce (range 0.22 to 0.38), of other GDDR (0.18 to 0.34), and of HBM
# with tensor cores (0.04 to 0.15, NVIDIA only)
FP32_GEFORCE, FP32_GDDR, FP32_HBM = 0.32, 0.19, 0.07
HBM_BANDWIDTH = 1.2e12  # bytes per second and more: every card with HBM since the A100, and two GeForce


def _geforce(gpu: Gpu) -> bool:
    return gpu.name.startswith("GeForce")


def half_share(gpu: Gpu) -> float:
    """Return the share of the data sheet's 16-bit rate that matrix products sustain on a card."""
    if row := MEASURED.get(gpu.short):
        return row.half / row.sheet
    if _geforce(gpu):
        return GEFORCE_SHARE
    if watts := WATTS.get(gpu.short):
        return min(PER_WATT[gpu.arch] * watts * 1e12 / gpu.half_flops, FULL_RATE_SHARE)
    return OTHER_SHARE.get(gpu.arch, USUAL_SHARE)


def fp32_share(gpu: Gpu) -> float:
    """Return the rate of fp32 products (TF32 off) as a share of what 16-bit products sustain on a card."""
    row = MEASURED.get(gpu.short)
    if row and row.fp32:
        return row.fp32 / row.half
    if _geforce(gpu):
        return FP32_GEFORCE
    return FP32_HBM if gpu.bandwidth >= HBM_BANDWIDTH else FP32_GDDR
