"""memfit.watch on the virtual card and on a CPU: phases, peaks, alarms, and the three classic leaks by line."""

from __future__ import annotations

import copy
import functools
import gc
import json
import pickle
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import memfit
from memfit.documents import watch_log
from memfit.errors import BadInput
from memfit.explain import read_watch
from memfit.live.watch import leak_search, loop
from memfit.live.watch.loop import Watch
from memfit.nouns.footprint import Footprint, Levels, PhasePeak
from memfit.nouns.sample import Leak
from memfit.units import GIB, MIB
from memfit.virtual.virtual_gpu import Card

STEPS = 30  # the first look is after 19, the search takes 8 more
CACHE: dict[int, Any] = {}


@pytest.fixture
def card() -> Iterator[Card]:
    with memfit.virtual_gpu("l4") as found:
        yield found


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experiments of other tests are none of this one's."""
    monkeypatch.setattr(loop, "THIS_PROCESS", leak_search.Experiments())
    monkeypatch.setitem(globals(), "CACHE", {})


@pytest.fixture
def small_heap(alone: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Objects of other tests are out of the collector's sight, so that counting tensors is quick."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    monkeypatch.setitem(globals(), "CACHE", {})
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


def model_of(width: int = 256) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


def watched(model: nn.Module, **options: Any) -> Watch:
    optimizer = options.pop("optimizer", None) or torch.optim.AdamW(model.parameters())
    return memfit.watch(model, optimizer, log=options.pop("log", None), quiet=True, **options)


def trained(watch: Watch, steps: int, each: Callable[[int], Any] = lambda step: None, rows: int = 64) -> Watch:
    """The usual loop, with one more thing per step."""
    model, optimizer = watch.model, watch.optimizer
    device = next(model.parameters()).device
    with watch:
        for step in range(steps):
            model(torch.randn(rows, model[0].in_features, device=device)).mean().backward()
            each(step)
            optimizer.step()
            optimizer.zero_grad()
    return watch


def line_of(text: str) -> int:
    """The line of this file with that comment."""
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.endswith(f"# {text}"))


# --- phases and peaks -----------------------------------------------------------------------------------------------


def test_peaks_are_those_of_the_allocator(card: Card) -> None:
    model = model_of().cuda()
    watch = watched(model, reset_peaks=False)
    trained(watch, 3)
    peaks = watch.recorder.peaks
    assert peaks["step"].allocated == torch.cuda.max_memory_allocated()
    assert peaks["step"].reserved == torch.cuda.max_memory_reserved()
    assert peaks["step"].device == card.gpu.context_bytes + torch.cuda.max_memory_reserved()
    assert list(peaks) == ["load", "first_step", "step"]


def test_every_phase_has_a_peak_of_its_own(card: Card) -> None:
    model = model_of().cuda()
    watch = watched(model)
    loaded = torch.cuda.memory_allocated()

    def evaluate(step: int) -> None:
        if step == 1:
            model.eval()
            with torch.no_grad():
                model(torch.randn(1 << 16, 256, device="cuda"))
            model.train()
        if step == 2:
            with watch.phase("save"):
                torch.empty(GIB, dtype=torch.int8, device="cuda")

    trained(watch, 4, evaluate)
    peaks = watch.recorder.peaks
    assert peaks["load"].requested == loaded
    assert peaks["save"].allocated > GIB > peaks["eval"].allocated > (1 << 16) * 1024 * 4 > peaks["step"].allocated
    phases = [span.phase for span in watch.timeline().spans]
    assert phases == ["load", "first_step", "step", "eval", "step", "save", "step"]


def test_the_footprint_adds_up_and_has_weights_and_states(card: Card) -> None:
    model = model_of().cuda()
    weights = sum(p.nbytes for p in model.parameters())
    watch = trained(watched(model), 4)
    found = watch.footprint()
    assert found.source == "measured"
    for peak in found.phases:
        levels = peak.levels
        assert sum(line.bytes for line in peak.lines) == levels.device
        assert levels.requested <= levels.allocated <= levels.reserved <= levels.device
    step = next(p for p in found.phases if p.phase == "step").by_role
    assert step["parameters"] == weights
    assert 2 * weights <= step["optimizer_states"] <= 2 * weights + 64
    assert found.peak.levels == watch.timeline().by_phase()["step"]


def test_a_loop_without_an_optimizer_calls_step(card: Card) -> None:
    with memfit.watch(log=None, quiet=True) as watch:
        for _ in range(3):
            watch.step()
    assert [s.step for s in watch.recorder.samples] == [0, 1, 2, 3, 3]


def test_steps_noted_by_hand_are_not_counted_twice(card: Card) -> None:
    watch = watched(model_of().cuda())
    trained(watch, 0)
    model, optimizer = model_of().cuda(), None
    optimizer = torch.optim.SGD(model.parameters())
    with watched(model, optimizer=optimizer) as watch:
        for _ in range(4):
            model(torch.randn(4, 256, device="cuda")).mean().backward()
            optimizer.step()
            watch.step()
    assert watch.done == 4


def test_hooks_are_gone_when_the_watch_is_closed(card: Card) -> None:
    model = model_of().cuda()
    watch = watched(model)
    optimizer = weakref.ref(watch.optimizer)
    trained(watch, 1)
    assert not model._forward_pre_hooks and not _global_optimizer_pre_hooks and not _global_optimizer_post_hooks
    assert watch.model is watch.optimizer is optimizer() is None  # nor does it keep what it watched


def test_a_watch_that_nobody_closes_keeps_nothing(card: Card) -> None:
    """As in a notebook whose cell is run again."""

    def cell() -> tuple[Any, Any]:
        model = model_of().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        watched(model, optimizer=optimizer)
        model(torch.randn(4, 256, device="cuda")).mean().backward()
        optimizer.step()
        return weakref.ref(model), weakref.ref(optimizer)

    gone = cell()
    gc.collect()
    assert gone[0]() is gone[1]() is None
    assert not _global_optimizer_pre_hooks and not _global_optimizer_post_hooks


def test_a_copy_of_a_watched_model_is_a_model_alone(tmp_path: Path) -> None:
    """A best model so far, an average, a file: none of them writes into the log, or keeps the optimizer."""
    model = model_of()
    with watched(model, log=tmp_path / "run.jsonl") as watch:
        copied = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(copied))
        x, said = torch.randn(4, 256), len(watch.recorder.samples)
        for other in (copied.eval(), loaded.eval()):
            assert other(x).shape == (4, 256)
        assert len(watch.recorder.samples) == said
        model.eval()(x)
        assert len(watch.recorder.samples) > said  # evaluation begins
    (hook,) = copied._forward_pre_hooks.values()
    assert b"memfit" not in pickle.dumps(hook) and hook(copied, (x,)) == (x,)


def test_the_optimizer_that_takes_the_place_of_the_first_is_counted(card: Card) -> None:
    model = model_of().cuda()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    first, foreign = weakref.ref(optimizer), torch.optim.SGD(model_of().cuda().parameters())
    with watched(model, optimizer=optimizer) as watch:
        for step in range(6):
            if step == 3:
                optimizer = torch.optim.SGD(model[0].parameters())
            model(torch.randn(4, 256, device="cuda")).mean().backward()
            optimizer.step()
            foreign.step()
            assert (first() is None) is (step >= 3)
    assert watch.done == 6


def test_a_second_optimizer_beside_the_first_is_not_counted(card: Card) -> None:
    model = model_of().cuda()
    one, other = torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[2].parameters())
    with watched(model, optimizer=one) as watch:
        for _ in range(4):
            model(torch.randn(4, 256, device="cuda")).mean().backward()
            other.step()
            other.step()
            one.step()
    assert watch.done == 4


@pytest.mark.parametrize(
    ("model", "optimizer"), [([nn.Linear(2, 2)], None), (None, [torch.optim.SGD([torch.zeros(1)])])]
)
def test_lists_are_refused_in_words(model: Any, optimizer: Any) -> None:
    with pytest.raises(BadInput, match="takes one") as refused:
        memfit.watch(model, optimizer, log=None, quiet=True)
    assert refused.value.hint


def test_the_error_that_a_run_ends_in_is_its_last_alarm(card: Card, tmp_path: Path) -> None:
    watch = memfit.watch(model_of(), log=tmp_path / "x.jsonl", quiet=True)
    with pytest.raises(torch.OutOfMemoryError), watch:
        torch.empty(card.gpu.total_bytes, dtype=torch.uint8, device="cuda")
    alarm = watch_log.loads((tmp_path / "x.jsonl").read_bytes()).alarms[-1]
    asked = pytest.approx(card.gpu.total_bytes, abs=GIB // 100)  # as it is printed
    assert (alarm.kind, alarm.bytes) == ("failed", asked) and "OutOfMemoryError" in alarm.text
    found = read_watch(watch_log.loads((tmp_path / "x.jsonl").read_bytes()))
    assert found.memory is not None and found.memory.asked == asked
    with pytest.raises(ValueError), memfit.watch(model_of(), log=tmp_path / "y.jsonl", quiet=True):
        raise ValueError("no tensor")
    (alarm,) = watch_log.loads((tmp_path / "y.jsonl").read_bytes()).alarms
    assert (alarm.kind, alarm.bytes, alarm.text) == ("failed", 0, "the run ended in ValueError: no tensor")


def test_tensors_are_counted_at_every_step_at_the_most(card: Card) -> None:
    with pytest.raises(BadInput, match="count_every must be at least 1, not 0"):
        memfit.watch(model_of(), count_every=0, log=None)


def test_an_unknown_phase_is_refused(card: Card) -> None:
    with (
        watched(model_of().cuda()) as watch,
        pytest.raises(ValueError, match="none of load"),
        watch.phase("lunch"),  # type: ignore[arg-type]
    ):
        pass


# --- the log and what was predicted ---------------------------------------------------------------------------------


def test_the_log_holds_the_run(card: Card, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.jsonl"
    watch = trained(watched(model_of().cuda(), log=path, name="mine.py"), 3)
    assert watch_log.loads(path.read_bytes()) == watch.recorder.watched()
    trained(watched(model_of().cuda(), log=path), 1)  # nothing is overwritten
    runs = list(watch_log.runs_of(path.read_bytes()))
    assert [run.header.name == "mine.py" for run in runs] == [True, False]


def test_ranks_have_logs_of_their_own(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    trained(watched(model_of().cuda(), log=tmp_path / "run.jsonl"), 1)
    assert [p.name for p in tmp_path.iterdir()] == ["run.rank3.jsonl"]


def predicted(reserved: int) -> Footprint:
    peak = PhasePeak("step", "backward", Levels(1, 1, reserved, reserved), ())
    return Footprint((peak, replace(peak, phase="first_step")), "formula")


def test_the_first_step_outside_the_band_is_reported_once(card: Card) -> None:
    watch = trained(watched(model_of().cuda(), predicted=predicted(60 * MIB)), 6)
    assert watch.recorder.alarms == []

    def grow(step: int) -> None:
        if step >= 3:
            torch.empty(100 * MIB, dtype=torch.int8, device="cuda")

    watch = trained(watched(model_of().cuda(), predicted=predicted(60 * MIB)), 6, grow)
    (alarm,) = watch.recorder.alarms
    assert (alarm.kind, alarm.step, alarm.phase, alarm.limit) == ("band", 4, "step", 63 * MIB)
    assert "left the predicted band" in alarm.text and "57.0 MiB to 63.0 MiB" in alarm.text


def test_nine_tenths_of_the_card_are_reported_once(card: Card) -> None:
    def fill(step: int) -> None:
        if step in (1, 2):
            torch.empty(21 * GIB, dtype=torch.int8, device="cuda")

    watch = trained(watched(model_of().cuda()), 4, fill)
    (alarm,) = watch.recorder.alarms
    assert (alarm.kind, alarm.step) == ("card", 2)
    assert re.match(r"9\d% of the card in use: 2\d\.\d GiB of 2\d\.\d GiB", alarm.text)


def test_a_prediction_can_be_any_run(tmp_path: Path) -> None:
    path = tmp_path / "first.jsonl"
    with memfit.virtual_gpu("l4"):
        trained(watched(model_of().cuda(), log=path), 3)
    with memfit.virtual_gpu("l4"):
        watch = trained(watched(model_of().cuda(), predicted=path), 3)
    assert watch.recorder.header.predicted is not None
    assert watch.recorder.alarms == []


# --- leaks ----------------------------------------------------------------------------------------------------------


class Metrics:
    def __init__(self) -> None:
        self.outputs: dict[str, list[Tensor]] = {"eval": []}

    def keep(self, out: Tensor) -> None:
        self.outputs["eval"].append(out)  # attribute


def summed(device: str) -> Watch:
    """A loss summed with its graph."""
    model = model_of().to(device)
    watch = watched(model, count_every=1)
    total: Any = 0
    with watch:
        for _ in range(STEPS):
            loss = model(torch.randn(128, 256, device=device)).mean()
            total = total + loss  # graph
            watch.optimizer.step()
    return watch


def hoarded(device: str) -> Watch:
    """Outputs kept in a list."""
    model = model_of().to(device)
    history: list[Tensor] = []
    watch = watched(model, count_every=1)
    with watch:
        for _ in range(STEPS):
            history.append(model(torch.randn(256, 256, device=device)))  # list
            history[-1].mean().backward()
            watch.optimizer.step()
    return watch


def cached(device: str) -> Watch:
    """A cache that grows from experiment to experiment, each of which is a step here."""
    with memfit.watch(log=None, quiet=True, count_every=1) as watch:
        for experiment in range(STEPS):
            model = model_of(128).to(device)
            CACHE[experiment] = model  # cache
            watch.step()
    return watch


def hoarded_later(device: str) -> Watch:
    """A dictionary that other lines store into too, under other keys and outside of loops; `out` is of the step."""
    model = model_of().to(device)
    kept: dict[Any, Any] = {}
    kept["first"] = [torch.zeros(3)]
    model[1].register_forward_hook(lambda *_: kept.setdefault("shapes", []).append(3))
    watch = watched(model, count_every=1)
    with watch:
        for step in range(STEPS):
            out = model(torch.randn(256, 256, device=device))
            out.mean().backward()
            watch.optimizer.step()
            kept[step] = [out.detach()]  # item
    return watch


CLASSICS = [(summed, "graph", "total"), (hoarded, "list", "history[...]"), (cached, "cache", "CACHE[...]"),
            (hoarded_later, "item", "kept[...]")]  # fmt: skip


def check(leak: Leak, marker: str, name: str) -> None:
    holder = leak.holders[0]
    assert holder.name == name
    assert holder.place.endswith(f"test_watch.py:{line_of(marker)}")
    assert holder.code.endswith(f"# {marker}")


@pytest.mark.parametrize(("program", "marker", "name"), CLASSICS, ids=[c[1] for c in CLASSICS])
def test_the_three_classics_on_a_card(card: Card, program: Callable[[str], Watch], marker: str, name: str) -> None:
    (leak,) = program("cuda").leaks
    check(leak, marker, name)
    assert 0.8 * leak.per_step < leak.holders[0].bytes < 1.2 * leak.per_step
    assert leak.until <= 20 and leak.bytes >= MIB


@pytest.mark.parametrize(("program", "marker", "name"), CLASSICS, ids=[c[1] for c in CLASSICS])
def test_the_three_classics_on_the_cpu(
    small_heap: None, program: Callable[[str], Watch], marker: str, name: str
) -> None:
    (leak,) = program("cpu").leaks
    check(leak, marker, name)
    assert 0.8 * leak.per_step < leak.holders[0].bytes < 1.2 * leak.per_step


def test_experiments_that_leave_memory_to_the_next(card: Card) -> None:
    def experiment(number: int) -> Watch:
        CACHE[number] = model = model_of().cuda()  # experiments
        return trained(watched(model), 2)

    CACHE["old"] = torch.nn.Linear(4096, 4096)  # larger than all of them, and no leak: it was there before
    found = [experiment(number).leaks for number in range(4)]
    assert [len(leaks) for leaks in found] == [
        0,
        0,
        1,
        0,
    ]  # one rise may be something that is shared; then it is reported once
    assert found[2][0].unit == "run"
    check(found[2][0], "experiments", "CACHE[...]")
    assert found[2][0].holders[0].bytes < 4 * 4096 * 4096


def test_what_an_optimizer_keeps_belongs_to_who_keeps_the_optimizer(card: Card) -> None:
    """Its states are keyed by parameters, so that these lead to it sooner than the states themselves."""

    def experiment(number: int) -> Watch:
        model = model_of().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        CACHE[number] = (model, optimizer)  # results
        return trained(watched(model, optimizer=optimizer), 2)

    (leak,) = [leak for number in range(3) for leak in experiment(number).leaks]
    check(leak, "results", "CACHE[...]")
    assert [(h.kind, h.count) for h in leak.holders] == [("container", 4 * 4)]  # a weight and its three states


def test_a_shared_model_is_no_leak_between_experiments(card: Card) -> None:
    model, seen = model_of().cuda(), []
    for _ in range(5):
        seen.append(trained(watched(model), 2).leaks)
    assert seen == [()] * 5


def test_other_holders_are_named_too(card: Card) -> None:
    metrics, model = Metrics(), model_of().cuda()
    watch = watched(model)
    trained(watch, STEPS, lambda step: metrics.keep(torch.ones(256, 1024, device="cuda")))
    check(watch.leaks[0], "attribute", "metrics.outputs['eval'][...]")

    @functools.cache
    def mask(length: int) -> Tensor:
        return torch.ones(length, 1024, device="cuda")

    watch = trained(watched(model_of().cuda()), STEPS, lambda step: mask(300 + step))
    holder = watch.leaks[0].holders[0]
    assert holder.name.endswith("mask()") and holder.code == "@functools.cache"


def test_a_leak_is_reported_once(card: Card) -> None:
    kept: list[Tensor] = []
    watch = trained(watched(model_of().cuda()), 90, lambda step: kept.append(torch.ones(256, 1024, device="cuda")))
    assert len(watch.leaks) == 1


def test_reference_cycles_are_named_as_such(card: Card) -> None:
    class Node:
        pass

    def cycle(step: int) -> None:
        node: Any = Node()
        node.itself, node.big = node, torch.ones(1 << 18, device="cuda")

    gc.disable()
    try:
        watch = trained(watched(model_of().cuda()), STEPS, cycle)
    finally:
        gc.enable()
    assert [h.kind for leak in watch.leaks for h in leak.holders] == ["cycle"]


# --- no false alarms ------------------------------------------------------------------------------------------------


def lengths(order: str) -> list[int]:
    draw = torch.randint(1, 2000, (80,), generator=torch.Generator().manual_seed(3)).tolist()
    return sorted(draw) if order == "ascending" else draw


@pytest.mark.parametrize("order", ["random", "ascending"])
def test_varying_lengths_are_no_leak(card: Card, order: str) -> None:
    """Outputs of the last step stay alive: with ascending lengths that grows steadily."""
    model = model_of().cuda()
    with watched(model) as watch:
        for rows in lengths(order):
            out = model(torch.randn(rows, 256, device="cuda"))
            out.mean().backward()
            watch.optimizer.step()
    assert watch.leaks == ()


def test_a_window_of_outputs_is_no_leak(card: Card) -> None:
    recent: list[Tensor] = []

    def window(step: int) -> None:
        recent.append(torch.ones(256, 1024, device="cuda"))
        del recent[:-10]

    assert trained(watched(model_of().cuda()), 60, window).leaks == ()


@pytest.mark.parametrize("most", [50, 1000])
def test_what_has_stopped_growing_is_taken_back(card: Card, most: int) -> None:
    cache: dict[int, Tensor] = {}

    def each(step: int) -> None:
        cache.setdefault(step % most, torch.empty(MIB, dtype=torch.uint8, device="cuda"))

    watch = trained(watched(model_of().cuda(), count_every=1), 140, each)
    assert [leak.holders[0].name for leak in watch.leaks] == ["cache[...]"]  # it may have been one
    said = [alarm.text for alarm in watch.recorder.alarms if alarm.kind == "unsure"]
    assert [text.startswith("what grew over steps") for text in said] == [True] * (most == 50)


def test_metrics_as_numbers_are_no_leak(card: Card) -> None:
    numbers: list[Tensor] = []
    watch = trained(watched(model_of().cuda()), 60, lambda step: numbers.append(torch.ones(1, device="cuda")))
    assert watch.leaks == ()


def test_missing_libraries_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module, package in (
        ("tensorboard", "torch.utils.tensorboard", "tensorboard"),
        ("wandb", "wandb", "wandb"),
        ("prometheus", "prometheus_client", "prometheus-client"),
    ):
        monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
        with pytest.raises(BadInput) as caught:
            memfit.watch(log=None, quiet=True, to=[name])
        assert caught.value.hint == f"pip install {package}"
    with pytest.raises(BadInput, match="unknown sink 'tensorbord'") as caught:
        memfit.watch(log=None, quiet=True, to=["tensorbord"])
    assert "tensorboard" in caught.value.hint


def test_an_error_that_nobody_catches_ends_the_watch(tmp_path: Path) -> None:
    log, program = tmp_path / "memory.jsonl", tmp_path / "train.py"
    program.write_text(
        "import memfit, torch\nnet = torch.nn.Linear(2, 2)\noptimizer = torch.optim.SGD(net.parameters(), 1)\n"
        f"watched = memfit.watch(net, optimizer, log={str(log)!r})\n"
        "net(torch.ones(1, 2)).sum().backward()\noptimizer.step()\nraise RuntimeError('boom')\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True)
    (alarm,) = [row for row in map(json.loads, log.read_text().splitlines()) if row["type"] == "alarm"]
    assert (alarm["kind"], alarm["text"]) == ("failed", "the run ended in RuntimeError: boom")
    assert done.returncode == 1 and done.stderr.rstrip().endswith("RuntimeError: boom")
