# A long sequence goes through a cell: all of its steps wait for the backward at its end.
# cause: activations · card: 120 MiB
cell = nn.LSTMCell(256, 512).cuda()
optimizer = torch.optim.Adam(cell.parameters())
for epoch in range(3):
    h = c = torch.zeros(64, 512, device="cuda")
    for _ in range(1200):
        h, c = cell(torch.randn(64, 256, device="cuda"), (h, c))  # <-
    optimizer.zero_grad()
    h.mean().backward()
    optimizer.step()
