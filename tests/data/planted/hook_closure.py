# The closure of a hook keeps every output; no variable of the program names it.
# cause: leak · card: 64 MiB
import torch
from torch import nn
from torch.nn import functional as F

def mlp(width=256, depth=4, **kw):
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to("cuda", **kw)


def watch(module):
    store = []
    module.register_forward_hook(lambda m, i, o: store.append(o.detach()))  # <-


model = mlp()
watch(model[0])
for _ in range(500):
    model(torch.randn(512, 256, device="cuda")).pow(2).mean().backward()
    model.zero_grad()
