"""The virtual GPU by itself: plain PyTorch code on a card without data."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from memfit.allocator.replay import replay  # noqa: E402
from memfit.documents.snapshot import read  # noqa: E402
from memfit.errors import BadInput, Unsupported  # noqa: E402
from memfit.explain import explain, read_text  # noqa: E402
from memfit.nouns.alloc_settings import torch_version  # noqa: E402
from memfit.nouns.tape import Alloc, Mark  # noqa: E402
from memfit.tables.cuda_kernels import reduction  # noqa: E402
from memfit.virtual import supported  # noqa: E402
from memfit.virtual.device.native_functions import shadowed, structured  # noqa: E402
from memfit.virtual.device.storage import Deaths  # noqa: E402
from memfit.virtual.device.temporaries import flash_splits  # noqa: E402
from memfit.virtual.observer import EnoughSteps, Observer  # noqa: E402
from memfit.virtual.process.host import no_random_weights  # noqa: E402
from memfit.virtual.virtual_gpu import Card, virtual_gpu  # noqa: E402

MIB = 1 << 20
Ran = Callable[..., tuple[int, str, str]]


def test_tensors_are_plain_cuda_tensors_with_the_allocators_addresses() -> None:
    with virtual_gpu("rtx-4090") as card:
        a = torch.empty(1000, device="cuda")
        b = torch.empty(1000, device="cuda", dtype=torch.bfloat16)
        assert type(a) is torch.Tensor
        assert a.device == torch.device("cuda", 0)
        assert b.data_ptr() - a.data_ptr() == 4096
        assert torch.cuda.memory_allocated() == 4096 + 2048
        assert torch.cuda.memory_reserved() == 2 * MIB
        del a, b
        assert torch.cuda.memory_allocated() == 0
        assert card.settled().reserved == 2 * MIB


def test_views_share_their_storage_and_outlive_their_base() -> None:
    with virtual_gpu("rtx-4090"):
        base = torch.empty(4, 6, device="cuda")
        view = base.t()[1:].reshape(-1)[:3]
        row = base[1]
        assert row.data_ptr() == base.data_ptr() + 24
        del base
        before = torch.cuda.memory_allocated()
        del row, view
        assert before > torch.cuda.memory_allocated() == 0


def test_the_facts_of_the_card_are_torch_cudas() -> None:
    with virtual_gpu("rtx-4090") as card:
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_capability() == (8, 9)
        assert torch.cuda.get_device_properties(0).total_memory == card.gpu.total_bytes
        assert torch.cuda.mem_get_info()[0] <= card.gpu.usable_bytes()
    assert not torch.cuda.is_available()


def test_small_integers_keep_their_values_through_views_copies_and_writes() -> None:
    with virtual_gpu("rtx-4090"):
        mask = torch.tensor([[1, 1, 0], [1, 0, 0]], device="cuda")
        lengths = mask.sum(-1)
        assert lengths.tolist() == [2, 1]
        mask[1, 1:] = 1
        assert bool(mask[1].all())
        assert not mask[0].all().item()
        assert (mask == 1).nonzero().shape == (5, 2)
        positions = torch.arange(3, device="cuda").expand(2, 3)[mask.bool()]
        assert positions.cpu().tolist() == [0, 1, 0, 1, 2]


def test_parts_written_into_an_empty_buffer_are_known() -> None:
    with virtual_gpu("rtx-4090"):
        shapes = torch.empty(1024, dtype=torch.int64, device="cuda")
        shapes[:3].copy_(torch.tensor([4, 5, 6]))
        shapes[3:5] = 7
        assert shapes[:5].tolist() == [4, 5, 6, 7, 7]
        unknown = torch.empty(8, dtype=torch.int64, device="cuda")
        unknown.copy_(torch.empty(8, dtype=torch.int64, device="cuda"))
        unknown[:2] = 9
        assert unknown[:2].tolist() == [0, 0]  # what the rest holds is not known, so that none of it is


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(0, 5))
def test_known_values_are_those_of_the_host(numbers: list[int], pivot: int) -> None:
    def work(device: str) -> list[list[int]]:
        x = torch.tensor(numbers, device=device)
        y = torch.where(x > pivot, x * 2, x).cumsum(0)
        y[x == pivot] -= 1
        return [
            y.tolist(),
            x.unique().tolist(),
            (x != pivot).nonzero().flatten().tolist(),
            [int(y.max()), int(x.argmax())],
        ]

    with virtual_gpu("rtx-4090"):
        assert work("cuda") == work("cpu")


def test_unknown_numbers_get_the_stated_answer() -> None:
    with virtual_gpu("rtx-4090") as card:
        loss = torch.randn(100, 100, device="cuda").mean()
        assert loss.item() == card.answers.number
        assert not (loss > 2).item()
        assert card.answers.reads["item"] == 2


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(x).float().pow(2).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(256, 512),
        torch.nn.GELU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(512, 256),
        torch.nn.LayerNorm(256),
    ).cuda()


def test_a_training_step_has_the_memory_of_its_arithmetic() -> None:
    with virtual_gpu("rtx-4090"):
        model = _model()
        weights = sum(p.numel() * 4 for p in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        x = torch.empty(8, 256, device="cuda")
        for _ in range(3):
            _step(model, optimizer, x)
        counters = 4 * len(list(model.parameters()))
        workspaces = 2 * 8_519_680
        stats = torch.cuda.memory_stats()
        assert stats["requested_bytes.all.current"] == 3 * weights + counters + x.numel() * 4 + workspaces


def test_gradients_are_accumulated_in_place() -> None:
    with virtual_gpu("rtx-4090"):
        x = torch.empty(1 << 20, device="cuda", requires_grad=True)
        loss = (x * 2 + x * 3 + x * 4).sum()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss.backward()
        grads = (torch.cuda.max_memory_allocated() - before) / (4 * x.numel())
        assert grads == pytest.approx(2.0, abs=0.01)  # the sum so far and the next term, never a third


def test_out_of_memory_is_torchs_own_error_and_can_be_survived() -> None:
    with virtual_gpu("rtx-4090") as card:
        with pytest.raises(
            torch.OutOfMemoryError, match=r"CUDA out of memory. Tried to allocate 100.00 GiB. GPU 0 has a"
        ):
            torch.empty(100 << 30, dtype=torch.uint8, device="cuda")
        assert torch.empty(MIB, device="cuda").is_cuda
        assert card.settled().num_ooms == 1


def test_a_tensor_that_dies_while_an_exception_is_on_its_way_leaves_it_alone() -> None:
    def fail() -> None:
        kept = torch.empty(1000, device="cuda")
        raise KeyError(kept.shape)

    with virtual_gpu("rtx-4090"):
        for _ in range(3):
            with pytest.raises(KeyError):
                fail()
            gc.collect()
        assert torch.cuda.memory_allocated() == 0


def test_checkpointing_recomputes_and_keeps_less() -> None:
    from torch.utils.checkpoint import checkpoint

    def peak(reentrant: bool | None) -> int:
        with virtual_gpu("rtx-4090"):
            model = _model()
            x = torch.empty(4096, 256, device="cuda", requires_grad=True)
            out = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
            kept = torch.cuda.memory_allocated()
            out.sum().backward()
            return kept

    plain, new, old = peak(None), peak(False), peak(True)
    assert plain > 1.5 * new
    assert new == pytest.approx(old, rel=0.01)


def test_a_backward_within_a_backward_is_no_instant_of_its_own() -> None:
    from torch.utils.checkpoint import checkpoint

    with virtual_gpu("rtx-4090") as card:
        observer = Observer(card)
        with observer.watching():
            model, x = _model(), torch.empty(64, 256, device="cuda", requires_grad=True)
            for _ in range(3):
                x = checkpoint(model, x, use_reentrant=True)
            x.sum().backward()
        tape = observer.tape({})
    assert [s.instant for s in replay(tape.events).spans] == ["load", *["forward"] * 3, "backward", "after backward"]


def test_code_may_start_the_engine_itself() -> None:
    """As Megatron-LM's pipelines do, which free an output's bytes before they start its backward."""
    with virtual_gpu("rtx-4090"):
        model = _model()
        out = model(torch.empty(8, 256, device="cuda"))
        torch.autograd.Variable._execution_engine.run_backward(
            tensors=(out,), grad_tensors=(torch.empty_like(out),), keep_graph=False, create_graph=False, inputs=(),
            allow_unreachable=True, accumulate_grad=True,
        )  # fmt: skip
        assert all(p.grad is not None and p.grad.is_cuda for p in model.parameters())


def test_deaths_are_reported_from_other_threads_in_full() -> None:
    with virtual_gpu("rtx-4090"):
        held = [torch.empty(512, device="cuda") for _ in range(2000)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        assert torch.cuda.memory_allocated() == 0


def test_the_ring_of_deaths_gives_everything_once() -> None:
    import ctypes

    deaths = Deaths()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deaths.function)
    for n in range(1, 1000):
        function(n)
    assert list(deaths) == list(range(1, 1000))
    assert list(deaths) == []


@pytest.mark.parametrize("by", ["the script", "a zero-bubble schedule"])
def test_steps_with_gradients_that_are_returned_and_given_to_the_weights_count(by: str) -> None:
    from torch.distributed.pipelining import stage

    with virtual_gpu("h100") as card, Observer(card).watching() as observer:
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)).cuda()
        weights, optimizer = list(model.parameters()), torch.optim.SGD(model.parameters())
        optimizer.step()  # without gradients, as DeepSpeed while it loads
        for _ in range(2):
            batch = torch.randn(8, 256, device="cuda", requires_grad=True)
            loss = model(batch).square().mean()
            if by == "the script":
                for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                    weight.grad = gradient
            else:
                _, groups = stage.stage_backward_input([loss], None, [batch], iter(weights))
                stage.stage_backward_weight(iter(weights), groups)
            optimizer.step()
    instants = [instant for _, phase, instant in card.ledger.marks if phase == "step"]
    assert observer.done == 2 and instants.count("optimizer step") == 1
    assert instants.count("backward") == (1 if by == "the script" else 2)
    assert "forward" not in instants[instants.index("backward") :]


def test_observer_names_phases_roles_and_stops_after_the_steps() -> None:
    with virtual_gpu("rtx-4090") as card:
        observer = Observer(card, steps=2)
        with observer.watching(), pytest.raises(EnoughSteps):
            model = _model()
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            for _ in range(10):
                _step(model, optimizer, torch.empty(8, 256, device="cuda"))
        tape = observer.tape({})
    timeline = replay(tape.events)
    assert [s.instant for s in timeline.spans if s.phase == "first_step"] == [
        "forward", "backward", "after backward", "optimizer step", "after the step",
    ]  # fmt: skip
    assert timeline.peak.requested == max(s.peak.requested for s in timeline.spans)
    born = [e for e in tape.events if hasattr(e, "role")]
    sizes = {role: sum(e.size for e in born if e.role == role) for role in {e.role for e in born}}
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert sizes["parameters"] >= weights
    assert sizes["gradients"] == 2 * weights
    assert sizes["optimizer_states"] == 2 * weights + 4 * 6
    assert sizes["workspace"] == 2 * 8_519_680
    assert sizes["activations"] > 0
    assert any(e.label.startswith("0: ") or e.label.startswith("Linear") or e.label.startswith("0") for e in born)


def test_what_the_card_lacks_is_said() -> None:
    lib = torch.library.Library("memfit_test", "DEF")
    lib.define("opaque(Tensor x) -> Tensor")
    with virtual_gpu("rtx-4090"), pytest.raises(Exception, match="opaque"):
        torch.ops.memfit_test.opaque(torch.empty(1, device="cuda"))
    lib._destroy()


def test_operators_that_this_build_would_decompose_are_known() -> None:
    assert {"native_layer_norm", "copy_", "_foreach_norm.Scalar"} <= set(shadowed())
    assert "mm.out" in structured()


@pytest.mark.parametrize(
    ("rows", "columns", "sms", "expected"),
    [  # recorded on the CUDA build: x.sum(0) of bf16
        (2048, 512, 108, (8_388_608, 16)), (2048, 4096, 108, (67_108_864, 128)), (8192, 4096, 108, (113_246_208, 128)),
        (8192, 11008, 108, (118_358_016, 344)), (512, 512, 108, ()), (128, 4096, 108, ()),
    ],
)  # fmt: skip
def test_staging_of_sums_as_recorded(rows: int, columns: int, sms: int, expected: tuple[int, ...]) -> None:
    assert reduction(rows, columns, fastest=False, multiprocessors=sms, threads=2048) == expected


def test_split_keys_as_recorded() -> None:
    assert flash_splits(2 * 8 * 8, 2 * 108, 4) == 4  # 2 x 8 heads, 512 tokens, width 128 on an A100
    assert flash_splits(4096, 2 * 108, 16) == 1


def test_two_cards_one_after_the_other() -> None:
    for name in ("rtx-4090", "h100"):
        with virtual_gpu(name) as card:
            assert isinstance(card, Card)
            torch.mm(torch.empty(8, 8, device="cuda"), torch.empty(8, 8, device="cuda"))
            assert torch.cuda.memory_stats()["requested_bytes.all.current"] == card.workspace


def test_pinned_host_memory_and_convolutions_are_there() -> None:
    with virtual_gpu("rtx-4090"):
        host = torch.empty(1000, pin_memory=True)
        assert torch.cuda.memory_allocated() == 0
        x = host.to("cuda", non_blocking=True).reshape(1, 10, 100).requires_grad_()
        y = torch.conv1d(x, torch.empty(20, 5, 1, device="cuda"), groups=2)
        assert y.shape == (1, 20, 100)
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape


def test_adapters_on_the_host_are_not_drawn() -> None:
    before = torch.get_rng_state()
    with no_random_weights():
        torch.nn.Linear(4, 4)
    assert torch.equal(before, torch.get_rng_state())
    torch.nn.Linear(4, 4)
    assert not torch.equal(before, torch.get_rng_state())


def test_where_no_virtual_gpu_can_be_the_formulas_answer(monkeypatch: pytest.MonkeyPatch, ran: Ran) -> None:
    by_formula = ran("estimate", "smollm2-135m", "--gpu", "l4", "--json")[1]
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    code, out, err = ran("trace", "smollm2-135m", "--gpu", "l4", "--json")
    assert (code, out) == (0, by_formula)
    assert "no virtual GPU on Darwin arm64: answered by formula" in err
    code, _, err = ran("plan", "smollm2-135m", "--gpu", "l4", "--trace", "--json")
    assert code == 0 and "not confirmed" in err
    code, out, err = ran("trace", __file__, "--gpu", "l4")
    assert (code, out) == (2, "") and "no virtual GPU on Darwin arm64" in err and "hint:" in err


@pytest.mark.parametrize(
    ("there", "problem"),
    [
        ({"torch": "2.9.1+cu128"}, "PyTorch 2.9.1"),
        ({"torch": "2.10.0"}, "missing: transformers"),
        ({}, "missing: torch"),
    ],
)
def test_what_a_trace_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, ran: Ran, there: dict[str, str], problem: str
) -> None:
    monkeypatch.setattr(supported, "versions", lambda: there)
    code, out, err = ran("trace", "smollm2-135m", "--gpu", "l4")
    assert (code, out) == (2, "") and problem in err and "hint:" in err


def test_the_allocator_is_that_of_the_torch_that_runs() -> None:
    with virtual_gpu("rtx-4090") as card:
        assert card.settled().torch == torch_version(torch.__version__)


def test_masks_index_as_their_nonzero_does() -> None:
    with virtual_gpu("rtx-4090") as card:
        x, mask = torch.arange(6, device="cuda"), torch.tensor([1, 0, 0, 1, 0, 1], device="cuda").bool()
        before = len(card.ledger.ops)
        assert x[mask].tolist() == [0, 3, 5]
        assert [op for op in card.ledger.ops[before:] if op >= 0] == [24, 24]  # where it is true, then what is there


def test_statistics_by_pool_add_up_and_the_summary_prints() -> None:
    with virtual_gpu("rtx-4090") as card:
        model = _model()
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(3):
            _step(model, optimizer, torch.empty(4096, 256, device="cuda"))
            if step == 1:
                torch.cuda.reset_peak_memory_stats()
            stats = torch.cuda.memory_stats()
            for name in ("requested", "allocated", "reserved", "active", "inactive_split"):
                by_pool = [stats[f"{name}_bytes.{pool}.current"] for pool in ("large_pool", "small_pool")]
                assert sum(by_pool) == stats[f"{name}_bytes.all.current"] == getattr(card.settled().stats, name)
                came_and_went = stats[f"{name}_bytes.all.allocated"] - stats[f"{name}_bytes.all.freed"]
                assert came_and_went == stats[f"{name}_bytes.all.current"]
        assert "GPU reserved segments" in torch.cuda.memory_summary()
        assert "Allocated memory" in torch.cuda.memory_summary(abbreviated=True)
        torch.cuda.reset_accumulated_memory_stats()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == 0


def test_a_memory_fraction_limits_the_card() -> None:
    with virtual_gpu("rtx-4090") as card:
        torch.cuda.set_per_process_memory_fraction(0.25)
        assert torch.cuda.get_per_process_memory_fraction() == 0.25
        room = int(0.25 * card.gpu.total_bytes)
        kept = torch.empty(room - 4 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match=r"memory in use. 5\.\d\d GiB allowed; Of the allocated"):
            torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.set_per_process_memory_fraction(1.0)
        assert torch.empty(8 * MIB, dtype=torch.uint8, device="cuda").is_cuda
        assert kept.is_cuda


def test_snapshots_of_the_card_are_torchs(tmp_path: Path) -> None:
    with virtual_gpu("rtx-4090") as card:
        torch.cuda.memory._record_memory_history()
        kept = [torch.empty(n * MIB, dtype=torch.uint8, device="cuda") for n in (1, 5, 30)]
        del kept[1]
        torch.cuda.memory._dump_snapshot(str(tmp_path / "s.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
        assert {s["segment_type"] for s in torch.cuda.memory_snapshot()} == {"small", "large"}
        assert sum(s["total_size"] for s in torch.cuda.memory_snapshot()) == torch.cuda.memory_reserved()
        tape = read(tmp_path / "s.pickle")
        assert replay(tape.events).peak.reserved == card.settled().reserved_peak


@pytest.mark.parametrize("name", ["MemPool", "use_mem_pool", "CUDAPluggableAllocator"])
def test_what_no_virtual_card_has_is_refused_by_name(name: str) -> None:
    with virtual_gpu("rtx-4090"), pytest.raises(Unsupported, match=f"torch.cuda.{name} is not modelled"):
        assert callable(getattr(torch.cuda, name).__wrapped__)  # read when PyTorch 2.15 imports its compiler
        getattr(torch.cuda, name)(torch.nn.Linear(2, 2))
    with virtual_gpu("rtx-4090"), torch.cuda.nvtx.range("a part"):
        torch.cuda.nvtx.mark("here")
        assert torch.cuda.mem_get_info()[1] == torch.cuda.get_device_properties().total_memory


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_random_state_of_efficient_attention_lies_on_the_host(dropout: float) -> None:
    with virtual_gpu("rtx-4090") as card:
        q, k, v = (torch.empty(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
        mask = torch.zeros(2, 1, 64, 64, device="cuda", dtype=torch.bfloat16)
        before = len(card.ledger.ops)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout)
        assert [op for op in card.ledger.ops[before:] if op >= 0] == [2 * 4 * 64 * 64 * 2, 2 * 4 * 64 * 4]
        out.sum().backward()
        assert q.grad is not None
        assert q.grad.shape == q.shape


LATE = """
import torch, memfit
{first}
with memfit.virtual_gpu("l4"):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).cuda()
    for _ in range(2):
        model(torch.ones(8, 64, device="cuda")).sum().backward()
    stats = torch.cuda.memory_stats()
print({{name: stats[name] for name in stats if "bytes" in name or "allocation" in name}})
"""


def test_a_backward_on_the_host_before_the_first_card_changes_nothing() -> None:
    def told(first: str) -> str:
        command = [sys.executable, "-c", LATE.format(first=first)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    assert told("torch.ones(2, requires_grad=True).sum().backward()") == told("") != ""


def test_a_capacity_may_be_written() -> None:
    with virtual_gpu("rtx-4090", capacity="2GiB") as card:
        assert card.ledger.allocator.capacity == 2 << 30
        with pytest.raises(torch.OutOfMemoryError) as error:  # a smaller card, which no other process has a part of
            torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
        free, total = torch.cuda.mem_get_info()
        assert total == torch.cuda.get_device_properties(0).total_memory == free + card.gpu.context_bytes
    assert "other-process" not in [f.cause for f in explain(read_text(str(error.value)))]
    with pytest.raises(BadInput, match="is not a size"), virtual_gpu("rtx-4090", capacity="much"):
        pass


def test_a_card_that_nobody_closes_ends_in_silence() -> None:
    program = "import torch, memfit\ncard = memfit.virtual_gpu('l4')\ncard.__enter__()\n"
    program += "torch.ones(4, device='cuda', requires_grad=True).sum().backward()\n"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_the_settings_of_the_environment_are_those_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    for conf, expandable in ((None, True), ("", False)):
        with virtual_gpu("l4", alloc_conf=conf) as card:
            assert card.ledger.allocator.settings.expandable_segments is expandable


@pytest.mark.parametrize("whole", [True, False], ids=["a module of all layers", "layers called one by one"])
@pytest.mark.parametrize("beside", [True, False], ids=["beside a frozen model", "alone"])
def test_what_waits_for_the_backward_is_an_activation_however_layers_are_called(whole: bool, beside: bool) -> None:
    depth, rows, width = 5, 4096, 256
    with virtual_gpu("rtx-4090") as card:
        observer = Observer(card)
        with observer.watching():
            layers = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(depth)]).cuda()
            frozen = torch.nn.Linear(width, 8).cuda()
            for _ in range(2):
                x = torch.zeros(rows, width, device="cuda")
                data = x
                for layer in [layers] if whole else layers:
                    x = layer(x)
                if beside:
                    with torch.no_grad():
                        frozen(data)
                x.sum().backward()
        tape = observer.tape({})
    made = [e for e in tape.events if isinstance(e, Alloc) and e.role == "activations"]
    assert [e.size for e in made if e.size == rows * width * 4] == [rows * width * 4] * depth * 2
    assert sum(isinstance(e, Mark) and e.instant == "backward" for e in tape.events) == 2
    batches = [e.role for e in tape.events if isinstance(e, Alloc) and e.size == rows * width * 4]
    assert batches.count("parameters") == 0
