# Functools.lru_cache without a limit keeps the dense propagation matrix of every graph on the card.
# cause: leak · card: 2048 MiB
import functools

import torch
from torch import nn
from torch.nn import functional as F


NODES = {graph: 2400 + 37 * (graph * 7 % 23) for graph in range(120)}


@functools.lru_cache(maxsize=None)  # <-
def propagation(graph):
    """D^-1/2 (A + I) D^-1/2 of one graph of the corpus."""
    count = NODES[graph]
    source, target = torch.randint(count, (2, count * 8), device="cuda")
    adjacency = torch.zeros(count, count, device="cuda")
    adjacency[source, target] = 1
    adjacency.fill_diagonal_(1)
    scale = adjacency.sum(1).rsqrt()
    return adjacency.mul_(scale[:, None]).mul_(scale[None, :])


class GraphConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x, graph):
        return propagation(graph) @ self.linear(x)


class GCN(nn.Module):
    def __init__(self, inputs=128, width=256, classes=40):
        super().__init__()
        self.first, self.second, self.last = GraphConv(inputs, width), GraphConv(width, width), GraphConv(width, classes)

    def forward(self, x, graph):
        x = F.dropout(F.relu(self.first(x, graph)), 0.5, self.training)
        x = F.dropout(F.relu(self.second(x, graph)), 0.5, self.training)
        return self.last(x, graph)


def train_epoch(model, optimizer, graphs):
    model.train()
    seen = 0
    for graph in graphs:
        x = torch.randn(NODES[graph], 128).cuda()
        y = torch.randint(40, (NODES[graph],)).cuda()
        loss = F.cross_entropy(model(x, graph), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += len(x)
    return seen


def main():
    model = GCN().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    for epoch in range(3):
        print("epoch", epoch, "nodes", train_epoch(model, optimizer, list(NODES)))
        scheduler.step()


if __name__ == "__main__":
    main()
