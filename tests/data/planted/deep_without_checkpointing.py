# Activations of many layers.
# cause: activations · card: 64 MiB
model = mlp(256, 32)
out = model(torch.randn(2048, 256, device="cuda"))  # <-
out.pow(2).mean().backward()
