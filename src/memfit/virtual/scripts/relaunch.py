"""Programs that start the training in other processes (`trl sft`, `tune run`): what they start is traced instead.

A launcher that a traced process would start as a child, or run within itself, ends the process with Relaunch, which
holds the command line of the launcher. A child process would train on no virtual card.
"""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from memfit.errors import BadInput
from memfit.virtual.patching import patched, when_imported
from memfit.virtual.scripts.command_line import SHELLS, CommandLine, parse, starts_training

# variables that a trace sets for its own process, which are not the script's
_OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES",
        "WANDB_MODE", "TOKENIZERS_PARALLELISM", "TORCH_CPP_LOG_LEVEL")  # fmt: skip

# where Lightning's classes stand that start a process for each further card
_LIGHTNING = tuple(
    f"{package}.strategies.launchers.subprocess_script"
    for package in ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning")
)


class Relaunch(BaseException):
    """The process would start a launcher; `run` is its command line. Not an Exception, so that no script catches it."""

    def __init__(self, run: CommandLine) -> None:
        super().__init__(run.name)
        self.run = run


@contextmanager
def no_children(run: CommandLine) -> Iterator[None]:
    """Raise Relaunch where the process would start a launcher."""

    def environment(given: Mapping[str, str] | None = None) -> dict[str, str]:
        now = dict(os.environ if given is None else given)
        kept = {name: run.environment[name] for name in _OWN if name in run.environment}
        return {name: value for name, value in now.items() if name not in _OWN} | kept

    def command(args: Any, given: Mapping[str, str] | None = None, folder: Any = None) -> None:
        """Raise Relaunch if the words, or a shell script that they name, start a launcher."""
        words = _words(args)
        where = environment(given), str(folder or Path.cwd()), run.devices
        if starts_training(words):
            raise Relaunch(parse(words, *where))
        if isinstance(args, str | bytes):
            words = ["sh", "-c", os.fsdecode(args)]
        if words and Path(words[0]).name in SHELLS:
            with suppress(BadInput):  # a script that memfit does not follow runs as it would without memfit
                found = parse(words, *where)
                if found.launcher:
                    raise Relaunch(found)

    real = subprocess.Popen.__init__

    def opened(self: Any, args: Any, *rest: Any, **named: Any) -> None:
        command(args, named.get("env"), named.get("cwd"))
        real(self, args, *rest, **named)

    def checked(name: str) -> Any:
        function = getattr(os, name)

        def call(first: Any, *rest: Any) -> Any:
            command(first if name == "system" else rest[0], rest[-1] if name in ("execve", "execvpe") else None)
            return function(first, *rest)

        return call

    def elastic(module: ModuleType) -> Any:
        launch = module.elastic_launch
        really = launch.__call__

        def call(self: Any, *args: Any) -> Any:
            if not isinstance(self._entrypoint, str):
                return really(self, *args)
            config = self._config
            words = [
                "torchrun", f"--nnodes={config.max_nodes}", f"--nproc_per_node={config.nproc_per_node}", "--no-python",
                self._entrypoint, *map(str, args),
            ]  # fmt: skip
            raise Relaunch(parse(words, environment(), str(Path.cwd()), run.devices))

        return patched(launch, {"__call__": call})

    def accelerated(module: ModuleType) -> Any:
        @functools.wraps(module.launch_command)
        def launch_command(args: Any) -> None:
            raise Relaunch(_by_accelerate(args, environment(), run.devices))

        return patched(module, {"launch_command": launch_command})

    def lightning(module: ModuleType) -> Any:
        def children(self: Any) -> None:
            """Start nothing for one process; others would be the same program with a LOCAL_RANK each."""
            if self.num_processes * self.num_nodes > 1:
                raise Relaunch(run.by_torchrun(self.num_processes, self.num_nodes, environment()))

        return patched(module._SubprocessScriptLauncher, {"_call_children_scripts": children})

    functions = ("system", "execv", "execve", "execvp", "execvpe")
    with ExitStack() as stack:
        stack.enter_context(patched(subprocess.Popen, {"__init__": opened}))
        stack.enter_context(patched(os, {name: checked(name) for name in functions}))
        changes = {"torch.distributed.launcher.api": elastic, "accelerate.commands.launch": accelerated}
        changes |= dict.fromkeys(_LIGHTNING, lightning)
        stack.enter_context(when_imported(changes))
        yield


def _words(args: Any) -> list[str]:
    """Return the words of a command that is about to be started; [] where they are not plain."""
    try:
        if isinstance(args, str | bytes):
            return shlex.split(os.fsdecode(args))
        return [os.fsdecode(word) for word in args]
    except (TypeError, ValueError):
        return []


def _by_accelerate(args: Any, environment: dict[str, str], devices: int) -> CommandLine:
    """Return the command line of accelerate's parsed arguments: what differs from its defaults, and the script."""
    from accelerate.commands.launch import launch_command_parser

    usual: Any = vars(launch_command_parser().parse_args(["script.py"]))
    given = getattr(args, "nondefault", ())  # what was typed, be it the default
    words: list[str] = []
    for name, value in vars(args).items():
        if name in ("training_script", "training_script_args", "nondefault") or (
            name not in given and value == usual.get(name)
        ):
            continue
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)] if value not in (None, False) else []
    rest: Sequence[str] = args.training_script_args
    return parse(["accelerate", "launch", *words, str(args.training_script), *rest], environment, devices=devices)
