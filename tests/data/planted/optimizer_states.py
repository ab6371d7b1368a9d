# The first step makes two states per weight.
# cause: optimizer-states · card: 96 MiB
import torch
from torch import nn
from torch.nn import functional as F

def mlp(width=256, depth=4, **kw):
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to("cuda", **kw)


model = mlp(1024, 6)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(3):
    model(torch.randn(8, 1024, device="cuda")).pow(2).mean().backward()
    optimizer.step()  # <-
    optimizer.zero_grad()
