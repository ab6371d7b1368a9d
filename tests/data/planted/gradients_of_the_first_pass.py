# Weights fill more than half of the card: their gradients do not fit beside them, however small the batch.
# cause: capacity · card: 900 MiB
model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(32)]).cuda()
loss = model(torch.randn(8, 2048, device="cuda")).pow(2).mean()
loss.backward()  # <-
