# The best state so far is cloned on the card, in the midst of training.
# cause: two-copies · card: 136 MiB
model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(1024, 1024), nn.GELU())]).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
best_state = {}
for step in range(10):
    model(torch.randn(1024, 1024, device="cuda")).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 3:
        best_state = {name: t.clone() for name, t in model.state_dict().items()}  # <-
