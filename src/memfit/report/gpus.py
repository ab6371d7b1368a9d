"""The GPU catalogue as a table, with the largest catalogued model each card trains in each way."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from memfit.nouns.gpu import Gpu, Platform
from memfit.planner.good_for import VENDORS, GpuRow, Largest
from memfit.report.layout import Column, Grid, paragraphs, text
from memfit.report.words import DOT
from memfit.tables.cautions import PLATFORMS
from memfit.units import GB, billions, gib

SOFTWARE: dict[Platform, str] = {
    platform: f"allocator and kernels of {name} are not modelled, so what it is good for is not computed"
    for platform, name in PLATFORMS.items() if platform not in ("cuda", "rocm")
}  # fmt: skip
METHODS = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}


def gpus_view(rows: Sequence[GpuRow], setting: str) -> Group:
    """All cards. `setting`: under which batch, length and precision "good for" was computed."""
    notes = [("full, LoRA, QLoRA:", f"the largest catalogued model that fits on one card by each method ({setting})")]
    notes.append(("more:", "memfit gpus NAME shows one card; for a card that is not here: --gpu-memory 40GiB"))
    return Group(_cards(rows), "", paragraphs(notes))


def _cards(rows: Sequence[GpuRow]) -> Grid:
    """Names of cards and models only where there is room."""
    heads = (
        Column("--gpu"), Column("card", spare=5), Column("usable\nGiB", right=True), Column("GB/s", right=True, spare=3),
        Column("$/h", right=True, spare=2),
    )  # fmt: skip
    methods = [c for title in METHODS.values() for c in (Column(title, right=True), Column("", spare=6))]
    return Grid((*heads, *methods), [_card(row) for row in rows])


def _card(row: GpuRow) -> list[Text | str]:
    gpu = row.gpu
    price = "-" if gpu.price_per_hour is None else f"{gpu.price_per_hour:.2f}"
    speed = f"{gpu.bandwidth / GB:,.0f}" if gpu.bandwidth else "-"
    good = [row.good_for.get(method) for method in METHODS]
    models = [cell for g in good for cell in (billions(g.parameters) if g else "-", text(g.model) if g else "")]
    return [Text(gpu.short, "bold"), text(gpu.name), gib(gpu.usable_bytes()), speed, price, *models]


def gpu_view(row: GpuRow, setting: str) -> Group:
    """One card in full."""
    gpu = row.gpu
    facts = [
        ("--gpu", ", ".join((gpu.short, *gpu.aliases))),
        ("memory", DOT.join((f"{gpu.sold_bytes / GB:.0f} GB sold", f"{gib(gpu.total_bytes, 2)} GiB for CUDA", f"{gib(gpu.usable_bytes(), 2)} GiB usable"))),
        ("chip", _chip(gpu)),
        ("speed", DOT.join((f"{gpu.bandwidth / GB:,.0f} GB/s", _rate(gpu)))),
        ("bus", DOT.join((gpu.pcie or "-", f"link {gpu.link_bandwidth / GB:.0f} GB/s one way" if gpu.link_bandwidth else "no link, cards meet over PCIe"))),
        ("price", f"{gpu.price_per_hour:.2f} USD per hour ({gpu.price_source})" if gpu.price_per_hour is not None else ""),
        ("unverified", ", ".join(gpu.unverified)),
        ("software", SOFTWARE.get(gpu.platform, "")),
        ("note", gpu.note),
    ]  # fmt: skip
    parts: list[RenderableType] = [text(gpu.name, "bold"), paragraphs(facts)]
    if gpu.vendor not in VENDORS:
        return Group(*parts)
    good = [(f"  {title}", _named(row.good_for.get(method))) for method, title in METHODS.items()]
    return Group(*parts, text(f"good for ({setting})"), paragraphs(good))


def _chip(gpu: Gpu) -> str:
    capability = f"compute capability {'.'.join(map(str, gpu.compute_capability))}" if gpu.compute_capability else ""
    return DOT.join(filter(None, (gpu.vendor, gpu.arch, capability, f"{gpu.sm_count} SMs" if gpu.sm_count else "")))


def _rate(gpu: Gpu) -> str:
    if not gpu.half_flops:
        return "16-bit rate not known"
    return f"{gpu.half_flops / 1e12:,.0f} TFLOP/s {'bf16' if gpu.bf16_flops else 'fp16 (no bf16 units)'}, dense"


def _named(found: Largest | None) -> str:
    return f"{found.model}, {billions(found.parameters)}" if found else "no catalogued model"
