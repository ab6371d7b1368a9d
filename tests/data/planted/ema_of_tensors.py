# The shadow of an EMA is a dict of clones on the card, made beside a model that nearly fills it.
# cause: two-copies · card: 135 MiB
class EMA:
    def __init__(self, model, decay=0.999):
        self.decay = decay
        self.shadow = {}
        for name, param in model.named_parameters():
            if param.requires_grad:
                self.shadow[name] = param.data.clone()  # <-

    @torch.no_grad()
    def update(self, model):
        for name, param in model.named_parameters():
            self.shadow[name].mul_(self.decay).add_(param.data, alpha=1 - self.decay)


class Mixer(nn.Module):
    def __init__(self, width=1024, depth=10):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


model = Mixer().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ema = EMA(model)
for step in range(10):
    out = model(torch.randn(256, 1024, device="cuda"))
    out.square().mean().backward()
    optimizer.step()
    ema.update(model)
    optimizer.zero_grad()
