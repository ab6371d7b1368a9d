"""torch.load on the virtual card: where map_location puts a file's storages, once each, and what they hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402

from memfit.allocator.replay import replay  # noqa: E402
from memfit.virtual.jobs.models import HollowFile  # noqa: E402
from memfit.virtual.scripts.script import trace_script  # noqa: E402
from memfit.virtual.virtual_gpu import virtual_gpu  # noqa: E402

KIB = 1 << 10
ON_THE_CARD: dict[str, Any] = {
    "a name": "cuda", "a number": "cuda:0", "a device": torch.device("cuda"), "a table": {"cpu": "cuda:0"},
    "a function": lambda storage, location: storage.cuda(), "of a number": lambda storage, location: storage.cuda(0),
    "by to": lambda storage, location: storage.to(device="cuda"),
}  # fmt: skip
ON_THE_HOST: dict[str, Any] = {
    "nothing": None, "a name": "cpu", "another's table": {"cuda:0": "cpu"},
    "as it comes": lambda storage, location: storage, "undecided": lambda storage, location: None,
    "back again": lambda storage, location: storage.cuda().cpu(),
}  # fmt: skip


def allocated(load: Callable[[], Any]) -> tuple[Any, int]:
    before = torch.cuda.memory_allocated()
    found = load()
    return found, torch.cuda.memory_allocated() - before


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "made.pt"
    torch.save({"weight": torch.arange(64 * KIB, dtype=torch.float32), "step": torch.tensor(7)}, path)
    return path


@pytest.mark.parametrize("old", [False, True], ids=["zip", "before 1.6"])
@pytest.mark.parametrize("where", ON_THE_CARD.values(), ids=ON_THE_CARD)
def test_what_belongs_on_the_card_is_there(file: Path, where: Any, old: bool) -> None:
    if old:
        torch.save(torch.load(file), file, _use_new_zipfile_serialization=False)
    with virtual_gpu("t4"):
        found, size = allocated(lambda: torch.load(file, map_location=where))
        assert {str(value.device) for value in found.values()} == {"cuda:0"}
        assert size == 64 * KIB * 4 + 512 and found["weight"].dtype == torch.float32
        assert found["step"].item() == 7
        del found
        assert torch.cuda.memory_allocated() == 0


@pytest.mark.parametrize("where", ON_THE_HOST.values(), ids=ON_THE_HOST)
def test_what_belongs_on_the_host_is_read(file: Path, where: Any) -> None:
    with virtual_gpu("t4"):
        found, size = allocated(lambda: torch.load(file, map_location=where))
        assert size == 0 and found["weight"][-1].item() == 64 * KIB - 1


def test_what_was_saved_from_the_card_goes_back_there(tmp_path: Path) -> None:
    path = tmp_path / "states.pt"
    with virtual_gpu("t4"):
        model = nn.Linear(256, 256, device="cuda")
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.zeros(1, 256, device="cuda")).sum().backward()
        optimizer.step()
        torch.save(optimizer.state_dict(), path)
        found, size = allocated(lambda: torch.load(path))
        assert size == 2 * (256 * 256 * 4 + 1024) and found["state"][0]["exp_avg"].is_cuda
        assert allocated(lambda: torch.load(path, map_location="cpu"))[1] == 0
        optimizer.load_state_dict(found)


def test_a_storage_is_loaded_once_and_whole(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 1000, bias=False))
    model[1].weight = model[0].weight
    slice_of = torch.zeros(100, 1024)[3:4]
    torch.save([model, slice_of, torch.zeros(8, dtype=torch.float8_e4m3fn)], tmp_path / "whole.pt")
    with virtual_gpu("t4"):
        found, size = allocated(lambda: torch.load(tmp_path / "whole.pt", map_location="cuda", weights_only=False))
        assert size == 1000 * 64 * 4 + 100 * 1024 * 4 + 512
        assert found[0][1].weight is found[0][0].weight and isinstance(found[0][0].weight, nn.Parameter)
        assert (found[1].shape, found[1].storage_offset()) == ((1, 1024), 3 * 1024)
        assert found[2].dtype == torch.float8_e4m3fn and found[2].is_cuda
        found[0](torch.zeros(2, dtype=torch.long, device="cuda")).sum().backward()
        assert found[0][0].weight.grad.is_cuda


def test_transformers_reads_a_checkpoint_in_one_order() -> None:
    loading = pytest.importorskip("transformers.core_model_loading")
    real = loading.ThreadPoolExecutor
    with virtual_gpu("t4"):
        pool = loading.ThreadPoolExecutor(max_workers=4)
        read = [pool.submit(lambda n: (n, get_ident()), n) for n in range(9)]
        assert all(one.done() for one in read) and [one.result() for one in read] == [
            (n, get_ident()) for n in range(9)
        ]
        failed = pool.submit(int, "x")  # told when it is asked for, as by a thread
        pool.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result()
    assert loading.ThreadPoolExecutor is real


@pytest.mark.parametrize("index", [..., (slice(8, 16), slice(None)), slice(0, 0), (slice(None), slice(4, 6))])
def test_a_rank_reads_its_part_of_a_checkpoint(tmp_path: Path, index: Any) -> None:
    save_file({"weight": torch.ones(64, 32, dtype=torch.bfloat16)}, tmp_path / "made.safetensors")
    with safe_open(tmp_path / "made.safetensors", "pt") as real, HollowFile(tmp_path / "made.safetensors") as hollow:
        parts = [file.get_slice("weight")[index] for file in (real, hollow)]
    assert parts[0].shape == parts[1].shape and parts[0].dtype == parts[1].dtype


def test_a_card_there_is_not_is_refused_as_torch_does(file: Path) -> None:
    with virtual_gpu("t4"), pytest.raises(RuntimeError, match=r"CUDA device 3 but torch.cuda.device_count\(\) is 1"):
        torch.load(file, map_location="cuda:3")
    assert torch.load(file)["step"] == 7


# --- in a traced script, whose files hold nothing ---------------------------------------------------------------------

SCRIPT = """
import torch
from torch import nn
model = nn.Linear(1024, 1024, bias=False, device="cuda")
model.tied = model.weight
part = torch.zeros(100, 1024, device="cuda")[3:4]
torch.save({"model": model.state_dict(), "part": part, "seed": torch.get_rng_state()}, "x.pt")
held = torch.load("x.pt"LOCATION)
assert torch.equal(held["seed"], torch.get_rng_state())
assert held["part"].storage_offset() == 3 * 1024
model.load_state_dict(held["model"])
"""


@pytest.mark.parametrize(
    ("location", "times"),
    [("", 2), (", 'cpu'", 1), (", map_location=lambda s, l: s.cuda()", 2), (", {'cuda:0': 'cpu'}", 1)],
)
def test_a_script_s_own_checkpoint_lies_where_it_loads_it(tmp_path: Path, location: str, times: int) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("LOCATION", location))
    tape, _ = trace_script(path, [], "t4")
    seed = 5056 * (times == 2) if location.startswith(", map") else 0  # kept on the host, and mapped as the rest
    assert replay(tape.events).peak.requested == times * (1024 * 1024 + 100 * 1024) * 4 + seed
