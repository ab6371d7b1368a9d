# Every experiment's model and optimizer stay in the table of results: the optimizer's first step meets a full card.
# cause: leak · card: 300 MiB
results = {}
for rate in (1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 3e-6):
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(5):
        loss = model(torch.randn(64, 1024, device="cuda")).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    results[rate] = (loss.item(), model, optimizer)  # <-
