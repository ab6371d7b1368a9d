# Training is resumed: the checkpoint is moved onto the card whole, and its dict lives as long as main() does.
# cause: stale-checkpoint · card: 190 MiB
import copy
import os
import tempfile

import torch
from torch import nn


def make_model():
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU())])


def save(path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 1024)).sum().backward()
    optimizer.step()
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "ema": copy.deepcopy(model.state_dict()), "best": copy.deepcopy(model.state_dict())}
    torch.save(states, path)


def to_device(tree, device):
    if torch.is_tensor(tree):
        return tree.to(device)
    if isinstance(tree, dict):
        return {key: to_device(value, device) for key, value in tree.items()}
    return [to_device(value, device) for value in tree] if isinstance(tree, list) else tree


def main(path):
    device = torch.device("cuda:0")
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    checkpoint = to_device(torch.load(path, map_location="cpu"), device)  # <-
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    for epoch in range(checkpoint["epoch"], 10):
        for _ in range(4):
            loss = model(torch.randn(512, 1024, device=device)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


with tempfile.TemporaryDirectory() as folder:
    file = os.path.join(folder, "last.pt")
    save(file)
    main(file)
