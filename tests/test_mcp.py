"""memfit mcp, asked by the protocol's own client: tools answer as commands, and hostile arguments do nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

mcp = pytest.importorskip("mcp")

import anyio  # noqa: E402

from memfit.cli import agent_tools  # noqa: E402
from memfit.cli.mcp import make_server  # noqa: E402
from memfit.documents.codec import DOCUMENTS  # noqa: E402

SCRIPTS = Path(__file__).parent / "data" / "scripts"
LLAMA = {"model": "llama-3.1-8b", "gpu": "rtx-4090"}
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB"


def ask(*calls: tuple[str, dict[str, Any]], traced: Path | None = None) -> list[Any]:
    """Return the results of calls, which the client has checked against the tools' output schemas."""

    async def talk() -> list[Any]:
        async with mcp.Client(make_server(traced)) as client:
            return [await client.call_tool(name, given) for name, given in calls]

    return anyio.run(talk)


def test_tools_are_described_by_the_documented_schemas() -> None:
    async def listed() -> list[Any]:
        async with mcp.Client(make_server(SCRIPTS)) as client:
            return list((await client.list_tools()).tools)

    tools = {tool.name: tool for tool in anyio.run(listed)}
    assert set(tools) == {*(tool.name for tool in agent_tools.TOOLS), "trace"}
    for name, tool in tools.items():
        own = agent_tools.tools(SCRIPTS)[name]
        assert not tool.input_schema["additionalProperties"]
        assert not {"out", "html", "force", "save_tape", "svg", "snapshot"} & tool.input_schema["properties"].keys()
        assert own.schema in DOCUMENTS
    assert len(json.dumps([tool.model_dump(mode="json") for tool in tools.values()])) < 80_000


def test_every_tool_answers_as_its_command(tmp_path: Path) -> None:
    asked: dict[str, dict[str, Any]] = {
        "plan": LLAMA, "estimate": {**LLAMA, "method": "qlora", "compile": False, "sequence_length": "4k"},
        "techniques": {"model": "smollm2-135m", "gpu": "l4"},
        "sweep": {"model": "smollm2-135m", "gpu": "l4", "over": ["micro-batch=1..2"]},
        "explain": {"text": OOM}, "gpus": {"text": "4090"}, "models": {"text": "qwen3"},
    }  # fmt: skip
    for tool, found in zip(agent_tools.TOOLS, ask(*((t.name, asked[t.name]) for t in agent_tools.TOOLS)), strict=True):
        assert not found.is_error, found.content[0].text
        assert found.structured_content["schema"] == tool.schema
        assert json.loads(found.content[0].text) == found.structured_content
        if tool.name == "estimate":
            words = [
                "estimate",
                "llama-3.1-8b",
                "--gpu",
                "rtx-4090",
                "--method",
                "qlora",
                "--sequence-length",
                "4096",
                "--json",
            ]
            said = subprocess.run([sys.executable, "-m", "memfit", *words], capture_output=True, check=False).stdout
            assert json.loads(said) == found.structured_content


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("plan", {"model": "--out=x"}), ("plan", {"model": "../x"}), ("plan", {"model": "llama\n--out"}), ("plan", {}),
        ("plan", {**LLAMA, "out": "x"}), ("plan", {**LLAMA, "gpu": "--html=x"}), ("plan", {**LLAMA, "gpu": "l4\0"}),
        ("plan", {"model": ["llama-3.1-8b"]}), ("plan", {**LLAMA, "from": "/dev/zero"}), ("nothing", {}),
        ("explain", {"text": "all is well"}), ("gpus", {"text": "--debug"}),
        ("trace", {"script": "../conftest.py"}), ("trace", {"script": "/etc/passwd"}),
        ("trace", {"script": "link.py"}), ("trace", {"script": "torchrun"}),
    ],
)  # fmt: skip
def test_hostile_arguments_are_refused_and_write_nothing(
    name: str, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.py").symlink_to(SCRIPTS / "plain_loop.py")
    (found,) = ask((name, given), traced=tmp_path)
    assert found.is_error and "a bug in" not in found.content[0].text and len(found.content[0].text) < 1000
    assert [path.name for path in tmp_path.iterdir()] == ["link.py"]


def test_scripts_run_only_where_that_was_allowed_and_no_longer_than_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = ask(("trace", {"script": str(SCRIPTS / "plain_loop.py")}))
    assert found.is_error
    (tmp_path / "slow.py").write_text("import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(60)\n")
    monkeypatch.setattr(agent_tools, "TRACE", replace(agent_tools.TRACE, seconds=4))
    (found,) = ask(("trace", {"script": "slow.py", "gpu": "l4"}), traced=tmp_path)
    assert found.is_error and "4 seconds" in found.content[0].text
    time.sleep(0.2)
    if (tmp_path / "pid").exists():  # on a slow machine it had not come so far
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)


def test_the_skills_commands_run(tmp_path: Path) -> None:
    """In order, in one folder with what a user would have there; only trace needs torch."""
    skill = Path(__file__).parents[1] / "skills" / "memfit" / "SKILL.md"
    head, text = re.match(r"---\n(.*?)\n---\n(.*)", skill.read_text(encoding="utf-8"), re.DOTALL).groups()  # type: ignore[union-attr]
    assert head.startswith("name: memfit\ndescription: ") and len(text.splitlines()) < 100
    (tmp_path / "train.log").write_text(OOM)
    (tmp_path / "train.py").write_text((SCRIPTS / "plain_loop.py").read_text())
    commands = [block.strip().split() for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)]
    assert len(commands) == 5
    for command in commands:
        line = [sys.executable, "-m", *command]
        found = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert found.returncode == 0, (command, found.stderr)
        if "--json" in command:
            assert json.loads(found.stdout)["schema"].startswith("memfit.")
    assert (tmp_path / "run" / "train.py").exists()
