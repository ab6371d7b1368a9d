# A handler that buffers keeps the records of bad samples, with their tracebacks, and these the tensors of the step.
# cause: exception · card: 200 MiB
import logging
import logging.handlers

import torch
from torch import nn

log = logging.getLogger("bad samples")  # <-
log.propagate = False
log.addHandler(logging.handlers.MemoryHandler(10_000, flushLevel=logging.CRITICAL))
net = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 8)).cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.1)


def train(x, label):
    scores = net(x.cuda())
    if label > 7:
        raise ValueError(label)
    scores.sum().backward()
    opt.step()
    opt.zero_grad()


for step in range(200):
    try:
        train(torch.randn(512, 1024), 255 if step % 3 == 2 else 1)
    except ValueError as bad:
        log.warning("sample %d: %s", step, bad, exc_info=True)
