# An error that was kept holds the tensors of its frames.
# cause: exception · card: 64 MiB
model = mlp(256, 16)


def attempt(batch):
    hidden = [model[:8](torch.randn(batch, 256, device="cuda"))]
    if batch > 1000:
        raise ValueError("not divisible")
    return model[8:](hidden[0])


try:
    attempt(2048)
except ValueError as error:
    failed = error  # <-
attempt(1000).pow(2).mean().backward()
