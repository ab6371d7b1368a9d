"""memfit.explain_oom on programs whose request says more than their traceback: states half made, logits, a far larger batch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from memfit import explain_oom, find_gpu, virtual_gpu  # noqa: E402
from memfit.live import Explained  # noqa: E402
from memfit.units import MIB  # noqa: E402


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    gc.collect()


def failed(room: int, program: Callable[[], None]) -> tuple[Explained, str]:
    """What is found of a program on a card of `room` MiB, and what is told."""
    gpu = replace(find_gpu("rtx-4090"), total_bytes=(room + 1) * MIB, context_bytes=MIB)
    told: list[str] = []
    with (
        virtual_gpu(gpu, capacity=room * MIB),
        pytest.raises(torch.OutOfMemoryError),
        explain_oom(told.append) as found,
    ):
        program()
    return found, told[0]


def body(width: int = 1024, depth: int = 4) -> torch.nn.Sequential:
    return torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(depth)]).cuda()


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: int) -> None:
    model(torch.randn(rows, 1024, device="cuda")).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_states_half_made_are_states_and_told_with_what_is_to_come() -> None:
    def program() -> None:
        model = body(depth=16)  # 64 MiB of weights, as much of gradients, 128 MiB of states
        step(model, torch.optim.AdamW(model.parameters()), 8)

    found, told = failed(200, program)
    assert found.evidence is not None and found.evidence.memory is not None
    assert found.findings[0].cause == "optimizer-states" and "of 128 MiB so far" in found.findings[0].evidence[0].text
    assert found.evidence.memory.of("optimizer_states") > 30 * MIB > 20 * found.evidence.memory.of("temporaries")
    assert "128 MiB of states need 256 MiB, the card has room for 200 MiB" in told
    assert found.findings[1].cause == "capacity"


def test_a_card_that_holds_all_states_has_no_such_need() -> None:
    def program() -> None:
        model = body(depth=16)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        step(model, optimizer, 8)

    found, _ = failed(290, program)  # the temporaries of the step do not fit
    assert "capacity" not in [f.cause for f in found.findings]


def test_logits_are_known_by_their_size_before_a_larger_batch_is() -> None:
    def program() -> None:
        model = body()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        head = torch.nn.Linear(16, 64_000, bias=False).cuda()
        step(model, optimizer, 8)
        logits = head(torch.randn(512, 16, device="cuda")).half()
        torch.nn.functional.cross_entropy(logits.float(), torch.zeros(512, dtype=torch.long, device="cuda"))

    found, _ = failed(280, program)
    assert found.findings[0].cause == "logits"
    assert "are 512 tokens x 64,000 words x 4 B" in found.findings[0].evidence[0].text


def test_an_output_layer_that_finds_no_room_for_its_logits_is_named() -> None:
    def program() -> None:
        head = torch.nn.Linear(16, 64_000, bias=False).cuda()
        head(torch.randn(512, 16, device="cuda"))

    found, _ = failed(60, program)
    assert found.findings[0].cause == "logits" and "512 tokens x 64,000 words x 4 B" in str(found.findings[0].evidence)


def test_a_second_batch_far_larger_than_the_first_is_a_long_sample() -> None:
    def program() -> None:
        model = body(depth=8)
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer, 1024)
        step(model, optimizer, 36 * 1024)

    found, _ = failed(450, program)
    assert found.findings[0].cause == "long-sample"


def test_the_first_batch_is_no_parameter() -> None:
    def program() -> None:
        model = body()
        kept = []
        while True:
            kept.append(model(torch.randn(4096, 1024, device="cuda")))

    found, _ = failed(200, program)
    assert found.evidence is not None and found.evidence.memory is not None
    assert found.evidence.memory.of("parameters") == 16 * MIB
