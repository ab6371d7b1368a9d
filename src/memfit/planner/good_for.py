"""Find the largest catalogued model that a card trains by each method, at one fixed setting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from memfit.closed_form.numerics import attention_kernel
from memfit.closed_form.run.estimate import estimate
from memfit.errors import Unsupported
from memfit.nouns.architecture import Architecture
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Recipe
from memfit.nouns.plan import verdict_of
from memfit.tables import combinations

SETTING = (
    "Llama, Qwen3, Mistral and Gemma 3; micro-batch 1, sequence 2048, full checkpointing, fused loss, AdamW; "
    "bf16, or fp16 mixed on cards without bf16"
)
# only well-known dense decoders of these publishers, to keep the table readable and the search quick
PUBLISHERS = ("meta-llama/", "Qwen/", "mistralai/", "google/")
FAMILIES = ("llama", "qwen3", "mistral", "gemma3_text")
_COMMON = Recipe(micro_batch=1, sequence_length=2048, checkpointing="full", loss="fused")
RECIPES: dict[str, Recipe] = {
    "full": _COMMON,
    "lora": _COMMON.but(method="lora"),
    "qlora": _COMMON.but(method="qlora", quantization="nf4-double"),
}
# least bytes per parameter, to skip models that cannot fit: AdamW in 16 bits, 16-bit and 4-bit bases
_LEAST = {"full": 8.0, "lora": 2.0, "qlora": 0.5}
VENDORS = ("NVIDIA", "AMD")  # vendors whose cards run the modelled allocator and kernels


class CatalogueModel(Protocol):
    """The fields of a catalogue entry that reports and the search read."""

    @property
    def stem(self) -> str: ...
    @property
    def id(self) -> str: ...
    @property
    def family(self) -> str: ...
    @property
    def parameters(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest catalogued model a card trains in one way."""

    model: str
    parameters: int


@dataclass(frozen=True, slots=True)
class GpuRow:
    """A card and its largest model by method; a missing method fits no model or is not modelled on the card."""

    gpu: Gpu
    good_for: Mapping[str, Largest]


E = TypeVar("E", bound=CatalogueModel)


def good_for(gpus: Iterable[Gpu], entries: Sequence[E], load: Callable[[E], Architecture | None]) -> tuple[GpuRow, ...]:
    """Return one row per card. `load` is called for models that might fit; None from it means not modelled."""
    named = (e for e in entries if e.parameters and e.family in FAMILIES and e.id.startswith(PUBLISHERS))
    # of equally large models of a family the newest: llama-3.3-70b, not llama-3-70b
    newest = {(e.family, e.parameters): e for e in sorted(named, key=lambda e: e.stem)}
    search = _Search(sorted(newest.values(), key=lambda e: -(e.parameters or 0)), load)
    return tuple(GpuRow(gpu, search.of(gpu)) for gpu in gpus)


def recipe_for(method: str, gpu: Gpu) -> Recipe:
    """Return SETTING's recipe on a card."""
    return RECIPES[method] if gpu.bf16 else RECIPES[method].but(precision="fp16-mixed")


class _Search(Generic[E]):
    """Searches the catalogue; caches needs by kind of chip, because cards share chips and differ in memory."""

    def __init__(self, entries: Sequence[E], load: Callable[[E], Architecture | None]) -> None:
        self.entries, self.load = entries, load
        self.needs: dict[tuple[str, Recipe, object, bool], tuple[int, int] | None] = {}

    def of(self, gpu: Gpu) -> dict[str, Largest]:
        found: dict[str, Largest] = {}
        for method in RECIPES if gpu.vendor in VENDORS else ():
            for entry in self.entries:
                size = entry.parameters or 0
                if size * _LEAST[method] <= gpu.usable_bytes() and self._fits(entry, method, gpu):
                    found[method] = Largest(entry.stem, size)
                    break
        return found

    def _fits(self, entry: E, method: str, gpu: Gpu) -> bool:
        architecture, recipe = self.load(entry), recipe_for(method, gpu)
        if architecture is None:
            return False
        key = (entry.stem, recipe, _kind(architecture, recipe, gpu))
        # a replay costs a hundred quick estimates, and only what fits by these is shown
        return all(self._need_fits(architecture, (*key, replay), gpu) for replay in (False, True))

    def _need_fits(self, architecture: Architecture, key: tuple[str, Recipe, object, bool], gpu: Gpu) -> bool:
        if key not in self.needs:
            self.needs[key] = _need(architecture, key[1], gpu, replay=key[3])
        need = self.needs[key]
        return need is not None and verdict_of(*need, gpu.usable_bytes()).verdict == "fits"


def _kind(architecture: Architecture, recipe: Recipe, gpu: Gpu) -> object:
    """Return the properties of a chip that change the need: its attention kernels and cuBLAS workspaces."""
    capability = gpu.compute_capability or (8, 0)
    kernels = {attention_kernel(x.attention, recipe, 2, gpu.compute_capability, False) for x in architecture.kinds}
    return frozenset(kernels), capability[0] >= 9


def _need(architecture: Architecture, recipe: Recipe, gpu: Gpu, *, replay: bool) -> tuple[int, int] | None:
    """Return the (reserved, allocated) peak bytes of the phases every run has, None if impossible or not modelled."""
    if combinations.refusal(recipe, architecture, gpu):
        return None
    try:
        phases = estimate(architecture, recipe, gpu, replay=replay).needed
    except Unsupported:
        return None
    return max(p.levels.reserved for p in phases), max(p.levels.allocated for p in phases)
