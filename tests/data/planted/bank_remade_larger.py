# The memory bank grows by every batch's keys, it is never cut to its size.
# cause: leak · card: 640 MiB
import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Views(Dataset):
    def __len__(self):
        return 64 * 60

    def __getitem__(self, index):
        image = torch.randn(3, 64, 64)
        return image, image.flip(-1)


class Encoder(nn.Module):
    """Dense features: one vector per 4 x 4 pixels, and one for the image."""

    def __init__(self, width=64, dim=128):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU())
        self.dense = nn.Conv2d(2 * width, dim, 1)
        self.image = nn.Linear(2 * width, dim)

    def forward(self, x):
        h = self.trunk(x)
        dense = F.normalize(self.dense(h), dim=1).permute(0, 2, 3, 1).flatten(0, 2)
        return dense, F.normalize(self.image(h.mean((2, 3))), dim=-1)


class MemoryBank:
    def __init__(self, dim=128, size=65536):
        self.size = size
        self.features = torch.empty(0, dim, device="cuda")

    def push(self, keys):
        keep = self.features
        self.features = torch.cat([keep, keys.detach()])  # <-

    def negatives(self, count=2048):
        return self.features[torch.randint(len(self.features), (count,), device="cuda")]


def info_nce(query, positive, negatives, temperature=0.2):
    scores = torch.cat([(query * positive).sum(-1, keepdim=True), query @ negatives.T], 1) / temperature
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device=scores.device))


@torch.no_grad()
def momentum_update(online, target, rate=0.999):
    for ours, theirs in zip(online.parameters(), target.parameters()):
        theirs.lerp_(ours, 1 - rate)


def main():
    online = Encoder().cuda()
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.SGD(online.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    bank = MemoryBank()
    for step, (first, second) in enumerate(DataLoader(Views(), batch_size=64, drop_last=True)):
        dense_q, image_q = online(first.cuda())
        with torch.no_grad():
            dense_k, image_k = target(second.cuda())
        bank.push(dense_k)
        loss = info_nce(image_q, image_k, bank.negatives()) + info_nce(dense_q[::16], dense_k[::16], bank.negatives())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        momentum_update(online, target)


if __name__ == "__main__":
    main()
