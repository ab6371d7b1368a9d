# The experts' weights alone are more than the card has, though already in bfloat16.
# cause: capacity · card: 160 MiB
EXPERTS = 64


class Expert(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False),
                                         nn.Linear(hidden, width, bias=False))

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MoE(nn.Module):
    def __init__(self, width, hidden, experts, active=2):
        super().__init__()
        self.router, self.active = nn.Linear(width, experts, bias=False), active
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(experts))

    def forward(self, x):
        shares, chosen = self.router(x).softmax(-1).topk(self.active, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, rank = (chosen == number).nonzero(as_tuple=True)
            out.index_add_(0, token, expert(x[token]) * shares[token, rank, None])
        return out


class Model(nn.Module):
    def __init__(self, vocab=16000, width=256, hidden=640, depth=4, experts=EXPERTS):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.mixers = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(depth))
        self.moes = nn.ModuleList(MoE(width, hidden, experts) for _ in range(depth))

    def forward(self, ids):
        x = self.embed(ids)
        for mixer, moe in zip(self.mixers, self.moes):
            x = x + mixer(x)[0]
            x = x + moe(x.flatten(0, 1)).view_as(x)
        return self.head(x)


def trainable(model):
    """Only routers and head are tuned."""
    for name, weight in model.named_parameters():
        weight.requires_grad_("router" in name or name.startswith("head"))
    return [weight for weight in model.parameters() if weight.requires_grad]


def main():
    model = Model().to(torch.bfloat16)
    print(sum(weight.numel() for weight in model.parameters()) / 1e6, "M weights")
    model.to("cuda")  # <-
    optimizer = torch.optim.AdamW(trainable(model), 1e-4, fused=True)
    for step in range(6):
        ids = torch.randint(16000, (2, 129)).cuda()
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


if __name__ == "__main__":
    main()
