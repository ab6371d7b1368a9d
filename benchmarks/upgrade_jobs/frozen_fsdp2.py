"""Train adapters beside frozen weights in bf16 under FSDP2, by accelerate."""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(2048, 2048, bias=False)
        self.down, self.up = nn.Linear(2048, 8, bias=False), nn.Linear(8, 2048, bias=False)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1_000_000)
accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
model = nn.Sequential(*(Block() for _ in range(8))).to(torch.bfloat16)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
model, optimizer = accelerator.prepare(model, optimizer)
for _ in range(2):
    loss = model(torch.randn(64, 2048, device=accelerator.device)).float().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
