"""Explain programs whose request says more than their traceback: states half made, logits, a far larger batch."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from memfit import explain_oom, find_gpu, virtual_gpu  # noqa: E402
from memfit.live.explain_oom import Explained  # noqa: E402
from memfit.units import MIB  # noqa: E402

pytestmark = pytest.mark.usefixtures("nothing_left")


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


def test_a_failure_that_was_caught_is_not_the_one_that_is_explained() -> None:
    def program() -> None:
        kept = []
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(500 * MIB, dtype=torch.uint8, device="cuda")
        for _ in range(40):
            kept.append(torch.empty(10 * MIB, dtype=torch.uint8, device="cuda"))

    found, _ = failed(120, program)
    assert found.evidence is not None and found.evidence.memory is not None
    assert (found.evidence.memory.asked, found.evidence.memory.requested) == (10 * MIB, 120 * MIB)


def test_a_module_that_runs_twice_in_a_step_is_no_measure_of_itself() -> None:
    def program() -> None:
        body, x = torch.nn.Linear(512, 128).cuda(), torch.randn(4096, 512, device="cuda")
        both = torch.cat([body(x), body(x + 0.1)])
        (both @ both.t()).logsumexp(1).mean().backward()  # 8,192 x 8,192

    found, _ = failed(200, program)
    assert found.findings[0].cause == "activations"
    assert found.findings[0].evidence[0].text == "a single tensor is requested"


def test_a_recurrent_net_that_reaches_its_weights_often_is_no_leak() -> None:
    def program() -> None:
        net, head = torch.nn.GRU(64, 64, batch_first=True).cuda(), torch.nn.Linear(64, 8000).cuda()
        out = head(net(torch.randn(16, 128, 64, device="cuda"))[0])
        loss = out.float().log_softmax(-1).mean()
        loss.backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a PyTorch without cuDNN
        found, _ = failed(170, program)
    assert "leak" not in [f.cause for f in found.findings]


@pytest.mark.parametrize(("kept", "said"), [("graph", "backward() on each loss"), ("models", "before making the next")])
def test_what_to_do_against_a_leak_is_told_by_what_is_kept(kept: str, said: str) -> None:
    def program() -> None:
        total, every = 0, []
        for _ in range(60):
            model = body(512, 2)
            every.append(model)
            if kept == "models":
                step_of(model)
            else:
                total = total + every[0](torch.randn(4096, 512, device="cuda")).pow(2).mean()
                every[1:] = []

    found, _ = failed(100, program)
    assert found.findings[0].cause == "leak"
    assert any(said in remedy.text for remedy in found.findings[0].remedies)


def test_copies_of_weights_are_kept_on_the_host_and_not_as_numbers() -> None:
    def program() -> None:
        model, best = body(1024, 4), []
        for _ in range(30):
            step_of(model, 1024)
            best.append({name: value.clone() for name, value in model.state_dict().items()})

    found, _ = failed(150, program)
    first = found.findings[0]
    assert first.cause == "leak"
    assert [remedy.text[:28] for remedy in first.remedies] == ["keep one copy, on the CPU: {"]


def test_an_error_a_console_showed_is_let_go_of_where_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def cell() -> None:
        held = [torch.empty(MIB, device="cuda") for _ in range(20)]
        raise ValueError(len(held))

    def program() -> None:
        try:
            cell()
        except ValueError as error:
            monkeypatch.setattr(sys, "last_value", error, raising=False)
        torch.empty(10 * MIB, device="cuda")

    found, _ = failed(100, program)
    assert found.findings[0].cause == "exception"
    assert found.findings[0].remedies[0].text.startswith("sys.last_value = sys.last_exc = ")


@pytest.mark.parametrize("optimized", [True, False])
def test_a_net_at_rest_is_no_companion(optimized: bool) -> None:
    """A GAN's larger net while the other's step is made; without an optimizer it is frozen for good."""

    def program() -> None:
        judge, maker = body(1024, 24), body(1024, 2)
        steps = [torch.optim.SGD(net.parameters(), 0.1) for net in ((judge, maker) if optimized else (maker,))]
        judge.requires_grad_(False)
        for rows in (8, 8, 40_000):
            judge(maker(torch.randn(rows, 1024, device="cuda"))).pow(2).mean().backward()
            steps[-1].step()
            steps[-1].zero_grad()

    found, _ = failed(150, program)
    assert (found.findings[0].cause == "companion-models") == (not optimized)


def step_of(model: torch.nn.Module, width: int = 512) -> None:
    model(torch.randn(8, width, device="cuda")).pow(2).mean().backward()
    model.zero_grad()


def test_models_made_on_several_lines_are_no_leak() -> None:
    def program() -> None:
        first = torch.nn.Linear(1024, 1024, bias=False).cuda()
        second = torch.nn.Linear(1024, 1024, bias=False).cuda()
        third = torch.nn.Linear(1024, 1024, bias=False).cuda()
        nets = [first, second, third]
        optimizer = torch.optim.AdamW([p for net in nets for p in net.parameters()])
        for rows in (8, 8, 8, 30_000):
            for net in nets:
                net(torch.randn(rows, 1024, device="cuda")).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    found, _ = failed(200, program)
    assert found.evidence is not None and found.evidence.memory is not None
    assert found.evidence.memory.of("optimizer_states") >= 24 * MIB
    assert "leak" not in [f.cause for f in found.findings]


def test_a_list_of_a_model_s_own_layers_is_nothing_to_let_go_of() -> None:
    def program() -> None:
        layers = [torch.nn.Linear(1024, 1024).cuda() for _ in range(8)]
        kept = []
        for _ in range(100):
            x = torch.randn(64, 1024, device="cuda")
            for layer in layers:
                x = layer(x)
            kept.append(x)

    found, _ = failed(80, program)
    assert found.evidence is not None and "models" in [root.what for root in found.evidence.roots]
    assert found.findings[0].cause == "leak"
    assert not any("del the model" in remedy.text for remedy in found.findings[0].remedies)


def test_transforms_of_functions_run_as_without_the_hook() -> None:
    """vmap and grad hand modules wrappers that have no storage."""

    def program() -> None:
        model = torch.nn.Linear(512, 512).cuda()
        weights = {name: weight.detach() for name, weight in model.named_parameters()}

        def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, weights, (x[None],)).pow(2).mean()

        rows = torch.randn(512, 512, device="cuda")
        torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, rows)  # a gradient of 1 MiB for each

    found, _ = failed(300, program)
    assert found.evidence is not None and found.evidence.memory is not None
    assert found.evidence.memory.asked == 512 * MIB


def test_what_hooks_of_one_line_share_is_counted_once() -> None:
    def program() -> None:
        model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]).cuda()
        kept: list[torch.Tensor] = []

        def keep(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
            kept.append(output.detach())

        for layer in model:
            layer.register_forward_hook(keep)
        with torch.no_grad():
            for _ in range(1000):
                model(torch.randn(256, 512, device="cuda"))

    found, _ = failed(80, program)
    assert found.evidence is not None and found.evidence.memory is not None
    hook = found.evidence.root("hook")
    assert hook is not None and hook.bytes <= found.evidence.memory.requested


def test_a_momentum_encoder_in_a_step_is_no_evaluation() -> None:
    """Its pass has no gradients; a backward follows, of the other one."""

    def program() -> None:
        online, target = (torch.nn.Linear(512, 512).cuda() for _ in range(2))
        optimizer = torch.optim.SGD(online.parameters())
        for rows in (256, 256, 1 << 15):
            x = torch.randn(rows, 512, device="cuda")
            with torch.no_grad():
                keys = target(x)
            (online(x) * keys).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    found, _ = failed(160, program)
    memory = found.evidence.memory if found.evidence else None
    assert memory is not None and memory.phase == "step" and not any(memory.evals)
    assert found.findings[0].cause == "long-sample"


def test_training_that_begins_at_another_line_is_no_evaluation() -> None:
    def program() -> None:
        model = torch.nn.Linear(512, 512).cuda()
        for _ in range(3):
            model(torch.randn(64, 512, device="cuda")).mean().backward()
        model(torch.randn(1 << 16, 512, device="cuda")).mean().backward()

    found, _ = failed(200, program)
    memory = found.evidence.memory if found.evidence else None
    assert memory is not None and memory.phase == "first_step" and "eval" not in found.findings[0].cause
