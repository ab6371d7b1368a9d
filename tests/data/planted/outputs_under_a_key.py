# Metrics of all steps, by name: numbers under one, whole outputs under another.
# cause: leak · card: 200 MiB
from collections import defaultdict

import torch
from torch import nn

net = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def step(x, metrics):
    out = net(x)
    loss = out.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    metrics["out"].append(out)  # <-
    for name, value in {"loss": loss, "norm": x.norm()}.items():
        metrics[name].append(value.item())


metrics = defaultdict(list)
for _ in range(1000):
    step(torch.randn(256, 1024, device="cuda"), metrics)
