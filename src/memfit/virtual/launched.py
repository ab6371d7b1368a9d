"""What `accelerate launch --config_file FILE` puts into the environment of the script it starts, by accelerate's own code."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from memfit.errors import BadInput

BESIDE = ("accelerate.yaml", "accelerate.yml")  # what memfit export calls the file
_TOLD = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "TP_", "CP_")  # the rest is torchrun's, or the machine's


def launcher_file(script: Path) -> Path | None:
    """accelerate's file that lies beside a script."""
    return next((path for name in BESIDE if (path := script.parent / name).is_file()), None)


def processes_of(path: Path) -> int:
    """How many processes the file starts. Raises BadInput for what accelerate cannot read."""
    return int(_arguments(path).num_processes or 1)


def variables(path: Path) -> dict[str, str]:
    """Name -> value. Raises BadInput for what accelerate cannot read."""
    from accelerate.utils import launch

    arguments = _arguments(path)
    if arguments.use_deepspeed:
        told = launch.prepare_deepspeed_cmd_env(arguments)[1]
    elif arguments.multi_gpu or arguments.use_fsdp or arguments.num_processes > 1:
        told = launch.prepare_multi_gpu_env(arguments)
    else:
        told = launch.prepare_simple_launcher_cmd_env(arguments)[1]
    return {name: value for name, value in told.items() if name.startswith(_TOLD) and os.environ.get(name) != value}


def _arguments(path: Path) -> Any:
    try:
        from accelerate.commands import launch
    except ImportError as error:
        raise BadInput(f"{path} is accelerate's, which is not installed", hint="pip install accelerate") from error

    words = ["--config_file", str(path), "--main_process_port", "0", "--num_cpu_threads_per_process", "1", "script.py"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arguments = launch.launch_command_parser().parse_args(words)
            return launch._validate_launch_command(arguments)[0]
    except (Exception, SystemExit) as error:  # a file with an unknown key or value ends in any of them
        first = str(error).strip().partition("\n")[0][:200]
        raise BadInput(f"{path}: accelerate cannot read it: {first}", hint="see: accelerate config") from error
