# no_grad is forgotten in the evaluation, and losses are kept.
# cause: eval-graph · card: 64 MiB
import torch
from torch import nn
from torch.nn import functional as F

def mlp(width=256, depth=4, **kw):
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to("cuda", **kw)


model = mlp(256, 8)
model(torch.randn(512, 256, device="cuda")).pow(2).mean().backward()
model.zero_grad()
model.eval()
losses = []
for _ in range(100):
    losses.append(model(torch.randn(512, 256, device="cuda")).pow(2).mean())  # <-
