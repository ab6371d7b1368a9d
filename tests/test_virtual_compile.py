"""torch.compile on the virtual card: Inductor's own plan of its buffers, seen in what is allocated."""

from __future__ import annotations

import copy
import importlib
import itertools
import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy, gelu  # noqa: E402

from conftest import Ran  # noqa: E402
from memfit.allocator.replay import replay  # noqa: E402
from memfit.virtual.libraries import inductor  # noqa: E402
from memfit.virtual.libraries.triton import Anything  # noqa: E402
from memfit.virtual.observer import Observer  # noqa: E402
from memfit.virtual.scripts.script import trace_script  # noqa: E402
from memfit.virtual.virtual_gpu import virtual_gpu  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # what PyTorch's compiler says of itself is its affair
CARD = "a100-80gb"
MIB = 1 << 20


def peak(function: Callable[[], object]) -> int:
    """Bytes that a call needs beyond what was there."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    return int(torch.cuda.max_memory_allocated() - before)


class Block(nn.Module):
    """A residual block whose elementwise half is fused where it is compiled."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(gelu(self.up(self.norm(x)) * 1.5))


# --- what is planned ---


def test_a_chain_of_elementwise_operators_needs_its_result_alone() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x * 2 + 1) * torch.relu(x)

    with virtual_gpu(CARD), torch.no_grad():
        x = torch.empty(64, MIB // 4, device="cuda")  # 64 MiB
        compiled = torch.compile(chain)
        compiled(x)
        assert peak(lambda: compiled(x)) == 64 * MIB
        assert peak(lambda: chain(x)) == 3 * 64 * MIB


def test_a_compiled_loss_makes_no_copy_of_the_logits() -> None:
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits.float(), labels)

    with virtual_gpu(CARD):
        logits = torch.empty(1024, 32 * 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)  # 64 MiB
        labels = torch.zeros(1024, device="cuda", dtype=torch.int64)
        compiled = torch.compile(loss)
        compiled(logits, labels).backward()
        assert peak(lambda: compiled(logits, labels)) < MIB
        assert peak(lambda: loss(logits, labels)) >= 2 * 128 * MIB
        logits.grad = None
        assert 64 * MIB <= peak(lambda: compiled(logits, labels).backward()) < 65 * MIB


def test_maxima_of_blocks_keep_one_number_each() -> None:
    """As in quantising 8-bit states: a reduction and an elementwise half."""

    def scaled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = x.view(-1, 256)
        scale = blocks.abs().amax(-1)
        return (blocks / scale.view(-1, 1) * 127).to(torch.int8).view(x.shape), scale

    with virtual_gpu(CARD), torch.no_grad():
        x = torch.empty(4096, 4096, device="cuda")
        compiled = torch.compile(scaled)
        compiled(x)
        assert peak(lambda: compiled(x)) == x.numel() + x.numel() // 256 * 4


# --- whatever is compiled, and however it is watched ---


@cache
def trained(how: str, watched: bool) -> tuple[int, int]:
    """Peaks in allocated bytes of the first and the third step of two blocks."""
    with virtual_gpu(CARD) as card:
        observer = Observer(card)
        model: nn.Module = nn.Sequential(Block(), Block()).cuda()
        if how == "wrapped":
            model = torch.compile(model)
        elif how == "in place":
            model.compile()
        elif how == "blocks":
            for block in model:
                block.compile()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        found = []
        with observer.watching() if watched else nullcontext():
            for _ in range(3):
                torch.cuda.reset_peak_memory_stats()
                model(torch.randn(4096, 512, device="cuda")).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(int(torch.cuda.max_memory_allocated()))
        if watched:
            tape = observer.tape({})
            phases = replay(tape.events).by_phase()
            assert {"first_step", "step"} <= set(phases) and phases["step"].allocated == found[-1]
            labels = {getattr(event, "label", "") for event in tape.events}
            assert not any("_orig_mod" in label for label in labels)
            assert any("triton_" in label and "gelu" in label for label in labels) == (how != "eager")
        return found[0], found[-1]


@pytest.mark.parametrize("how", ["wrapped", "in place", "blocks"])
def test_who_watches_changes_no_byte_and_compiled_code_needs_less(how: str) -> None:
    assert trained(how, watched=True) == trained(how, watched=False)
    assert trained(how, watched=False)[1] < trained("eager", watched=False)[1]


def test_a_second_card_in_a_process_compiles_anew() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * 2)

    compiled = torch.compile(double)
    for gpu, size in ((CARD, 8), ("rtx-4090", 16)):
        with virtual_gpu(gpu) as card, torch.no_grad():
            x = torch.empty(size, MIB, device="cuda")
            assert peak(lambda: compiled(x)) == 4 * size * MIB  # noqa: B023
            assert inductor.PLANNED in card.assumed
    assert compiled(torch.ones(3)).tolist() == [2.0] * 3  # and where there is no card, the host's own code


def test_nothing_is_left_behind() -> None:
    import torch._inductor.config as config
    from torch.utils import _triton

    before, cached = _triton.has_triton(), config.fx_graph_cache
    with virtual_gpu(CARD), torch.no_grad():
        torch.compile(torch.sin)(torch.empty(8, device="cuda"))
        assert _triton.has_triton() and config.fx_graph_cache is inductor.SETTINGS["fx_graph_cache"]
    assert _triton.has_triton() == before
    assert config.fx_graph_cache == cached
    assert not any("memfit" in directory for directory in torch._dynamo.trace_rules.SKIP_DIRS)


# --- settings, modes and failures ---


@pytest.mark.parametrize("name", inductor.SETTINGS)
def test_every_setting_is_one_of_inductors(name: str) -> None:
    import torch._inductor.config as config

    assert name in vars(config)["_config"]


@pytest.mark.parametrize("cache", inductor.CACHES)
def test_every_cache_is_there_to_be_forgotten(cache: str) -> None:
    import importlib
    from operator import attrgetter

    module, _, path = cache.partition(":")
    forget = inductor.CACHES[cache]
    assert callable(attrgetter(f"{path}.{forget}" if path else forget)(importlib.import_module(module)))


@pytest.mark.parametrize(
    ("mode", "said"),
    [("default", ()), ("reduce-overhead", ("CUDA graphs",)), ("max-autotune", ("CUDA graphs", "autotuning")),
     ("max-autotune-no-cudagraphs", ("autotuning",))],
)  # fmt: skip
def test_modes_record_graphs_and_say_what_needs_a_card(mode: str, said: tuple[str, ...]) -> None:
    with virtual_gpu(CARD) as card, torch.no_grad():
        weight, x = torch.empty(512, 512, device="cuda"), torch.empty(1024, 512, device="cuda")
        compiled = torch.compile(lambda x: torch.relu(x @ weight), mode=mode)
        for _ in range(2):  # graphs: warms up, then records
            compiled(x)
        assert peak(lambda: compiled(x)) == (0 if "CUDA graphs" in said else 1024 * 512 * 4)
        notes = " ".join(card.assumed)
    assert [word in notes for word in ("CUDA graphs", "autotuning")] == [
        word in said for word in ("CUDA graphs", "autotuning")
    ]


def test_a_script_is_traced_until_its_graphs_are_recorded(tmp_path: Path, ran: Ran) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "w = torch.nn.Linear(64, 64).cuda()\n"
        "step, adam = torch.compile(w, mode='reduce-overhead'), torch.optim.AdamW(w.parameters())\n"
        "for _ in range(3):\n"
        "    step(torch.randn(8, 64, device='cuda')).sum().backward()\n"
        "    adam.step()\n"
    )
    code, out, _ = ran("trace", str(tmp_path / "train.py"), "--gpu", CARD, "--steps", "1", "--json")
    assert code == 0 and json.loads(out)["steps"] == 2


def test_what_cannot_be_compiled_runs_as_it_was_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.graph

    def broken(self: object, *_: object) -> None:
        raise NotImplementedError("no lowering")

    monkeypatch.setattr(torch._inductor.graph.GraphLowering, "run", broken)
    with virtual_gpu(CARD) as card, torch.no_grad():
        x = torch.empty(MIB, device="cuda")
        assert torch.compile(lambda x: torch.sin(x) + 1)(x).shape == x.shape
        assert any("ran as it was traced" in text and "no lowering" in text for text in card.assumed)


def test_a_backward_pass_compiles_in_the_engines_thread_with_the_same_settings(tmp_path: Path) -> None:
    """An optimizer steps, compiled, in a hook of the backward pass, where a cache would look for Triton's libraries."""
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(256, 256).cuda()\n"
        "update = torch.compile(lambda p, g: p.sub_(g * 0.1), fullgraph=True)\n"
        "def step(p):\n"
        "    with torch.no_grad():\n"
        "        update(p, p.grad)\n"
        "    p.grad = None\n"
        "for p in model.parameters():\n"
        "    p.register_post_accumulate_grad_hook(step)\n"
        "for _ in range(2):\n"
        "    model(torch.randn(64, 256, device='cuda')).sum().backward()\n"
    )
    tape, outcome = trace_script(tmp_path / "train.py", [], CARD)
    assert outcome.ending == "finished" and inductor.PLANNED in outcome.assumed
    assert not any("ran as it was traced" in text for text in outcome.assumed)
    assert not any(getattr(event, "label", "").endswith(": mul") for event in tape.events)  # g * 0.1 is fused


@pytest.mark.parametrize("name", inductor.LEFT_OUT)
def test_what_a_script_sets_by_hand_is_left_out_and_said(name: str) -> None:
    import torch._inductor.config as config

    with virtual_gpu(CARD) as card, torch.no_grad(), config.patch({name: True}):
        torch.compile(torch.sin)(torch.empty(8, device="cuda"))
        assert inductor.LEFT_OUT[name] in card.assumed


def test_what_a_kernel_reads_stays_known_and_what_it_writes_does_not() -> None:
    def masked(x: torch.Tensor, mask: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        count.add_(mask)
        return x * mask

    with virtual_gpu(CARD) as card, torch.no_grad():
        mask, count = torch.tensor([1, 1, 0, 1], device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
        torch.compile(masked)(torch.empty(1024, 4, device="cuda"), mask, count)
        assert mask.sum().item() == 3 and mask.nonzero().shape == (3, 1) and not card.answers.reads
        count.sum().item()
        assert card.answers.reads


def test_a_source_that_does_not_tell_what_it_writes_leaves_nothing_known() -> None:
    with virtual_gpu(CARD) as card:
        known = torch.tensor([1, 2], device="cuda")
        inductor.InductorKernel("triton_x", "def triton_x(in_ptr0, xnumel): pass").run(known, 2, stream=0)
        known.sum().item()
        assert card.answers.reads


def test_an_operator_made_of_triton_kernels_allocates_its_result_and_launches_nothing() -> None:
    with virtual_gpu(CARD):
        import triton  # type: ignore[import-not-found]

        def doubled(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            torch.library.wrap_triton(kernel)[(1,)](x, out)
            return out

        kernel = triton.jit(lambda x, out: None)
        double = torch.library.triton_op("memfit_tests::doubled", doubled, mutates_args={})
        x = torch.empty(MIB // 4, device="cuda")
        assert peak(lambda: double(x)) == MIB


def test_a_library_may_list_tritons_types() -> None:
    with virtual_gpu(CARD):
        language: Any = importlib.import_module("triton.language")
        assert list(language.dtype.SINT_TYPES + language.dtype.UINT_TYPES) == []


def test_a_second_card_is_asked_for_its_own_properties() -> None:
    import torch._dynamo.device_interface as interfaces

    for gpu, count in ((CARD, 108), ("rtx-4090", 128)):
        with virtual_gpu(gpu):
            assert interfaces.CudaInterface.get_device_properties(0).multi_processor_count == count


def test_weights_of_a_model_that_compiled_code_calls_are_weights() -> None:
    with virtual_gpu(CARD) as card:
        observer = Observer(card)
        model = Block().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        loss = torch.compile(lambda x: model(x).square().mean())
        with observer.watching():
            for _ in range(2):
                loss(torch.randn(256, 512, device="cuda")).backward()
                optimizer.step()
                optimizer.zero_grad()
        weights = [e for e in observer.tape({}).events if getattr(e, "role", "") == "parameters"]
        assert sum(e.size for e in weights) == sum(4 * p.numel() for p in model.parameters())


# --- what the compiler needs of the card ---


def test_numbers_stand_for_tensors() -> None:
    with virtual_gpu(CARD):
        assert (torch.arange(5, device="cuda") % 3).tolist() == [0, 1, 2, 0, 1]


def test_constants_are_made_below_a_mode_that_is_on() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with virtual_gpu(CARD):
        torch.compile(torch.sin)(torch.empty(8, device="cuda"))
        with FakeTensorMode():
            assert torch.tensor(2.0, device="cuda").device.type == "cuda"


def test_the_stand_in_for_triton_has_no_end_of_items() -> None:
    assert list(itertools.islice(Anything, 3)) == list(itertools.islice(Anything(), 3)) == []


def test_tensors_of_the_card_are_copied_deeply() -> None:
    with virtual_gpu(CARD):
        whole = torch.arange(2048, device="cuda")
        assert (
            peak(lambda: copy.deepcopy(whole)) == 2048 * 8 + 512
        )  # PyTorch makes a scalar first, and gives it the storage
        view = copy.deepcopy(whole[4:8])
        assert view.tolist() == [4, 5, 6, 7] and view.untyped_storage().nbytes() == 2048 * 8
        model = copy.deepcopy(nn.BatchNorm1d(64).cuda())
        assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cuda"}
        assert copy.deepcopy(torch.empty(0, device="cuda")).shape == (0,)


def test_checkpoints_with_dropout_are_compiled() -> None:
    from torch.utils.checkpoint import checkpoint

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.GELU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    with virtual_gpu(CARD) as card:
        model = torch.compile(Dropped().cuda())
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        assert inductor.PLANNED in card.assumed
        assert not any("ran as it was traced" in text for text in card.assumed)
