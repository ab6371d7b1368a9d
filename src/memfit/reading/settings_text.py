"""Parse JSON, TOML and YAML of settings: plain data of a bounded number of values, in time linear in the text.

A text of settings is short. What makes the parsers slow, or lets a short text unfold to much, is refused: aliases and
merge keys that multiply, names of hundreds of dotted parts, integers beyond 64 bits (equal hashes, and thousands of
digits that nothing can print), keys that are no words. So is a key with two values, of which some tools take the last.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

import yaml

from memfit.errors import BadInput

VALUES = 20_000  # of a text with its aliases unfolded; a large real one has some hundred
LARGEST = 1 << 63  # integers are less than this
DEEPEST = 100  # levels of nesting
_PARTS = 32  # of a dotted name; tomllib's work grows with the cube of their number
_DOTTED = re.compile(r"(?<![\w.-])(?:(?:[\w-]++|\"(?:[^\"\\\n]|\\.)*+\"|'[^'\n]*+')[ \t]*+\.[ \t]*+)" rf"{{{_PARTS}}}")
_ASSIGNED = re.compile(r"^[ \t]*[\w.\"-]+[ \t]*=", re.MULTILINE)
_DIGITS = 100  # characters of a YAML number; PyYAML reads 1:1:1 to base 60, in time that grows with their square


class TooMuchError(BadInput, ValueError):
    """A text unfolds to more than settings have."""

    def __init__(self, why: str, what: str = "the file") -> None:
        super().__init__(f"{what} is no file of settings: {why}", hint="write out what it means")
        self.why = why


def is_json(text: str) -> bool:
    """Return whether a text is a JSON object."""
    return text.lstrip().startswith("{")


def parsed(text: str, what: str) -> Any:
    """Return the data of a text whose format is recognised by its content. Raises BadInput."""
    try:
        if is_json(text):
            return checked(json.loads(text, object_pairs_hook=_once_each))
        try:
            return of_toml(text)
        except tomllib.TOMLDecodeError as error:
            found = of_yaml(text)
            if isinstance(found, str) and _ASSIGNED.search(text):  # YAML takes a damaged TOML for a sentence
                raise error from None
            return found
    except TooMuchError as error:
        raise TooMuchError(error.why, what) from None
    except Exception as error:  # a damaged text raises almost anything: KeyError, IndexError, OverflowError ...
        problem = _first_line(error)
        raise BadInput(f"{what} is not valid JSON, TOML or YAML: {problem}", hint="check the file") from None


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a mapping. Raises ValueError for a key with two values: some tools take the last one, others refuse it."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if found.setdefault(key, value) != value:
            raise ValueError(f"the key {key!r} stands twice, with different values")
    return found


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def of_toml(text: str) -> dict[str, Any]:
    """Return the data of a TOML text. Raises TOMLDecodeError, and ValueError for what is no settings."""
    if _DOTTED.search(text):
        raise TooMuchError(f"a name has {_PARTS} or more parts")
    found: dict[str, Any] = checked(tomllib.loads(text))
    return found


def of_yaml(text: str) -> Any:
    """Return the data of a YAML text. Raises YAMLError or ValueError, for some damaged texts other exceptions."""
    loader = SettingsLoader(text)
    try:
        return checked(loader.get_single_data())
    finally:
        loader.dispose()


def node_of(text: str) -> Any:
    """Return the node of a YAML text, with its places in the text. Raises as `of_yaml`."""
    return yaml.compose(text, Loader=SettingsLoader)


class SettingsLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which stops at VALUES nodes, or as many keys that are merged."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.nodes = self.merged = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Count every node; an alias is one as well."""
        self.nodes = _counted(self.nodes + 1)
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Refuse a key with two values; what a merge key brings may be overridden."""
        node = super().compose_mapping_node(anchor)
        _once_each([
            (key.value, value.value if isinstance(value, yaml.ScalarNode) else id(value))
            for key, value in node.value
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge"
        ])  # fmt: skip
        return node

    def flatten_mapping(self, node: Any) -> None:
        """Count what a merge key brings; PyYAML calls this for each mapping that is merged, before it copies it."""
        super().flatten_mapping(node)
        self.merged = _counted(self.merged + len(node.value))


def _number(loader: SettingsLoader, node: Any) -> int | float:
    """Construct a number before it becomes a key: integers of one hash make a mapping of n keys cost n * n."""
    if len(node.value) > _DIGITS:
        raise TooMuchError(f"a number of {len(node.value)} characters")
    is_int = node.tag.endswith(":int")
    found: int | float = (loader.construct_yaml_int if is_int else loader.construct_yaml_float)(node)
    _size(found, {}, 0)
    return found


for _kind in ("int", "float"):
    SettingsLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _number)


def _counted(number: int) -> int:
    if number > VALUES:
        raise TooMuchError(f"it unfolds to more than {VALUES} values")
    return number


def checked(data: Any) -> Any:
    """Return parsed data. Raises ValueError where it has too many values, levels or digits, or a key is no word."""
    _size(data, {}, 0)
    return data


def _size(value: Any, known: dict[int, int], depth: int) -> int:
    """Return the number of values in nested data; what is shared counts each time but is visited once."""
    if isinstance(value, int) and not -LARGEST <= value < LARGEST:
        raise TooMuchError(f"a number of {value.bit_length()} bits is out of range")
    if not isinstance(value, Mapping | list | tuple | set):
        return 1
    if depth > DEEPEST:
        raise TooMuchError(f"it is nested more than {DEEPEST} levels deep")
    if id(value) not in known:
        if isinstance(value, Mapping) and not all(isinstance(key, str | int | float | None) for key in value):
            raise TooMuchError("a key is neither a word nor a number")
        inner = (*value, *value.values()) if isinstance(value, Mapping) else value
        known[id(value)] = _counted(1 + sum(_size(one, known, depth + 1) for one in inner))
    return known[id(value)]
