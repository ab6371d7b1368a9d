# no_grad is forgotten in the evaluation, whose batch is larger.
# cause: eval-graph · card: 64 MiB
import torch
from torch import nn
from torch.nn import functional as F

def mlp(width=256, depth=4, **kw):
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to("cuda", **kw)


model = mlp(256, 8)
model(torch.randn(256, 256, device="cuda")).pow(2).mean().backward()
model.zero_grad()
model.eval()
score = model(torch.randn(4096, 256, device="cuda")).pow(2).mean()  # <-
