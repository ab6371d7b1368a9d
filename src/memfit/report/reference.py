"""The screens of the catalogues: GPUs with the largest model each trains, models, and the glossary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Group, RenderableType
from rich.text import Text

from memfit.closed_form.task_runs import TASK_RUNS
from memfit.errors import UnknownName
from memfit.nouns.gpu import Gpu
from memfit.report.layout import Column, Grid, paragraphs, text
from memfit.report.words import DOT, NO_PRICE
from memfit.tables.matmul_rates import MEASURED, half_share
from memfit.units import GB, billions, gib

if TYPE_CHECKING:
    from memfit.planner.good_for import CatalogueModel, GpuRow, Largest

    class ModelRow(CatalogueModel, Protocol):
        """The fields of a catalogued model that its row shows."""

        @property
        def architecture(self) -> str: ...

        @property
        def refused(self) -> str: ...


METHODS = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}


def gpus_view(rows: Sequence[GpuRow], setting: str, prices_read: str) -> Group:
    """Show cards. `setting`: the batch, length and precision of "good for"; `prices_read`: the day of the prices."""
    notes = [("full, LoRA, QLoRA:", f"the largest catalogued model that fits on one card by each method ({setting})")]
    notes.append(("$/h:", f"USD per hour of one card on demand, read on {prices_read}; -: {NO_PRICE}"))
    notes.append(("more:", "memfit gpus TEXT shows the cards with that name, vendor, architecture or memory"))
    notes.append(("not here:", "for another card give its memory: --gpu-memory 40GiB"))
    return Group(_cards(rows), "", paragraphs(notes))


def _cards(rows: Sequence[GpuRow]) -> Grid:
    """Make the table of cards; names of cards and models are left out where the terminal is narrow."""
    heads = (
        Column("--gpu"), Column("card", spare=5), Column("usable\nGiB", right=True),
        Column("GB/s", right=True, spare=3), Column("$/h", right=True, spare=2),
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


def gpu_view(row: GpuRow, setting: str, prices_read: str) -> Group:
    """Show one card in full."""
    from memfit.planner.good_for import VENDORS  # imported late, because the other screens need no planner

    gpu = row.gpu
    sizes = (f"{gpu.sold_bytes / GB:.0f} GB sold", f"{gib(gpu.total_bytes, 2)} GiB for CUDA")
    link = (
        f"link {gpu.link_bandwidth / GB:.0f} GB/s one way"
        if gpu.link_bandwidth
        else "no link, cards communicate over PCIe"
    )
    price = NO_PRICE
    if gpu.price_per_hour is not None:
        price = f"{gpu.price_per_hour:.2f} USD per hour ({gpu.price_source}, read on {prices_read})"
    facts = [
        ("--gpu", ", ".join((gpu.short, *gpu.aliases))),
        ("memory", DOT.join((*sizes, f"{gib(gpu.usable_bytes(), 2)} GiB usable"))),
        ("chip", _chip(gpu)),
        ("speed", DOT.join((f"{gpu.bandwidth / GB:,.0f} GB/s", _rate(gpu)))),
        ("bus", DOT.join((gpu.pcie or "-", link))),
        ("price", price),
        ("unverified", ", ".join(gpu.unverified)),
        ("software", _software(gpu)),
        ("note", gpu.note),
    ]  # fmt: skip
    parts: list[RenderableType] = [text(gpu.name, "bold"), paragraphs(facts)]
    if gpu.vendor not in VENDORS:
        return Group(*parts)
    good = [(f"  {title}", _named(row.good_for.get(method))) for method, title in METHODS.items()]
    return Group(*parts, text(f"good for ({setting})"), paragraphs(good))


def _software(gpu: Gpu) -> str:
    from memfit.tables.cautions import PLATFORMS

    if gpu.platform in ("cuda", "rocm"):
        return ""
    return f"the allocator and kernels of {PLATFORMS[gpu.platform]} are not modelled, so 'good for' is not computed"


def _chip(gpu: Gpu) -> str:
    capability = f"compute capability {'.'.join(map(str, gpu.compute_capability))}" if gpu.compute_capability else ""
    return DOT.join(filter(None, (gpu.vendor, gpu.arch, capability, f"{gpu.sm_count} SMs" if gpu.sm_count else "")))


def _rate(gpu: Gpu) -> str:
    if not gpu.half_flops:
        return "16-bit rate not known"
    name, sheet = "bf16" if gpu.bf16_flops else "fp16 (no bf16 units)", gpu.half_flops / 1e12
    sustained = "measured" if gpu.short in MEASURED else "estimated"
    return f"{sheet:,.0f} TFLOP/s {name} dense, of which products sustain {sheet * half_share(gpu):,.0f} ({sustained})"


def _named(found: Largest | None) -> str:
    return f"{found.model}, {billions(found.parameters)}" if found else "no catalogued model"


_DECODERS = ("ForCausalLM", "LMHeadModel", "ChatGLMForConditionalGeneration")  # classes of language models
_USUAL = ("masked-lm", "image-text", "image-classification", "seq2seq", "speech")  # what other models are trained for
_FAMILIES = frozenset().union(*(TASK_RUNS[key].families for key in _USUAL))


def by_formula(row: ModelRow) -> bool:
    """Return whether a model's usual task is planned by formula, as far as its class and family say."""
    return row.family in _FAMILIES or (not row.refused and row.architecture.endswith(_DECODERS))


def models_view(rows: Sequence[ModelRow]) -> Group:
    """Show each model's name to type, size, family, Hugging Face id, and how a plan of it is counted."""
    columns = (
        Column("model"), Column("parameters", right=True), Column("family", spare=2),
        Column("Hugging Face id", spare=3), Column("training", wraps=8, spare=1),
    )  # fmt: skip
    lines = [
        (text(r.stem), "-" if r.parameters is None else billions(r.parameters), text(r.family), text(r.id),
         "by formula" if by_formula(r) else "by trace")
        for r in rows
    ]  # fmt: skip
    note = "for others give org/name on Hugging Face, a folder with a config.json, or a config.json"
    return Group(Grid(columns, lines), "", text(f"{len(rows)} models; {note}", "dim"))


@dataclass(frozen=True, slots=True)
class Term:
    """A word of the glossary. `means` is one sentence; `more` adds numbers or a caveat; `see` names other terms."""

    name: str
    means: str
    more: str = ""
    also: tuple[str, ...] = ()  # other names for it
    see: tuple[str, ...] = ()


def terms(data: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[Term, ...]:
    """Return the terms of the parsed glossary.toml, by name."""
    found = []
    for row in data["term"]:
        cells: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
        found.append(Term(**cells))
    return tuple(sorted(found, key=lambda t: t.name.lower()))


def lookup(known: Iterable[Term], word: str) -> Term:
    """Return the term with `word` as its name or other name. Raises UnknownName with similar names."""
    by_name = {_key(name): t for t in known for name in (t.name, *t.also)}
    if _key(word) not in by_name:
        raise UnknownName("term", word, by_name, hint="see: memfit glossary")
    return by_name[_key(word)]


def _key(word: str) -> str:
    return " ".join(word.lower().replace("_", " ").replace("-", " ").split())


def glossary_view(known: Sequence[Term]) -> Group:
    """Show all terms, one line each."""
    return Group(paragraphs([(t.name, t.means) for t in known]))


def term_view(term: Term) -> Group:
    """Show one term in full."""
    parts: list[RenderableType] = [text(term.name, "bold"), text(term.means)]
    parts += [text(term.more)] if term.more else []
    return Group(*parts, paragraphs([("also called:", ", ".join(term.also)), ("see:", ", ".join(term.see))]))
