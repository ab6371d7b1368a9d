"""The environment that `accelerate launch --config_file FILE` gives its script, made by accelerate's own code."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

from memfit.errors import BadInput
from memfit.virtual.patching import patched

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


def processes_of(path: Path) -> int:
    """Return how many processes the file starts. Raises BadInput if accelerate cannot read it or starts none here."""
    return int(_caught(path)[1].num_processes or 1)


def variables(path: Path) -> dict[str, str]:
    """Return the variables that the file sets. Raises BadInput if accelerate cannot read it or starts none here."""
    from accelerate.utils import launch

    prepare, arguments = _caught(path)
    made = getattr(launch, prepare)(arguments)
    made = made[1] if isinstance(made, tuple) else made  # some return (command, environment)
    return {name: value for name, value in made.items() if name.startswith(_SET) and os.environ.get(name) != value}


def _caught(path: Path) -> tuple[str, Any]:
    """Return accelerate's function that prepares the environment, and the arguments passed to its launcher."""
    try:
        from accelerate.commands import launch
    except ImportError as error:
        raise BadInput(f"{path} is accelerate's, which is not installed", hint="pip install accelerate") from error

    words = ["--config_file", str(path), "--main_process_port", "0", "--num_cpu_threads_per_process", "1", "script.py"]
    caught: list[tuple[str, Any]] = []
    launchers = {
        name: lambda args, prepare=prepare: caught.append((prepare, args)) for name, prepare in _LAUNCHERS.items()
    }
    try:
        with warnings.catch_warnings(), patched(launch, launchers):
            warnings.simplefilter("ignore")
            launch.launch_command(launch.launch_command_parser().parse_args(words))
    except (Exception, SystemExit) as error:  # an unknown key or value may raise any exception
        first = str(error).strip().partition("\n")[0][:200]
        raise BadInput(f"{path}: accelerate cannot read it: {first}", hint="see: accelerate config") from error
    if not caught[0][0]:
        raise BadInput(f"{path} starts no processes on GPUs of this machine", hint="compute_environment: LOCAL_MACHINE")
    return caught[0]
