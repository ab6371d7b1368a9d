"""What a traced script's passes without a backward are: an evaluation, or a part of a training step."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from memfit.nouns.tape import GENERATION, WITHOUT_GRADIENTS, Mark, Tape  # noqa: E402
from memfit.virtual.scripts.script import trace_script  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

LOOP = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
def net():
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)).cuda()
model, teacher = net(), net().eval()
optimizer = torch.optim.AdamW(model.parameters())
data = DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=16)
held_out = DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=16)
def learn(x, wanted):
    loss = (model(x) - wanted).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# what a script does -> the phases of its passes without gradients
LOOPS = {
    "teacher": ("""
for (x,) in data:
    with torch.no_grad():
        wanted = teacher(x.cuda())
    learn(x.cuda(), wanted)
""", {"first_step", "step"}),
    "teacher without a loader": ("""
for _ in range(4):
    x = torch.randn(16, 64, device="cuda")
    with torch.no_grad():
        wanted = teacher(x)
    learn(x, wanted)
""", {"first_step", "step"}),
    "rollout in evaluation mode": ("""
for (x,) in data:
    model.eval()
    with torch.no_grad():
        wanted = model(x.cuda())
    model.train()
    learn(x.cuda(), wanted)
""", {"first_step", "step"}),
    "evaluation of its own": ("""
for epoch in range(3):
    for (x,) in data:
        learn(x.cuda(), x.cuda())
    with torch.no_grad():
        for (x,) in held_out:
            model(x.cuda())
""", {"eval"}),
    "evaluation without a loader": ("""
def loss_of_batches():
    model.eval()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(16, 64, device="cuda"))
    model.train()
for _ in range(4):
    loss_of_batches()
    x = torch.randn(16, 64, device="cuda")
    learn(x, x)
""", {"eval"}),
    "an average of the weights, evaluated": ("""
for epoch in range(3):
    for (x,) in data:
        learn(x.cuda(), x.cuda())
    with torch.no_grad():
        for (x,) in held_out:
            teacher(x.cuda())
""", {"eval"}),
    "samples between steps": ("""
@torch.no_grad()
def generate(x, tokens):
    for _ in range(tokens):
        x = model(x)
    return x
for _ in range(4):
    x = torch.randn(16, 64, device="cuda")
    learn(x, x)
    model.eval()
    generate(x[:1], 8)
    model.train()
""", {"step"}),
}  # fmt: skip


def marks(tape: Tape) -> list[Mark]:
    return [event for event in tape.events if isinstance(event, Mark)]


@pytest.mark.parametrize("name", LOOPS)
def test_passes_without_gradients_are_what_they_serve(tmp_path: Path, name: str) -> None:
    body, phases = LOOPS[name]
    script = tmp_path / "train.py"
    script.write_text(LOOP + body)
    tape, outcome = trace_script(script, (), "l4")
    found = marks(tape)
    idle = {m.phase for m in found if m.instant in (WITHOUT_GRADIENTS, GENERATION) or m.phase == "eval"}
    assert outcome.steps >= 2
    assert idle == phases


TRL = """
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import (
    LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast)
known = {word: i for i, word in enumerate(["<unk>", "<pad>", "<s>", "yes", "no"])}
words = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="<s>")
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, pad_token_id=1, bos_token_id=2, eos_token_id=2)
model = LlamaForCausalLM(config).to("cuda")
common = dict(per_device_train_batch_size=4, bf16=True, report_to=[])
adapters = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
pairs = Dataset.from_list([{"prompt": "yes ", "chosen": "yes no " * 5, "rejected": "no " * 3}] * 16)
"""
TRAINERS = {
    "DPO, adapters off": """
from trl import DPOConfig, DPOTrainer
DPOTrainer(model=model, args=DPOConfig("out", max_length=32, **common), train_dataset=pairs, processing_class=tokenizer,
    peft_config=adapters).train()
""",
    "KTO, a reference model": """
from trl import KTOConfig, KTOTrainer
rows = [{"prompt": "yes ", "completion": "yes no " * 5, "label": bool(i % 2)} for i in range(16)]
KTOTrainer(model=model, ref_model=LlamaForCausalLM(config), args=KTOConfig("out", max_length=32, **common),
    train_dataset=Dataset.from_list(rows), processing_class=tokenizer).train()
""",
    "GRPO, a reward model": """
from trl import GRPOConfig, GRPOTrainer
judge = LlamaForSequenceClassification(LlamaConfig.from_dict({**config.to_dict(), "num_labels": 1}))
GRPOTrainer(model=model, reward_funcs=judge, reward_processing_classes=tokenizer, processing_class=tokenizer,
    peft_config=adapters,
    args=GRPOConfig("out", num_generations=4, max_completion_length=6, beta=0.1, **common),
    train_dataset=Dataset.from_list([{"prompt": "yes no yes"}] * 16)).train()
""",
}


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_that_never_evaluate_have_no_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(TRL + TRAINERS[name])
    tape, outcome = trace_script(script, (), "l4", steps=2)
    found = marks(tape)
    assert outcome.steps == 2
    assert "eval" not in {m.phase for m in found}
    assert any(m.phase == "step" and m.instant == WITHOUT_GRADIENTS for m in found)
    assert any(m.instant == GENERATION for m in found) == name.startswith("GRPO")


EPOCHS = """
import torch
from torch.utils.data import DataLoader, Dataset
class Flip(torch.nn.Module):
    def forward(self, x):
        return x.flip(0)
class Pictures(Dataset):
    flip = Flip()
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return self.flip(torch.randn(8))
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(Pictures(), batch_size=64):
    model(x.cuda()).sum().backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        count = sum(len(model(x.cuda())) for x in DataLoader(Pictures(), batch_size=16))
    print("mean of", 1 / count)
    model.train()
"""


def test_transforms_of_pictures_are_no_passes_of_the_model(tmp_path: Path) -> None:
    """Sixteen of them for a batch would be more evaluations than one loader gets, and end it before its first."""
    script = tmp_path / "train.py"
    script.write_text(EPOCHS)
    tape, outcome = trace_script(script, [], "t4")
    assert outcome.ending == "finished" and outcome.steps == 1
    assert [e.phase for e in tape.events if isinstance(e, Mark)].count("eval") == 4


def test_a_file_is_a_checkpoint_to_resume_from_once_there_is_an_optimizer(tmp_path: Path) -> None:
    torch.save({"images": torch.ones(64, 64)}, tmp_path / "data.pt")
    (tmp_path / "train.py").write_text(
        f"import torch\nimages = torch.load({str(tmp_path / 'data.pt')!r}, map_location='cuda')['images']\n"
        f"{LOOP}state = torch.load({str(tmp_path / 'data.pt')!r})\nlearn(images, images)\nlearn(images, images)\n"
    )
    tape, _ = trace_script(tmp_path / "train.py", [], "l4")
    phases = [event.phase for event in tape.events if isinstance(event, Mark)]
    assert phases.count("resume") == 1 and set(phases[: phases.index("resume")]) == {"load"}
