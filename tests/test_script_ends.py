"""When a traced script has trained enough, and what its answer says of what was not seen."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from memfit.allocator.replay import Timeline, replay  # noqa: E402
from memfit.nouns.tape import Alloc, Tape  # noqa: E402
from memfit.virtual.libraries.megatron_core import CHANGES, EVALUATIONS, read_batches_of  # noqa: E402
from memfit.virtual.ranks.traced import ScriptOutcome  # noqa: E402
from memfit.virtual.scripts.script import trace_script  # noqa: E402
from memfit.virtual.scripts.stages import compiled, may_train  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # what scripts and their libraries are warned of is their affair
MIB = 1 << 20
HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
def loader(count, batch): return DataLoader(TensorDataset(torch.zeros(count, 256)), batch)
def step(model, optimizer, x):
    model(x.cuda()).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
"""


def traced(folder: Path, text: str, **words: Any) -> tuple[Tape, ScriptOutcome, Timeline]:
    path = folder / "train.py"
    path.write_text(HEAD + text)
    tape, outcome = trace_script(path, [], "rtx-4090", **{"steps": 2, **words})
    return tape, outcome, replay(tape.events)


def states(tape: Tape) -> int:
    return sum(e.size for e in tape.events if isinstance(e, Alloc) and e.role == "optimizer_states" and e.size > MIB)


# --- every optimizer gets its steps ---

CRITIC = """
critic, made = nn.Linear(256, 1024).cuda(), nn.Linear(256, 4096).cuda()
first, second = torch.optim.Adam(critic.parameters()), torch.optim.Adam(made.parameters())
for i, (x,) in enumerate(loader(64 * 100, 64)):
    step(critic, first, x)
    if (i + 1) % 5 == 0: step(made, second, x)
"""


def test_a_generator_is_trained_however_seldom(tmp_path: Path) -> None:
    tape, outcome, _ = traced(tmp_path, CRITIC)
    weights = {256 * 1024 * 4: 2, 256 * 4096 * 4: 2}  # bytes of a state -> how many there are
    made = [e.size for e in tape.events if isinstance(e, Alloc) and e.role == "optimizer_states" and e.size in weights]
    assert {size: made.count(size) for size in weights} == weights
    assert outcome.steps == 12  # ten of the critic, two of the generator
    assert not any("made no step" in text for text in outcome.assumed)


def test_an_optimizer_that_never_steps_is_named(tmp_path: Path) -> None:
    _, outcome, _ = traced(tmp_path, CRITIC.replace("% 5 == 0", "% 99 == 0"))
    assert "Adam of 1,052,672 parameters made no step: its states are not counted" in outcome.assumed
    assert outcome.steps < 45


def test_an_optimizer_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    text = """
model = nn.Linear(256, 256).cuda()
for way in (torch.optim.SGD, torch.optim.Adam): optimizer = way(model.parameters(), lr=0.1)
for _ in range(100): step(model, optimizer, torch.zeros(8, 256))
"""
    _, outcome, _ = traced(tmp_path, text)
    assert outcome.steps == 2 and not any("made no step" in text for text in outcome.assumed)


@pytest.mark.parametrize("same", [True, False], ids=["same optimizer", "another"])
def test_a_second_stage_trains_its_own_steps(tmp_path: Path, same: bool) -> None:
    text = f"""
model = nn.Sequential(nn.Linear(256, 4096), nn.Linear(4096, 256)).cuda()
optimizer = torch.optim.Adam(model.parameters())
for batch in (16, 4096):
    {"" if same else "optimizer = torch.optim.Adam(model.parameters())"}
    made = loader(40960, batch)
    for epoch in range(3):
        for (x,) in made: step(model, optimizer, x)
"""
    tape, outcome, timeline = traced(tmp_path, text)
    assert outcome.ending == "finished"
    assert sum(isinstance(e, Alloc) and e.size == 4096 * 4096 * 4 and "mm" in e.label for e in tape.events) >= 2
    assert timeline.by_phase()["step"].requested > 2 * 4096 * 4096 * 4


# loops that cannot do without a batch; each script makes two steps of its four epochs, and is to come to its end
NEED_A_BATCH = {
    "what a loop binds is returned": """
def epoch():
    for (x,) in data: loss = step(model, optimizer, x)
    return loss
for _ in range(4): epoch()
""",
    "a generator that reads ahead": """
def ahead(made):
    first = True
    for (following,) in made:
        if not first: yield x
        first, x = False, following
    yield x
for _ in range(4):
    for x in ahead(data): step(model, optimizer, x)
""",
    "an iterator around a generator": """
def moved():
    for (x,) in data: yield x
class Cycled:
    made = None
    def __next__(self):
        self.made = self.made or moved()
        try: return next(self.made)
        except StopIteration: self.made = moved(); return next(self.made)
def fit(cycled):
    for _ in range(8): step(model, optimizer, next(cycled))
fit(Cycled())
""",
    "an iterator that starts again": """
class Cycled:
    made = None
    def __next__(self):
        self.made = self.made or iter(data)
        try: return next(self.made)
        except StopIteration: self.made = iter(data)
        return next(self.made)
def fit(cycled):
    for _ in range(8): step(model, optimizer, next(cycled)[0])
try: fit(Cycled())
except Exception: print("cleaned up"); raise
""",
}


@pytest.mark.parametrize("way", NEED_A_BATCH)
def test_a_loop_that_cannot_do_without_a_batch_gets_one_more(
    tmp_path: Path, way: str, capfd: pytest.CaptureFixture[str]
) -> None:
    text = MODEL + "data = loader(16, 8)\n" + NEED_A_BATCH[way] + "print('all was', 'seen')\n"
    _, outcome, _ = traced(tmp_path, text)
    assert outcome.ending == "finished" and 2 <= outcome.steps <= 4
    assert "all was seen" in capfd.readouterr().out


MODEL = "model = nn.Linear(256, 256).cuda()\noptimizer = torch.optim.Adam(model.parameters())\n"
ENDLESS = {  # what a script may do for ever -> the steps of it that are seen
    "one batch": (MODEL + "(x,) = next(iter(loader(64, 8)))\nwhile True: step(model, optimizer, x)", 3),
    "one batch of a living iterator": (MODEL + "it = iter(loader(64, 8)); (x,) = next(it)\n"
    "while True: step(model, optimizer, x)", 4),
    "an optimizer for every step": (MODEL + "sgd = torch.optim.SGD\n"
    "while True: step(model, sgd(model.parameters()), torch.zeros(8, 256))", 64),
    "a loader for every epoch": (MODEL + "while True:\n    for (x,) in loader(64, 8): step(model, optimizer, x)", 8),
    "stages": (MODEL + "import itertools\nfor n in itertools.count(1):\n"
    "    for (x,) in loader(8 * n, 8): step(model, optimizer, x)", 110),
    "one optimizer per weight": ("""
model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(20)]).cuda()
optimizers = {p: torch.optim.Adam([p]) for p in model.parameters()}
def hook(p): optimizers[p].step(); optimizers[p].zero_grad()
for p in model.parameters(): p.register_post_accumulate_grad_hook(hook)
while True: model(torch.zeros(8, 256, device="cuda")).square().mean().backward()""", 120),
}  # fmt: skip


@pytest.mark.parametrize("way", ENDLESS)
def test_every_script_ends(tmp_path: Path, way: str) -> None:
    text, most = ENDLESS[way]
    _, outcome, _ = traced(tmp_path, text)
    assert outcome.ending == "enough" and 2 <= outcome.steps <= most


def test_models_of_one_fold_are_gone_in_the_next(tmp_path: Path) -> None:
    text = """
def fold():
    model = nn.Linear(256, 1 << 16).cuda(); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in loader(64, 8): step(model, optimizer, x)
for _ in range(5): fold()
"""
    _, outcome, timeline = traced(tmp_path, text)
    one = 256 * (1 << 16) * 4
    assert outcome.steps == 10 and timeline.peak.requested < 3.5 * one


def test_an_optimizer_of_another_ones_weights_is_not_waited_for(tmp_path: Path) -> None:
    text = (
        MODEL + "outer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(99): step(model, optimizer, torch.zeros(8, 256))"
    )
    _, outcome, _ = traced(tmp_path, text)
    assert outcome.steps == 2 and not any("made no step" in text for text in outcome.assumed)


def test_what_fails_after_the_steps_is_no_error(tmp_path: Path) -> None:
    text = (
        MODEL + "idle = torch.optim.SGD(nn.Linear(8, 8).cuda().parameters())\n"
        "for _ in range(4): step(model, optimizer, torch.zeros(8, 256))\nraise OSError"
    )
    _, outcome, _ = traced(tmp_path, text)
    assert (outcome.ending, outcome.steps) == ("enough", 4)


def test_a_search_that_converges_on_values_nobody_has_goes_on(tmp_path: Path) -> None:
    text = (
        MODEL
        + """
for _ in range(10):
    old = model.weight.detach().clone(); step(model, optimizer, torch.zeros(8, 256))
    if ((model.weight - old).abs() < 1e-6).all() or torch.allclose(model.weight, old): break
"""
    )
    assert traced(tmp_path, text)[1].steps == 2


def test_lbfgs_that_returns_at_once_is_left_alone(tmp_path: Path) -> None:
    text = (
        MODEL
        + """
for _ in range(3): step(model, optimizer, torch.zeros(8, 256))
scale = nn.Parameter(torch.ones(1)); search = torch.optim.LBFGS([scale])
def closure():
    search.zero_grad(); loss = (scale * 0).sum(); loss.backward(); return loss
search.step(closure); torch.save(scale, "scale.pt")
"""
    )
    assert traced(tmp_path, text)[1].ending in ("enough", "finished")


def test_the_history_of_lbfgs_is_full(tmp_path: Path) -> None:
    text = """
model = nn.Linear(256, 4096, bias=False).cuda()
optimizer = torch.optim.LBFGS(model.parameters(), history_size=10, line_search_fn="strong_wolfe")
def closure():
    optimizer.zero_grad(); loss = model(torch.zeros(8, 256, device="cuda")).square().mean()
    loss.backward(); return loss
for _ in range(5): optimizer.step(closure)
"""
    _, outcome, timeline = traced(tmp_path, text)
    assert timeline.by_phase()["step"].requested > 2 * 10 * 256 * 4096 * 4
    assert "LBFGS: its history taken as full" in outcome.assumed


# --- values nobody has keep no script from training ---


@pytest.mark.parametrize(
    "check",
    [
        "torch.isfinite(loss)", "not torch.isnan(loss)", "not torch.isinf(loss).any()", "torch.isfinite(big).all()",
        "(big == big).all()", "torch.allclose(big, big)", "not (torch.isnan(big) | torch.isinf(big)).any()",
    ],
)  # fmt: skip
def test_losses_are_finite(tmp_path: Path, check: str) -> None:
    text = f"""
model = nn.Linear(256, 256).cuda()
optimizer = torch.optim.Adam(model.parameters())
big = torch.randn(3000, 3000, device="cuda")
for _ in range(5):
    loss = model(torch.zeros(8, 256, device="cuda")).square().mean()
    if not ({check}): continue
    loss.backward(); optimizer.step()
"""
    assert traced(tmp_path, text)[1].steps == 2


def test_distributions_accept_what_nobody_knows(tmp_path: Path) -> None:
    text = """
from torch.distributions import Beta, Categorical, Dirichlet, Normal
x = torch.randn(64, 8, device="cuda")
for d in (Normal(x, x.exp()), Categorical(logits=x), Dirichlet(x.exp()), Beta(x.exp(), x.exp())):
    drawn = d.sample()
    assert d.log_prob(drawn).device.type == "cuda"
kept = torch.zeros(4096, device="cuda")
kept[:64] = Categorical(logits=x).sample()
Categorical(logits=torch.randn(4096, 8, device="cuda")).log_prob(kept.long())
"""
    assert traced(tmp_path, text)[1].ending == "finished"


def test_gradients_of_torch_func_are_steps(tmp_path: Path) -> None:
    text = """
from torch.func import functional_call, grad, vmap
model = nn.Linear(256, 256).cuda()
optimizer = torch.optim.Adam(model.parameters())
held = {name: p.detach() for name, p in model.named_parameters()}
def loss(p, x): return functional_call(model, p, (x[None],)).square().mean()
for _ in range(100):
    made = vmap(grad(loss), (None, 0))(held, torch.randn(8, 256, device="cuda"))
    for name, p in model.named_parameters(): p.grad = made[name].mean(0)
    optimizer.step()
"""
    tape, outcome, _ = traced(tmp_path, text)
    assert outcome.steps == 2
    assert states(tape) == 0 < sum(isinstance(e, Alloc) and e.role == "optimizer_states" for e in tape.events)


# --- what was not seen is said ---

SELDOM = """
model = nn.Linear(256, 1024).cuda()
optimizer = torch.optim.Adam(model.parameters())
for i in range(100):
    step(model, optimizer, torch.zeros(8, 256))
    if (i + 1) % 4 == 0:
        model.eval()
        with torch.no_grad(): model(torch.zeros(65536, 256, device="cuda"))
        model.train(); torch.save(model.state_dict(), "m.pt")
"""


def test_evaluation_that_was_not_reached_is_said(tmp_path: Path) -> None:
    _, outcome, timeline = traced(tmp_path, SELDOM)
    for what in (
        "evaluation was seen in these steps, as line 14",
        "saving of a checkpoint was seen in these steps, as line 16",
    ):
        assert f"no {what} may bring; --steps goes further" in outcome.assumed
    assert set(timeline.by_phase()) == {"load", "first_step", "step"}


def test_what_follows_the_last_step_is_reached(tmp_path: Path) -> None:
    _, outcome, timeline = traced(tmp_path, SELDOM, steps=4)
    assert (outcome.ending, outcome.steps) == ("enough", 4)
    assert timeline.by_phase()["eval"].requested > 65536 * 1024 * 4
    assert "save" in timeline.by_phase() and not any("may bring" in text for text in outcome.assumed)


COUNTS = """
def fit(model, optimizer, batches, step):
    count = 0
    while count < 1000:
        step(model, optimizer, next(batches)[0])
        count += 1
"""


def test_a_loop_of_a_framework_that_is_not_installed_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone" / "steps_of_a_framework.py").write_text(COUNTS)
    monkeypatch.syspath_prepend(str(tmp_path / "clone"))
    (tmp_path / "own").mkdir()
    _, outcome, timeline = traced(tmp_path / "own", """
from steps_of_a_framework import fit
model = nn.Linear(256, 256).cuda()
fit(model, torch.optim.SGD(model.parameters(), 0.1), iter(loader(8000, 8)), step)
torch.save(model.state_dict(), "model.pt")
""")  # fmt: skip
    assert outcome.ending == "finished" and outcome.steps < 5
    assert "save" in timeline.by_phase()


# --- the command's verdict ---


def command(ran: Any, folder: Path, text: str, *flags: str) -> tuple[int, dict[str, Any], str]:
    path = folder / "train.py"
    path.write_text(HEAD + text)
    code, out, err = ran("trace", path, "--json", *flags)
    return code, json.loads(out), err


RESTARTED = """
model = nn.Linear(256, 1024)
torch.save(model.state_dict(), "m.pt"); model.load_state_dict(torch.load("m.pt")); model.cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(4): step(model, optimizer, torch.zeros(1 << 18, 256))
"""


def test_a_loaded_checkpoint_cuts_nothing_off(ran: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, found, _ = command(ran, tmp_path, RESTARTED, "--gpu", "rtx-4090")
    assert (code, found["verdict"], found["ending"], found["steps"]) == (0, "fits", "enough", 3)
    assert found["peak"]["requested"] > 2 * (1 << 18) * 1024 * 4
    code, found, err = command(ran, tmp_path, RESTARTED, "--gpu-memory", "3GiB")
    assert (code, found["verdict"], found["died"], found["ending"]) == (3, "misfit", True, "oom")
    assert 'Traceback (most recent call last):\n  File "' in err and "torch.OutOfMemoryError: CUDA out of memory" in err
    assert "memfit" not in err.partition("Traceback")[2].partition("OutOfMemoryError")[0]
    assert found["notes"][0].startswith("out of memory at train.py:")


def test_a_run_that_died_just_below_the_limit_does_not_fit(ran: Any, tmp_path: Path) -> None:
    text = "held = [torch.empty(1 << 20, device='cuda') for _ in range(1000)]"
    code, found, _ = command(ran, tmp_path, text, "--gpu-memory", "1GiB")
    assert (code, found["verdict"], found["fits"]) == (3, "misfit", False)


def test_a_script_that_makes_itself_small_enough_says_what_it_settled_for(ran: Any, tmp_path: Path) -> None:
    text = """
model, batch = nn.Linear(256, 8192).cuda(), 1 << 20
optimizer = torch.optim.Adam(model.parameters())
for _ in range(10):
    try: step(model, optimizer, torch.zeros(batch, 256))
    except torch.OutOfMemoryError: batch //= 2; optimizer.zero_grad()
"""
    code, found, _ = command(ran, tmp_path, text, "--gpu", "rtx-4090")
    assert (code, found["verdict"], found["oom"]) == (4, "tight", None)
    settled = next(text for text in found["notes"] if "out-of-memory there were at most" in text)
    most = float(settled.partition("at most ")[2].split()[0])  # GiB
    assert 2 * 8192 * 4 * (1 << 17) / (1 << 30) <= most < 23
    assert found["phases"][-1]["phase"] == "step"


def test_the_worst_instant_is_where_most_is_allocated(ran: Any, tmp_path: Path) -> None:
    text = """
model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(4): step(model, optimizer, torch.zeros(1 << 18, 256))
"""
    _, found, _ = command(ran, tmp_path, text, "--gpu", "rtx-4090")
    worst = {phase["phase"]: phase["instant"] for phase in found["phases"]}
    assert worst["first_step"] in ("forward", "backward") and worst["step"] in ("forward", "backward")


@pytest.mark.parametrize("flags", [(), ("--num-gpus", "1")], ids=["alone", "launched"])
def test_a_script_for_torchrun_on_one_card(ran: Any, tmp_path: Path, flags: tuple[str, ...]) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        HEAD + "import os; rank = int(os.environ['LOCAL_RANK']); torch.distributed.init_process_group('nccl')"
    )
    code, _, err = ran("trace", path, "--gpu", "l4", *flags)
    assert code == (6 if flags else 2)  # it trains nothing
    assert ("KeyError: 'LOCAL_RANK'" in err and "--num-gpus 1" in err) != bool(flags)


def test_what_a_trace_leaves_behind_is_explained_alike(ran: Any, tmp_path: Path) -> None:
    text = """
class Model(nn.Module):
    def __init__(self):
        super().__init__(); self.embed, self.lm_head = nn.Embedding(50000, 512), nn.Linear(512, 50000)
    def forward(self, x):
        logits = self.lm_head(self.embed(x))
        return nn.functional.cross_entropy(logits.view(-1, 50000).float(), x.view(-1))
model = Model().cuda().bfloat16()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    model(torch.zeros(16, 2048, dtype=torch.long, device="cuda")).backward(); optimizer.step(); optimizer.zero_grad()
"""
    path = tmp_path / "train.py"
    path.write_text(HEAD + text)
    kept = {"--save-tape": tmp_path / "run.tape.gz", "--snapshot": tmp_path / "run.pickle"}
    code, _, err = ran("trace", path, "--gpu", "a100-80gb", *(word for pair in kept.items() for word in pair))
    assert code == 0, err
    code, _, err = ran("trace", path, "--gpu", "t4")
    log = tmp_path / "run.log"
    log.write_text(err)
    assert code == 3
    for left in (*kept.values(), log):
        assert json.loads(ran("explain", left, "--json")[1])["findings"][0]["cause"] == "logits", left


@pytest.mark.parametrize(("body", "trains"), [
    ("    for x in xs:\n        fit(x)", True),  # a function of the file that trains
    ("    while xs:\n        if xs.pop():\n            xs.step()\n            break", True),
    ("    for x in xs:\n        print(x.step)\n    fit(xs)", False),  # named, not called; called after the loop
    ("    return [fit(x) for x in xs]", False),
])  # fmt: skip
def test_files_whose_loops_train_are_told_from_others(body: str, trains: bool) -> None:
    source = f"def fit(x):\n    x.backward()\nclass A:\n  def run(self, xs):\n{body}\n"
    code = compile(source, "a.py", "exec")
    assert (compiled(source, "a.py", code) is not code) == trains and may_train(code) >= trains


@pytest.mark.parametrize(("settings", "given", "wanted"), [
    (50, {}, EVALUATIONS), (1, {}, 1), (50, {"eval_iters": 7}, EVALUATIONS), ([3, 4], {}, [3, 4]),
])  # fmt: skip
def test_megatron_evaluates_twice(settings: Any, given: dict[str, int], wanted: Any) -> None:
    args, module = SimpleNamespace(eval_iters=settings), ModuleType("megatron.training.training")
    vars(module).update(get_args=lambda: args, evaluate=lambda eval_iters=None: eval_iters or args.eval_iters)
    with CHANGES[module.__name__](module):
        assert module.evaluate(**given) == wanted
    assert args.eval_iters == settings


@pytest.mark.parametrize(("args", "wanted"), [
    (["--tensor-model-parallel-size", "4", "--bf16"], 4), (["--tensor-model-parallel-size=2"], 6),
    (["--bf16"], 7), (["--tensor-model-parallel-size"], 7),
])  # fmt: skip
def test_the_first_rank_of_a_tensor_group_reads_the_batches(args: list[str], wanted: int) -> None:
    assert read_batches_of(7, args) == wanted


def test_a_function_may_keep_a_name_of_its_own(tmp_path: Path) -> None:
    text = """
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.name = "doubled"
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        return grad * 2
model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    Doubled.apply(model(torch.ones(4, 8, device="cuda"))).sum().backward()
    optimizer.step()
"""
    tape, outcome, _ = traced(tmp_path, text)
    assert outcome.steps == 2
    assert any(isinstance(e, Alloc) and e.label.startswith("backward of Doubled") for e in tape.events)
