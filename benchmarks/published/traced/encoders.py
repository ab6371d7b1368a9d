"""Run GPUMemNet's training of nn.TransformerEncoder (NeuroNetGen_scripts/Transformer/transformer.py)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from published.case import NotCovered
from published.rows import Row

PACKAGES: tuple[str, ...] = ()
STEPS = 3


class Classifier(nn.Module):
    """The script's model: an embedding, positions, encoder layers with dropout, the mean, a head."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        width = sizes["embedding_size"]
        self.embedding = nn.Embedding(sizes["input_size"], width)
        self.positional_encoding = nn.Parameter(torch.zeros(1, sizes["seq_length"], width))
        layer = nn.TransformerEncoderLayer(
            width, sizes["num_heads"], sizes["ff_hidden_size"], dropout=0.1, batch_first=True
        )
        self.model = nn.TransformerEncoder(layer, sizes["num_layers"])
        self.fc_out = nn.Linear(width, sizes["num_classes"])

    def forward(self, ids: Tensor) -> Tensor:
        """[B, S] token ids to [B, classes] logits."""
        return self.fc_out(self.model(self.embedding(ids) + self.positional_encoding).mean(dim=1))


def run(row: Row) -> None:
    """Run two passes with gradients, as the script does before training, then train."""
    sizes = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row.model)}
    if not row.model.startswith("nn.TransformerEncoder"):
        raise NotCovered(f"{row.model} is not an encoder of the script")
    model = Classifier(sizes).to("cuda")
    ids = torch.ones((sizes["batch_size"], sizes["seq_length"]), dtype=torch.long)
    shown = ids.to("cuda")
    for _ in range(2):  # to see whether it runs, and the summary
        model(shown)
    trained(model, [(ids, torch.zeros(sizes["batch_size"], dtype=torch.long))] * STEPS)


def trained(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Train as all scripts of GPUMemNet do; what a step made lives until the next one has made the same."""
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for given, labels in batches:
        inputs, targets = given.to("cuda"), labels.to("cuda")
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
