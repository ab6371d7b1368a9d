"""The tools that memfit mcp offers to agents: a table of commands, their arguments as JSON Schema, and how they run.

A tool is a command of memfit with --json in a process of its own, which ends when nobody waits for it. Its arguments
are rows of the table of flags: those that write a file are none of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.cli.flags import AUTO, BATCH, CARD, FROM, HOST, RECIPE, TASK, Flag
from memfit.documents.codec import DOCUMENTS
from memfit.errors import BadInput

LONGEST_TEXT = 4 << 20  # bytes of a log to explain
LONGEST_WORD = 4096  # bytes of any other argument
MOST_WORDS = 64  # values of a list
NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")  # of the catalogue or of the Hub


@dataclass(frozen=True, slots=True)
class AgentTool:
    """One tool. schema: the document that it answers with, "" for none; first: the argument that is no flag."""

    name: str
    title: str
    help: str
    flags: tuple[Flag, ...]
    schema: str
    first: Flag
    seconds: float  # it is ended after that long
    required: bool = True


_MODEL = Flag("model", str, "A name from the tool models, an org/name on Hugging Face, or a model folder's full path.")
_TEXT = Flag("text", str, "The log or the traceback, whole or its end.")
_SCRIPT = Flag("script", str, "A Python file below the allowed folder.")
_WORDS = Flag("text", str, "Words of a name; all are listed without them.")
_OVER = Flag(
    "over", str, "NAME=VALUES, one or two: sequence-length=1k..32k, micro-batch=1..16, gpu=l4,h100.", many=True
)
_ARGUMENTS = Flag("arguments", str, "The script's own arguments.", many=True)
_STEPS = Flag("steps", int, "Optimizer steps to run. Default: 2.")

TOOLS: tuple[AgentTool, ...] = (
    AgentTool(
        "plan", "Find the cheapest recipe that fits",
        "Say whether training a model fits a GPU and the cheapest recipe that makes it fit, with the bytes of every "
        "phase. Ask it before writing a training script. What no formula counts is traced, which takes a minute.",
        (*CARD, *HOST, *TASK, BATCH, FROM, *AUTO), "memfit.plan/1", _MODEL, 300,
    ),
    AgentTool(
        "estimate", "Judge one recipe",
        "Count the bytes of exactly one recipe on a GPU, by phase, role and tensor, and say whether it fits.",
        (*CARD, *HOST, TASK[0], FROM, *RECIPE), "memfit.estimate/1", _MODEL, 60,
    ),
    AgentTool(
        "techniques", "List what saves memory",
        "List each technique that saves memory for a model on a GPU, in order, with what it saves and costs.",
        (*CARD, *HOST, TASK[0], BATCH, FROM, *AUTO), "memfit.techniques/1", _MODEL, 300,
    ),
    AgentTool(
        "sweep", "Map the headroom",
        "Judge a recipe at every combination of one or two of its fields: length against micro-batch, cards, methods.",
        (*CARD, *HOST, FROM, *RECIPE, _OVER), "memfit.sweep/1", _MODEL, 120,
    ),
    AgentTool(
        "explain", "Explain an out-of-memory",
        "Say from a log or a traceback why memory ran out, with evidence, and what to change. With the model and the "
        "GPU it computes what each change saves.",
        (_MODEL, CARD[0], CARD[1]), "memfit.explain/1", _TEXT, 60,
    ),
    AgentTool(
        "gpus", "List GPUs", "List GPUs with their memory, speed and price.", (), "memfit.gpus/1", _WORDS, 60, False
    ),
    AgentTool("models", "List models", "List the models of the catalogue.", (), "memfit.models/1", _WORDS, 60, False),
)  # fmt: skip
TRACE = AgentTool(
    "trace", "Run a script on a virtual GPU",
    "Run a training script of the allowed folder on a virtual GPU, without data and without a GPU: whether it fits, "
    "and what holds the memory at each phase. The script really runs, as a program of this machine.",
    (*CARD, HOST[0], _STEPS, _ARGUMENTS), "memfit.replay/1", _SCRIPT, 600,
)  # fmt: skip


def tools(traced: Path | None) -> dict[str, AgentTool]:
    """Return the tools by name. traced: the folder whose scripts may be run; None: none may."""
    return {tool.name: tool for tool in (*TOOLS, *((TRACE,) if traced else ()))}


def input_schema(tool: AgentTool) -> dict[str, Any]:
    """Return the JSON Schema of a tool's arguments."""
    rows = (tool.first, *tool.flags)
    return {
        "type": "object",
        "properties": {row.name: _schema_of(row, tool) for row in rows},
        "required": [tool.first.name] if tool.required else [],
        "additionalProperties": False,
    }


def _schema_of(row: Flag, tool: AgentTool) -> dict[str, Any]:
    longest = LONGEST_TEXT if row is _TEXT else LONGEST_WORD
    text: dict[str, Any] = {"type": "string", "maxLength": longest}
    choices = [word for word in row.metavar.split("|") if word.islower()] if "|" in row.metavar else []
    if choices and "[" not in row.metavar:
        text["enum"] = choices
    kinds = {bool: {"type": "boolean"}, int: {"type": "integer"}, float: {"type": "number"}}
    found = kinds.get(row.kind, text)  # type: ignore[call-overload]
    if row.name == "sequence_length":
        found = {"type": ["integer", "string"], "maxLength": 32}  # 8k
    if row.many:
        found = {"type": "array", "items": found, "maxItems": MOST_WORDS}
    return {**found, "description": row.help}


def output_schema(tool: AgentTool) -> dict[str, Any]:
    """Return the JSON Schema of a tool's answer without texts and defaults: agents pay for each word of the list."""
    import msgspec

    (shape,), parts = msgspec.json.schema_components([DOCUMENTS[tool.schema]], ref_template="#/$defs/{name}")
    own = parts.pop(shape["$ref"].rpartition("/")[2])
    bare: dict[str, Any] = _bare({**own, "$defs": parts})
    return bare


def _bare(schema: Any) -> Any:
    """Return a schema without titles, descriptions and defaults, where these are no names of properties."""
    if isinstance(schema, dict):
        told = {name for name in ("title", "description") if isinstance(schema.get(name), str)}
        told |= {"default"} & (schema.keys() if schema.keys() & {"type", "enum", "anyOf", "$ref"} else set())
        return {name: _bare(value) for name, value in schema.items() if name not in told}
    return [_bare(one) for one in schema] if isinstance(schema, list) else schema


def command_of(tool: AgentTool, given: Mapping[str, Any], traced: Path | None) -> tuple[list[str], bytes]:
    """Return the words of memfit's command line and its standard input. Raises BadInput for what is not allowed."""
    flags: list[str] = ["--json"]
    own: list[str] = []
    for row in tool.flags:
        value = given.get(row.name)
        if row is _ARGUMENTS:
            own = [str(word) for word in value or ()]
        elif isinstance(value, bool):
            flags += [row.flag] if value else [row.off] if row.default is None else []
        elif value is not None:
            for one in value if isinstance(value, list) else [value]:
                flags.append(f"{row.flag}={one}")
    first, text = given.get(tool.first.name), b""
    words = [tool.name]
    if tool.first is _TEXT:
        text, first = str(first).encode("utf-8", "replace"), "-"
    elif tool.first is _SCRIPT:
        first = str(_allowed(str(first), traced))
    elif tool.first is _WORDS:
        first = None if not first else _plain(str(first))
    for row in tool.flags:
        if row is _MODEL and given.get("model") is not None:
            _model(str(given["model"]))
    if tool.first is _MODEL:
        first = _model(str(first))
    found = [*words, *flags, *([first] if first else []), *(["--", *own] if own else [])]
    if any("\0" in word for word in found):
        raise BadInput("an argument holds a NUL character", hint="leave it out")
    return found, text


def _model(name: str) -> str:
    """Return the name of a model, or the path of its folder; neither is taken for a flag or a command."""
    if NAME.fullmatch(name) or (Path(name).is_absolute() and Path(name).exists()):
        return name
    raise BadInput(
        f"no model is named {name[:100]!r}", hint="the tool models lists names; or give a folder's full path"
    )


def _plain(text: str) -> str:
    if text.startswith("-"):
        raise BadInput(f"no words to look for: {text[:100]!r}", hint="4090")
    return text


def _allowed(script: str, traced: Path | None) -> Path:
    """Return the path of a script below the folder that may be traced, links followed."""
    assert traced is not None
    try:
        path = (traced / script).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        raise BadInput(
            f"there is no script {script[:200]!r} in {traced}", hint="give a path below that folder"
        ) from None
    if path.suffix != ".py" or not path.is_file() or not path.is_relative_to(traced.resolve()):
        raise BadInput(f"{script[:200]!r} is no Python file below {traced}", hint="give a path below that folder")
    return path
