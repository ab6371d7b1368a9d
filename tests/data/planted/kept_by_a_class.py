# A meter keeps every loss with its graph in a dictionary of its class, which all meters share.
# cause: leak · card: 64 MiB
class Meter:
    seen = {}

    def __init__(self, name):
        self.name = name

    def update(self, value):
        Meter.seen.setdefault(self.name, []).append(value)  # <-


model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).to("cuda")
meter = Meter("regulariser")
for _ in range(300):
    out = model(torch.randn(512, 256, device="cuda"))
    meter.update(out.abs().mean())
    model(torch.randn(512, 256, device="cuda")).pow(2).mean().backward()
