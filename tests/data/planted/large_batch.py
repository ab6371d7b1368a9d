# A batch that is too large.
# cause: activations · card: 64 MiB
import torch
from torch import nn
from torch.nn import functional as F

def mlp(width=256, depth=4, **kw):
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to("cuda", **kw)


model = mlp(128, 2)
out = model(torch.randn(65536, 128, device="cuda"))  # <-
out.pow(2).mean().backward()
