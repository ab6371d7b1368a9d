"""Import what a script imports before its ranks are forked, so that they share the time and the memory of it.

Libraries are imported as the traced script would import them: with torch.cuda of the card, the stand-ins of what needs
a CUDA compiler, and loops that can end. Modules of the script's own are left to the ranks: they may look at their rank.
"""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from memfit.nouns.gpu import Gpu
from memfit.reading.shell_words import for_rank
from memfit.virtual.scripts.command_line import CommandLine

_NEVER = ("deepspeed",)  # it looks at the card when it is imported
_ANYWHERE = ("megatron", "transformer_engine")  # imported ahead from a clone, too
# what a library imports when it runs
_LATER = {"megatron": ("transformers", "torch._inductor.compile_fx", "megatron.core.tokenizers.text")}


@contextmanager
def imported_ahead(script: Path, args: Sequence[str], gpu: Gpu, command: CommandLine | None) -> Iterator[None]:
    """Import the libraries of a script, and keep what stands in for others for the length of the block.

    What fails is left to the ranks, which fail in the same way.
    """
    from memfit.virtual.device import api, device_guard
    from memfit.virtual.device.card import Card
    from memfit.virtual.libraries import triton
    from memfit.virtual.ranks import world  # noqa: F401
    from memfit.virtual.scripts.endings import is_installed
    from memfit.virtual.scripts.script import standing_in
    from memfit.virtual.scripts.stages import Stages, loops_can_end

    gc.disable()  # collections while everything is still growing would take a tenth of the time
    importlib.import_module("torch._dynamo")  # which the first optimizer would import in each rank
    if command:
        os.environ.update({name: for_rank(value, os.environ) for name, value in command.variables.items()})
    device_guard.install()
    with ExitStack() as stack:
        with _first_on_path(script.parent):
            names = _imported_by(script)
            ahead = {package for package in {name.partition(".")[0] for name in names} if _is_ahead(package)}
            if not ahead.isdisjoint(_ANYWHERE):
                stack.enter_context(triton.launches_nothing())
                stack.enter_context(standing_in(script, args))
            with (
                api.torch_cuda_of(Card(gpu, None, "")), loops_can_end(Stages(), lambda file: not is_installed(file)),
                warnings.catch_warnings(),
            ):  # fmt: skip
                warnings.simplefilter("ignore")
                later = [name for package in sorted(ahead) for name in _LATER.get(package, ())]
                for name in dict.fromkeys((*names, *later)):
                    if name.startswith("torch.") or name.partition(".")[0] in ahead or name in later:
                        with suppress(Exception):
                            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # a collection in a rank would touch all that is shared, and so copy its memory
        gc.enable()
        try:
            yield
        finally:
            gc.unfreeze()


def _imported_by(script: Path) -> list[str]:
    """Return the modules that the script's text imports."""
    try:
        tree = ast.parse(script.read_text(errors="replace"))
    except (OSError, SyntaxError):
        return []
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    return names


def _is_ahead(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    if spec is None or name in _NEVER:
        return False
    return name in _ANYWHERE or "site-packages" in str(spec.origin)


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    before = sys.path[:]
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before
