# Clips of every length are swapped in a pool that stays as large: much is free, in pieces, when all are put together.
# cause: fragmentation · card: 425 MiB
import random

import torch
from torch import nn

rng = random.Random(5)


def draw():
    return torch.randn(rng.randint(1200, 5200), 256, device="cuda")


clips = [draw() for _ in range(72)]
net = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64)).cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(200):
    net(torch.stack([clip[:1200] for clip in rng.sample(clips, 8)])).mean().backward()
    opt.step()
    opt.zero_grad()
    for _ in range(6):
        i = rng.randrange(len(clips))
        clips[i] = None
        clips[i] = draw()
    if step % 50 == 49:
        print(torch.cat([clip[:1200] for clip in clips]).mean())  # <-
