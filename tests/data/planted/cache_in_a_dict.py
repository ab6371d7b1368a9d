# A cache that nobody empties.
# cause: leak · card: 64 MiB
import torch
from torch import nn
from torch.nn import functional as F

def mlp(width=256, depth=4, **kw):
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to("cuda", **kw)


model = mlp()
cache = {}


def features(step, x):
    out = model(x)
    cache[step] = out.detach()  # <-
    return out


for step in range(500):
    features(step, torch.randn(512, 256, device="cuda")).pow(2).mean().backward()
    model.zero_grad()
