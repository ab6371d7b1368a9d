# An EMA copy lies on the card.
# cause: two-copies · card: 64 MiB
import torch
from torch import nn
from torch.nn import functional as F

def mlp(width=256, depth=4, **kw):
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to("cuda", **kw)


from copy import deepcopy

model = mlp(1024, 6)
ema = deepcopy(model)  # <-
model(torch.randn(1024, 1024, device="cuda")).pow(2).mean().backward()
