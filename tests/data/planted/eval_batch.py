# The evaluation has a batch size of its own.
# cause: eval-batch · card: 64 MiB
model = mlp(512, 4)
model(torch.randn(64, 512, device="cuda")).pow(2).mean().backward()
model.zero_grad()
model.eval()
with torch.no_grad():
    score = model(torch.randn(16384, 512, device="cuda"))  # <-
