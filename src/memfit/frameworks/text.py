"""Text of exported files: literals, comments, YAML, the summary line of a plan, and what each choice saves."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import yaml

from memfit._package import __version__
from memfit.closed_form.run.account import Account
from memfit.closed_form.run.estimate import closed_form
from memfit.errors import MemfitError
from memfit.nouns.footprint import Footprint, Levels, PhasePeak
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Plan
from memfit.tables import combinations
from memfit.tables.adapters import method_title
from memfit.tables.optimizers import optimizer
from memfit.units import MIB, human

WIDTH = 120
# of a plan that is only tried, to find out whether a target can express it: nothing is computed for its comments
UNESTIMATED = Footprint((PhasePeak("step", "", Levels(0, 0, 0, 0), ()),), "formula")


def literal(value: object) -> str:
    """Return a Python literal with double quotes; safe for any text."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, range):
        return f"list(range({value.stop}))"
    if isinstance(value, list):
        return "[" + ", ".join(literal(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    return repr(value)


def comment(value: str) -> str:
    """Return text for a comment or docstring: one line, no quotes or backslashes that could end it."""
    return one_line(value).replace("\\", "/").replace('"', "'").strip()


def one_line(value: str) -> str:
    """Return one line of text that can be copied from a # comment and typed as it is: quotes are kept."""
    return "".join(c if c.isprintable() else " " for c in value)


class _Plain(yaml.SafeDumper):
    """YAML as people write it: no anchors and aliases, and text of several lines as a block."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _style(text: str) -> str | None:
    """Return the style of a text of several lines: a block where that keeps it as it is, else quotes with escapes."""
    if "\n" not in text:
        return None
    return '"' if text[0].isspace() or text.endswith("\n\n") else "|"


_Plain.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style=_style(text))
)


def yaml_text(settings: Mapping[str, Any], notes: Mapping[str, str] | None = None, head: Sequence[str] = ()) -> str:
    """Return a mapping as YAML in its own order; `notes` puts a comment behind a top-level key."""
    lines = list(head)
    for key, value in settings.items():
        plain = repr(value).isprintable() and "\\" not in repr(value)  # else escapes, which survive every reader
        dumped = yaml.dump({key: value}, Dumper=_Plain, sort_keys=False, allow_unicode=plain, width=10**6)
        first, *rest = dumped.rstrip("\n").split("\n")
        note = (notes or {}).get(key, "")
        lines += [f"{first}  # {note}" if note else first, *rest]
    return "\n".join(lines) + "\n"


def summary(plan: Plan) -> str:
    """Return 'QLoRA r16, 14.1 GiB of the 23.2 GiB usable on RTX 4090', for the first line of a file."""
    card = (
        comment(plan.job.gpu.name)
        if plan.recipe.num_gpus == 1
        else f"{plan.recipe.num_gpus} x {comment(plan.job.gpu.name)}"
    )
    short = "" if plan.judgement.need <= plan.judgement.usable else ", which does NOT fit"
    need, usable = human(plan.judgement.need), human(plan.judgement.usable)
    return f"{method_title(plan.recipe)}, {need} of the {usable} usable on {card}{short}"


def with_environment(recipe: Recipe, line: str) -> str:
    """Return the command with PYTORCH_ALLOC_CONF in front where the recipe sets it."""
    return f"PYTORCH_ALLOC_CONF={shlex.quote(comment(recipe.alloc_conf))} {line}" if recipe.alloc_conf else line


def stamp(target: str) -> str:
    """Return a line that names memfit's version and the framework's."""
    return f"written by memfit {__version__} for {target}"


def head(plan: Plan, target: str, *more: str) -> list[str]:
    """Return the comments above a written file: the prediction, the versions, and `more`, as the command to type."""
    return [f"# {line}" for line in (summary(plan), stamp(target), *more)]


Change = Callable[[Recipe], Recipe]

# recipe field -> (the recipe without that choice, what it is compared with)
_WITHOUT: dict[str, tuple[Change, str]] = {
    "method": (lambda r: r.but(method="full", quantization="none"), "training every weight"),
    "quantization": (lambda r: r.but(method="lora", quantization="none"), "a 16-bit base"),
    "precision": (lambda r: r.but(precision="fp32"), "fp32"),
    "checkpointing": (lambda r: r.but(checkpointing="none"), "keeping all activations"),
    "optimizer": (lambda r: r.but(optimizer="adamw"), optimizer("adamw").title),
    "loss": (lambda r: r.but(loss="full"), "whole logits"),
    "attention": (lambda r: r.but(attention="eager"), "eager attention"),
    "micro_batch": (
        lambda r: r.but(micro_batch=r.micro_batch * r.accumulation, accumulation=1), "the whole batch at once"
    ),
    "offload": (lambda r: r.but(offload="none"), "no offloading"),
    "shard": (lambda r: r.but(shard="none"), "no sharding"),
}  # fmt: skip


def savings(plan: Plan) -> dict[str, str]:
    """Return recipe field -> "saves 13.4 GiB against keeping all activations", for choices that save at least 1 MiB.

    A saving is the peak of tensor bytes without the choice, everything else unchanged, minus the peak with it. A choice
    that cannot be undone alone is left out, and so are all of an UNESTIMATED plan.
    """
    if plan.footprint is UNESTIMATED:
        return {}
    if plan.footprint.source == "traced":
        return _traced_savings(plan)
    chosen = _peak(plan, plan.recipe)
    found = {}
    for field, (change, against) in _WITHOUT.items():
        without = change(plan.recipe)
        refused = combinations.refusal(without, plan.job.architecture, plan.job.gpu)
        if chosen is None or without == plan.recipe or refused:
            continue
        peak = _peak(plan, without)
        if peak is not None and peak - chosen >= MIB:
            found[field] = f"saves {human(peak - chosen)} against {against}"
    return found


def _traced_savings(plan: Plan) -> dict[str, str]:
    """Return the savings of a plan by traces, which are those of the ladder's rungs, each against the one before.

    A rung that changes several fields tells it at the first of them.
    """
    found = {}
    for before, rung in pairwise(plan.ladder):
        changed = [f for f in _WITHOUT if getattr(before.recipe, f) != getattr(rung.recipe, f)]
        if changed and rung.saved >= MIB and getattr(rung.recipe, changed[0]) == getattr(plan.recipe, changed[0]):
            against = _WITHOUT[changed[0]][1] if len(changed) == 1 else before.title.removeprefix("+ ")
            found[changed[0]] = f"saves {human(rung.saved)} against {against}"
    return found


def savings_at(plan: Plan, places: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return key of a file -> what its choice saves. `places`: (recipe field, key); the first field of a key counts."""
    saved, found = savings(plan), dict[str, str]()
    for field, key in places:
        if field in saved:
            found.setdefault(key, saved[field])
    return found


def _peak(plan: Plan, recipe: Recipe) -> int | None:
    """Return the peak in bytes of tensors; None for a model whose training memory is not modelled."""
    try:
        return closed_form(Account(plan.job.architecture, recipe, plan.job.gpu)).requested
    except MemfitError:
        return None
