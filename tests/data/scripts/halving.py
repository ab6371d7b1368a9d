"""Halves the batch for as long as the card runs out of memory."""

import gc

import torch
from torch import nn

batch = 1 << 20
model = nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096)).cuda()
optimizer = torch.optim.AdamW(model.parameters())


def train_step(size):
    x = torch.randn(size, 4096, device="cuda", generator=torch.Generator(device="cuda").manual_seed(0))
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


while True:
    try:
        train_step(batch)
        print("trained with", batch)
    except torch.OutOfMemoryError:
        batch //= 2
        if not batch:
            raise
        model.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
