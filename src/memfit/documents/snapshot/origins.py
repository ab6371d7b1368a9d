"""What a library's function makes tensors for, by where it lies and what it is called: a module, from a file, a copy, a cache."""

from __future__ import annotations

from typing import Literal

Origin = Literal["", "module", "file", "copy", "cache"]
# (what it is made for, where the library's function lies, its names; none: any), the first that a function has decides
MADE_FOR: tuple[tuple[Origin, str, frozenset[str]], ...] = (
    ("module", "transformers/", frozenset(["from_pretrained", "from_config"])),
    ("module", "torch/nn/modules/", frozenset(["__init__", "_apply", "convert", "to_empty", "load_state_dict", "reset_parameters"])),
    ("file", "torch/serialization.py", frozenset()),
    ("file", "safetensors/", frozenset()),
    ("copy", "/copy.py", frozenset(["deepcopy", "_reconstruct", "_deepcopy_dict"])),
    ("cache", "transformers/cache_utils.py", frozenset()),
)  # fmt: skip
LABELS: dict[Origin, str] = {"file": "torch.load", "copy": "deepcopy", "cache": "DynamicCache"}  # begin a label


def made_for(path: str, name: str) -> Origin:
    """Of one function; its path has forward slashes."""
    return next((made for made, part, names in MADE_FOR if part in path and (not names or name in names)), "")


def of_both(found: Origin, further_out: Origin) -> Origin:
    """The inner one's, but a model's weights come from a file, too."""
    return "module" if further_out == "module" else found or further_out
