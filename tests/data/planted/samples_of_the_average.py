# Sampling after the epoch runs fifty denoising steps with gradients on, one graph through all of them.
# cause: eval-graph · card: 1536 MiB
import copy
import math

import torch
from torch import nn
from torch.nn import functional as F


STEPS = 1000


class ResBlock(nn.Module):
    def __init__(self, width, time):
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm, self.norm2, self.time = nn.GroupNorm(8, width), nn.GroupNorm(8, width), nn.Linear(time, width)

    def forward(self, x, t):
        h = self.first(F.silu(self.norm(x))) + self.time(t)[:, :, None, None]
        return x + self.second(F.silu(self.norm2(h)))


class Denoiser(nn.Module):
    def __init__(self, width=64, depth=4, time=128):
        super().__init__()
        self.time = time
        self.stem, self.head = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.blocks = nn.ModuleList(ResBlock(width, time) for _ in range(depth))

    def forward(self, x, t):
        rates = torch.exp(-math.log(1e4) * torch.arange(self.time // 2, device=x.device) / (self.time // 2))
        angles = t[:, None] * rates
        t = torch.cat([angles.sin(), angles.cos()], -1)
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, t)  # <-
        return self.head(x)


class Diffusion:
    def __init__(self, device):
        self.alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, STEPS, device=device), 0)

    def loss(self, model, images):
        t = torch.randint(STEPS, (len(images),), device=images.device)
        noise, scale = torch.randn_like(images), self.alpha_bar[t][:, None, None, None]
        return F.mse_loss(model(scale.sqrt() * images + (1 - scale).sqrt() * noise, t), noise)

    def sample(self, model, count, steps=50):
        x = torch.randn(count, 3, 64, 64, device="cuda")
        with torch.set_grad_enabled(True):
            for t in torch.linspace(STEPS - 1, 1, steps).long().tolist():
                now, before = self.alpha_bar[t], self.alpha_bar[max(t - STEPS // steps, 0)]
                noise = model(x, torch.full((count,), t, device="cuda"))
                clean = (x - (1 - now).sqrt() * noise) / now.sqrt()
                x = before.sqrt() * clean + (1 - before).sqrt() * noise
        return x.clamp(-1, 1).cpu()


def main():
    model = Denoiser().cuda()
    ema = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-4)
    diffusion = Diffusion("cuda")
    for epoch in range(2):
        for _ in range(8):
            loss = diffusion.loss(model, torch.randn(16, 3, 64, 64).cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for average, weight in zip(ema.parameters(), model.parameters()):
                average.data.lerp_(weight.data, 0.001)
        print("epoch", epoch, diffusion.sample(ema, 8).shape)


if __name__ == "__main__":
    main()
