# Samples of a generator are kept for a film, a few between steps: they lie between other tensors, and what is free is in pieces.
# cause: leak · card: 200 MiB
G = nn.Sequential(nn.Linear(100, 1024), nn.ReLU(), nn.Linear(1024, 3 * 32 * 32), nn.Unflatten(1, (3, 32, 32))).cuda()
D = nn.Sequential(nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(64, 128, 4, 2, 1), nn.Flatten(), nn.Linear(8192, 1)).cuda()
of_g, of_d = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
frames = []
fixed = torch.randn(64, 100, device="cuda")
for number in range(2000):
    fake = G(torch.randn(128, 100, device="cuda"))
    of_d.zero_grad()
    (D(torch.randn(128, 3, 32, 32, device="cuda")).mean() + D(fake.detach()).mean()).backward()
    of_d.step()
    of_g.zero_grad()
    D(fake).mean().backward()
    of_g.step()
    if number % 5 == 0:
        frames.append(G(fixed).detach())  # <-
