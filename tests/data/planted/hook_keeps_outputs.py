# Forward hooks keep every output.
# cause: leak · card: 64 MiB
model = mlp()
seen = []


def keep(module, inputs, output):
    seen.append(output.detach())  # <-


for layer in model:
    layer.register_forward_hook(keep)
for _ in range(500):
    model(torch.randn(512, 256, device="cuda")).pow(2).mean().backward()
    model.zero_grad()
