# The last batch is longer than the ones before it.
# cause: long-sample · card: 256 MiB
import torch
from torch import nn
from torch.nn import functional as F

def mlp(width=256, depth=4, **kw):
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to("cuda", **kw)


model = mlp(1024, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for length in (2048, 2048, 2048, 2048, 8192):
    out = model(torch.randn(length, 1024, device="cuda"))  # <-
    out.pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
