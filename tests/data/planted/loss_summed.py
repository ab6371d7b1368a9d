# The loss is summed with its graph.
# cause: leak · card: 64 MiB
import torch
from torch import nn
from torch.nn import functional as F

def mlp(width=256, depth=4, **kw):
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to("cuda", **kw)


model = mlp()
total = torch.zeros((), device="cuda")
for _ in range(200):
    loss = model(torch.randn(512, 256, device="cuda")).pow(2).mean()
    total = total + loss  # <-
total.backward()
