"""Cheaper imports of the training libraries: the compiler comes when it is asked for, and nothing else is different."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torch") is None or find_spec("transformers") is None:
    pytest.skip("the trace needs PyTorch and transformers", allow_module_level=True)

from memfit.virtual.process.fast_imports import lean_imports

PUT_OFF = """
import sys
from memfit.virtual.process.fast_imports import lean_imports
import torch
from torch.utils.checkpoint import checkpoint

def loaded():
    return "torch._dynamo.symbolic_convert" in sys.modules

x = torch.ones(3, requires_grad=True)
with lean_imports():
    module = torch._dynamo
    optimizer = torch.optim.AdamW([x])
    checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert x.grad is None and torch._dynamo.disable(reason="none")(print) is print
    assert not isinstance(torch.nn.Linear(1, 1), torch._dynamo.eval_frame.OptimizedModule)
    assert not hasattr(module, "__wrapped__") and not loaded()
    if "NAME" == "submodule":
        import torch._dynamo.symbolic_convert
    elif "NAME" == "attribute":
        torch._dynamo.reset()
    assert loaded() == ("NAME" != "nothing")
import torch._dynamo.symbolic_convert
assert sys.modules["torch._dynamo"] is torch._dynamo and (torch._dynamo is module) == ("NAME" != "nothing")
assert torch._dynamo.disable(print) is not print and torch._dynamo.__spec__.origin == torch._dynamo.__file__
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
assert torch.compile(torch.sin, backend="eager")(x).shape == (3,)
"""


@pytest.mark.parametrize("asked", ["nothing", "attribute", "submodule"])
def test_the_compiler_is_imported_when_it_is_asked_for(asked: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PUT_OFF.replace("NAME", asked)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_transformers_finds_the_same_names_when_it_reads_its_files_once() -> None:
    import transformers
    from transformers.utils import import_utils

    folder = str(Path(transformers.__file__).with_name("models"))
    before = import_utils.create_import_structure_from_path
    with lean_imports():
        once = import_utils.create_import_structure_from_path
        assert once is not before and once(folder) == before(folder)
        misses = once.cache_info().misses
        assert once(f"{folder}/__init__.py") == once(folder) and once.cache_info().misses == misses + 1
    assert import_utils.create_import_structure_from_path is before
