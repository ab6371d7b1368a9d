# The first step of layers called one by one had room; the states it made leave none for the second.
# cause: optimizer-states · card: 130 MiB
layers = nn.Sequential(*[nn.Linear(512, 512) for _ in range(16)]).to("cuda")
optimizer = torch.optim.Adam(layers.parameters(), fused=True)
for _ in range(3):
    x = torch.randn(1024, 512, device="cuda")
    for layer in layers:
        h = F.gelu(layer(x))  # <-
        x = x + h
    x.pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
