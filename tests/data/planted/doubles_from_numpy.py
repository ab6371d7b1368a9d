# Data of numpy have 64 bits, so the model was made to have them, too.
# cause: wrong-dtype · card: 300 MiB
import numpy as np
import torch
from torch import nn

data = torch.from_numpy(np.random.rand(4096, 1024))
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(5)]).double().cuda()  # <-
opt = torch.optim.AdamW(model.parameters())
for _ in range(3):
    loss = model(data.cuda()).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
