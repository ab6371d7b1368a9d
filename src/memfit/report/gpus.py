"""The GPU catalogue as a table, with the largest catalogued model each card trains in each way."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from memfit.report.good_for import GpuRow, Largest
from memfit.report.layout import paragraphs, table, text
from memfit.units import GB, billions, gib

WIDE = 170  # columns from which models are named
METHODS = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}


def gpus_view(rows: Sequence[GpuRow], setting: str) -> Group:
    """All cards. `setting`: under which batch, length and precision "good for" was computed."""
    notes = [("full, LoRA, QLoRA:", f"the largest catalogued model that fits on one card by each method ({setting})")]
    notes.append(("more:", "memfit gpus NAME shows one card; for a card that is not here: --gpu-memory 40GiB"))
    return Group(_Cards(rows), "", paragraphs(notes))


class _Cards:
    """The table: sizes alone where columns are few, names of cards and models where there is room."""

    def __init__(self, rows: Sequence[GpuRow]) -> None:
        self.rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= WIDE
        heads = [f">{title}" for title in METHODS.values()]
        made = table("--gpu", *(["card"] if wide else []), ">usable GiB", ">GB/s", ">$/h", *heads)
        for row in self.rows:
            gpu = row.gpu
            price = "-" if gpu.price_per_hour is None else f"{gpu.price_per_hour:.2f}"
            speed = f"{gpu.bandwidth / GB:,.0f}" if gpu.bandwidth else "-"
            good = [_size(row.good_for.get(method), wide) for method in METHODS]
            name = [text(gpu.name)] if wide else []
            made.add_row(Text(gpu.short, "bold"), *name, gib(gpu.usable_bytes()), speed, price, *good)
        yield made


def gpu_view(row: GpuRow, setting: str) -> Group:
    """One card in full."""
    gpu = row.gpu
    capability = ".".join(map(str, gpu.compute_capability)) if gpu.compute_capability else "-"
    facts = [
        ("--gpu", ", ".join((gpu.short, *gpu.aliases))),
        (
            "memory",
            f"{gpu.sold_bytes / GB:.0f} GB sold · {gib(gpu.total_bytes, 2)} GiB for CUDA · {gib(gpu.usable_bytes(), 2)} GiB usable",
        ),
        (
            "chip",
            " · ".join(filter(None, (gpu.vendor, gpu.arch, f"compute capability {capability}", f"{gpu.sm_count} SMs"))),
        ),
        ("speed", f"{gpu.bandwidth / GB:,.0f} GB/s · {gpu.bf16_flops / 1e12:.0f} TFLOP/s bf16, dense"),
        ("bus", f"{gpu.pcie or '-'} · link {gpu.link_bandwidth / GB:.0f} GB/s one way"),
        (
            "price",
            f"{gpu.price_per_hour:.2f} USD per hour ({gpu.price_source})" if gpu.price_per_hour is not None else "",
        ),
        ("unverified", ", ".join(gpu.unverified)),
        ("note", gpu.note),
    ]
    parts: list[RenderableType] = [text(gpu.name, "bold"), paragraphs(facts)]
    good = [(f"  {title}", _named(row.good_for.get(method))) for method, title in METHODS.items()]
    return Group(*parts, text(f"good for ({setting})"), paragraphs(good))


def _size(found: Largest | None, named: bool) -> str:
    if found is None:
        return "-"
    return f"{found.model} {billions(found.parameters)}" if named else billions(found.parameters)


def _named(found: Largest | None) -> str:
    return f"{found.model}, {billions(found.parameters)}" if found else "no catalogued model"
