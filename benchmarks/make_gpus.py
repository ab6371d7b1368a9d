"""Writes src/memfit/catalogue/gpus.toml from gpus.csv: `python benchmarks/make_gpus.py [CSV] [TOML]`.

The CSV holds what was read in public sources, one device per row, blank where nothing was found; the tables below hold
what people call the cards, their SM counts, and values found later. Everything else in the TOML is derived here, and a
derived value is listed in its row's `unverified`.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from memfit.nouns.gpu import Gpu
from memfit.units import GB, MIB

HERE = Path(__file__).resolve().parent
HEADER = """\
# GPUs memfit knows. Written by benchmarks/make_gpus.py from benchmarks/gpus.csv; edit those, not this file.
# Sizes are bytes, rates per second, prices USD per hour. A field listed in `unverified` has no source of its own:
#
# total_bytes     what cudaMemGetInfo reports on Linux (Windows reports more, but no more can be filled). Estimate: the
#                 total nvidia-smi shows (or else the sold size times the median smi/sold ratio of sourced cards) minus
#                 the median driver reserve of sourced cards, both over the same class and architecture, or the same
#                 class, or all. Apple: recommendedMaxWorkingSetSize, 2/3 of memory up to 36 GB and 3/4 above.
# context_bytes   CUDA context and modules of one process, with lazy loading. Published values for the T4, RTX 2080 Ti,
#                 A100, A40, RTX 4090, L40S and RTX 5090, the H100's measured after training steps (742 to 760 MiB under
#                 driver 580.159 with CUDA 13.0, of which 527 before the first kernel); the same chip takes the same
#                 value. Estimate:
#                 {base} MiB + {per_sm} MiB per SM, the line through the T4 and the median of the published newer cards;
#                 {flat} MiB where the SM count is not known. Drivers differ by about 100 MiB.
# pcie_bandwidth  achievable, one direction: 80 % of the bus: Gen3 x16 13e9, Gen4 26e9, Gen5 52e9, Gen6 104e9; x8 half.
#                 Unified memory: half its bandwidth, because a copy reads and writes the same chips.
# bf16_flops      dense; 0 without bf16 units, or unknown when listed in `unverified`.
# fp16_flops      dense, with fp32 accumulation as PyTorch's products; only where there are no bf16 units.
# price_per_hour  of one card on demand, as its price_source listed it on the day below; most cards have none.

prices_read = "{read}"
"""

# name in the CSV -> (short name, other names, SMs; 0: not NVIDIA). nvidia-smi's own names are found by their parts.
NAMES: dict[str, tuple[str, tuple[str, ...], int]] = {
    "GeForce RTX 3060 12 GB": ("rtx-3060", ("3060", "rtx-3060-12gb"), 28),
    "GeForce RTX 3060 Ti": ("rtx-3060-ti", ("3060-ti",), 38),
    "GeForce RTX 3070": ("rtx-3070", ("3070",), 46),
    "GeForce RTX 3080": ("rtx-3080", ("3080", "rtx-3080-10gb"), 68),
    "GeForce RTX 3080 12 GB": ("rtx-3080-12gb", ("3080-12gb",), 70),
    "GeForce RTX 3080 Ti": ("rtx-3080-ti", ("3080-ti",), 80),
    "GeForce RTX 3090": ("rtx-3090", ("3090",), 82),
    "GeForce RTX 3090 Ti": ("rtx-3090-ti", ("3090-ti",), 84),
    "GeForce RTX 4060": ("rtx-4060", ("4060",), 24),
    "GeForce RTX 4060 Ti 16 GB": ("rtx-4060-ti-16gb", ("4060-ti-16gb",), 34),
    "GeForce RTX 4070": ("rtx-4070", ("4070",), 46),
    "GeForce RTX 4070 SUPER": ("rtx-4070-super", ("4070-super",), 56),
    "GeForce RTX 4070 Ti": ("rtx-4070-ti", ("4070-ti",), 60),
    "GeForce RTX 4070 Ti SUPER": ("rtx-4070-ti-super", ("4070-ti-super",), 66),
    "GeForce RTX 4080": ("rtx-4080", ("4080",), 76),
    "GeForce RTX 4080 SUPER": ("rtx-4080-super", ("4080-super",), 80),
    "GeForce RTX 4090": ("rtx-4090", ("4090",), 128),
    "GeForce RTX 5060": ("rtx-5060", ("5060",), 30),
    "GeForce RTX 5060 Ti 16 GB": ("rtx-5060-ti-16gb", ("5060-ti-16gb",), 36),
    "GeForce RTX 5070": ("rtx-5070", ("5070",), 48),
    "GeForce RTX 5070 Ti": ("rtx-5070-ti", ("5070-ti",), 70),
    "GeForce RTX 5080": ("rtx-5080", ("5080",), 84),
    "GeForce RTX 5090": ("rtx-5090", ("5090",), 170),
    "GeForce RTX 2080 Ti": ("rtx-2080-ti", ("2080-ti",), 68),
    "TITAN RTX": ("titan-rtx", (), 72),
    "RTX A4000": ("rtx-a4000", ("a4000",), 48),
    "RTX A4500": ("rtx-a4500", ("a4500",), 56),
    "RTX A5000": ("rtx-a5000", ("a5000",), 64),
    "RTX A6000": ("rtx-a6000", ("a6000",), 84),
    "RTX 4000 Ada Generation": ("rtx-4000-ada", ("4000-ada",), 48),
    "RTX 5000 Ada Generation": ("rtx-5000-ada", ("5000-ada",), 100),
    "RTX 6000 Ada Generation": ("rtx-6000-ada", ("6000-ada",), 142),
    "RTX PRO 2000 Blackwell": ("rtx-pro-2000", ("pro-2000",), 34),
    "RTX PRO 4000 Blackwell": ("rtx-pro-4000", ("pro-4000",), 70),
    "RTX PRO 4500 Blackwell": ("rtx-pro-4500", ("pro-4500",), 82),
    "RTX PRO 5000 Blackwell": ("rtx-pro-5000", ("pro-5000",), 110),
    "RTX PRO 6000 Blackwell": (
        "rtx-pro-6000",
        (
            "pro-6000",
            "rtx-pro-6000-blackwell-server-edition",
            "rtx-pro-6000-blackwell-workstation-edition",
            "rtx-pro-6000-blackwell-max-q-workstation-edition",
        ),
        188,
    ),
    "GB10": ("gb10", ("dgx-spark",), 48),
    "Tesla T4": ("t4", (), 40),
    "Tesla P100 PCIe 16 GB": ("p100", ("p100-16gb",), 56),
    "Tesla V100 SXM2 16 GB": ("v100-16gb", (), 80),
    "Tesla V100 SXM2 32 GB": ("v100-32gb", (), 80),
    "L4": ("l4", (), 58),
    "L40": ("l40", (), 142),
    "L40S": ("l40s", (), 142),
    "A10": ("a10", (), 72),
    "A10G": ("a10g", (), 80),
    "A30": ("a30", (), 56),
    "A40": ("a40", (), 84),
    "A100 PCIe 40 GB": ("a100-pcie-40gb", ("a100-40gb-pcie",), 108),
    "A100 SXM4 40 GB": ("a100-40gb", ("a100-sxm-40gb", "a100-40gb-sxm"), 108),
    "A100 PCIe 80 GB": ("a100-pcie-80gb", ("a100-80gb-pcie",), 108),
    "A100 SXM4 80 GB": ("a100-80gb", ("a100-sxm-80gb", "a100-80gb-sxm"), 108),
    "H100 PCIe": ("h100-pcie", ("h100-80gb-pcie",), 114),
    "H100 SXM": ("h100", ("h100-sxm", "h100-sxm5", "h100-80gb", "h100-80gb-hbm3"), 132),
    "H100 NVL": ("h100-nvl", (), 132),
    "H200 SXM": ("h200", ("h200-sxm",), 132),
    "H200 NVL": ("h200-nvl", (), 132),
    "GH200 96GB": ("gh200-96gb", ("gh200-480gb",), 132),  # nvidia-smi names it after the Grace memory
    "GH200 144GB": ("gh200-144gb", (), 132),
    "B200 SXM": ("b200", ("b200-sxm",), 148),
    "GB200": ("gb200", (), 152),
    "B300 SXM": ("b300", ("b300-sxm",), 148),
    "GB300": ("gb300", (), 152),
    "MI210": ("mi210", (), 0),
    "MI250X (per GCD)": ("mi250x", (), 0),
    "MI300X": ("mi300x", (), 0),
    "MI325X": ("mi325x", (), 0),
    "MI350X": ("mi350x", (), 0),
    "MI355X": ("mi355x", (), 0),
    "Radeon RX 7900 XTX": ("rx-7900-xtx", ("7900-xtx",), 0),
    "Radeon PRO W7900": ("w7900", (), 0),
    "Radeon AI PRO R9700": ("r9700", (), 0),
    "Ryzen AI Max+ 395": ("ai-max-395", ("strix-halo",), 0),
    "Gaudi2": ("gaudi2", (), 0),
    "Gaudi3": ("gaudi3", (), 0),
    "Arc A770": ("arc-a770", ("a770",), 0),
    "Arc B580": ("arc-b580", ("b580",), 0),
    "Arc Pro B60": ("arc-b60", ("b60",), 0),
    "Arc Pro B70": ("arc-b70", ("b70",), 0),
}

# Found after the CSV was made, on Linux: name -> (CUDA total MiB, nvidia-smi total MiB or None). Sources: the device
# line Ultralytics prints (total_memory in MiB) in public logs, or the capacity an OutOfMemoryError states.
SEEN: dict[str, tuple[float, float | None]] = {
    "GeForce RTX 3070": (7.78 * 1024, 8192),  # akshitac8/OW-DETR#46
    "GeForce RTX 3080": (9.78 * 1024, 10240),  # zai-org/CogVideo#34; the CSV's value is from Windows
    "GeForce RTX 3080 12 GB": (11.6 * 1024, None),
    "GeForce RTX 3080 Ti": (11910.6, 12288),
    "GeForce RTX 3090 Ti": (24110, 24564),
    "GeForce RTX 4070": (11994, 12282),
    "GeForce RTX 4070 Ti": (12007, 12282),
    "GeForce RTX 4080 SUPER": (15944, 16376),
    "GeForce RTX 4090": (24210, 24564),  # torch 2.5.1+cu121
    "GeForce RTX 5060 Ti 16 GB": (15848, 16311),
    "TITAN RTX": (24212, None),
    "RTX A4000": (15.61 * 1024, None),  # DengKaiCQ/VGGT-Long#6
    "Tesla P100 PCIe 16 GB": (16269, 16280),
    "Tesla V100 SXM2 16 GB": (16160, 16160),
    "A30": (23.53 * 1024, 24576),  # google/RB-Modulation#5
    "GB10": (119.61 * 1024, None),
}
WINDOWS = {"GeForce RTX 5080"}  # the CSV's CUDA total is a Windows one, which nothing can fill: estimate instead
ASSUMED_TOTAL = {"Ryzen AI Max+ 395": 96 * 1024}  # MiB: the largest share of the 128 GB its firmware can set apart
ASSUMED_BANDWIDTH = {  # bytes per second, from the width and speed of the memory
    "Arc Pro B70": 608e9,  # 256 bit x 19 Gb/s
    "Apple M5 Pro": 307e9,  # twice and four times the bus of the M5
    "Apple M5 Max": 614e9,
}
PRICES_READ = "2026-11-21"  # the day on which the prices of the CSV and of this table were read
PRICES = {"L4": (0.44, None, "SkyPilot catalog v8 jarvislabs/vms.csv @57d65781")}

# MiB of one process's context, published or measured (H100). Keys are names in the CSV; the second table lists cards
# with the same chip.
CONTEXT = {
    "Tesla T4": 100.0, "GeForce RTX 2080 Ti": 106.0, "A100 SXM4 40 GB": 414.0, "A40": 317.0, "L40S": 317.0,
    "GeForce RTX 4090": 471.0, "H100 SXM": 758.0, "GeForce RTX 5090": 595.0,
}  # fmt: skip
SAME_CHIP = {
    "TITAN RTX": "GeForce RTX 2080 Ti", "L40": "L40S",
    **dict.fromkeys(("A100 PCIe 40 GB", "A100 PCIe 80 GB", "A100 SXM4 80 GB"), "A100 SXM4 40 GB"),
    **dict.fromkeys(("H100 PCIe", "H100 NVL", "H200 SXM", "H200 NVL", "GH200 96GB", "GH200 144GB"), "H100 SXM"),
}  # fmt: skip
BASE_CONTEXT, FLAT_CONTEXT = CONTEXT["Tesla T4"], 500.0
NEWER = ("A100 SXM4 40 GB", "A40", "GeForce RTX 4090", "H100 SXM", "GeForce RTX 5090")
CONTEXT_PER_SM = round(median((CONTEXT[n] - BASE_CONTEXT) / NAMES[n][2] for n in NEWER), 1)

PCIE_X16 = {"3.0": 13e9, "4.0": 26e9, "5.0": 52e9, "6.0": 104e9}
C2C_SHARE = 0.8  # of NVLink-C2C's 450 GB/s, as for PCIe
NOTES = {
    "GeForce RTX 3080": "",  # the CSV's note is about the value replaced above
    "GeForce RTX 5080": "16302 MiB was seen, likely on Windows; Linux is lower",
    "H100 SXM": "'h100' alone means this SXM card (h100-pcie and h100-nvl are others); 81082-81114 MiB by driver",
    "GH200 96GB": "nvidia-smi names it GH200 480GB, after the memory of its CPU; a 144 GB HBM3e variant exists",
    "Ryzen AI Max+ 395": "the largest share of its 128 GB that the firmware can set apart; GTT may lend more",
}
APPLE_NOTE = "macOS lets the GPU take this share of memory unless iogpu.wired_limit_mb is raised"
CSV_FIELD = {
    "cuda_total_mib": "total_bytes", "bandwidth_gbs": "bandwidth", "bf16_dense_tflops": "bf16_flops",
    "link_gbs_unidir": "link_bandwidth",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One device of the CSV; None where the CSV is blank and nothing was found later. Sizes in MiB."""

    cells: dict[str, str]
    name: str
    sold: float
    smi: float | None
    total: float | None

    @classmethod
    def read(cls, cells: dict[str, str]) -> Row:
        name = cells["name"]
        total, smi = _number(cells["cuda_total_mib"]), _number(cells["smi_total_mib"])
        if name in WINDOWS:
            total = None
        if name in SEEN:
            total, smi = SEEN[name][0], SEEN[name][1] or smi
        return cls(cells, name, float(cells["mem_sold_gb"]) * 1024, smi, total)

    @property
    def family(self) -> str:
        """Cards whose drivers keep back alike: by memory and market."""
        kind = self.cells["mem_type"]
        if self.cells["vendor"] != "NVIDIA":
            return self.cells["vendor"]
        if kind.startswith(("HBM", "LPDDR")):
            return kind[:3]
        if self.name.startswith(("GeForce", "TITAN")):
            return "GeForce"
        return "workstation" if self.name.startswith("RTX") else "datacentre GDDR"


def estimated_total(row: Row, rows: Iterable[Row]) -> float:
    """MiB: what nvidia-smi shows minus what the drivers of sourced cards like it keep back (medians)."""
    sourced = [r for r in rows if r.total]
    arch = row.cells["arch"]
    tests: tuple[Callable[[Row], bool], ...] = (
        lambda r: r.family == row.family and r.cells["arch"] == arch,
        lambda r: r.family == row.family,
        lambda r: True,
    )
    like = next(found for test in tests if (found := [r for r in sourced if test(r)]))
    pairs = [(r.smi, r.total, r.sold) for r in like if r.smi and r.total]
    if not pairs:
        return row.sold * median((r.total or 0) / r.sold for r in like)
    smi = row.smi or row.sold * median(s / sold for s, _, sold in pairs)
    return smi - median(s - total for s, total, _ in pairs)


def context(name: str, sms: int) -> tuple[float, bool]:
    """(MiB of one process's context, whether it is published for this very card)."""
    if name in CONTEXT:
        return CONTEXT[name], True
    if name in SAME_CHIP:
        return CONTEXT[SAME_CHIP[name]], False
    return (BASE_CONTEXT + CONTEXT_PER_SM * sms if sms else FLAT_CONTEXT), False


def pcie_bandwidth(text: str, bandwidth: float) -> tuple[float, bool]:
    """(bytes per second in one direction, whether the rule was checked): see the TOML's header."""
    if "unified" in text:
        return bandwidth / 2, False
    if found := re.search(r"C2C (\d+)", text):
        return float(found[1]) * C2C_SHARE * GB, False
    generation, lanes = re.search(r"(\d\.0)", text), re.search(r"x(\d+)", text)
    assert generation, text
    return PCIE_X16[generation[1]] * (int(lanes[1]) if lanes else 16) / 16, generation[1] in ("3.0", "4.0", "5.0")


def gpu(row: Row, rows: list[Row]) -> Gpu:
    """One discrete card as memfit sees it."""
    cells, unverified = row.cells, {CSV_FIELD[f] for f in row.cells["unverified_fields"].split() if f in CSV_FIELD}
    short, aliases, sms = NAMES[row.name]
    total = row.total or ASSUMED_TOTAL.get(row.name) or estimated_total(row, rows)
    if row.name in SEEN:
        unverified.discard("total_bytes")
    if not row.total:
        unverified.add("total_bytes")
    context_mib, published = context(row.name, sms)
    rates, more = _rates(row)
    price, spot, source = PRICES.get(
        row.name,
        (_number(cells["price_usd_per_hour"]), _number(cells["spot_usd_per_hour"]), cells["price_source"]),
    )
    return Gpu(
        name=row.name,
        short=short,
        aliases=aliases,
        vendor=cells["vendor"],
        arch=cells["arch"],
        compute_capability=_capability(cells["compute_capability"]),
        sold_bytes=round(row.sold / 1024 * GB),
        total_bytes=round(total) * MIB,
        context_bytes=round(context_mib) * MIB,
        pcie=cells["pcie"],
        price_per_hour=price,
        spot_per_hour=spot,
        price_source=source,
        sm_count=sms,
        unverified=tuple(sorted({*unverified, *more, *(() if published else ("context_bytes",))})),
        note=NOTES.get(row.name, cells["note"]),
        **rates,
    )


def _rates(row: Row) -> tuple[dict[str, float], set[str]]:
    """Bandwidths and flops per second, and which of them have no source."""
    cells, unverified = row.cells, set()
    bandwidth = _number(cells["bandwidth_gbs"])
    if bandwidth is None:
        unverified.add("bandwidth")
    speed = bandwidth * GB if bandwidth else ASSUMED_BANDWIDTH[row.name]
    pcie, checked = pcie_bandwidth(cells["pcie"], speed)
    if not checked:
        unverified.add("pcie_bandwidth")
    bf16 = _number(cells["bf16_dense_tflops"])
    if bf16 is None and cells["vendor"] in ("Intel", "Apple"):
        unverified.add("bf16_flops")
    fp16, fp8 = _number(cells["fp16_dense_tflops"]), _number(cells["fp8_dense_tflops"])
    if fp8 and "bf16_dense_tflops" in cells["unverified_fields"]:
        unverified.add("fp8_flops")
    link = _number(cells["link_gbs_unidir"]) or 0.0
    return {
        "bandwidth": speed,
        "bf16_flops": (bf16 or 0.0) * 1e12,
        "fp16_flops": (fp16 or 0.0) * 1e12,
        "fp8_flops": (fp8 or 0.0) * 1e12,
        "pcie_bandwidth": pcie,
        "link_bandwidth": link * GB,
    }, unverified


def apple(cells: dict[str, str]) -> list[Gpu]:
    """One row per memory size a chip is sold with; the bare chip name means the smallest, which promises least."""
    sizes = [int(s) for s in cells["mem_sold_gb"].split("/")]
    chip = cells["name"].removeprefix("Apple ").lower().replace(" ", "-")
    unverified = {CSV_FIELD[f] for f in cells["unverified_fields"].split() if f in CSV_FIELD}
    found = []
    for size in sizes:
        rates, more = _rates(Row(cells, cells["name"], size * 1024, None, None))
        found.append(
            Gpu(
                name=f"{cells['name']} {size} GB",
                short=f"{chip}-{size}gb",
                aliases=(chip,) if size == sizes[0] else (),
                vendor="Apple",
                arch=cells["arch"],
                sold_bytes=size * GB,
                total_bytes=size * 1024 * MIB * (8 if size <= 36 else 9) // 12,
                context_bytes=round(FLAT_CONTEXT) * MIB,
                pcie=cells["pcie"],
                unverified=tuple(sorted({*unverified, *more, "total_bytes", "context_bytes"})),
                note=APPLE_NOTE,
                **rates,
            )
        )
    return found


def to_toml(gpus: Iterable[Gpu]) -> str:
    """The table, without the fields that have their default value."""
    lines = [HEADER.format(base=round(BASE_CONTEXT), per_sm=CONTEXT_PER_SM, flat=round(FLAT_CONTEXT), read=PRICES_READ)]
    for card in gpus:
        lines.append("[[gpu]]")
        for field in fields(Gpu):
            value = getattr(card, field.name)
            if value != field.default:
                lines.append(f"{field.name} = {_toml(value)}")
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return f"{value:_}" if isinstance(value, int) else f"{value:.6g}".replace("e+", "e")


def _number(text: str) -> float | None:
    return float(text) if text else None


def _capability(text: str) -> tuple[int, int] | None:
    found = re.fullmatch(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def main(csv_path: Path, toml_path: Path) -> None:
    cells = list(csv.DictReader(csv_path.read_text(encoding="utf-8").splitlines()))
    discrete = [Row.read(c) for c in cells if c["vendor"] != "Apple"]
    gpus = [gpu(row, discrete) for row in discrete] + [g for c in cells if c["vendor"] == "Apple" for g in apple(c)]
    part = toml_path.with_suffix(".part")
    part.write_text(to_toml(gpus), encoding="utf-8")
    part.replace(toml_path)
    print(f"{len(gpus)} rows from {len(cells)} devices -> {toml_path}", file=sys.stderr)


if __name__ == "__main__":
    defaults = (HERE / "gpus.csv", HERE.parent / "src" / "memfit" / "catalogue" / "gpus.toml")
    main(*(Path(a) for a in sys.argv[1:3]), *defaults[len(sys.argv[1:3]) :])
