# A queue for a contrastive loss keeps every batch with its graph, and each step reads all of it.
# cause: leak · card: 200 MiB
class Queue:
    def __init__(self):
        self.items = []

    def push(self, z):
        self.items.append(z)  # <-

    def all(self):
        return torch.cat(self.items).detach()


encoder = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).cuda()
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
queue = Queue()
for _ in range(400):
    z = encoder(torch.randn(256, 256, device="cuda"))
    queue.push(z)
    loss = (z @ queue.all().T).logsumexp(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
