# The evaluation has a batch size of its own.
# cause: eval-batch · card: 64 MiB
import torch
from torch import nn
from torch.nn import functional as F

def mlp(width=256, depth=4, **kw):
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to("cuda", **kw)


model = mlp(512, 4)
model(torch.randn(64, 512, device="cuda")).pow(2).mean().backward()
model.zero_grad()
model.eval()
with torch.no_grad():
    score = model(torch.randn(16384, 512, device="cuda"))  # <-
