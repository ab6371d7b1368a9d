"""The callbacks: a transformers Trainer, a Lightning Trainer where it is installed, and the protocol of both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.nouns.sample import Sample

QUIET = {"log": None, "quiet": True}


def phases(samples: list[Sample]) -> list[tuple[str, int]]:
    """(phase, step) without repetitions."""
    found = [(s.phase, s.step) for s in samples]
    return [pair for i, pair in enumerate(found) if i == 0 or pair != found[i - 1]]


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        out = self.layer(x)
        return {"loss": out.pow(2).mean(), "logits": out}


def test_a_transformers_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import Trainer, TrainingArguments

    rows = [{"x": torch.ones(8), "labels": torch.ones(8)} for _ in range(12)]
    callback = memfit.MemfitCallback(**QUIET, count_every=1)
    args = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3,
        eval_strategy="steps", eval_steps=2, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, seed=1,
    )  # fmt: skip
    Trainer(Tiny(), args, train_dataset=rows, eval_dataset=rows[:4], callbacks=[callback]).train()
    assert callback.watch is not None
    found = phases(callback.watch.recorder.samples)
    assert found[:5] == [("load", 0), ("first_step", 1), ("step", 2), ("eval", 2), ("save", 2)]
    assert ("step", 3) in found and found[-1][1] == 3
    assert dict(callback.watch.recorder.shares)["parameters"] == 72 * 4
    assert dict(callback.watch.recorder.shares)["optimizer_states"] >= 2 * 72 * 4
    assert callback.leaks == ()


def test_a_training_that_raised_is_no_longer_watched_once_the_next_begins(tmp_path: Path) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Boom(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            raise RuntimeError("mine")

    rows = [{"x": torch.ones(8), "labels": torch.ones(8)} for _ in range(4)]
    args = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=2, save_strategy="no",
        report_to=[], use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    model, first, second = Tiny(), memfit.MemfitCallback(**QUIET), memfit.MemfitCallback(**QUIET)
    with pytest.raises(RuntimeError, match="mine"):
        Trainer(model, args, train_dataset=rows, callbacks=[first, Boom()]).train()  # type: ignore[arg-type]
    assert first.watch is not None
    said = len(first.watch.recorder.samples)
    Trainer(model, args, train_dataset=rows, callbacks=[second]).train()  # type: ignore[arg-type]
    assert not model._forward_pre_hooks and len(first.watch.recorder.samples) == said + 1  # its last look
    assert second.watch is not None and second.watch.done == 2


def test_the_callback_costs_no_import_of_torch() -> None:
    import subprocess
    import sys

    code = "import sys, memfit, memfit.live.outside.command, memfit.live.watch.outputs; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def lightning() -> ModuleType:
    return pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_a_lightning_trainer(tmp_path: Path) -> None:
    pl = lightning()

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.tiny = Tiny()

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return self.tiny(batch)["loss"]  # type: ignore[no-any-return]

        def validation_step(self, batch: Tensor, _: int) -> None:
            self.tiny(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    rows = torch.utils.data.DataLoader(torch.ones(16, 8), batch_size=2)  # type: ignore[arg-type]
    callback = memfit.LightningCallback(**QUIET, count_every=1)
    trainer = pl.Trainer(
        max_steps=4, accumulate_grad_batches=2, val_check_interval=4, default_root_dir=tmp_path, accelerator="cpu",
        callbacks=[callback], logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), rows, rows)
    assert callback.watch is not None
    found = phases(callback.watch.recorder.samples)
    assert found[:2] == [("load", 0), ("first_step", 1)]
    assert ("eval", 2) in found and found[-1][1] == 4
    assert callback.watch.done == 4
    assert dict(callback.watch.recorder.shares)["optimizer_states"] >= 2 * 72 * 4


@pytest.fixture
def callback(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """LightningCallback without the package: the class it inherits from is a bare one."""
    import importlib
    import sys

    package, module = ModuleType("lightning"), ModuleType("lightning.pytorch")
    module.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning", package)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", module)
    monkeypatch.delitem(sys.modules, "memfit.live.watch.lightning", raising=False)
    yield importlib.import_module("memfit.live.watch.lightning").LightningCallback(**QUIET, count_every=1)
    monkeypatch.delitem(sys.modules, "memfit.live.watch.lightning")


def test_the_protocol_of_lightning(callback: Any) -> None:
    """The same order of calls."""
    model = Tiny()
    trainer = SimpleNamespace(global_step=0, optimizers=[torch.optim.SGD(model.parameters())])
    callback.on_train_start(trainer, model)
    for batch in range(4):
        callback.on_train_batch_start(trainer, model, None, batch)
        trainer.global_step += batch % 2  # two batches are accumulated
        callback.on_train_batch_end(trainer, model, None, None, batch)
    callback.on_validation_start(trainer, model)
    callback.on_validation_end(trainer, model)
    callback.on_save_checkpoint(trainer, model, {})
    callback.on_train_end(trainer, model)
    assert phases(callback.watch.recorder.samples) == [
        ("load", 0), ("first_step", 1), ("step", 2), ("eval", 2), ("step", 2), ("save", 2),
    ]  # fmt: skip


@pytest.mark.parametrize("late", [False, True])
def test_the_states_of_every_optimizer_count(callback: Any, late: bool) -> None:
    """Two of them, as of a generator and a critic; the second steps with the first, or only from the third batch on."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    optimizers = [torch.optim.AdamW(part.parameters()) for part in model]
    trainer = SimpleNamespace(global_step=0, optimizers=optimizers)
    callback.on_train_start(trainer, model)
    for batch in range(4):
        callback.on_train_batch_start(trainer, model, None, batch)
        model(torch.ones(2, 64)).sum().backward()
        for optimizer in optimizers[: 1 if late and batch < 2 else 2]:
            optimizer.step()
            trainer.global_step += 1
        model.zero_grad()
        callback.on_train_batch_end(trainer, model, None, None, batch)
    callback.on_train_end(trainer, model)
    assert callback.watch.done == 4
    alive = sum(v.nbytes for o in optimizers for state in o.state.values() for v in state.values())
    assert dict(callback.watch.recorder.shares)["optimizer_states"] == alive > 2 * 2 * 64 * 64 * 4
    (step,) = [p for p in callback.watch.footprint().phases if p.phase == "step"]
    assert [line.bytes for line in step.lines if line.role == "optimizer_states"] == [alive]
