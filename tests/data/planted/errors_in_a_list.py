# The error of a batch that was too large is kept, and with it the frames and tensors of that try.
# cause: exception · card: 300 MiB
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(12)]).cuda()


def step(batch):
    x = torch.randn(batch, 512, device="cuda")
    model(x).pow(2).mean().backward()


errors = []
for batch in (8192, 4096):
    try:
        step(batch)
    except RuntimeError as error:
        errors.append(error)  # <-
        torch.cuda.empty_cache()
step(2048)
