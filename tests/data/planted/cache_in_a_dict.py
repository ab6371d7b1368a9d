# A cache that nobody empties.
# cause: leak · card: 64 MiB
model = mlp()
cache = {}


def features(step, x):
    out = model(x)
    cache[step] = out.detach()  # <-
    return out


for step in range(500):
    features(step, torch.randn(512, 256, device="cuda")).pow(2).mean().backward()
    model.zero_grad()
