# Another process has most of the card.
# cause: other-process · card: 64 MiB
model = mlp(1024, 8)
model(torch.randn(4096, 1024, device="cuda")).pow(2).mean().backward()  # <-
