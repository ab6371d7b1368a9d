# Adapters are small; embedding and head are trained whole beside them, as PEFT's modules_to_save are, in copies.
# cause: modules-to-save · card: 180 MiB
class Saved(nn.Module):
    """A frozen module, and the copy of it that is trained."""

    def __init__(self, module):
        super().__init__()
        self.original_module = module.requires_grad_(False)
        self.modules_to_save = nn.ModuleDict({"default": type(module)(*module.weight.T.shape, bias=False)})

    def forward(self, x):
        return self.modules_to_save["default"](x)


down, up = nn.Linear(16384, 256, bias=False), nn.Linear(256, 16384, bias=False)
model = nn.Sequential(Saved(down), nn.GELU(), nn.Linear(256, 256), Saved(up)).to("cuda")  # <-
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
for _ in range(20):
    x = torch.randn(64, 16384, device="cuda")
    F.mse_loss(model(x), x).backward()
    optimizer.step()
    optimizer.zero_grad()
