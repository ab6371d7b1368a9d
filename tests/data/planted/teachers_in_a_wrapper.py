# The teachers lie inside the module that is trained, which calls them for what the student shall say.
# cause: reference-model · card: 130 MiB
def mlp(width, depth):
    return nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())])


class Distiller(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = mlp(1024, 1)
        self.teachers = nn.ModuleList(mlp(1024, 5) for _ in range(5)).requires_grad_(False)  # <-

    def forward(self, x):
        with torch.no_grad():
            wanted = sum(teacher(x) for teacher in self.teachers).softmax(-1)
        logits = self.student(x)
        return F.kl_div(logits.log_softmax(-1), wanted, reduction="batchmean")


model = Distiller().to("cuda")
optimizer = torch.optim.AdamW(model.student.parameters())
for _ in range(3):
    model(torch.randn(2048, 1024, device="cuda")).backward()
    optimizer.step()
    optimizer.zero_grad()
