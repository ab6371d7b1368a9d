"""Run one loss operator as Liger's and Apple's benchmarks do, with the bytes that these call its memory."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from published.case import NotCovered
from published.rows import Row

PACKAGES = ("liger-kernel",)
SOFTCAP = 30.0  # of Gemma 2's logits
WIDTH, VOCABULARY, TOKENS = 2304, 256_000, 8192  # of Gemma 2 2B in Apple's benchmark


def run(row: Row) -> int:
    """Run the operator of a row; return its allocated bytes as its benchmark counts them. Raises NotCovered."""
    return _liger(row) if row.group == "op_liger" else _apple(row)


def _liger(row: Row) -> int:
    """Run benchmark_cross_entropy.py or benchmark_fused_linear_cross_entropy.py: the peak, inputs and weights in it."""
    name, _, given = row.model.partition(" ")
    about, count = json.loads(given), row.number("micro_batch")
    if name == "cross_entropy":
        logits = torch.randn(about["B"] * about["T"], count, device="cuda", requires_grad=True)
        target = torch.randint(count, (logits.shape[0], 1), device="cuda").squeeze(1)
        loss = torch.nn.CrossEntropyLoss() if row.loss_kernel == "huggingface" else _of_liger("LigerCrossEntropyLoss")
        return _highest(lambda: loss(logits, target).backward())
    dtype = getattr(torch, about["dtype"].removeprefix("torch."))
    # the benchmark puts the head of either kernel on the card and runs one
    head, _other = (torch.nn.Linear(about["H"], about["V"], bias=False, dtype=dtype).to("cuda") for _ in range(2))
    hidden = torch.randn(count, about["H"], dtype=dtype, device="cuda", requires_grad=True)
    target = torch.randint(about["V"], (count, 1), device="cuda").squeeze(1)
    plain, fused = torch.nn.CrossEntropyLoss(), _of_liger("LigerFusedLinearCrossEntropyLoss")
    if row.loss_kernel == "huggingface":
        return _highest(lambda: plain(head(hidden), target).backward())
    return _highest(lambda: fused(head.weight, hidden, target).backward())


def _of_liger(name: str) -> Any:
    from liger_kernel import transformers as liger

    return getattr(liger, name)()


def _highest(step: Any) -> int:
    """Return the highest allocated bytes of the second of two steps: gradients exist and are added to."""
    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def _apple(row: Row) -> int:
    """Run benchmark/memory.py: how far the peak rises above what is held when the operator begins."""
    if row.loss_kernel not in ("baseline", "torch_compile"):
        raise NotCovered("the kernels of cut cross entropy run on no card of ours")
    hidden = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(VOCABULARY, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(VOCABULARY, (TOKENS,), device="cuda")
    kind, compiled = row.method.rpartition("loss-")[2], row.loss_kernel == "torch_compile"
    if compiled and kind != "fw":
        raise NotCovered("what the backward keeps is the choice of the compiler, here of PyTorch 2.4's")
    loss = torch.compile(_loss) if compiled else _loss
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = loss(hidden, head, target)
    if kind == "bw":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    if kind != "fw":
        made.backward()
    return torch.cuda.max_memory_allocated() - before


def _loss(hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of capped logits, as the baseline writes it."""
    logits = hidden @ head.T
    logits = torch.tanh(logits / SOFTCAP) * SOFTCAP
    return torch.nn.functional.cross_entropy(logits.float(), target)
