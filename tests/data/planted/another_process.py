# Another process has most of the card.
# cause: other-process · card: 64 MiB
import torch
from torch import nn
from torch.nn import functional as F

def mlp(width=256, depth=4, **kw):
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to("cuda", **kw)


model = mlp(1024, 8)
model(torch.randn(4096, 1024, device="cuda")).pow(2).mean().backward()  # <-
