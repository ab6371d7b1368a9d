# A prefetcher puts three batches onto the card for every one that training takes.
# cause: leak · card: 300 MiB
from collections import deque

import torch
from torch import nn


class Prefetcher:
    def __init__(self, source, ahead=3):
        self.source, self.ahead = iter(source), ahead
        self.ready = deque()

    def __iter__(self):
        return self

    def __next__(self):
        for _ in range(self.ahead):
            item = next(self.source, None)
            if item is None:
                break
            self.ready.append({key: value.to("cuda", non_blocking=True) for key, value in item.items()})  # <-
        if not self.ready:
            raise StopIteration
        return self.ready.popleft()


def batches(n):
    for _ in range(n):
        yield {"image": torch.rand(16, 3, 64, 64), "label": torch.randint(0, 10, (16,)), "weight": torch.rand(16)}


net = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8192, 10)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step, batch in enumerate(Prefetcher(batches(3000))):
    losses = nn.functional.cross_entropy(net(batch["image"]), batch["label"], reduction="none")
    loss = (losses * batch["weight"]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
