# The gradients of training are still there when the evaluation begins.
# cause: eval-leftovers · card: 104 MiB
model = mlp(1024, 6)
held_out = torch.randn(4096, 1024, device="cuda")
model(torch.randn(8, 1024, device="cuda")).pow(2).mean().backward()
model.eval()
with torch.no_grad():
    score = model(held_out)  # <-
