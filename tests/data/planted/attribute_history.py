# An object keeps a history of outputs.
# cause: leak · card: 64 MiB
class Trainer:
    def __init__(self):
        self.model = mlp()
        self.history = []

    def step(self):
        out = self.model(torch.randn(512, 256, device="cuda"))
        out.pow(2).mean().backward()
        self.model.zero_grad()
        self.history.append({"out": out.detach()})  # <-


trainer = Trainer()
for _ in range(500):
    trainer.step()
