# The states have room, the copy of all weights in a foreach step has not.
# cause: optimizer-step · card: 126 MiB
model = mlp(1024, 6)
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
for _ in range(3):
    model(torch.randn(8, 1024, device="cuda")).pow(2).mean().backward()
    optimizer.step()  # <-
    optimizer.zero_grad()
