# A second model of the same size is made while the first is there.
# cause: two-copies · card: 80 MiB
model = mlp(1024, 6)
best = mlp(1024, 6)  # <-
model(torch.randn(4096, 1024, device="cuda")).pow(2).mean().backward()
