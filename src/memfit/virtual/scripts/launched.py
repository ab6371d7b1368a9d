"""The environment that `accelerate launch` gives its script, made by accelerate's own code from its arguments."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memfit.errors import BadInput
from memfit.virtual.patching import patched
from memfit.virtual.scripts.command_line import CommandLine

BESIDE = ("accelerate.yaml", "accelerate.yml")  # as memfit export names the file
_USED = re.compile(r"\baccelerate\b|\bAccelerator\b|Trainer\b")  # the script imports accelerate, or a Trainer that does
# prefixes of accelerate's variables; others are torchrun's or the machine's
_SET = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
# launcher -> its function in accelerate.utils.launch that prepares the environment; no launcher is called
_LAUNCHERS = {
    "deepspeed_launcher": "prepare_deepspeed_cmd_env",
    "multi_gpu_launcher": "prepare_multi_gpu_env",
    "simple_launcher": "prepare_simple_launcher_cmd_env",
    "tpu_launcher": "",
    "tpu_pod_launcher": "",
    "sagemaker_launcher": "",
}


def launcher_file(script: Path) -> Path | None:
    """Return accelerate's file beside a script that uses accelerate or a Trainer."""
    path = next((path for name in BESIDE if (path := script.parent / name).is_file()), None)
    return path if path and script.is_file() and _USED.search(script.read_text(errors="replace")) else None


def by_accelerate(script: Path, config: Path) -> CommandLine:
    """Return the command line of accelerate launch with its file, in this interpreter."""
    return CommandLine(
        sys.executable, "file", str(script), environment=dict(os.environ), folder=str(Path.cwd()),
        launcher="accelerate", settings=_settings(config),
    )  # fmt: skip


def _settings(config: Path) -> tuple[str, ...]:
    return "--config_file", str(config)


def processes_of(path: Path) -> int:
    """Return how many processes the file starts. Raises BadInput if accelerate cannot read it or starts none here."""
    return int(_caught(_settings(path))[1].num_processes or 1)


def variables(settings: Sequence[str], processes: int | None = None) -> dict[str, str]:
    """Return the variables that accelerate launch sets for these arguments of its own, and so many processes.

    Raises BadInput if accelerate cannot read them, or starts none on this machine.
    """
    from accelerate.utils import launch

    prepare, arguments = _caught(settings, processes)
    made = getattr(launch, prepare)(arguments)
    made = made[1] if isinstance(made, tuple) else made  # some return (command, environment)
    return {name: value for name, value in made.items() if name.startswith(_SET) and os.environ.get(name) != value}


def _caught(settings: Sequence[str], processes: int | None = None) -> tuple[str, Any]:
    """Return accelerate's function that prepares the environment, and the arguments passed to its launcher."""
    asked = " ".join(settings) or "accelerate launch"
    try:
        import torch
        from accelerate.commands import launch
    except ImportError as error:
        raise BadInput(f"{asked} is accelerate's, which is not installed", hint="pip install accelerate") from error

    # the last of two equal arguments counts
    own = ["--main_process_ip", "127.0.0.1", "--main_process_port", "0", "--num_cpu_threads_per_process", "1"]
    count = [] if processes is None else ["--num_processes", str(processes)]
    words = [*settings, *own, *count, "script.py"]
    # without a file accelerate starts one process for each card that it sees
    seen = {} if processes is None else {"is_available": lambda: True, "device_count": lambda: processes}
    caught: list[tuple[str, Any]] = []
    launchers = {
        name: lambda args, prepare=prepare: caught.append((prepare, args)) for name, prepare in _LAUNCHERS.items()
    }
    try:
        with warnings.catch_warnings(), patched(launch, launchers), patched(torch.cuda, seen):
            warnings.simplefilter("ignore")
            real = getattr(launch.launch_command, "__wrapped__", launch.launch_command)  # see relaunch
            real(launch.launch_command_parser().parse_args(words))
    except (Exception, SystemExit) as error:  # an unknown key or value may raise any exception
        first = str(error).strip().partition("\n")[0][:200]
        raise BadInput(f"{asked}: accelerate cannot read it: {first}", hint="see: accelerate config") from error
    if not caught[0][0]:
        raise BadInput(
            f"{asked} starts no processes on GPUs of this machine", hint="compute_environment: LOCAL_MACHINE"
        )
    return caught[0]
