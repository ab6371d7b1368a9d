# Cross-validation keeps the model of every fold for the ensemble at its end.
# cause: leak · card: 260 MiB
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass
class Fold:
    number: int
    model: nn.Module
    scores: list = field(default_factory=list)


class CrossValidation:
    def __init__(self, folds, epochs=3):
        self.folds, self.epochs = folds, epochs
        self.results = []

    def fit_fold(self, number):
        model = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1)).cuda()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
        fold = Fold(number, model)
        for _ in range(self.epochs):
            for _ in range(4):
                x, y = torch.randn(128, 256).cuda(), torch.randn(128, 1).cuda()
                loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            fold.scores.append(loss.item())
        return fold

    def run(self):
        for number in range(self.folds):
            fold = self.fit_fold(number)
            self.results.append(fold)  # <-
            print(f"fold {number}: {min(fold.scores):.3f}")
        return self.results


CrossValidation(folds=10).run()
