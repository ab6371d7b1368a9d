"""Text shared by the exports: literals, comments, YAML with comments, and the line that sums up a plan."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from memfit._package import __version__
from memfit.nouns.job import Recipe
from memfit.nouns.plan import Plan
from memfit.units import human

WIDTH = 120


def literal(value: object) -> str:
    """A Python literal with double quotes; safe for any text."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return "[" + ", ".join(literal(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    return repr(value)


def comment(value: str) -> str:
    """Text that may stand in a comment or docstring: one line, no quotes or backslashes that could end it."""
    return one_line(value).replace("\\", "/").replace('"', "'").strip()


def one_line(value: str) -> str:
    """Text that may stand behind a # and be typed as it is: quotes are kept."""
    return "".join(c if c.isprintable() else " " for c in value)


class _Plain(yaml.SafeDumper):
    """YAML as people write it: nothing refers to something above, and text of several lines is a block of them."""

    def ignore_aliases(self, data: object) -> bool:
        """Say everything where it belongs."""
        return True


def _style(text: str) -> str | None:
    """A block where it says the same text at any place of a file; else quotes with escapes."""
    if "\n" not in text:
        return None
    return '"' if text[0].isspace() or text.endswith("\n\n") else "|"


_Plain.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style=_style(text))
)


def yaml_text(settings: Mapping[str, Any], notes: Mapping[str, str] | None = None, head: Sequence[str] = ()) -> str:
    """YAML of a flat or nested mapping in its own order; `notes` puts a comment behind a top-level key."""
    lines = list(head)
    for key, value in settings.items():
        plain = repr(value).isprintable() and "\\" not in repr(value)  # else escapes, which survive every reader
        dumped = yaml.dump({key: value}, Dumper=_Plain, sort_keys=False, allow_unicode=plain, width=10**6)
        first, *rest = dumped.rstrip("\n").split("\n")
        note = (notes or {}).get(key, "")
        lines += [f"{first}  # {note}" if note else first, *rest]
    return "\n".join(lines) + "\n"


def summary(plan: Plan) -> str:
    """'qlora, 14.1 GiB of the 23.2 GiB usable on RTX 4090', for the first line of a file."""
    card = (
        comment(plan.job.gpu.name)
        if plan.recipe.num_gpus == 1
        else f"{plan.recipe.num_gpus} x {comment(plan.job.gpu.name)}"
    )
    short = "" if plan.judgement.need <= plan.judgement.usable else ", which does NOT fit"
    need, usable = human(plan.judgement.need), human(plan.judgement.usable)
    return f"{title(plan.recipe)}, {need} of the {usable} usable on {card}{short}"


def title(recipe: Recipe) -> str:
    """'QLoRA r16', 'LoRA r8' or 'full fine-tuning'."""
    words = {"full": "full fine-tuning", "lora": f"LoRA r{recipe.lora_rank}", "qlora": f"QLoRA r{recipe.lora_rank}"}
    return words[recipe.method]


def with_environment(recipe: Recipe, line: str) -> str:
    """The command with PYTORCH_ALLOC_CONF in front where the recipe sets it."""
    return f"PYTORCH_ALLOC_CONF={shlex.quote(comment(recipe.alloc_conf))} {line}" if recipe.alloc_conf else line


def stamp(target: str) -> str:
    """Who wrote the file, and for which versions of the framework."""
    return f"written by memfit {__version__} for {target}"
