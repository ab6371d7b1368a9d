"""What `accelerate launch --config_file FILE` puts into the environment of the script it starts, by accelerate's own code."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

from memfit.errors import BadInput
from memfit.virtual.patching import patched

BESIDE = ("accelerate.yaml", "accelerate.yml")  # what memfit export calls the file
_USED = re.compile(r"\baccelerate\b|\bAccelerator\b|Trainer\b")  # by the script, or by what it uses
_TOLD = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")  # the rest is torchrun's, or the machine's

_LAUNCHERS = {  # -> what prepares their environment, in accelerate.utils.launch; none of them is ever called
    "deepspeed_launcher": "prepare_deepspeed_cmd_env",
    "multi_gpu_launcher": "prepare_multi_gpu_env",
    "simple_launcher": "prepare_simple_launcher_cmd_env",
    "tpu_launcher": "",
    "tpu_pod_launcher": "",
    "sagemaker_launcher": "",
}


def launcher_file(script: Path) -> Path | None:
    """accelerate's file that lies beside a script that uses accelerate, or a Trainer, which does."""
    path = next((path for name in BESIDE if (path := script.parent / name).is_file()), None)
    return path if path and script.is_file() and _USED.search(script.read_text(errors="replace")) else None


def processes_of(path: Path) -> int:
    """How many processes the file starts. Raises BadInput for what accelerate cannot read, or starts elsewhere."""
    return int(_caught(path)[1].num_processes or 1)


def variables(path: Path) -> dict[str, str]:
    """Name -> value. Raises BadInput for what accelerate cannot read, or starts elsewhere."""
    from accelerate.utils import launch

    prepare, arguments = _caught(path)
    told = getattr(launch, prepare)(arguments)
    told = told[1] if isinstance(told, tuple) else told  # (command, environment) of the launchers that start one
    return {name: value for name, value in told.items() if name.startswith(_TOLD) and os.environ.get(name) != value}


def _caught(path: Path) -> tuple[str, Any]:
    """Which of accelerate's functions prepares the environment, and the arguments that its launcher was called with."""
    try:
        from accelerate.commands import launch
    except ImportError as error:
        raise BadInput(f"{path} is accelerate's, which is not installed", hint="pip install accelerate") from error

    words = ["--config_file", str(path), "--main_process_port", "0", "--num_cpu_threads_per_process", "1", "script.py"]
    caught: list[tuple[str, Any]] = []
    catching = {name: lambda args, way=way: caught.append((way, args)) for name, way in _LAUNCHERS.items()}
    try:
        with warnings.catch_warnings(), patched(launch, catching):
            warnings.simplefilter("ignore")
            launch.launch_command(launch.launch_command_parser().parse_args(words))
    except (Exception, SystemExit) as error:  # a file with an unknown key or value ends in any of them
        first = str(error).strip().partition("\n")[0][:200]
        raise BadInput(f"{path}: accelerate cannot read it: {first}", hint="see: accelerate config") from error
    if not caught[0][0]:
        raise BadInput(f"{path} starts no processes on GPUs of this machine", hint="compute_environment: LOCAL_MACHINE")
    return caught[0]
