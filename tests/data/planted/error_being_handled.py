# The second try runs inside the handler of the first.
# cause: exception · card: 72 MiB
model = mlp(256, 16)


def attempt(batch):
    hidden = model(torch.randn(batch, 256, device="cuda"))
    if batch > 1000:
        raise ValueError("not divisible")
    return hidden


try:
    attempt(1200)
except ValueError:
    attempt(900).pow(2).mean().backward()  # <-
