# Losses are collected with their graphs.
# cause: leak · card: 64 MiB
import torch
from torch import nn
from torch.nn import functional as F

def mlp(width=256, depth=4, **kw):
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to("cuda", **kw)


model = mlp()
losses = []
for _ in range(200):
    out = model(torch.randn(512, 256, device="cuda"))
    losses.append(out.pow(2).mean())  # <-
