# Four small batches are accumulated without trouble; then AMSGrad makes three states per weight.
# cause: optimizer-states · card: 260 MiB
class Recommender(nn.Module):
    def __init__(self, users=60_000, items=40_000, width=128):
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.head = nn.Sequential(nn.Linear(2 * width, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, user, item):
        return self.head(torch.cat([self.users(user), self.items(item)], -1)).squeeze(-1)


class Loop:
    def __init__(self, model, accumulate=4):
        self.model, self.accumulate = model, accumulate
        groups = [{"params": model.head.parameters(), "lr": 1e-3}]
        groups += [{"params": table.parameters(), "lr": 1e-2} for table in (model.users, model.items)]
        self.optimizer = torch.optim.Adam(groups, amsgrad=True, foreach=False)

    def batches(self):
        while True:
            yield torch.randint(0, 60_000, (256,)).cuda(), torch.randint(0, 40_000, (256,)).cuda(), torch.rand(256).cuda()

    def run(self, steps):
        for number, (user, item, rating) in zip(range(steps), self.batches()):
            loss = nn.functional.mse_loss(self.model(user, item), rating) / self.accumulate
            loss.backward()
            if number % self.accumulate == self.accumulate - 1:
                self.update()

    def update(self):
        self.optimizer.step()  # <-
        self.optimizer.zero_grad(set_to_none=True)


Loop(Recommender().cuda()).run(40)
