"""Reading an untrusted configuration file of at most 1 MiB as plain data: JSON, TOML or YAML, told apart by content."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import yaml

from memfit.documents.recipe_file import read_text
from memfit.errors import BadInput


def parse(path: Path) -> Any:
    """The data in a file. Raises BadInput for a missing, large or broken file; nothing in it is ever executed."""
    text = read_text(path)
    try:
        if text.lstrip().startswith("{"):
            return json.loads(text)
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError:
            return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInput(f"{path} is not valid JSON, TOML or YAML: {problem}", hint="check the file") from None
