# Rolling back to the last checkpoint loads weights and Adam's states onto the card beside those there.
# cause: resume-states · card: 350 MiB
import math
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


class Mixer(nn.Module):
    def __init__(self, width=512, hidden=2048, depth=8, bands=128):
        super().__init__()
        self.inputs, self.outputs = nn.Linear(bands, width), nn.Linear(width, bands)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
            for _ in range(depth))

    def forward(self, x):
        x = self.inputs(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.outputs(x)


class Checkpoints:
    def __init__(self, folder):
        self.path = Path(folder) / "last.pt"

    def save(self, step, model, optimizer):
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, self.path)

    def load(self, model, optimizer):
        state = torch.load(self.path, map_location="cuda")  # <-
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return state["step"]


class Spikes:
    """Says when a loss is far above the recent ones, or asked to for a test of the rollback."""

    def __init__(self, at):
        self.at, self.seen = set(at), 0

    def __call__(self, loss):
        self.seen += 1
        return math.isnan(loss) or self.seen in self.at


def train(model, optimizer, saved, spiked, steps=20):
    step = 0
    while step < steps:
        clean = torch.randn(4, 64, 128).cuda()
        loss = F.l1_loss(model(clean + 0.1 * torch.randn_like(clean)), clean)
        optimizer.zero_grad(set_to_none=True)
        if spiked(loss.item()):
            del loss, clean
            step = saved.load(model, optimizer)
            print("spike: back to step", step)
            continue
        loss.backward()
        optimizer.step()
        step += 1
        if step % 5 == 0:
            saved.save(step, model, optimizer)


def main():
    model = Mixer().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    with tempfile.TemporaryDirectory() as folder:
        train(model, optimizer, Checkpoints(folder), Spikes([8]))


if __name__ == "__main__":
    main()
