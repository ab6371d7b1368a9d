"""Edit single keys of a YAML, JSON or TOML text; the rest of it stays as it is, comments and order included.

PyYAML drops comments when it writes, but its parser knows where each key and value begins and ends. Only these spans
are replaced. The result is parsed again: where it does not hold what it should (anchors, merge keys, repeated keys), or
the text is TOML, the data is written anew, without comments.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any

import tomli_w
import yaml

from memfit.frameworks.text import yaml_text
from memfit.reading.settings_text import checked, is_json, node_of, of_toml, of_yaml

KeyPath = tuple[str | int, ...]  # the keys (of a list: the place) from the top of the file to a setting
Changes = Mapping[KeyPath, Any]  # setting -> its new value, or REMOVED
REMOVED = object()


def edited(text: str, data: Mapping[str, Any], changes: Changes) -> str:
    """Return `text`, whose content is `data`, with the changes. Raises BadInput for a file that unfolds to too much."""
    checked(data)
    wanted = applied(data, changes)
    if not is_json(text) and _is_toml(text):
        return tomli_w.dumps(wanted)
    found = text
    try:
        for path, value in changes.items():
            found = _changed(found, path, value)
        if _load(found) == wanted:
            return found
    except (yaml.YAMLError, ValueError):
        pass
    return json.dumps(wanted, indent=2) + "\n" if is_json(text) else yaml_text(wanted)


def applied(data: Any, changes: Changes) -> Any:
    """Return the data with the changes; a mapping that loses its last key goes with it."""
    for path, value in changes.items():
        data = _with(data, path, value)
    return data


def _with(data: Any, path: KeyPath, value: Any) -> Any:
    name, inner = path[0], path[1:]
    if isinstance(name, int):
        return [_with(one, inner, value) if i == name else one for i, one in enumerate(data)]
    found = dict(data) if isinstance(data, Mapping) else {}
    if inner and not (value is REMOVED and name not in found):
        value = _with(found.get(name), inner, value) or REMOVED
    if value is REMOVED:
        found.pop(name, None)
    else:
        found[name] = value
    return found


def _is_toml(text: str) -> bool:
    try:
        of_toml(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


def _load(text: str) -> Any:
    return json.loads(text) if is_json(text) else of_yaml(text)


def _changed(text: str, path: KeyPath, value: Any) -> str:
    """Return the text with one setting replaced, added or removed."""
    # YAML refuses the tabs that JSON may be indented with; positions stay the same
    node: Any = node_of(text.replace("\t", " ") if is_json(text) else text)
    parents: list[tuple[yaml.MappingNode, int]] = []
    for depth, name in enumerate(path):
        if isinstance(name, int):
            node = node.value[name]
            continue
        mapping = isinstance(node, yaml.MappingNode)
        found = [i for i, (key, _) in enumerate(node.value) if key.value == name] if mapping else []
        if not found and value is REMOVED:
            return text
        if not mapping and not parents:  # nothing is left of the file but comments
            raise ValueError("no mapping to add to")
        if not mapping:  # `key: auto`, where a mapping is wanted
            return _replaced(text, *parents[-1], _nested(path[depth:], value))
        if not found:
            return _added(text, node, name, _nested(path[depth + 1 :], value))
        parents.append((node, found[-1]))
        node = node.value[found[-1]][1]
    while value is REMOVED and len(parents) > 1 and len(parents[-1][0].value) == 1:
        parents.pop()
    return _removed(text, *parents[-1]) if value is REMOVED else _replaced(text, *parents[-1], value)


def _nested(path: KeyPath, value: Any) -> Any:
    """Return the value inside a mapping for each key of the path."""
    for name in reversed(path):
        value = {name: value}
    return value


def _end(text: str, node: yaml.Node) -> int:
    """Return where a value ends in the text, without the blank lines and comments behind a block."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(text, last[1] if isinstance(last, tuple) else last)
    end = int(node.end_mark.index)
    return len(text[:end].rstrip()) if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">") else end


def _line_end(text: str, place: int) -> int:
    """Return the end of the line that `place` is in."""
    found = text.find("\n", place)
    return len(text) if found < 0 else found


def _entry(name: str, value: Any, column: int) -> str:
    """Return `name: value` as block YAML, indented by `column`."""
    lines = yaml_text({name: value}).rstrip("\n").split("\n")
    return "\n".join(" " * column + line if line else line for line in lines)


def _replaced(text: str, node: yaml.MappingNode, place: int, value: Any) -> str:
    key, old = node.value[place]
    start, end = int(old.start_mark.index), _end(text, old)
    if start < key.end_mark.index:
        raise ValueError("the value is an alias of an anchor above")
    if node.flow_style:
        return text[:start] + json.dumps(value, ensure_ascii=False) + text[end:]
    one_line = old.style not in ("|", ">") if isinstance(old, yaml.ScalarNode) else old.flow_style
    if not one_line or isinstance(value, Mapping | list):
        first = int(key.start_mark.index)
        return text[:first] + _entry(key.value, value, int(key.start_mark.column)).lstrip() + text[end:]
    written = _entry("key", value, 0).removeprefix("key:").strip()
    return text[:start] + (" " if start == end else "") + written + text[end:]


def _removed(text: str, node: yaml.MappingNode, place: int) -> str:
    key, old = node.value[place]
    if not node.flow_style:
        start = text.rfind("\n", 0, int(key.start_mark.index)) + 1
        return text[:start] + text[_line_end(text, _end(text, old)) + 1 :]
    if place + 1 < len(node.value):
        return text[: key.start_mark.index] + text[node.value[place + 1][0].start_mark.index :]
    before = _end(text, node.value[place - 1][1]) if place else node.start_mark.index + 1
    return text[:before] + text[_end(text, old) :]


def _added(text: str, node: yaml.MappingNode, name: str, value: Any) -> str:
    if not node.flow_style:
        key, last = node.value[-1]
        place = _line_end(text, _end(text, last))
        return f"{text[:place]}\n{_entry(name, value, int(key.start_mark.column))}{text[place:]}"
    entry = f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}"
    if not node.value:
        return text[: node.start_mark.index + 1] + entry + text[node.start_mark.index + 1 :]
    (first, _), (_, last) = node.value[0], node.value[-1]
    between = text[node.start_mark.index + 1 : first.start_mark.index] or " "
    return f"{text[: _end(text, last)]},{between}{entry}{text[_end(text, last) :]}"
