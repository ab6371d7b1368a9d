# Activations of many layers.
# cause: activations · card: 64 MiB
import torch
from torch import nn
from torch.nn import functional as F

def mlp(width=256, depth=4, **kw):
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to("cuda", **kw)


model = mlp(256, 32)
out = model(torch.randn(2048, 256, device="cuda"))  # <-
out.pow(2).mean().backward()
