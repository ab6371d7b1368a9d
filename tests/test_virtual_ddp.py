"""DDP on a virtual card is PyTorch's own reducer, which times no pass: no CUDA event, and not a byte different for it.

On builds without CUDA the reducer has no timer, so there it can also count its passes as it does on a card. A
difference between the two tapes would be what leaving out the count changes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

import torch.distributed as dist  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from memfit.virtual.device.values import Answers  # noqa: E402
from memfit.virtual.jobs import run  # noqa: E402
from memfit.virtual.jobs.recipe import Setup  # noqa: E402
from memfit.virtual.observer import Observer  # noqa: E402
from memfit.virtual.patching import patched  # noqa: E402
from memfit.virtual.virtual_gpu import virtual_gpu  # noqa: E402

_c10d: Any = torch._C._distributed_c10d
COUNTED = {"prepare_for_forward": _c10d.Reducer.prepare_for_forward}  # before a world takes it away
UNLOGGED = {"set_runtime_stats_and_log": lambda *_: None}  # the log of times asserts that there is a timer

WIDTH = 600  # a layer of 1.4 MB fp32, more than the first bucket of 1 MiB
TINY = {
    "model_type": "llama", "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip

without_cuda = pytest.mark.skipif(torch.backends.cuda.is_built(), reason="there a reducer that counts takes the time")


class Net(torch.nn.Module):
    """Layers in a row, one of them left out on request."""

    def __init__(self, unused: bool = False, frozen: int = 0) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.unused = unused
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    def forward(self, x: Any) -> Any:
        for layer in self.layers[1 if self.unused else 0 :]:
            x = layer(x)
        return x


def ran_by_hand(
    unused: bool = False, frozen: int = 0, hook: Callable[[Any], None] = lambda _: None, autocast: bool = False,
    accumulation: int = 1, steps: int = 3, keep: bool = False, **words: Any,
) -> Any:  # fmt: skip
    """The wrapped model after some optimizer steps."""
    model = Net(unused, frozen).cuda()
    wrapped = DistributedDataParallel(model, device_ids=[0], **({"bucket_cap_mb": 2} | words))
    hook(wrapped)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for _ in range(steps):
        for left in reversed(range(accumulation)):
            with wrapped.no_sync() if left else nullcontext(), torch.autocast("cuda", torch.bfloat16, autocast):
                wrapped(torch.ones(8, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keep)
    return wrapped


def tape(job: Callable[[Any], object], counted: bool = False) -> tuple[list[int], int]:
    """What happened on the card, and the highest reserved bytes.

    What dies together is sorted: autocast drops its casts in the order of a hash table of addresses.
    """
    with (
        virtual_gpu("h100", world_size=4) as card,
        patched(_c10d.Reducer, COUNTED) if counted else nullcontext(),
        patched(_c10d.Logger, UNLOGGED) if counted else nullcontext(),
    ):
        job(card)
        reserved = card.settled().reserved_peak
    events: list[int] = []
    dying: list[int] = []
    for op in [*card.ledger.ops, 0]:
        if op >= 0:
            events += [*sorted(dying), op]
            dying = []
        else:
            dying.append(op)
    return events, reserved


def compressing(hook: Any, state: Any = lambda: None) -> Callable[[Any], None]:
    return lambda wrapped: wrapped.register_comm_hook(state(), hook)


def builtin(name: str) -> Callable[[Any], None]:
    return lambda wrapped: wrapped._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))


BY_HAND: dict[str, dict[str, Any]] = {
    "full": {},
    "one bucket": {"bucket_cap_mb": 100},
    "frozen parameters": {"frozen": 3},
    "autocast": {"autocast": True},
    "no_sync": {"accumulation": 3},
    "bucket view": {"gradient_as_bucket_view": True},
    "bucket view, no_sync, kept": {"gradient_as_bucket_view": True, "accumulation": 2, "keep": True},
    "unused parameters": {"unused": True, "find_unused_parameters": True},
    "none unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "static graph, unused": {"static_graph": True, "unused": True},
    "static graph, past the tenth pass": {"static_graph": True, "steps": 12},
    "bfloat16 gradients": {"hook": compressing(default_hooks.bf16_compress_hook)},
    "PowerSGD": {
        "hook": compressing(
            powerSGD_hook.powerSGD_hook, lambda: powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        )
    },
}
TRAINED: dict[str, dict[str, Any]] = {
    "loop": {"trainer": "torch", "load": "meta", "autocast": "bf16", "bucket_view": True, "use_cache": False},
    "Trainer, accumulated": {"trainer": "transformers", "autocast": "bf16", "accumulation": 2},
    "SFTTrainer, LoRA": {"trainer": "trl", "method": "lora", "dtype": "bf16"},
}


@without_cuda
@pytest.mark.parametrize("words", BY_HAND.values(), ids=BY_HAND)
def test_a_reducer_that_counts_its_passes_has_the_same_tape(words: dict[str, Any]) -> None:
    assert tape(lambda _: ran_by_hand(**words)) == tape(lambda _: ran_by_hand(**words), counted=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "words",
    [
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"find_unused_parameters": True, "static_graph": True},
    ],
)
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_model_that_is_let_go_of_leaves_nothing_behind(words: dict[str, Any], steps: int) -> None:
    """Also before its buckets were rebuilt."""
    with virtual_gpu("h100", world_size=4, answers=Answers(late_watchdog=False)):
        before = torch.cuda.memory_allocated()
        wrapped = ran_by_hand(steps=steps, **words)
        assert torch.cuda.memory_allocated() > before
        del wrapped
        torch._C._cuda_clearCublasWorkspaces()
        # gc.collect() does nothing while another thread collects, as the test runner's may
        until = time.monotonic() + 10
        while gc.collect() >= 0 and torch.cuda.memory_allocated() != before and time.monotonic() < until:
            time.sleep(0.01)
        assert torch.cuda.memory_allocated() == before


@without_cuda
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("words", TRAINED.values(), ids=TRAINED)
def test_so_have_the_trainers(words: dict[str, Any]) -> None:
    def job(card: Any) -> None:
        observer = Observer(card)
        with observer.watching():
            run(
                Setup(**({"config": TINY, "sequence": 64, "dtype": "fp32", "world_size": 4, "steps": 3} | words)),
                observer,
            )

    assert tape(job) == tape(job, counted=True)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic graph", "static graph"])
def test_no_pass_is_timed(static: bool) -> None:
    """A reducer takes the time in each of its first ten passes, then in every hundredth, or as often as it is told."""
    with virtual_gpu("h100", world_size=4):
        wrapped = ran_by_hand(static_graph=static, hook=lambda d: d._set_ddp_runtime_logging_sample_rate(1), steps=12)
        assert wrapped._get_ddp_logging_data()["iteration"] == 0


@pytest.mark.parametrize(("name", "copies"), [("ALLREDUCE", 0), ("FP16_COMPRESS", 3)])
def test_hooks_of_c_plus_plus_run(name: str, copies: int) -> None:
    """Compressed gradients are one more allocation per bucket and pass, of half its bytes."""
    bucket = 4 * sum(p.numel() for p in Net().parameters())
    ops, _ = tape(lambda _: ran_by_hand(hook=builtin(name), bucket_cap_mb=100))
    assert bucket in ops
    assert ops.count(bucket // 2) == copies


# Recorded with PyTorch 2.13.0+cu130, rank 0 of 4 without the others: requested bytes at the peak of each step
SYNCED = (129_124_888, 129_280_792, 129_280_792)
MASKS = 64  # bytes: without other ranks no count is over zero, and what a mask picks is empty


def test_synchronised_batch_norm_needs_what_was_recorded() -> None:
    peaks = []
    with virtual_gpu("a100-80gb", world_size=4, answers=Answers(late_watchdog=False)):
        inner = [
            torch.nn.Conv2d(3, 64, 3, padding=1),
            torch.nn.BatchNorm2d(64),
            torch.nn.ReLU(),
            torch.nn.Conv2d(64, 64, 3),
        ]
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(
            torch.nn.Sequential(*inner, torch.nn.BatchNorm2d(64)).cuda()
        )
        wrapped = DistributedDataParallel(model, device_ids=[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in SYNCED:
            torch.cuda.reset_peak_memory_stats()
            x = torch.randn(16, 3, 64, 64, device="cuda")
            loss = wrapped(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(torch.cuda.memory_stats()["requested_bytes.all.peak"])
    assert peaks == pytest.approx(SYNCED, abs=MASKS)
