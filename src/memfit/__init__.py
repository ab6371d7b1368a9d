"""memfit answers "will this fit on my GPU?" before a GPU-hour is spent. `import memfit` loads nothing heavy."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from memfit._package import __version__ as __version__

if TYPE_CHECKING:
    from memfit.catalogue.cards import find_gpu as find_gpu
    from memfit.closed_form.rule_of_thumb import static_lines as static_lines
    from memfit.closed_form.run.estimate import estimate as estimate
    from memfit.footprints.compare import compare as compare
    from memfit.live.explain_oom import explain_oom as explain_oom
    from memfit.live.watch.lightning import LightningCallback as LightningCallback
    from memfit.live.watch.loop import watch as watch
    from memfit.live.watch.transformers import MemfitCallback as MemfitCallback
    from memfit.models.hub import resolve_model as resolve_model
    from memfit.nouns.architecture import Architecture as Architecture
    from memfit.nouns.footprint import Footprint as Footprint
    from memfit.nouns.gpu import Gpu as Gpu
    from memfit.nouns.job import Job as Job
    from memfit.nouns.job import Recipe as Recipe
    from memfit.nouns.plan import judge as judge
    from memfit.planner import make_plan as make_plan
    from memfit.virtual.virtual_gpu import virtual_gpu as virtual_gpu

_LAZY = {
    "Architecture": "memfit.nouns.architecture",
    "Footprint": "memfit.nouns.footprint",
    "Gpu": "memfit.nouns.gpu",
    "Job": "memfit.nouns.job",
    "Recipe": "memfit.nouns.job",
    "explain_oom": "memfit.live.explain_oom",
    "compare": "memfit.footprints.compare",
    "estimate": "memfit.closed_form.run.estimate",
    "find_gpu": "memfit.catalogue.cards",
    "judge": "memfit.nouns.plan",
    "make_plan": "memfit.planner",
    "resolve_model": "memfit.models.hub",
    "static_lines": "memfit.closed_form.rule_of_thumb",
    "virtual_gpu": "memfit.virtual.virtual_gpu",
    "watch": "memfit.live.watch.loop",
    "MemfitCallback": "memfit.live.watch.transformers",
    "LightningCallback": "memfit.live.watch.lightning",
}
__all__ = sorted(_LAZY)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        found = getattr(import_module(_LAZY[name]), name)
        if "IPython" in sys.modules:  # a notebook shows plans, comparisons and explanations as the page does
            import_module("memfit.cli.notebook").install()
        return found
    raise AttributeError(f"module 'memfit' has no attribute {name!r}")
