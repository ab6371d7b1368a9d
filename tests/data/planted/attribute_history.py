# An object keeps a history of outputs.
# cause: leak · card: 64 MiB
import torch
from torch import nn
from torch.nn import functional as F

def mlp(width=256, depth=4, **kw):
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to("cuda", **kw)


class Trainer:
    def __init__(self):
        self.model = mlp()
        self.history = []

    def step(self):
        out = self.model(torch.randn(512, 256, device="cuda"))
        out.pow(2).mean().backward()
        self.model.zero_grad()
        self.history.append({"out": out.detach()})  # <-


trainer = Trainer()
for _ in range(500):
    trainer.step()
