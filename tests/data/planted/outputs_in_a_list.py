# Outputs are detached and kept on the card.
# cause: leak · card: 64 MiB
import torch
from torch import nn
from torch.nn import functional as F

def mlp(width=256, depth=4, **kw):
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to("cuda", **kw)


model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for _ in range(500):
    out = model(torch.randn(512, 256, device="cuda"))
    out.pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    history.append(out.detach())  # <-
