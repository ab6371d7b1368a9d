"""A user's own script on the virtual card, unmodified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from memfit import cli  # noqa: E402
from memfit.allocator.replay import replay  # noqa: E402
from memfit.errors import BadInput  # noqa: E402
from memfit.nouns.tape import Alloc, EmptyCache, Oom, Tape  # noqa: E402
from memfit.virtual.ranks.traced import ScriptOutcome  # noqa: E402
from memfit.virtual.scripts.script import trace_script  # noqa: E402
from memfit.virtual.virtual_gpu import Answers  # noqa: E402

SCRIPTS = Path(__file__).parent / "data" / "scripts"
MIB = 1 << 20
pytestmark = pytest.mark.filterwarnings("ignore")  # what scripts and their libraries are warned of is their affair


def trace(script: str, *args: str, gpu: str = "rtx-4090", **words: object) -> tuple[Tape, ScriptOutcome]:
    return trace_script(SCRIPTS / f"{script}.py", args, gpu, **{"steps": 2, **words})  # type: ignore[arg-type]


def written(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- scripts of every kind ---


def test_a_plain_loop_trains_evaluates_and_saves(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tape, outcome = trace("plain_loop", "--batch", "64")
    assert (outcome.ending, outcome.steps) == ("finished", 2)
    assert [text.partition(":")[0] for text in outcome.assumed] == ["convolutions"]  # measured on another card
    peaks = replay(tape.events).by_phase()
    assert set(peaks) == {"load", "first_step", "step", "eval", "save"}
    activation = 64 * 32 * 32 * 32 * 2  # of the first convolution, in fp16
    assert peaks["step"].requested > 3 * activation
    assert "accuracy" in capsys.readouterr().out
    assert list(elsewhere.iterdir()) == []


@pytest.fixture
def fresh_accelerate() -> None:
    """accelerate keeps one state per process, which a Trainer of another test may have made."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_loop_with_accelerate(fresh_accelerate: None, elsewhere: Path) -> None:
    tape, outcome = trace("accelerated")
    assert (outcome.ending, outcome.steps) == ("finished", 3)  # accelerate reads a batch ahead
    assert "save" in replay(tape.events).by_phase()
    assert list(elsewhere.iterdir()) == []


def test_a_script_that_loops_for_ever_is_stopped_after_its_steps(elsewhere: Path) -> None:
    tape, outcome = trace("gpt", steps=3)
    assert (outcome.ending, outcome.steps) == ("enough", 3)
    assert any("torch.compile: buffers as Inductor" in text for text in outcome.assumed)
    logits = 50304 * 8 * 256 * 4  # bytes in fp32, which cross_entropy wants
    assert replay(tape.events).by_phase()["step"].requested > 2 * logits


def test_an_out_of_memory_handler_is_run_and_the_tape_keeps_what_it_saw() -> None:
    tape, outcome = trace("halving", gpu="l4")
    assert (outcome.ending, outcome.survived) == ("enough", 4)
    assert sum(isinstance(e, Oom) for e in tape.events) == 4
    assert sum(isinstance(e, EmptyCache) for e in tape.events) == 4


def test_out_of_memory_that_nobody_catches_names_the_line(tmp_path: Path) -> None:
    script = written(
        tmp_path, "import torch\n\ndef load():\n    return torch.empty(1 << 40, device='cuda')\n\nload()\n"
    )
    tape, outcome = trace_script(script, [], "l4")
    assert (outcome.ending, outcome.where) == ("oom", "train.py:4")
    assert outcome.message.startswith("CUDA out of memory. Tried to allocate 4096.00 GiB")
    assert replay(tape.events, capacity=1 << 34).oom is not None
    assert trace_script(script, [], "l4", capacity=None)[1].ending == "finished"


def test_what_scripts_ask_of_torch_cuda_is_answered() -> None:
    _, outcome = trace("features")
    assert outcome.ending == "enough"
    assert torch.empty(1).device.type == "cpu"  # the script had set another default


# --- Hugging Face's trainers ---


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(f'{{"text": "{"some words of a sample, " * (20 + i)}"}}\n' for i in range(60)))
    return path


def test_transformers_trainer_with_a_model_by_name(elsewhere: Path, texts: Path) -> None:
    before = sorted(elsewhere.iterdir())
    tape, outcome = trace("trainer", "Qwen/Qwen2.5-0.5B-Instruct", str(texts))
    assert (outcome.ending, outcome.steps) == ("finished", 2)
    peaks = replay(tape.events).by_phase()
    assert set(peaks) == {"load", "first_step", "step", "eval", "save"}
    assert peaks["load"].requested == pytest.approx(2 * 494_032_768, rel=0.01)
    assert any("stand-in, 4 characters per token" in text for text in outcome.assumed)
    assert sorted(elsewhere.iterdir()) == before


def test_trls_dpo_trainer(elsewhere: Path) -> None:
    _, outcome = trace("dpo")
    assert (outcome.ending, outcome.steps) == ("finished", 2)


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_memfits_own_exports_need_what_its_formulas_say(
    elsewhere: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    asked = [
        "qwen2.5-0.5b",
        "--gpu",
        "rtx-4090",
        "--method",
        method,
        "--sequence-length",
        "512",
        "--effective-batch",
        "4",
    ]
    assert cli.main(["plan", *asked, "--out", "run", "--target", "trl"]) == 0
    capsys.readouterr()
    cli.main(["estimate", "--from", "run/recipe.toml", "--json"])
    formula = json.loads(capsys.readouterr().out)["peak"]
    chat = [
        [{"role": "user", "content": "what " * n}, {"role": "assistant", "content": "that " * n}] for n in (900, 90)
    ]
    Path("data.jsonl").write_text("".join(json.dumps({"messages": chat[i % 2]}) + "\n" for i in range(32)))
    tape, outcome = trace_script(Path("run/train.py"), ["--data", "data.jsonl"], "rtx-4090")
    assert (outcome.ending, outcome.steps) == ("finished", 3)
    peak = replay(tape.events).peak
    for level in ("requested", "reserved"):
        print(f"{method} {level}: traced {getattr(peak, level):,}, formula {formula[level]:,}")
    assert peak.requested == pytest.approx(formula["requested"], rel=0.03)
    assert peak.reserved == pytest.approx(formula["reserved"], rel=0.03)


def test_liger_kernels_keep_no_logits(tmp_path: Path) -> None:
    pytest.importorskip("liger_kernel", reason="pip install liger-kernel")
    script = written(
        tmp_path,
        "import sys, torch\nfrom transformers import AutoModelForCausalLM, LlamaConfig\n"
        "from liger_kernel.transformers import apply_liger_kernel_to_llama, AutoLigerKernelForCausalLM\n"
        "config = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8)\n"
        "model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()\n"
        "apply_liger_kernel_to_llama(model=model) if sys.argv[1:] else None\n"
        "optimizer = torch.optim.AdamW(model.parameters())\nids = torch.randint(0, 32000, (16, 512), device='cuda')\n"
        "for _ in range(2):\n    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n",
    )  # fmt: skip
    plain, fused = (replay(trace_script(script, args, "rtx-4090")[0].events).peak.requested for args in ([], ["liger"]))
    assert plain - fused > 2 * 16 * 512 * 32000 * 4


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_get_equal_shares_whatever_the_implementation(family: str) -> None:
    peaks = {}
    for experts in ("eager", "grouped_mm"):
        tape, outcome = trace("moe", family, experts)
        assert outcome.answered == {"topk": 8}
        peaks[experts] = replay(tape.events).peak.requested
    assert peaks["eager"] == pytest.approx(peaks["grouped_mm"], rel=0.02)


def test_routing_can_be_set() -> None:
    rows = {}
    for how in ("balanced", "first"):
        tape, _ = trace("moe", "mixtral", "eager", answers=Answers.of([f"routing={how}"]))
        rows[how] = {e.size // (2 * 512) for e in tape.events if isinstance(e, Alloc) and "silu" in e.label}
    assert 64 in rows["balanced"]  # 2 x 128 tokens, each to 2 of 8 experts
    assert 512 in rows["first"]  # all of them to the first expert, twice


@pytest.mark.parametrize("kind", ["dora", "ia3", "vera", "prefix"])
def test_adapters(elsewhere: Path, kind: str) -> None:
    tape, outcome = trace("adapters", kind)
    assert outcome.steps == 2
    states = sum(e.size for e in tape.events if getattr(e, "role", "") == "optimizer_states")
    assert 0 < states < 50 * MIB  # of the adapter alone


# --- what nobody can know, and what cannot be done ---


def test_answers_can_be_set(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        "import torch\nx = torch.randn(100, 100, device='cuda')\n"
        "if x.mean().item() > 2:\n    big = torch.empty(1 << 30, device='cuda')\n",
    )

    def peak(answers: Answers) -> int:
        return replay(trace_script(script, [], "l4", answers=answers)[0].events).peak.requested

    assert peak(Answers()) < MIB < peak(Answers.of(["item=3"]))


@pytest.mark.parametrize("setting", ["item=much", "mask=perhaps", "routing=", "loss=1", ""])
def test_answers_that_mean_nothing(setting: str) -> None:
    with pytest.raises(BadInput):
        Answers.of([setting])


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("import torch\nx = 1\nraise ValueError('no such key')\n", "train.py:3: ValueError: no such key", "--debug"),
        ("import nowhere_to_be_found\n", "train.py:1: ModuleNotFoundError", "install nowhere_to_be_found"),
        ("x = (\n", "train.py:1: SyntaxError", ""),
        ("open('not/here.txt')\n", "train.py:1: FileNotFoundError", "current folder"),
        ("import sys\nsys.exit('no data')\n", "train.py ended by itself: no data (after 0", "printed"),
        ("import sys\nsys.exit(3)\n", "train.py ended with exit code 3 (after 0 optimizer steps)", "printed"),
        (
            "import torch\nlib = torch.library.Library('memfit_script', 'DEF')\nlib.define('odd(Tensor x) -> Tensor')\n"
            "torch.ops.memfit_script.odd(torch.ones(2, device='cuda'))\n",
            "train.py:4: ", "register_fake",
        ),
        (
            "from transformers import AutoModelForCausalLM\n"
            "AutoModelForCausalLM.from_pretrained('nobody/knows-this')\n",
            "train.py:2: nobody/knows-this is neither", "config.json",
        ),
        (
            "from transformers import AutoModelForCausalLM\n"
            "AutoModelForCausalLM.from_pretrained('TheBloke/Llama-2-7B-GPTQ')\n",
            "train.py:2: TheBloke/Llama-2-7B-GPTQ is stored quantised", "BitsAndBytesConfig",
        ),
        ("open('kept.txt', 'w')\n", "train.py:1: the script would overwrite", "another folder"),
        ("import os\nos.remove('kept.txt')\n", "train.py:2: the script would remove", "another folder"),
    ],
)  # fmt: skip
def test_errors_name_the_line_and_what_to_do(elsewhere: Path, text: str, message: str, hint: str) -> None:
    kept = elsewhere / "kept.txt"
    kept.write_text("mine")
    with pytest.raises(BadInput) as caught:
        trace_script(written(elsewhere, text), [], "l4")
    assert caught.value.message.startswith(message)
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message
    assert kept.read_text() == "mine"


@pytest.mark.parametrize(
    "use",
    [
        "import parted\nparted.part.run()\n",
        "try:\n    from parted import part\nexcept ImportError:\n    pass\npart.run()\n",
    ],
)
def test_an_import_that_a_package_passed_over_is_the_reason(tmp_path: Path, use: str) -> None:
    """As Transformer Engine passes over that of its part for PyTorch."""
    (tmp_path / "parted").mkdir()
    (tmp_path / "parted" / "__init__.py").write_text("try:\n    from . import part\nexcept ImportError:\n    pass\n")
    (tmp_path / "parted" / "part.py").write_text("\nimport cv2.nowhere\n")
    with pytest.raises(BadInput) as caught:
        trace_script(written(tmp_path, use), [], "l4")
    assert "ModuleNotFoundError: No module named 'cv2'" in caught.value.message
    assert "parted/part.py:2" in caught.value.message
    assert "install opencv-python-headless" in caught.value.hint


RANKS = """import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
for layer in model:
    fully_shard(layer)
optimizer = torch.optim.AdamW(fully_shard(model).parameters())
for _ in range(3):
    model(torch.randn(8, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_for_torchrun_is_traced_as_its_rank_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = written(tmp_path, RANKS)
    states = {}
    for size in (2, 8):
        tape, outcome = trace_script(script, [], "a100-80gb", steps=2, world_size=size)
        assert outcome.steps == 2 and f"rank 0 of {size}" in " ".join(outcome.assumed)
        states[size] = sum(e.size for e in tape.events if isinstance(e, Alloc) and e.role == "optimizer_states")
    assert states[2] > 3.5 * states[8] > 0
    assert cli.main(["trace", str(script), "--gpu", "8xa100-80gb"]) == 0
    out, err = capsys.readouterr()
    assert "rank 0 of 8, on 8 x A100" in out and "usable of 80 GB each" in out and "rank 0 of 8" in err
    assert cli.main(["trace", str(script), "--gpu", "a100-80gb"]) == 2
    assert "--gpu 8xh100" in capsys.readouterr().err
    assert cli.main(["trace", str(script), "--gpu", "8xa100-80gb", "--num-gpus", "4"]) == 2


def test_a_model_in_eval_mode_that_is_trained_is_no_evaluation(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        "import torch\nfrom transformers import AutoModelForSequenceClassification, AutoTokenizer\n"
        "name = 'bert-base-uncased'\ntokenizer = AutoTokenizer.from_pretrained(name)\n"
        "model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=3).cuda()\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "batch = tokenizer(['a sentence'] * 4, padding='max_length', max_length=64, return_tensors='pt').to('cuda')\n"
        "for _ in range(9):\n"
        "    model(**batch, labels=torch.zeros(4, dtype=torch.long, device='cuda')).loss.backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n",
    )  # fmt: skip
    tape, _ = trace_script(script, [], "l4")
    assert list(replay(tape.events).by_phase()) == ["load", "first_step", "step"]


def test_there_must_be_a_script_and_a_step(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        trace_script(tmp_path / "none.py", [], "l4")
    with pytest.raises(BadInput, match="trains nothing"):
        trace_script(written(tmp_path, ""), [], "l4", steps=0)


# --- surroundings ---


def test_a_script_finds_its_arguments_its_modules_and_its_folder(
    elsewhere: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("project")
    (folder / "beside.py").write_text("NUMBER = 7\n")
    (elsewhere / "data.txt").write_text("here")
    script = written(
        folder,
        "import sys, beside\nfrom pathlib import Path\nassert __name__ == '__main__'\n"
        "assert sys.argv[1:] == ['--lr', '3']\n"
        "assert Path('data.txt').read_text() == 'here'\nassert beside.NUMBER == 7\n"
        "assert Path(__file__).name == 'train.py'\n",
    )  # fmt: skip
    tape, outcome = trace_script(script, ["--lr", "3"], "l4")
    assert outcome.assumed == ("the script made no optimizer step",)
    assert tape.about["script"] == "train.py"


def test_models_built_on_the_host_take_no_memory_there(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        "import resource, torch\nbefore = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "layers = torch.nn.ModuleList([torch.nn.Linear(8192, 28672) for _ in range(8)])\n"
        "for layer in layers:\n    torch.nn.init.trunc_normal_(layer.weight, std=0.02)\n"
        "layers.load_state_dict({k: v.clone() for k, v in layers.state_dict().items()})\n"
        "layers = layers.to(torch.bfloat16).to('cuda')\n"
        "torch.save(layers.state_dict(), 'x.pt')\nlayers.load_state_dict(torch.load('x.pt', map_location='cpu'))\n"
        "assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000\n",
    )  # fmt: skip
    tape, _ = trace_script(script, [], "rtx-4090")
    assert replay(tape.events).peak.requested == 8 * (8192 * 28672 + 28672) * 2
    assert float(torch.ones(MIB).sum()) == MIB  # afterwards large tensors are written again


def test_no_module_is_the_script_afterwards(elsewhere: Path) -> None:
    """multiprocess, when it is imported, makes `__main__` known under a second name, which may have been there."""
    import multiprocessing  # noqa: F401
    import sys

    before = sys.modules["__mp_main__"]
    path = written(elsewhere, "import sys, helper\nsys.modules['__mp_main__'] = sys.modules['__main__']\n")
    (elsewhere / "helper.py").write_text("")
    trace_script(path, [], "rtx-4090")
    assert sys.modules["__mp_main__"] is before and "helper" not in sys.modules


# --- optimizers that step others ---

STEPPERS = {
    "a container": """
class All(torch.optim.Optimizer):
    def __init__(self, weights):
        weights = list(weights)
        self.inner = [torch.optim.AdamW([weight]) for weight in weights]
        super().__init__(weights, {})
    def step(self, closure=None):
        for one in self.inner:
            one.step()
""",
    "a subclass, beside its base": """
class All(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)
beside = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4, device="cuda"))])
beside.param_groups[0]["params"][0].grad = torch.ones(4, device="cuda")
beside.step()
del beside
""",
}


@pytest.mark.parametrize("kind", STEPPERS)
def test_a_step_that_steps_other_optimizers_is_one(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = written(
        tmp_path,
        f"import torch{STEPPERS[kind]}"
        + """
model = torch.nn.Linear(512, 512).cuda()
optimizer = All(model.parameters())
for step in range(9):
    model(torch.randn(8, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"<{step}>")
""",
    )
    tape, outcome = trace_script(script, [], "l4", steps=2)
    assert outcome.steps == 2 and "<1>" in capsys.readouterr().out
    assert not any("made" in text for text in outcome.assumed)
    states = [e for e in tape.events if isinstance(e, Alloc) and e.role == "optimizer_states"]
    assert sum(e.size for e in states) >= 2 * 4 * (512 * 512 + 512)  # those of the inner ones
