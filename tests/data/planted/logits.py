# A vocabulary of 32,000 in the loss.
# cause: logits · card: 240 MiB
import torch
from torch import nn
from torch.nn import functional as F

def mlp(width=256, depth=4, **kw):
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to("cuda", **kw)


body = mlp(128, 2)
head = nn.Linear(128, 32000, bias=False).cuda()
x = torch.randn(1024, 128, device="cuda")
logits = head(body(x))
labels = torch.zeros(1024, dtype=torch.long, device="cuda")
loss = F.cross_entropy(logits.float(), labels)  # <-
loss.backward()
