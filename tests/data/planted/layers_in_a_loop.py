# Layers are called one by one; each is a pass of its own only in appearance.
# cause: activations · card: 160 MiB
layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(24)).to("cuda")
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(2048, 512, device="cuda")
    for layer in layers:
        h = F.gelu(layer(x))  # <-
        x = x + h
    x.pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
