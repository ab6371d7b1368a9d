# The loss is summed with its graph.
# cause: leak · card: 64 MiB
model = mlp()
total = torch.zeros((), device="cuda")
for _ in range(200):
    loss = model(torch.randn(512, 256, device="cuda")).pow(2).mean()
    total = total + loss  # <-
total.backward()
