# After each epoch a whole copy of the net is made on the card, to be changed and written.
# cause: two-copies · card: 180 MiB
import copy

import torch
from torch import nn

net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24))).cuda()
for p in net[:23].parameters():
    p.requires_grad_(False)
opt = torch.optim.SGD(net[23].parameters(), lr=0.1)
for _ in range(2):
    for _ in range(4):
        net(torch.randn(16, 1024, device="cuda")).sum().backward()
        opt.step()
        opt.zero_grad()
    written = copy.deepcopy(net)  # <-
    torch.save(written.half().state_dict(), "/dev/null")
