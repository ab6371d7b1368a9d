# A decoder keeps the cache of every token for its hypotheses; each is one token longer than the one before.
# cause: kv-cache · card: 200 MiB
layers = [torch.nn.Linear(256, 256).cuda() for _ in range(4)]


@torch.no_grad()
def decode(tokens):
    hypotheses = []
    cache = [torch.zeros(16, 1, 256, device="cuda") for _ in layers]
    x = torch.randn(16, 1, 256, device="cuda")
    for _ in range(tokens):
        for number, layer in enumerate(layers):
            cache[number] = torch.cat([cache[number], layer(x)], 1)
            x = torch.softmax(x @ cache[number].transpose(1, 2), -1) @ cache[number]
        hypotheses.append(list(cache))  # <-
    return hypotheses


decode(400)
