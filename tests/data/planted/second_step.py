# The first step fits, the second has the states beside its activations.
# cause: optimizer-states · card: 112 MiB
model = mlp(1024, 4)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(3):
    out = model(torch.randn(1024, 1024, device="cuda"))  # <-
    loss = out.pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
