# A frozen reference beside the policy.
# cause: reference-model · card: 64 MiB
import torch
from torch import nn
from torch.nn import functional as F

def mlp(width=256, depth=4, **kw):
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to("cuda", **kw)


policy = mlp(1024, 6)
reference = mlp(1024, 6)  # <-
policy(torch.randn(1024, 1024, device="cuda")).pow(2).mean().backward()
