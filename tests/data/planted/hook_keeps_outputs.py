# Forward hooks keep every output.
# cause: leak · card: 64 MiB
import torch
from torch import nn
from torch.nn import functional as F

def mlp(width=256, depth=4, **kw):
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to("cuda", **kw)


model = mlp()
seen = []


def keep(module, inputs, output):
    seen.append(output.detach())  # <-


for layer in model:
    layer.register_forward_hook(keep)
for _ in range(500):
    model(torch.randn(512, 256, device="cuda")).pow(2).mean().backward()
    model.zero_grad()
