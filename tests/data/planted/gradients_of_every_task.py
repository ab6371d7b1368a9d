# Gradient surgery holds a flat gradient of all weights for each of six tasks, and projected copies.
# cause: temporaries · card: 1700 MiB
TASKS = {"depth": 1, "normals": 3, "edges": 1, "seg": 13, "keypoints": 8, "albedo": 3}


class Shared(nn.Module):
    def __init__(self, width=640, depth=12):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.GroupNorm(8, width), nn.Conv2d(width, width, 3, padding=1), nn.GELU())
                                    for _ in range(depth))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x


class MultiTask(nn.Module):
    def __init__(self, width=640):
        super().__init__()
        self.shared = Shared(width)
        self.heads = nn.ModuleDict({task: nn.Conv2d(width, outputs, 1) for task, outputs in TASKS.items()})

    def forward(self, images):
        h = self.shared(images)
        return {task: head(h) for task, head in self.heads.items()}


def flat_gradient(loss, weights):
    grads = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
    return torch.cat([grad.flatten() for grad in grads])


def surgery(losses, weights):
    """PCGrad: a gradient that works against another one is projected onto its normal plane."""
    flat = [flat_gradient(loss, weights) for loss in losses]  # <-
    projected = [grad.clone() for grad in flat]
    for i, grad in enumerate(projected):
        for j, other in enumerate(flat):
            if i != j:
                grad.sub_(other * ((grad @ other) / other.norm() ** 2).clamp(max=0))
    return torch.stack(projected).mean(0)


def apply(weights, flat):
    start = 0
    for weight in weights:
        weight.grad = flat[start:start + weight.numel()].view_as(weight)
        start += weight.numel()


def main():
    model = MultiTask().cuda()
    weights = list(model.shared.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, foreach=False)
    for step in range(8):
        images = torch.randn(4, 3, 128, 128).cuda()
        losses = [F.l1_loss(out, torch.randn_like(out)) for out in model(images).values()]
        optimizer.zero_grad(set_to_none=True)
        apply(weights, surgery(losses, weights))
        optimizer.step()
        print(step, [round(loss.item(), 2) for loss in losses])


if __name__ == "__main__":
    main()
