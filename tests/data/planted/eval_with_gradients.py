# no_grad is forgotten in the evaluation, and losses are kept.
# cause: eval-graph · card: 64 MiB
model = mlp(256, 8)
model(torch.randn(512, 256, device="cuda")).pow(2).mean().backward()
model.zero_grad()
model.eval()
losses = []
for _ in range(100):
    losses.append(model(torch.randn(512, 256, device="cuda")).pow(2).mean())  # <-
