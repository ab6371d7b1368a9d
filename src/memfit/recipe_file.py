"""recipe.toml, the file a plan leaves behind: the chosen recipe with its model, card and data, written and read back."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from memfit.errors import BadInput, Unsupported, closest
from memfit.job import RECIPE_FIELDS, Recipe, check_values

SCHEMA = 1  # raised when a key changes its meaning; adding a key with a default does not
SIZE_LIMIT = 1 << 20  # bytes; a real recipe.toml has about 800
