# Each batch is a little longer than any before, and its kept vectors sit in the middle of a freed block.
# cause: fragmentation · card: 920 MiB
import contextlib

import torch
from torch import nn
from torch.nn import functional as F


class PassageEncoder(nn.Module):
    def __init__(self, vocab=30000, width=256, depth=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                                                  nn.Linear(4 * width, width)) for _ in range(depth))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)  # <-
        return F.normalize(x, dim=-1)


class Index:
    """Late interaction: 16 vectors for every passage stay on the card, to be searched there."""

    def __init__(self):
        self.parts = []

    def add(self, vectors):
        self.parts.append(vectors[:, :16].contiguous())

    def search(self, query):
        return torch.cat([(part @ query).amax(1) for part in self.parts]).topk(10)


def sorted_batches(count=28, shortest=64, longest=400, size=192):
    """Passages sorted by length, as encoders want them, so that little is padding."""
    for number in range(count):
        length = shortest + (longest - shortest) * number // count
        yield torch.randint(30000, (size, length))


def train(model, steps=6):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    for _ in range(steps):
        query, passage = (model(torch.randint(30000, (32, 48)).cuda()).mean(1) for _ in range(2))
        loss = F.cross_entropy(query @ passage.T / 0.05, torch.arange(32, device="cuda"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def build(model, batches):
    index = Index()
    for number, ids in enumerate(batches):
        index.add(model.eval()(ids.cuda()))
        if number % 10 == 0:
            print("batch", number, torch.cuda.memory_allocated() >> 20, "MiB")
    return index


def main():
    model = PassageEncoder().cuda()
    train(model)
    index = build(model, sorted_batches())
    print(index.search(torch.randn(256, device="cuda")).values.shape)


if __name__ == "__main__":
    main()
