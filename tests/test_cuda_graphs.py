"""CUDA graphs on the virtual card, against what an H100 recorded of the same program (PyTorch 2.11, 2026-11-26)."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from memfit.allocator.blocks import PRIVATE_POOLS  # noqa: E402
from memfit.allocator.replay import replay  # noqa: E402
from memfit.nouns.tape import Alloc  # noqa: E402
from memfit.virtual.observer import Observer  # noqa: E402
from memfit.virtual.scripts.script import trace_script  # noqa: E402
from memfit.virtual.supported import MOVED  # noqa: E402
from memfit.virtual.virtual_gpu import virtual_gpu  # noqa: E402

# what was done -> allocated bytes, their peak, reserved bytes, their peak; and streams that multiplied by then: for
# each thread and stream, PyTorch 2.11 allocates 1 MiB for cuBLASLt, which 2.13 does not
RECORDED = {
    "made": ((37720064, 37720064, 56623104, 56623104), 0),
    "warmed up": ((172634112, 187593216, 218103808, 218103808), 1),
    "captured": ((243233792, 255751680, 293601280, 293601280), 2),
    "replayed": ((243233792, 245330944, 293601280, 293601280), 2),
    "cache emptied": ((243233792, 243233792, 293601280, 293601280), 2),
}
FURTHER = {"two layers": 256924672, "graphed": 346113024, "step": 346113024}  # allocated bytes; 2, 3 and 3 streams
MIB = 1 << 20


def test_a_capture_has_a_pool_of_its_own_and_a_replay_allocates_nothing() -> None:
    with virtual_gpu("h100") as card:
        observer, functional = Observer(card), torch.nn.functional

        def check(what: str) -> None:
            stats = torch.cuda.memory_stats()
            found = [
                stats[f"{n}_bytes.all.{m}"] for n in ("allocated", "reserved") for m in ("current", "peak")
            ]  # fmt: skip
            bytes_of, streams = RECORDED[what]
            assert found == [bytes_of[0] - streams * MIB, bytes_of[1] - streams * MIB, *bytes_of[2:]], what
            torch.cuda.reset_peak_memory_stats()

        model = torch.nn.Sequential(
            torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(4096, 1000)
        ).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, y = torch.randn(512, 1024, device="cuda"), torch.randn(512, 1000, device="cuda")
        check("made")
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                optimizer.zero_grad(set_to_none=True)
                functional.mse_loss(model(x), y).backward()
                optimizer.step()
        check("warmed up")
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            assert torch.cuda.is_current_stream_capturing()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        assert not torch.cuda.is_current_stream_capturing()
        check("captured")
        for _ in range(3):
            x.copy_(torch.randn(512, 1024, device="cuda"))
            graph.replay()
        check("replayed")
        torch.cuda.empty_cache()
        check("cache emptied")
        again = torch.cuda.CUDAGraph()
        with torch.cuda.graph(again, pool=graph.pool()):
            z = (x * 2).relu() @ x.T
        own = torch.cuda.CUDAGraph()
        with torch.cuda.graph(own):
            w = (x * 2).relu() @ x.T
        assert again.pool() == graph.pool() != own.pool()
        del loss, z, w
        torch.cuda.empty_cache()
        one, two = torch.nn.Linear(1024, 2048).cuda(), torch.nn.Linear(2048, 512).cuda()
        into = [torch.randn(256, n, device="cuda", requires_grad=True) for n in (1024, 2048)]
        assert torch.cuda.memory_allocated() == FURTHER["two layers"] - 2 * MIB
        one, two = torch.cuda.make_graphed_callables((one, two), ((into[0],), (into[1],)))
        assert torch.cuda.memory_allocated() == FURTHER["graphed"] - 3 * MIB
        for _ in range(2):
            two(one(torch.randn(256, 1024, device="cuda"))).sum().backward()
            assert torch.cuda.memory_allocated() == FURTHER["step"] - 3 * MIB
        assert replay(observer.tape({}).events).peak.reserved == card.settled().reserved_peak


@pytest.mark.filterwarnings("ignore")  # of PyTorch's compiler
def test_compiled_steps_are_recorded_in_one_pool_and_replayed() -> None:
    """What PyTorch's own trees of graphs do: two compiled functions, the second one beside replays of the first."""
    with virtual_gpu("h100") as card:
        observer = Observer(card)
        parts = [torch.nn.Sequential(torch.nn.Linear(1024, n), torch.nn.GELU(), torch.nn.Linear(n, 1024)).cuda()
                 for n in (4096, 2048)]  # fmt: skip
        compiled = [torch.compile(part, mode="reduce-overhead") for part in parts]
        optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)

        def step(both: bool) -> tuple[int, int]:
            """Train; return the peak of the forward and backward pass, and what is left, in bytes that were there."""
            before = torch.cuda.memory_allocated()
            x = torch.randn(512, 1024, device="cuda")
            torch.cuda.reset_peak_memory_stats()
            y = compiled[0](x)
            (compiled[1](y) if both else y).square().mean().backward()
            found = torch.cuda.max_memory_allocated() - before
            optimizer.step()
            optimizer.zero_grad()
            del x, y
            return found, torch.cuda.memory_allocated() - before

        (warm, seeds), (recorded, left), *replayed = [step(False) for _ in range(4)]
        assert recorded - (warm - seeds) == 512 * 1024 * 4  # the batch is copied into the pool
        outside = 5 * 512 * 1024 * 4 + 2 * 512  # the batch and what the loss makes, forwards and backwards
        assert replayed == [(outside, 0)] * 2 and left == 0
        (warm, _), (recorded, _), *replayed = [step(True) for _ in range(4)]
        assert recorded > 24 * MIB and replayed == [(outside, 0)] * 2
        assert MOVED not in card.assumed
        assert replay(observer.tape({}).events).peak.reserved == card.settled().reserved_peak
    torch._dynamo.reset()


@pytest.mark.nightly  # compiles for a minute
def test_compiled_bert_reserves_what_an_h200_recorded() -> None:
    """1 MiB less is held by each workspace, and in the first step other buffers are, since PyTorch 2.11."""
    from measure import compare

    measured = compare.MEASURED / "h200-planned-2026-11-26.jsonl"
    name = "bert classification compiled with graphs"
    record = next(record for record in compare.records(measured) if record["case"] == name)
    compared = compare.Compared(record, compare.traced(record, None), None)
    assert abs(compared.off("reserved") or 1) < 0.01 and abs(compared.off("requested") or 1) < 0.001


SCRIPT = """
import torch
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(4096, 1024, device="cuda")
for _ in range(3):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    kept = model(x)
    kept.sum().backward()
    optimizer.step()
for _ in range(10):
    graph.replay()
"""


def test_a_script_is_traced_up_to_its_capture(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    tape, outcome = trace_script(tmp_path / "train.py", [], "l4", steps=2)
    assert outcome.steps == 4
    assert any(e.stream >= PRIVATE_POOLS and e.size == 4096 * 1024 * 4 for e in tape.events if isinstance(e, Alloc))


def test_a_generator_of_the_card_can_be_shared_and_cloned() -> None:
    with virtual_gpu("l4"):
        generator = torch.cuda.default_generators[0]
        shared, cloned = generator.graphsafe_get_state(), generator.clone_state()
        assert shared.device == cloned.device == torch.device("cuda")
        state = torch.arange(16, dtype=torch.uint8)
        shared.set_state(state)
        assert generator.get_state().equal(state) and not cloned.get_state().equal(state)
