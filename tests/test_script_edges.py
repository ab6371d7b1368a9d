"""Scripts that end in their own ways, and what they do to their process: no verdict is given for what was not seen."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from memfit import cli  # noqa: E402
from memfit.errors import BadInput  # noqa: E402
from memfit.nouns.tape import Alloc, Tape  # noqa: E402
from memfit.virtual.device.graphs import KEPT  # noqa: E402
from memfit.virtual.libraries import flash_attn  # noqa: E402
from memfit.virtual.ranks.traced import ScriptOutcome  # noqa: E402
from memfit.virtual.scripts import loaders  # noqa: E402
from memfit.virtual.scripts.script import trace_script  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
MIB = 1 << 20
TRAINS = """
import torch
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.AdamW(model.parameters())
def train(count=3):
    for _ in range(count):
        model(torch.randn(64, 512, device="cuda")).sum().backward(); optimizer.step(); optimizer.zero_grad()
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


def traced(folder: Path, text: str) -> tuple[Tape, ScriptOutcome]:
    return trace_script(written(folder, text), [], "l4", steps=2)


# --- ends ---


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import sys, torch\nsys.exit(0)\n", "exited at train.py:2"),
        ("import torch\n", "nothing was allocated"),
        (TRAINS.replace(".cuda()", "").replace(', device="cuda"', "") + "train()\n", "on the CPU"),
        ("import torch\ntorch.ones(9).cuda()\n" + TRAINS.replace(".cuda()", "").replace(', device="cuda"', "")
         + "train()\n", "on the CPU"),
        (TRAINS + "exit()\n", "train.py:8 before its first training step"),
        (TRAINS, "its optimizer made no step"),
    ],
)  # fmt: skip
def test_a_run_that_did_not_train_on_the_card_has_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    assert cli.main(["trace", str(written(tmp_path, text)), "--gpu", "l4"]) == 6
    out, err = capsys.readouterr()
    assert out == "" and said in err and "FITS" not in err


@pytest.mark.parametrize(
    "end", ["", "import os; os._exit(0)\n", "raise SystemExit\n", "import sys; sys.exit(1)\n", "1 / 0\n"]
)
def test_a_run_that_trained_has_a_verdict_however_it_ends(tmp_path: Path, end: str) -> None:
    _, outcome = traced(tmp_path, TRAINS + "train(2)\n" + end)
    assert outcome.untrained == "" and outcome.steps == 2
    failed = end in ("import sys; sys.exit(1)\n", "1 / 0\n")
    assert any("after its steps" in text for text in outcome.assumed) == failed


USAGE = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.parse_args()
"""
CAUGHT = """
import sys, torch
try: {}
except Exception as error:
    print(error)
    sys.exit(1)
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (USAGE, "arguments are required: --data"),
        (CAUGHT.format("open('nowhere.json')"), "FileNotFoundError"),
        ("import os\nos._exit(7)\n", "exit code 7 (after 0 optimizer steps) at train.py:2"),
        ("import torch\ntorch.nn.Linear(8, 8)(torch.ones(4, 9))\n", "in torch/nn/modules/linear.py:"),
        ("import torch\ntorch.randn(9999, device='cuda').sum().item()\ntorch.ones(1)._local_tensor\n", "_local_tensor"),
    ],
)
def test_the_reason_of_a_script_that_ends_itself_is_shown(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        traced(tmp_path, text)
    assert said in caught.value.message and "--answer" not in caught.value.hint


def test_a_hint_names_defaults_only_where_a_value_was_read(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        traced(tmp_path, "import torch\n[0, 1][int(torch.randn(9999, device='cuda').mul(3).sum()) + 1]\n")
    assert "--answer" in caught.value.hint


@pytest.mark.parametrize("thread", [False, True])
def test_memory_that_runs_out_is_seen_where_the_script_hides_it(tmp_path: Path, thread: bool) -> None:
    text = CAUGHT.format("torch.empty(1 << 40, device='cuda')")
    if thread:
        text = "import threading, torch\nthreading.Thread(target=lambda: torch.empty(1 << 40, device='cuda')).start()\n"
    _, outcome = traced(tmp_path, text)
    assert outcome.ending == "oom" and outcome.where.startswith("train.py:")


# --- its process ---


def test_a_thread_that_outlives_the_script_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.virtual.process.lifecycle.PATIENCE", 0.1)
    text = """
import threading, time, torch
w = torch.ones(3, device="cuda", requires_grad=True)
w.sum().backward(); torch.optim.SGD([w]).step()
threading.Thread(name="slow", target=lambda: time.sleep(1)).start()
"""
    _, outcome = traced(tmp_path, text)
    assert outcome.steps == 1 and any("slow of train.py" in note for note in outcome.assumed)


def test_the_process_is_as_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    handler, folder = signal.getsignal(signal.SIGTERM), Path.cwd()
    text = f"""
import atexit, os, signal, sys, tempfile, threading
signal.signal(signal.SIGTERM, lambda *_: None)
os.makedirs("{tmp_path}/new/deep"); os.chdir("{tmp_path}/new")
atexit.register(lambda: print("bytes at exit", torch.ones(3, device="cuda").nbytes))
child = os.fork()
if child == 0: sys.exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
child = os.fork()
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    worker = threading.Thread(target=train); worker.start(); worker.join()
"""
    _, outcome = traced(tmp_path, TRAINS + text)
    assert outcome.steps == 2
    assert signal.getsignal(signal.SIGTERM) is handler and Path.cwd() == folder
    assert "bytes at exit 12" in capfd.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


FILES = """
import logging, os, tempfile  # the script lies below the folder for temporary files
from pathlib import Path
logging.getLogger("own").addHandler(logging.FileHandler("run.log"))
logging.getLogger("own").error("to the log")
with open("kept.txt", "a") as kept: pass
with tempfile.NamedTemporaryFile(suffix=".json") as file: file.write(b"{}")
with tempfile.TemporaryDirectory() as folder: Path(folder, "x").write_text("y")
with tempfile.TemporaryFile() as file: file.write(b"z")
os.symlink("kept.txt", "latest"); os.link("kept.txt", "twin")
os.makedirs("out/deep"); open("out/deep/metrics.csv", "a").write("1")
assert Path("run.log").read_text() and Path("latest").read_text() == "mine"
import torch
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler: torch.ones(2)
profiler.export_chrome_trace("profile.json")  # written in C++
assert Path("profile.json").stat().st_size
"""


def test_files_that_the_script_makes_are_gone_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept.txt").write_text("mine")
    traced(tmp_path, FILES + TRAINS + "train()\n")
    assert {path.name for path in tmp_path.iterdir()} == {"kept.txt", "train.py"}
    assert (tmp_path / "kept.txt").read_text() == "mine"


# --- loaders that run dry ---

DRY = """
import itertools, torch
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8)
model = torch.nn.Linear(8, 8).cuda(); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
turns = 0
def step(x):
    global turns
    turns += 1
    model(x.cuda()).sum().backward(); optimizer.step(); optimizer.zero_grad()
def cycled(loader):
    while True:
        for x in loader: yield x
class Endless:
    def __init__(self, loader): self.loader, self.real = loader, iter(loader)
    def __next__(self):
        try: return next(self.real)
        except StopIteration:
            self.real = iter(self.loader)
            return next(self.real)
"""
LOOPS = {
    "again": """
it = iter(loader)
for number in range(10_000):
    try: (x,) = next(it)
    except StopIteration: it = iter(loader); (x,) = next(it)
    step(x)
""",
    "endless": "it = Endless(loader)\nwhile turns < 10_000: step(next(it)[0])\n",
    "generator": "it = cycled(loader)\nwhile True:\n    step(next(it)[0])\n    if turns > 10_000: break\n",
    "cycle": "for (x,) in itertools.cycle(loader):\n    step(x)\n    if turns > 10_000: break\n",
    "counted": "while turns < 10_000:\n    for (x,) in loader: step(x)\n",
    "in order": "it = iter(loader)\nfor _ in range(8): step(next(it)[0])\n",
    "peeked": """
for epoch in range(9):
    size = len(next(iter(loader))[0])
    for (x,) in loader: step(x)
assert epoch == 8
""",
    "checked": """
for (x,) in loader: step(x)
checks = iter(loader)
with torch.no_grad(): seen = [model(next(checks)[0].cuda()) for _ in range(8)]
assert len(seen) == 8
""",
    "evaluated": """
for epoch in range(3):
    for (x,) in loader: step(x)
    model.eval()
    with torch.no_grad(): seen = [model(x.cuda()) for (x,) in loader]
    assert len(seen) == (4 if epoch == 0 else 0), seen
""",
}


@pytest.mark.parametrize("loop", LOOPS)
def test_what_follows_a_loader_that_ran_dry_is_traced(tmp_path: Path, loop: str) -> None:
    _, outcome = traced(tmp_path, DRY + LOOPS[loop] + "torch.empty(1 << 40, device='cuda')\n")
    assert outcome.ending == "oom" and outcome.steps <= 6, outcome


def test_later_epochs_read_no_data_to_evaluate(tmp_path: Path) -> None:
    text = """
class Counted(torch.utils.data.Dataset):
    read = 0
    def __len__(self): return 64
    def __getitem__(self, i): Counted.read += 1; return torch.randn(8)
held = DataLoader(Counted(), batch_size=8)
for epoch in range(300):
    for (x,) in loader: step(x)
    model.eval(); seen = [model(x.cuda()).shape[0] for x in held]; model.train()
    assert seen == [8] * (4 if epoch < 2 else 1), seen
assert Counted.read < 300
torch.empty(1 << 40, device='cuda')
"""
    assert traced(tmp_path, DRY + text)[1].ending == "oom"


def test_epochs_that_repeat_long_enough_end_and_what_follows_is_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loaders, "FURTHER", 500)
    text = """
from torch.utils.data import DataLoader
data = DataLoader(torch.zeros(64, 512), 32)
for fold in range(2):
    seen = 0
    for epoch in range(100):
        for x in data: model(x.cuda()).sum().backward(); optimizer.step(); optimizer.zero_grad()
        with torch.no_grad():
            for _ in range(20): model(torch.randn(8, 512).cuda())
        seen += 1
    print("fold", fold, seen)
"""
    _, outcome = traced(tmp_path, TRAINS + text)
    counts = [int(line.split()[-1]) for line in capfd.readouterr().out.splitlines() if line.startswith("fold")]
    assert outcome.ending == "finished" and 5 < counts[0] < 50
    assert any("ended early" in text for text in outcome.assumed)


def test_a_loop_without_an_optimizer_ends(tmp_path: Path) -> None:
    text = """
import torch
weight = torch.randn(512, 512, device="cuda", requires_grad=True)
while True:
    (weight @ torch.randn(512, 64, device="cuda")).sum().backward()
    with torch.no_grad(): weight -= 0.1 * weight.grad
    weight.grad = None
"""
    tape, outcome = traced(tmp_path, text)
    assert outcome.ending == "enough" and any("200 backward" in note for note in outcome.assumed)
    assert any(isinstance(e, Alloc) and e.size == MIB for e in tape.events)


LIGHTNING = """
class Trainer:
    def __init__(self): self.should_stop = False
    def fit(self, step, validate):
        for turn in range(10_000):
            step(torch.randn(8, 8))
            if self.should_stop: break
        assert self.should_stop and turn < 9
        validate()
import torch
"""


def test_lightning_validates_after_the_steps(tmp_path: Path) -> None:
    folder = tmp_path / "lightning" / "pytorch" / "trainer"
    folder.mkdir(parents=True)
    (folder / "trainer.py").write_text(LIGHTNING)
    fit = "Trainer().fit(step, lambda: torch.empty(1 << 40, device='cuda'))\n"
    try:
        _, outcome = traced(tmp_path, DRY + "from lightning.pytorch.trainer.trainer import Trainer\n" + fit)
    finally:  # else tests of the real package would find this one
        for name in [n for n in sys.modules if n.partition(".")[0] == "lightning"]:
            del sys.modules[name]
    assert outcome.ending == "oom"


def test_a_rewritten_loop_is_the_same_loop(tmp_path: Path) -> None:
    """Loops that train are compiled anew: their lines, else branches, breaks and held values stay."""
    text = """
import gc, sys, torch
class Item:
    alive = 0
    def __init__(self): Item.alive += 1
    def __del__(self): Item.alive -= 1
def step(): pass
class It:
    def step(self): pass
for item in (Item() for _ in range(3)):
    del item
    assert Item.alive == 0
    It().step()
else: ended = True
count = 0
while count < 3:
    count += 1
    if count == 2: continue
    It().step()
else: ended = ended and True
assert ended and count == 3
for _ in range(3):
    It().step()
    break
else: raise AssertionError
line = sys._getframe().f_lineno
assert open(__file__).read().splitlines()[line - 1].startswith("line =")
"""
    with pytest.raises(BadInput, match=r"train.py:28: ZeroDivisionError"):
        traced(tmp_path, text + "1 / 0\n")


@pytest.mark.parametrize("call", ["load(name='rwkv', sources=['k.cu'])", "load_inline('rwkv', cpp_sources='int x;')"])
def test_extensions_are_refused_by_name_before_they_compile(tmp_path: Path, call: str) -> None:
    with pytest.raises(BadInput, match=r"train.py:2: the extension rwkv is compiled at run time") as caught:
        traced(tmp_path, f"from torch.utils.cpp_extension import load, load_inline\n{call}\n")
    assert "register_fake" in caught.value.hint


def test_megatrons_extension_that_shares_storage_is_stood_in_for(tmp_path: Path) -> None:
    text = (
        "import torch\nfrom torch.utils.cpp_extension import load_inline\n"
        "share = load_inline(name='share_storage_ext', cpp_sources='').share_storage\n"
        "kept, made = (torch.empty(1 << 20, device='cuda') for _ in range(2))\n"
        "kept.untyped_storage().resize_(0)\nbefore = torch.cuda.memory_allocated()\nshare(kept, made)\ndel made\n"
        "assert torch.cuda.memory_allocated() == before and kept.untyped_storage().nbytes() == 4 << 20\ndel kept\n"
    )
    _, outcome = traced(tmp_path, text + TRAINS + "train()\n")
    assert outcome.steps == 2


@pytest.mark.parametrize(
    ("setting", "asked"),
    [("attn_implementation: flash_attention_2", True), ("flash_attn: fa2", True), ("flash_attn: auto", False)],
)
def test_a_file_of_settings_may_ask_for_flash_attn(tmp_path: Path, setting: str, asked: bool) -> None:
    (tmp_path / "run.yaml").write_text(f"model: gpt2\n{setting}\n")
    assert flash_attn.asked_in(["train", f"--config={tmp_path}/run.yaml"]) is asked


def test_an_installed_flash_attn_lends_what_the_stand_in_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its C++ module cannot be loaded without CUDA's libraries, and a library imports it where no script names it."""
    package = tmp_path / "site" / "flash_attn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import flash_attn_2_cuda\n")
    (package / "losses.py").write_text("from flash_attn import flash_attn_func\n")
    (tmp_path / "site" / "library.py").write_text("import flash_attn.losses\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    _, outcome = traced(tmp_path, "import library\n" + TRAINS + "train()\n")
    assert outcome.steps == 2


CAPTURED = """
for _ in range(3): train(1)
static, graph = torch.ones(1, 512).cuda(), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph): model(static)
"""


def test_a_cuda_graph_is_reached_after_its_warm_up(tmp_path: Path) -> None:
    _, outcome = traced(tmp_path, TRAINS + CAPTURED)
    assert KEPT in outcome.assumed
    assert not any("no capture" in text for text in outcome.assumed)


def test_an_evaluation_that_was_seen_is_not_missed(tmp_path: Path) -> None:
    loop = "for _ in range(5):\n    model.eval()\n    with torch.no_grad(): model(torch.ones(1, 512).cuda())\n"
    _, outcome = traced(tmp_path, TRAINS + loop + "    model.train(); train(1)\n")
    assert not any("no evaluation" in text for text in outcome.assumed)


def test_old_constructors_and_types_make_tensors_of_the_card(tmp_path: Path) -> None:
    text = """
made = torch.cuda.FloatTensor(1000, 1024).uniform_()
assert isinstance(made, torch.cuda.FloatTensor) and not isinstance(made, torch.cuda.HalfTensor)
assert made.type(torch.cuda.HalfTensor).type() == "torch.cuda.HalfTensor"
assert torch.cuda.ByteTensor([1, 2, 3]).sum().item() == 6 and torch.cuda.LongTensor(torch.Size([3])).shape == (3,)
torch.set_default_tensor_type("torch.cuda.DoubleTensor")
assert (torch.zeros(2).device.type, torch.zeros(2).dtype) == ("cuda", torch.float64)
torch.set_default_tensor_type(torch.FloatTensor)
assert torch.zeros(2).device.type == "cpu"
train(2)
"""
    tape, outcome = traced(tmp_path, TRAINS + text)
    sizes = [event.size for event in tape.events if isinstance(event, Alloc)]
    assert outcome.steps == 2 and sizes.count(1000 * 1024 * 4) == 1 and sizes.count(1000 * 1024 * 2) == 1


def test_products_on_the_host_that_would_take_long_are_left_out(tmp_path: Path) -> None:
    text = "made = torch.ones(40000, 3) @ torch.ones(3, 40000)\nassert made[0, 0] == 0 == made[-1, -1]\ntrain(2)\n"
    assert traced(tmp_path, TRAINS + text)[1].steps == 2


ON_TWO = """
import torch
MIB = 1 << 20
one, two = torch.nn.Linear(1024, 1024, bias=False).cuda(), torch.nn.Linear(1024, 2048, bias=False).to("cuda:1")
optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
assert [torch.cuda.memory_allocated(i) for i in (0, 1)] == [4 * MIB, 8 * MIB]
for _ in range(2):
    x = torch.ones(512, 1024, device="cuda")  # the current device is still the first
    two(one(x).to("cuda:1")).sum().backward()
    optimizer.step()
assert torch.cuda.memory_allocated(1) - torch.cuda.memory_allocated(0) == 2 * (8 - 4) * MIB - 2 * MIB  # x is on 0
kept = torch.empty(MORE << 30, dtype=torch.uint8, device="cuda:1")
"""


@pytest.mark.parametrize(("more", "code"), [(12, 0), (23, 3)])
def test_each_card_of_a_process_has_its_own_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: int, code: int
) -> None:
    path = written(tmp_path, ON_TWO.replace("MORE", str(more)))
    assert cli.main(["trace", str(path), "--gpu", "l4", "--json"]) == code
    out, err = capsys.readouterr()
    peak = json.loads(out)["peak"]["requested"] if not code else 0
    assert code or 12 << 30 < peak < 12.1 * 2**30
    assert "cuda:1 is shown" in err if not code else "GPU 1 has" in err


# --- settings of the environment ---

SET = 'import os\nos.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"\n'
CALLED = 'import torch\ntorch.cuda.memory._set_allocator_settings("expandable_segments:True")\n'


@pytest.mark.parametrize("text", [SET + TRAINS, "import torch\n" + SET + TRAINS, CALLED + TRAINS], ids=range(3))
def test_allocator_settings_before_the_first_allocation_are_followed(tmp_path: Path, text: str) -> None:
    tape, outcome = traced(tmp_path, text + "train()\nassert torch.cuda.memory_reserved() < 20 << 20\n")
    assert tape.about["alloc_conf"] == "expandable_segments:True" and outcome.steps == 2


def test_allocator_settings_that_come_too_late_are_named(tmp_path: Path) -> None:
    tape, outcome = traced(tmp_path, TRAINS + SET + "train(2)\n")
    assert tape.about["alloc_conf"] == "" and any("not followed" in text for text in outcome.assumed)


@pytest.mark.parametrize(("config", "size"), [(":4096:8", 32 * MIB), (":16:8:4096:2", 8 * MIB + (128 << 10))])
def test_the_workspace_of_cublas_is_the_one_that_is_set(tmp_path: Path, config: str, size: int) -> None:
    setting = f'import os\nos.environ["CUBLAS_WORKSPACE_CONFIG"] = "{config}"\n'
    tape, _ = traced(tmp_path, setting + TRAINS + "train(2)\n")
    made = {event.size for event in tape.events if isinstance(event, Alloc) and event.role == "workspace"}
    assert made == {size}
