"""Run torchao's pretraining of a Llama 2 of 1B (benchmarks/quantized_training/pretrain_llama2.py of September 2024)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torchao._models.llama.model import ModelArgs, Transformer
from torchao.prototype import low_bit_optim
from torchao.prototype.quantized_training import int8_weight_only_quantized_training
from torchao.quantization import quantize_

from published.rows import Row

PACKAGES = ("torchao",)
STEPS = 3
SIZES = {"n_layer": 24, "n_head": 24, "dim": 1536, "intermediate_size": 6144}  # the script's "1B"
# The script keeps all tokens of TinyStoriesV2-GPT4-train.txt on the card, BOS and EOS around every story. Its author
# publishes them tokenized that way and states their number: huggingface.co/datasets/gaunernst/tokenized-datasets.
TOKENS = 587_316_317


def run(row: Row) -> None:
    """Train on slices of the data."""
    batch, length = row.number("micro_batch"), row.number("seq_len")
    model = Transformer(ModelArgs(block_size=length, **SIZES)).bfloat16().cuda()
    with torch.device("cuda"):
        model.setup_caches(batch, length, training=True)
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if "INT8" in row.framework:
        quantize_(model, int8_weight_only_quantized_training(), set_inductor_config=False)
    optimizer = low_bit_optim._AdamW(model.parameters(), lr=3e-4, weight_decay=1e-2)
    data = torch.zeros(TOKENS, dtype=torch.uint16, device="cuda")
    model.train()
    score = torch.compile(_loss) if row.framework.endswith("compile") else _loss
    for _ in range(STEPS):
        ids = data[: batch * length].view(batch, length).long()
        loss = score(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _loss(model: Transformer, batch: Tensor) -> Tensor:
    logits = model(batch)[:, :-1].float().flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten())
