# The run's state keeps the pretrained checkpoint (its EMA weights and optimizer too) on the card.
# cause: stale-checkpoint · card: 950 MiB
import tempfile
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Patches(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.randn(3, 128, 128), index % 12


class Bottleneck(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(width, width // 2, 1), nn.BatchNorm2d(width // 2), nn.ReLU(),
                                  nn.Conv2d(width // 2, width, 3, padding=1), nn.BatchNorm2d(width))

    def forward(self, x):
        return F.relu(x + self.body(x))


def make_model(classes, width=768, depth=14):
    return nn.Sequential(nn.Conv2d(3, width, 16, 16), *(Bottleneck(width) for _ in range(depth)),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


@dataclass
class Run:
    model: nn.Module
    epoch: int = 0
    origin: dict = field(default_factory=dict)  # <-
    history: list = field(default_factory=list)


def pretrain(path):
    """What the upstream project published: weights, their average and its optimizer."""
    model = make_model(1000)
    average = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save({"model": model.state_dict(), "ema": average, "epoch": 90, "arch": "bottle14"}, path)


def start(path, classes):
    checkpoint = torch.load(path, map_location="cuda")
    model = make_model(classes).cuda()
    weights = {name: tensor for name, tensor in checkpoint["ema"].items() if not name.startswith("17.")}
    print(model.load_state_dict(weights, strict=False))
    kept = checkpoint
    return Run(model, origin=kept)


def fit(run, loader, epochs=2):
    optimizer = torch.optim.AdamW(run.model.parameters(), 1e-4, fused=True)
    for run.epoch in range(epochs):
        for images, labels in loader:
            loss = F.cross_entropy(run.model(images.cuda()), labels.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.history.append(loss.item())
        print(run.origin["arch"], "epoch", run.epoch, sum(run.history) / len(run.history))


def main():
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        pretrain(file.name)
        run = start(file.name, 12)
    fit(run, DataLoader(Patches(), 16, shuffle=True))


if __name__ == "__main__":
    main()
