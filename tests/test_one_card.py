"""A virtual card in somebody else's process: one at a time, and nothing of it is left behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate.state
import numpy as np
import pytest
import torch
from torch import nn
from transformers.utils import import_utils

from memfit.errors import Unsupported
from memfit.virtual.libraries import third_party
from memfit.virtual.patching import patched
from memfit.virtual.virtual_gpu import virtual_gpu

PAGE = os.sysconf("SC_PAGESIZE")
LEAK, HEAP = 5 << 10, 1 << 20  # bytes of resident memory: per opening (it was 135 KiB), and the heap moves in any case


def names() -> dict[tuple[Any, ...], Any]:
    """Everything that a module or a class of one holds, and what Python itself is asked by."""
    found: dict[tuple[Any, ...], Any] = {}
    for module in [m for n, m in list(sys.modules.items()) if isinstance(m, ModuleType) and _may_change(n)]:
        for name, value in list(vars(module).items()):
            found[module.__name__, name] = value
            if type(value) is type and value.__module__ == module.__name__:
                found.update({(module.__name__, name, own): v for own, v in list(vars(value).items())})
    return found | {("finders",): tuple(sys.meta_path), ("environment",): tuple(os.environ.items())}


def _may_change(module: str) -> bool:
    if module in ("torch._dynamo.mutation_guard", "torch._dynamo.compiled_autograd"):
        return False  # they count what was compiled, in the tests before
    return module.partition(".")[0] in ("torch", "accelerate", "transformers", "atexit")


def changed(before: dict[tuple[Any, ...], Any]) -> list[tuple[Any, ...]]:
    now = names()
    return [k for k, value in before.items() if now.get(k) is not value and now.get(k) != value] + [
        k for k in now if k not in before
    ]


def trained_on_host() -> list[float]:
    """The losses of a small real training."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 1))
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    for _ in range(5):
        loss = model(torch.randn(32, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained_on_card() -> None:
    with virtual_gpu("l4"):
        model = nn.Linear(8, 8, device="cuda")
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        assert torch.cuda.is_available() and import_utils.is_torch_cuda_available()
        accelerate.state.PartialState()


def failed_on_card() -> None:
    with suppress(torch.OutOfMemoryError), virtual_gpu("l4", capacity="1GiB"):
        torch.empty(2 << 30, dtype=torch.int8, device="cuda")


def failed_to_open() -> None:
    def broken() -> Iterator[None]:
        raise ZeroDivisionError
        yield

    library = patched(third_party, {"deepspeed_on_card": contextmanager(broken)})
    with library, pytest.raises(ZeroDivisionError), virtual_gpu("l4"):
        pass


def closed_by_the_collector() -> None:
    virtual_gpu("l4").__enter__()
    gc.collect()


def in_a_thread() -> None:
    thread = threading.Thread(target=trained_on_card)
    thread.start()
    thread.join()


def refused_beside_another() -> None:
    first = virtual_gpu("l4")
    first.__enter__()
    try:
        with pytest.raises(Unsupported, match=rf"{Path(__file__).name}:\d+; asked for another: Tesla T4"):
            virtual_gpu("t4").__enter__()
        assert torch.cuda.get_device_name() == "NVIDIA L4"
    finally:
        first.__exit__(None, None, None)


WAYS = (
    trained_on_card, failed_on_card, failed_to_open, closed_by_the_collector, in_a_thread, refused_beside_another,
)  # fmt: skip


@pytest.fixture
def opened_before() -> Iterator[None]:
    """A process in which each way was gone once: what is imported then is imported."""
    shared = dict(accelerate.state.PartialState._shared_state)  # of a training on the host, in the tests before
    for way in WAYS:
        way()
    yield
    assert not torch.cuda.is_available() and torch.accelerator.current_accelerator() is None
    assert not import_utils.is_torch_cuda_available()
    assert accelerate.state.PartialState._shared_state == shared


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.parametrize("openings", [60, pytest.param(1000, marks=pytest.mark.nightly)])
def test_a_card_leaves_everything_as_it_was(opened_before: None, openings: int) -> None:
    losses, before, start = trained_on_host(), names(), resident()
    for number in range(openings):
        WAYS[number % len(WAYS)]()
    assert resident() - start < LEAK * openings + HEAP
    assert changed(before) == []
    assert trained_on_host() == losses


def in_child(what: Callable[[], None]) -> int:
    if not (pid := os.fork()):
        try:
            what()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_trains_on_the_host_after_a_card_and_beside_one_of_a_thread(opened_before: None) -> None:
    losses, before, opened, done = trained_on_host(), names(), threading.Event(), threading.Event()

    def real() -> None:
        assert changed(before) == [] and not torch.cuda.is_available()
        assert trained_on_host() == losses
        trained_on_card()

    def hold() -> None:
        with virtual_gpu("t4"):
            opened.set()
            done.wait(60)

    assert in_child(real) == 0
    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert opened.wait(60)
        assert in_child(real) == 0
    finally:
        done.set()
        thread.join()
    with virtual_gpu("l4"):
        assert in_child(lambda: torch.ones(2, device="cuda", requires_grad=True).sum().backward()) == 0


def test_threads_train_on_one_card_together() -> None:
    wrong: list[BaseException] = []
    with virtual_gpu("l4") as card:
        model = nn.Sequential(*[nn.Linear(8, 8, device="cuda") for _ in range(4)])
        before, together = torch.cuda.memory_allocated(), threading.Barrier(3)

        def train() -> None:
            try:
                together.wait(60)  # a thread that begins when another has ended takes over its workspace
                for _ in range(10):
                    x = torch.ones(2, 8, device="cuda", requires_grad=True)
                    torch.autograd.grad(model(x).sum(), x)
                together.wait(60)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=train) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        workspaces = 2 * len(threads) * card.workspace  # of each thread, and of its backward passes
        assert torch.cuda.memory_allocated() - before == workspaces


def drawn() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def test_the_card_draws_random_numbers_of_its_own() -> None:
    with virtual_gpu("l4"):
        torch.manual_seed(3)
        before = drawn()
        nn.Linear(4, 4, device="cuda"), nn.Embedding(3, 4, device="cuda"), nn.LSTM(4, 4, device="cuda")
        nn.init.trunc_normal_(torch.empty(4, 4, device="cuda"))
        state = torch.cuda.get_rng_state()
        first = torch.randperm(40, device="cuda").tolist()
        nn.functional.dropout(torch.ones(8, device="cuda"))
        given = torch.Generator("cuda").manual_seed(7)
        assert torch.randint(1000, (8,), device="cuda", generator=given).tolist() != torch.randint(
            1000, (8,), device="cuda", generator=given).tolist()  # fmt: skip
        assert torch.randperm(40, device="cuda").tolist() != first
        torch.cuda.set_rng_state(state)
        assert torch.randperm(40, device="cuda").tolist() == first
        assert drawn() == before


INTERRUPTED = """
import os, signal, sys
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Press())
from memfit.__main__ import program
sys.argv[1:] = {words!r}
sys.exit(program())
"""


@pytest.mark.parametrize("module", ["memfit.cli", "memfit.cli.tree", "numpy"])  # PyTorch goes on without NumPy
def test_interrupted_imports_end_with_130_and_nothing_else(module: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch")
    words = ["trace", str(tmp_path / "train.py"), "--gpu", "l4"]
    command = [sys.executable, "-c", INTERRUPTED.format(module=module, words=words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
