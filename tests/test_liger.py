"""Hold models under Liger's kernels against traces of liger-kernel 0.8.5, torch 2.13 and transformers 5.23."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memfit import Recipe, estimate, find_gpu, resolve_model
from memfit.tables.liger_kernels import LIGER

FULL: dict[str, Any] = {"sequence_length": 512, "micro_batch": 2}
LORA: dict[str, Any] = {"method": "lora", "sequence_length": 1024}
# requested bytes of the worst step of `memfit trace MODEL --gpu a100-80gb --trainer transformers --loss fused`: norms,
# gated products and rotation in turn in place, copied, by head, on parts of one tensor, left as they are, and experts
TRACED: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("smollm2-135m", FULL, 1486045530),
    ("smollm2-135m", LORA, 1037737200),
    ("smollm2-135m", FULL | {"checkpointing": "full", "precision": "bf16-mixed"}, 2284910940),
    ("gemma-3-270m", FULL, 2505332428),
    ("gemma-3-270m", LORA, 1280762186),
    ("qwen3-0.6b", FULL, 5375588082),
    ("qwen3-0.6b", LORA, 2974939856),
    ("tencent/Hunyuan-0.5B-Instruct", FULL, 5140897346),
    ("allenai/OLMo-2-0425-1B", LORA, 5112104720),
    ("microsoft/Phi-3-mini-4k-instruct", LORA, 11954851984),
    ("deepseek-ai/DeepSeek-V2-Lite", LORA | {"lora_targets": ("attention",)}, 35389764324),
)


def worst(model: str, recipe: Recipe) -> int:
    """Requested bytes of the worst training step."""
    phases = estimate(resolve_model(model), recipe, find_gpu("a100-80gb")).phases
    return max(p.levels.requested for p in phases if p.phase in ("first_step", "step"))


@pytest.mark.parametrize(("model", "changes", "traced"), TRACED, ids=lambda x: x if isinstance(x, str) else "")
def test_the_account_equals_the_trace(model: str, changes: dict[str, Any], traced: int) -> None:
    recipe = Recipe(trainer="transformers", loss="fused", **changes)
    assert worst(model, recipe) == pytest.approx(traced, rel=0.001)


def test_axolotl_has_the_loss_without_the_layers() -> None:
    own, alone = (
        worst("smollm2-135m", Recipe(trainer=t, loss="fused", **FULL)) for t in ("transformers", "axolotl-loss")
    )
    assert alone > 1.1 * own


@pytest.mark.parametrize("model", ["smollm2-135m", "gemma-3-270m"])
def test_a_trace_says_the_same(model: str) -> None:
    pytest.importorskip("liger_kernel", reason="pip install liger-kernel")
    from memfit.allocator.replay import replay
    from memfit.footprints.footprint_of_trace import footprint_of
    from memfit.models.hub import resolve_config
    from memfit.virtual.tracing import trace_recipe

    gpu, recipe = find_gpu("a100-80gb"), Recipe(trainer="transformers", loss="fused", **FULL)
    tape, _ = trace_recipe(recipe, resolve_config(model), gpu)
    footprint = footprint_of(tape, replay(tape.events), (), (), gpu.context_bytes)
    traced = max(p.levels.requested for p in footprint.phases if p.phase in ("first_step", "step"))
    assert worst(model, recipe) == pytest.approx(traced, rel=0.001)


PATCH = """
import torch
def norm(self, x):
    return x
def loss(*args, **words):
    return 0
class LigerNorm(torch.nn.Module):
    pass
def apply():
    from transformers.models.{family} import modeling_{family} as module
    module.{name}RMSNorm, module.{name}ForCausalLM.forward = LigerNorm, norm
    torch.nn.functional.cross_entropy, module.nn.LayerNorm = loss, LigerNorm
"""


@pytest.fixture
def no_liger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another package of its name can be imported."""
    real = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "liger_kernel"}
    for name in real:
        del sys.modules[name]
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] == "liger_kernel"]:
        del sys.modules[name]
    sys.modules.update(real)


@pytest.mark.parametrize("known", [False, True], ids=["imported on the card", "imported before it"])
@pytest.mark.parametrize(("family", "name"), [("llama", "Llama"), ("arcee", "Arcee")])
@pytest.mark.usefixtures("no_liger")
def test_what_liger_replaces_is_back_after_the_card(
    family: str, name: str, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arcee's module is imported for Liger alone."""
    pytest.importorskip("transformers.models.llama.modeling_llama")
    import torch

    from memfit import virtual_gpu

    folder = tmp_path / "liger_kernel" / "transformers"
    folder.mkdir(parents=True)
    for file, text in (("../__init__", ""), ("__init__", ""), ("monkey_patch", PATCH.format(family=family, name=name))):
        (folder / f"{file}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    patch = "liger_kernel.transformers.monkey_patch"
    if known:
        importlib.import_module(patch)
    of_torch = torch.nn.functional.cross_entropy, torch.nn.LayerNorm
    with virtual_gpu("a100-80gb"):
        importlib.import_module(patch).apply()
        module = vars(sys.modules[f"transformers.models.{family}.modeling_{family}"])
        assert torch.nn.LayerNorm is module[f"{name}RMSNorm"]
        assert of_torch[0] is not torch.nn.functional.cross_entropy
    assert (torch.nn.functional.cross_entropy, torch.nn.LayerNorm) == of_torch
    own = module[f"{name}RMSNorm"], module[f"{name}ForCausalLM"].forward
    assert {made.__module__ for made in own} == {module["__name__"]}


def test_the_table_is_ligers_own() -> None:
    pytest.importorskip("liger_kernel", reason="pip install liger-kernel")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    assert set(LIGER) <= set(MODEL_TYPE_TO_APPLY_LIGER_FN)
