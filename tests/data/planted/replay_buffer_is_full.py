# A replay buffer has been full for long when the batch becomes four times as large.
# cause: long-sample · card: 150 MiB
import random
from collections import deque

import torch
from torch import nn

net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1))
net.cuda()
opt = torch.optim.Adam(net.parameters())
segments = deque(maxlen=30)
random.seed(0)
for step in range(80):
    segments.append(torch.rand(32, 3, 80, 80, device="cuda"))
    count = 2 if step < 60 else 8
    frames = torch.stack([s[:8] for s in random.sample(list(segments), min(count, len(segments)))]).flatten(0, 1)
    loss = (net(frames) - frames).square().mean()  # <-
    opt.zero_grad()
    loss.backward()
    opt.step()
