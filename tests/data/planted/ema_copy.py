# An EMA copy lies on the card.
# cause: two-copies · card: 64 MiB
from copy import deepcopy

model = mlp(1024, 6)
ema = deepcopy(model)  # <-
model(torch.randn(1024, 1024, device="cuda")).pow(2).mean().backward()
