# Losses are collected with their graphs.
# cause: leak · card: 64 MiB
model = mlp()
losses = []
for _ in range(200):
    out = model(torch.randn(512, 256, device="cuda"))
    losses.append(out.pow(2).mean())  # <-
