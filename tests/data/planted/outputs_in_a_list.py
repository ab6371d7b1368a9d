# Outputs are detached and kept on the card.
# cause: leak · card: 64 MiB
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for _ in range(500):
    out = model(torch.randn(512, 256, device="cuda"))
    out.pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    history.append(out.detach())  # <-
