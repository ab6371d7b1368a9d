# Early stopping keeps the state dict of every epoch that was better than the one before, cloned where it lies.
# cause: leak · card: 300 MiB
import heapq
import itertools

import torch
from torch import nn


class BestKeeper:
    """The k best states, worst first."""

    def __init__(self, k=50):
        self.k, self.heap, self.tie = k, [], itertools.count()

    def offer(self, score, model):
        state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        heapq.heappush(self.heap, (-score, next(self.tie), state))  # <-
        if len(self.heap) > self.k:
            heapq.heappop(self.heap)


def evaluate(model, batches=2):
    model.eval()
    with torch.no_grad():
        return sum(model(torch.randn(64, 512, device="cuda")).abs().mean().item() for _ in range(batches))


model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
keeper = BestKeeper()
for epoch in range(60):
    model.train()
    for _ in range(5):
        loss = model(torch.randn(256, 512, device="cuda")).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    keeper.offer(evaluate(model) - epoch, model)
