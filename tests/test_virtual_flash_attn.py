"""flash-attn's stand-in on the virtual card: found by those who ask, and to the byte what flash_api.cpp allocates."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from memfit import Recipe, estimate, find_gpu, resolve_model, virtual_gpu  # noqa: E402
from memfit.allocator.replay import replay  # noqa: E402
from memfit.errors import Unsupported  # noqa: E402
from memfit.models.hub import resolve_config  # noqa: E402
from memfit.nouns.tape import Alloc  # noqa: E402
from memfit.virtual.libraries.flash_attn import standing_in  # noqa: E402
from memfit.virtual.scripts.script import trace_script  # noqa: E402
from memfit.virtual.tracing import trace_recipe  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
A100 = find_gpu("a100-80gb")
HALF: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}


def peak(action: Any) -> int:
    """Bytes requested at most while `action` runs, above those before it."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    kept = action()
    found = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    del kept
    return int(found)


def test_it_is_installed_only_inside() -> None:
    from transformers.utils import is_flash_attn_2_available

    there = is_flash_attn_2_available()
    with virtual_gpu("a100-80gb"), standing_in():
        import flash_attn

        assert flash_attn.__version__ == importlib.metadata.version("flash-attn") == "2.8.3"
        assert is_flash_attn_2_available()
    assert is_flash_attn_2_available() is there
    assert there or importlib.util.find_spec("flash_attn") is None


def test_decoding_is_refused_with_a_way_out() -> None:
    with virtual_gpu("a100-80gb"), standing_in():
        from flash_attn import flash_attn_with_kvcache

        with pytest.raises(Unsupported, match="kvcache") as refused:
            flash_attn_with_kvcache()
    assert "sdpa" in refused.value.hint


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("deterministic", [False, True])
def test_buffers_of_a_batch(kv_heads: int, deterministic: bool) -> None:
    batch, tokens, heads, width = 2, 1000, 8, 128
    with virtual_gpu("a100-80gb"), standing_in():
        from flash_attn import flash_attn_func

        q = torch.empty(batch, tokens, heads, width, requires_grad=True, **HALF)
        k, v = (torch.empty(batch, tokens, kv_heads, width, requires_grad=True, **HALF) for _ in "kv")
        made = []
        forward = peak(lambda: made.append(flash_attn_func(q, k, v, causal=True, deterministic=deterministic)))
        one, rows = 2 * q.numel(), 4 * batch * heads * tokens
        assert forward == one + rows + 16  # the output, the log-sum-exp, the random state
        grad = torch.empty_like(made[0])
        rounded = batch * 1024 * heads
        splits = -(-A100.sm_count // (batch * heads)) if deterministic and A100.sm_count else 1
        expanded = 2 * one if kv_heads != heads else 0
        gradients = one + 4 * k.numel()
        backward = peak(lambda: torch.autograd.grad(made.pop(), (q, k, v), grad))
        assert backward == gradients + 4 * rounded + 4 * splits * rounded * width + expanded


def test_buffers_of_sequences_end_to_end() -> None:
    lengths, heads, width = (300, 500, 200), 4, 64
    with virtual_gpu("a100-80gb"), standing_in():
        from flash_attn import flash_attn_varlen_func

        total = sum(lengths)
        q, k, v = (torch.empty(total, heads, width, requires_grad=True, **HALF) for _ in "qkv")
        starts = torch.tensor([0, 300, 800, 1000], dtype=torch.int32, device="cuda")
        out = flash_attn_varlen_func(q, k, v, starts, starts, 500, 500, causal=True)
        assert out.shape == q.shape
        assert out.grad_fn.saved_tensors[4].shape == (heads, total)
        grad, padded = torch.empty_like(out), (total + 128 * 3) * heads
        found = peak(lambda: torch.autograd.grad(out, (q, k, v), grad))
        assert found == 3 * 2 * q.numel() + 4 * padded + 4 * padded * width


@pytest.mark.parametrize(
    ("card", "dtype", "width", "said"),
    [("v100-16gb", torch.float16, 64, "Ampere"), ("l4", torch.float32, 64, "fp16 and bf16"), 
     ("l4", torch.float16, 320, "256")],
)  # fmt: skip
def test_what_the_kernels_refuse_is_refused(card: str, dtype: Any, width: int, said: str) -> None:
    with virtual_gpu(card), standing_in():
        from flash_attn import flash_attn_func

        q = torch.empty(1, 16, 2, width, device="cuda", dtype=dtype)
        with pytest.raises(RuntimeError, match=said):
            flash_attn_func(q, q, q)


@pytest.mark.parametrize("knobs", [{}, {"micro_batch": 3}, {"padding": "packing", "micro_batch": 2}], ids=str)
def test_the_formulas_agree(knobs: dict[str, Any]) -> None:
    """Alone, padded (rows are picked and put back), and packed without padding."""
    recipe = Recipe(
        method="lora",
        trainer="trl",
        loss="fused",
        attention="flash",
        sequence_length=1024,
        checkpointing="none",
        **knobs,
    )
    tape, _ = trace_recipe(recipe, resolve_config("llama-3.2-1b"), A100)
    levels = replay(tape.events).by_phase()
    formula = {p.phase: p.levels for p in estimate(resolve_model("llama-3.2-1b"), recipe, A100).phases}
    for phase in ("first_step", "step"):
        assert formula[phase].requested == pytest.approx(levels[phase].requested, rel=1e-3)


SCRIPT = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
config = LlamaConfig(vocab_size=500, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2)
model = AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention_2", dtype=torch.bfloat16).cuda()
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.zeros(2, 64, dtype=torch.long, device="cuda")
mask = torch.ones_like(ids)
mask[1, 32:] = 0
for step in range(5):
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_that_names_it_gets_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    tape, outcome = trace_script(tmp_path / "train.py", [], "l4", steps=2)
    assert outcome.steps == 2
    assert any("flash-attn" in line for line in outcome.assumed)
    assert any("flash_attn_2" in event.label for event in tape.events if isinstance(event, Alloc))
