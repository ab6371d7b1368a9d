# A recurrent state is never detached, and retain_graph keeps what it was made from.
# cause: leak · card: 64 MiB
import torch
from torch import nn
from torch.nn import functional as F

def mlp(width=256, depth=4, **kw):
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to("cuda", **kw)


cell = mlp()
state = torch.zeros(256, 256, device="cuda")
for _ in range(300):
    state = cell(torch.randn(256, 256, device="cuda") + state)  # <-
    state.pow(2).mean().backward(retain_graph=True)
