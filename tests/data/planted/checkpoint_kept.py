# The checkpoint that training resumed from is still on the card.
# cause: stale-checkpoint · card: 64 MiB
import torch
from torch import nn
from torch.nn import functional as F

def mlp(width=256, depth=4, **kw):
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to("cuda", **kw)


checkpoint = {k: v.clone() for k, v in mlp(1024, 6).state_dict().items()}  # <-
model = mlp(1024, 6)
model.load_state_dict(checkpoint)
model(torch.randn(1024, 1024, device="cuda")).pow(2).mean().backward()
