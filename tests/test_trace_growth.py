"""What keeps growing from step to step of a traced script is told with the line that keeps it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from memfit import cli  # noqa: E402
from memfit.nouns.sample import LeakHolder  # noqa: E402
from memfit.nouns.tape import Alloc  # noqa: E402
from memfit.report.watching import holder_words  # noqa: E402
from memfit.virtual.ranks.traced import ScriptOutcome  # noqa: E402
from memfit.virtual.scripts.growth import LONGER  # noqa: E402
from memfit.virtual.scripts.script import trace_script  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

BEFORE = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept, cache = [], {}
def other(x, state):
    state = state + model(x)
    return state.square(), state
class Tracker:
    def __init__(self):
        self.seen = []
    def hook(self, module, inputs, output):
        self.seen.append(output.detach())
"""
STEP = """
for step in range(12):
    x = torch.randn(64, 256, device="cuda")
    out = model(x)
    loss = out.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
OUT = 64 * 256 * 4  # bytes of the model's output
# what is done before and in each step -> bytes a step, the kind of what keeps them, its line
LEAKS = {
    "losses with their graphs": ("", "    kept.append(loss)  # here", None, "container"),
    "losses that no backward followed": ("", "    kept.append(model(x).square().mean())  # here", None, "graph"),
    "outputs in a list": ("", "    kept.append(out.detach())  # here", OUT, "container"),
    "outputs in a dictionary": ("", "    cache[step] = out  # here", OUT, "container"),
    "a state that is carried on": (
        "state = torch.zeros(64, 256, device='cuda')", "    out, state = other(x, state)  # here\n"
        "    out.sum().backward(retain_graph=True)", None, "graph",
    ),
    "activations of a hook": (
        "tracker = Tracker()\nmodel[0].register_forward_hook(tracker.hook)", "", 64 * 512 * 4, "container",
    ),
    "a cache that each step extends": (
        "cache['k'] = torch.zeros(0, 256, device='cuda')",
        "    cache['k'] = torch.cat([cache['k'], out.detach()])  # here", OUT, "container",
    ),
    "states with their graphs": (
        "class Slow(torch.optim.Optimizer):\n    def step(self):\n        for p in self.param_groups[0]['params']:\n"
        "            mine = self.state[p]\n            mine['mean'] = 0.9 * mine.get('mean', 0) + p.grad\n"
        "slow = Slow(model.parameters(), {})  # here",
        "    model(x).square().mean().backward(create_graph=True)\n    slow.step(); slow.zero_grad()", None, "graph",
    ),
}  # fmt: skip
HARMLESS = {
    "nothing": "",
    "the last output": "    last = out.detach()",
    "a cache that fills once": "    cache.setdefault(min(step, 1), out.detach())",
    "numbers": "    kept.append(loss.item())",
    "scalars without graphs": "    kept.append(loss.detach())",
    "the last three": "    kept = [*kept, out.detach()][-3:]",
    "a longer batch each time": "    later = torch.randn(64 * step, 256, device='cuda')",
    "states that come late": "    model[0].requires_grad_(step > 0)",
}
# what keeps at most so many outputs -> the rest that a run of 5 steps lacks; None where the script does not say it
WINDOWS = {
    "a deque with a length": ("recent = deque(maxlen=32)", "    recent.append(out.detach())", 32),
    "a deque of losses with their graphs": ("recent = deque(maxlen=32)", "    recent.append(model(x).square())", 32),
    "a deque of pairs in an object": (
        "class Meter:\n    def __init__(self):\n        self.values = deque(maxlen=32)\nmeter = Meter()",
        "    meter.values.append((step, out.detach()))", 32,
    ),
    "a cache with a size": (
        "@lru_cache(maxsize=32)\ndef outputs(step):\n    return torch.randn(64, 256, device='cuda')",
        "    outputs(step)", 32,
    ),
    "a ring of places": ("ring = [None] * 32", "    ring[step % len(ring)] = out.detach()", 32),
    "a dictionary by a remainder": ("", "    cache[step % 32] = out.detach()", 32),
    "a list that drops its first": (
        "SIZE = 32", "    kept.append(out.detach())\n    if len(kept) > SIZE:\n        kept.pop(0)", 32,
    ),
    "a list that is cut": ("", "    kept.append(out.detach())\n    kept = kept[-32:]", 32),
    "a list that is emptied sometimes": (
        "", "    kept.append(out.detach())\n    if step % 20 == 19:\n        kept.clear()", None,
    ),
}  # fmt: skip
ENDLESS = {
    "a deque without a length": ("recent = deque()", "    recent.append(out.detach())  # here"),
    "a cache without a size": (
        "@lru_cache(maxsize=None)\ndef outputs(step):  # here\n    return torch.randn(64, 256, device='cuda')",
        "    outputs(step)",
    ),
    "a deque and a list": (
        "recent = deque(maxlen=32)", "    recent.append(out.detach())\n    kept.append(recent[-1])  # here",
    ),
    "a deque longer than the card": ("recent = deque(maxlen=10**9)", "    recent.append(out.detach())  # here"),
}  # fmt: skip
IMPORTS = "from collections import deque\nfrom functools import lru_cache\n"


def traced(folder: Path, before: str, after: str) -> tuple[ScriptOutcome, int]:
    text = BEFORE + before + STEP + after + "\n"
    (folder / "train.py").write_text(text)
    lines = text.splitlines()
    sign = "# here" if "# here" in text else "self.seen.append"
    here = next(n for n, line in enumerate(lines, 1) if sign in line)
    return trace_script(folder / "train.py", (), "l4", steps=2)[1], here


@pytest.mark.parametrize("name", LEAKS)
def test_leaks_are_found_with_the_line_that_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before, after, size, kind = LEAKS[name]
    outcome, here = traced(tmp_path, before, after)
    (leak,) = outcome.leaks
    assert outcome.steps == (2 + LONGER) * (2 if "slow" in before else 1)  # of every optimizer
    assert [holder.place for holder in leak.holders][:1] == [f"train.py:{here}"]
    assert leak.holders[0].kind == kind
    assert size is None or leak.per_step == size


def test_advice_fits_what_keeps_a_graph() -> None:
    for name, code, advice in (
        ("h[...]", "y, h = rnn(x, h)", "detach it"),
        ("total", "total = total + loss", "loss.item()"),
        ("total", "total += criterion(total, y)", "loss.item()"),
    ):
        assert advice in holder_words(LeakHolder("graph", name, "train.py:7", code, 3, 0))


@pytest.mark.parametrize("name", HARMLESS)
def test_what_stays_without_growing_is_no_leak(tmp_path: Path, name: str) -> None:
    assert traced(tmp_path, "", HARMLESS[name])[0].leaks == ()


@pytest.mark.parametrize("name", WINDOWS)
def test_a_container_with_a_bound_is_no_leak_and_taken_as_full(tmp_path: Path, name: str) -> None:
    before, after, most = WINDOWS[name]
    (tmp_path / "train.py").write_text(IMPORTS + BEFORE + before + STEP + after + "\n")
    tape, outcome = trace_script(tmp_path / "train.py", (), "l4", steps=2)
    assert outcome.leaks == ()
    filled = sum(e.size for e in tape.events if isinstance(e, Alloc) and "taken as full" in e.label)
    item = OUT if "graphs" not in name else 3 * OUT + 64 * 512 * 4  # input, outputs of two layers, result
    lacking = 0 if most is None else (most - 1 - LONGER) * item  # the last step's is stored after the step
    assert filled == pytest.approx(lacking, rel=0.15 if "graphs" in name else 0)
    assert any("taken as full" in text if most else "takes from it" in text for text in outcome.assumed)
    assert outcome.steps == 2 + LONGER + (most is not None)


@pytest.mark.parametrize("name", ENDLESS)
def test_a_container_without_a_bound_is_a_leak(tmp_path: Path, name: str) -> None:
    before, after = ENDLESS[name]
    (leak,) = traced(tmp_path, IMPORTS + before, after)[0].leaks
    assert leak.per_step == OUT


@pytest.mark.parametrize("cards", [["l4"], ["2xl4", "--ranks", "all"]], ids=["here", "on one of two ranks"])
def test_a_leak_is_in_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], cards: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    step = "    if os.environ.get('RANK', '1') == '1':\n        kept.append(out)\n    print(f'<{step}>')\n"
    (tmp_path / "train.py").write_text("import os" + BEFORE + STEP + step)
    assert cli.main(["trace", "train.py", "--json", "--gpu", *cards]) == 0
    said = capfd.readouterr()
    document = json.loads(said.out)
    (leak,) = document["leaks"]
    assert leak["per_step"] == OUT and document["steps"] == 3 + LONGER
    assert "<4>" in said.err, "rank 0, whose output is shown, makes the further steps too"
    assert any(leak["holders"][0]["place"] in note for note in document["notes"])
