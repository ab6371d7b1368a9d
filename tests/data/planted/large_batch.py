# A batch that is too large.
# cause: activations · card: 64 MiB
model = mlp(128, 2)
out = model(torch.randn(65536, 128, device="cuda"))  # <-
out.pow(2).mean().backward()
