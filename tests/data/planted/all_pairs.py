# Differences of all pairs, made before there is any model.
# cause: activations · card: 300 MiB
x, y = torch.randn(6000, 64, device="cuda"), torch.randn(6000, 64, device="cuda")
distances = (x[:, None, :] - y[None, :, :]).pow(2).sum(-1)  # <-
