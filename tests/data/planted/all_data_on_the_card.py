# The whole dataset is put on the card before the first step.
# cause: temporaries · card: 600 MiB
model = nn.Linear(1024, 10).cuda()
data = [torch.randn(256, 1024) for _ in range(700)]
data = [part.cuda() for part in data]  # <-
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x in data:
    model(x).sum().backward()
    opt.step()
