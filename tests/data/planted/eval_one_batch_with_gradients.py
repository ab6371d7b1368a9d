# no_grad is forgotten in the evaluation, whose batch is larger.
# cause: eval-graph · card: 64 MiB
model = mlp(256, 8)
model(torch.randn(256, 256, device="cuda")).pow(2).mean().backward()
model.zero_grad()
model.eval()
score = model(torch.randn(4096, 256, device="cuda")).pow(2).mean()  # <-
