# The first step makes two states per weight.
# cause: optimizer-states · card: 96 MiB
model = mlp(1024, 6)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(3):
    model(torch.randn(8, 1024, device="cuda")).pow(2).mean().backward()
    optimizer.step()  # <-
    optimizer.zero_grad()
