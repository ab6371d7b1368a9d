# As in a notebook: the error of the first cell lives on as sys.last_value, and the second cell has no room beside its frames.
# cause: exception · card: 200 MiB
import sys

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


model = nn.Sequential(*[Block(256) for _ in range(6)]).cuda()


def train(batch_size, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        inputs = torch.randn(batch_size, 256, device="cuda")
        outputs = model(inputs)
        if outputs.shape != (batch_size, 10):
            loss = nn.functional.cross_entropy(outputs, torch.zeros(batch_size + 1, dtype=torch.long, device="cuda"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def cell(code):
    try:
        code()
    except ValueError as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__  # <-
        print(f"{type(error).__name__}: {error}", file=sys.stderr)


def fixed_train():
    for _ in range(3):
        outputs = model(torch.randn(3000, 256, device="cuda"))
        outputs.square().mean().backward()
        model.zero_grad()


cell(lambda: train(3000))
cell(fixed_train)
