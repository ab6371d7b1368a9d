# The last batch is longer than the ones before it.
# cause: long-sample · card: 256 MiB
model = mlp(1024, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for length in (2048, 2048, 2048, 2048, 8192):
    out = model(torch.randn(length, 1024, device="cuda"))  # <-
    out.pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
