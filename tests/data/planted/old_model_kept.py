# A second model of the same size is made while the first is there.
# cause: two-copies · card: 80 MiB
import torch
from torch import nn
from torch.nn import functional as F

def mlp(width=256, depth=4, **kw):
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to("cuda", **kw)


model = mlp(1024, 6)
best = mlp(1024, 6)  # <-
model(torch.randn(4096, 1024, device="cuda")).pow(2).mean().backward()
