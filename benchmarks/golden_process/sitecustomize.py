"""Start-up of the processes that goldens.py traces: what Megatron-LM logs of its memory goes to the file GOLDENS_LOG.

Python imports this module before any other. It opens the file before memfit guards those of the script, and takes the
place of torch.utils.tensorboard, for which no package is needed then. `typing.override`, which Megatron-LM imports, is
of Python 3.12.
"""

from __future__ import annotations

import json
import os
import sys
import typing
from pathlib import Path
from types import ModuleType
from typing import Any

if "GOLDENS_LOG" in os.environ:
    _log = Path(os.environ["GOLDENS_LOG"]).open("a", buffering=1)  # noqa: SIM115  # open as long as the process

    class SummaryWriter:
        """Logs the scalars of memory; takes and forgets everything else."""

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def add_scalar(self, name: str, value: Any, step: int, *_: Any, **__: Any) -> None:
            if name.startswith("mem-"):
                _log.write(json.dumps([int(step), name, int(value)]) + "\n")

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    tensorboard: Any = ModuleType("torch.utils.tensorboard")
    tensorboard.SummaryWriter = SummaryWriter
    sys.modules["torch.utils.tensorboard"] = tensorboard
    vars(typing).setdefault("override", lambda function: function)
