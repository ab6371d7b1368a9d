"""memfit mcp: answer agents over the Model Context Protocol, on standard input and output."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit._package import __version__
from memfit.cli.flags import COMMON, Flag, takes
from memfit.errors import EXIT_BAD_INPUT, BadInput

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server

    from memfit.cli.agent_tools import AgentTool

EXAMPLES = ("memfit mcp", "memfit mcp --allow-trace ~/project")
ALLOW = Flag(
    "allow_trace", str, "Offer the tool trace, which runs scripts below this folder as programs of this machine.", "DIR"
)
AT_ONCE = 2  # commands that run at the same time; others wait
HOW = (
    "memfit says to the byte whether a training job fits a GPU, and the cheapest change that makes it fit. Sizes are "
    "whole bytes. Ask `plan` before you write a training script, and `explain` with the whole traceback after an "
    "out-of-memory. A verdict of not_judged names what is not understood: say so, and do not guess."
)


@takes(ALLOW, COMMON[1])
def run(**flags: Any) -> int:
    """Serve agents over the Model Context Protocol.

    The tools answer as the commands do, with the same JSON. Nothing is written, and nothing of yours is executed unless
    --allow-trace names the folder of the scripts that may be.
    """
    try:
        import anyio
        from mcp.server.stdio import stdio_server
    except ModuleNotFoundError:
        from memfit.extras import MissingExtra

        raise MissingExtra("memfit mcp", "mcp") from None
    traced = _folder(flags["allow_trace"])
    server = make_server(traced)

    async def serve() -> None:
        async with stdio_server() as (incoming, outgoing):
            await server.run(incoming, outgoing, server.create_initialization_options())

    with suppress(KeyboardInterrupt):
        anyio.run(serve)
    return 0


def _folder(name: str | None) -> Path | None:
    if name is None:
        return None
    folder = Path(name).expanduser().resolve()
    if not folder.is_dir():
        raise BadInput(f"{name} is no folder", hint="--allow-trace FOLDER, whose scripts may be run")
    return folder


def make_server(traced: Path | None = None) -> Server[Any]:
    """Return the server with its tools. traced: the folder whose scripts may be run; None: none may."""
    import anyio
    import jsonschema
    from mcp import types
    from mcp.server.lowlevel import Server

    from memfit.cli.agent_tools import input_schema, output_schema, tools

    offered = tools(traced)
    described = [
        types.Tool(
            name=tool.name, title=tool.title, description=tool.help, input_schema=input_schema(tool),
            output_schema=output_schema(tool),
            annotations=types.ToolAnnotations(read_only_hint=tool.name != "trace", open_world_hint=False),
        )
        for tool in offered.values()
    ]  # fmt: skip
    at_once = anyio.Semaphore(AT_ONCE)

    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=described)

    async def call(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        tool, given = offered.get(params.name), params.arguments or {}
        if tool is None:
            return failed(f"there is no tool {params.name[:100]!r}", f"one of {', '.join(offered)}")
        try:
            jsonschema.validate(given, input_schema(tool))
        except jsonschema.ValidationError as error:
            where = ".".join(map(str, error.absolute_path))
            return failed(f"{where}: {error.message}"[:500].removeprefix(": "), "see the tool's input schema")
        try:
            async with at_once:
                found = await answer(tool, given, traced)
        except BadInput as error:
            return failed(error.message, error.hint)
        text = types.TextContent(type="text", text=json.dumps(found))
        return types.CallToolResult(content=[text], structured_content=found)

    def failed(message: str, hint: str) -> types.CallToolResult:
        text = f"error: {message}" + (f"\nhint: {hint}" if hint else "")
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=True)

    return Server("memfit", version=__version__, instructions=HOW, on_list_tools=list_tools, on_call_tool=call)


async def answer(tool: AgentTool, given: dict[str, Any], traced: Path | None) -> dict[str, Any]:
    """Run a tool's command and return its document. Raises BadInput with what the command says of a failure.

    The process, and what it started, is killed when it takes too long or when nobody waits for it any more.
    """
    import subprocess

    import anyio

    from memfit.cli.agent_tools import command_of

    words, text = command_of(tool, given, traced)
    process = await anyio.open_process(
        [sys.executable, "-m", "memfit", *words], stdin=subprocess.PIPE, cwd=traced if tool.name == "trace" else None,
        start_new_session=True,
    )  # fmt: skip
    said = {"out": b"", "err": b""}

    async def read(name: str, stream: Any) -> None:
        async for piece in stream:
            said[name] += piece

    try:
        with anyio.move_on_after(tool.seconds) as limit:
            async with anyio.create_task_group() as group:
                group.start_soon(read, "out", process.stdout)
                group.start_soon(read, "err", process.stderr)
                assert process.stdin is not None
                with suppress(anyio.BrokenResourceError, BrokenPipeError):
                    await process.stdin.send(text)
                await process.stdin.aclose()
            await process.wait()
    finally:
        with anyio.CancelScope(shield=True):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.aclose()
    if limit.cancelled_caught:
        raise BadInput(f"it took longer than {tool.seconds:g} seconds", hint="ask for less, or in a terminal")
    return document_of(said["out"], said["err"].decode("utf-8", "replace"), process.returncode or 0)


def document_of(output: bytes, told: str, code: int) -> dict[str, Any]:
    """Return the document that a command printed. Raises BadInput where it printed none."""
    with suppress(ValueError, RecursionError):
        found = json.loads(output)
        if isinstance(found, dict) and code != EXIT_BAD_INPUT:
            return found
    lines = told.splitlines()
    message = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), told[-500:].strip())
    hint = next((line.removeprefix("hint: ") for line in lines if line.startswith("hint: ")), "")
    raise BadInput(message or f"memfit ended with {code}", hint=hint)
