# Every stage has an optimizer of its own, and the list of schedulers keeps them all, with their states.
# cause: leak · card: 220 MiB
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
schedulers = []
for stage in range(8):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 / (stage + 1))
    schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1))  # <-
    for _ in range(5):
        model(torch.randn(64, 1024, device="cuda")).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
